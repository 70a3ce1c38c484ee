"""What it costs to keep replies to a grammar, and which schemas cannot be kept.

    python bench/grammar.py --model qwen2.5-coder-0.5b --weights int8 --bfcl bfcl_eval-2026.3.23-py3-none-any.whl

`coverage`: every function of the Berkeley Function Calling Leaderboard becomes a grammar of calls. How long does that
take, and which are refused, for which keyword?

`validity`: calls of functions drawn from there, at temperatures 0 and 1. Is every one that ended valid, as jsonschema
sees it?

`speed`: replies of one length with and without a grammar in turn, one at a time and eight: JSON whose texts the model
chooses, greedily (the model's best token is asked about) and sampled (whole masks), and calls of tools, most of whose
tokens are forced.

Prints all three and keeps them in bench/results/grammar-<model>.json. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
from bfcl import read_questions
from machine import require_idle, versions
from results import add_options, keep, result_head

from openk3.engine import EngineConfig
from openk3.engine.grammar.compiler import GrammarCompiler
from openk3.engine.grammar.spec import Grammar
from openk3.engine.grammar.tools import ToolCalls
from openk3.llm import LLM, load

_PEOPLE = Grammar.json_schema(
    {
        "type": "array",
        "minItems": 1000,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "biography": {"type": "string"},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["name", "biography", "age", "tags"],
            "additionalProperties": False,
        },
    }
)
_BOOKING: dict[str, Any] = {
    "book_flight": {
        "type": "object",
        "properties": {
            "origin": {"type": "string", "maxLength": 20},
            "destination": {"type": "string", "maxLength": 20},
            "date": {"type": "string", "format": "date"},
            "passengers": {"type": "integer", "minimum": 1, "maximum": 9},
            "cabin_class": {"enum": ["economy", "business", "first"]},
            "refundable": {"type": "boolean"},
        },
        "required": ["origin", "destination", "date", "passengers", "cabin_class", "refundable"],
    },
    "cancel_booking": {
        "type": "object",
        "properties": {"booking_reference": {"type": "string", "maxLength": 8}},
        "required": ["booking_reference"],
    },
}
_ASK_PEOPLE = "Describe some people in JSON: name, biography, age and tags of each."
_ASK_BOOKING = "Book an economy flight from Lisbon to Oslo on 3 May 2026 for two, refundable."


def coverage(llm: LLM, questions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each distinct function by itself, then which questions have all of theirs."""
    compiler = GrammarCompiler(llm.tokenizer, llm.config.vocab_size)
    begin = time.perf_counter()
    compiler.compile(Grammar.choice(["yes"]))
    vocabulary_s = time.perf_counter() - begin
    seconds: list[float] = []
    refusals: dict[str, str] = {}  # of functions, by what they are
    for tools in questions.values():
        for name, schema in tools.items():
            key = json.dumps([name, schema])
            if key in refusals:
                continue
            begin = time.perf_counter()
            try:
                compiler.compile(ToolCalls({name: schema}).grammar)
                refusals[key] = ""
                seconds.append(time.perf_counter() - begin)
            except ValueError as error:
                refusals[key] = str(error)
    refused = [reason for reason in refusals.values() if reason]
    refused_questions = sum(
        any(refusals[json.dumps([name, schema])] for name, schema in tools.items()) for tools in questions.values()
    )
    return {
        "vocabulary_s": vocabulary_s,
        "functions": len(refusals),
        "questions": len(questions),
        "refused_functions": len(refused) / len(refusals),
        "refused_questions": refused_questions / len(questions),
        "reasons": dict(Counter(map(_keyword, refused)).most_common()),
        "examples": sorted(set(refused))[:10],
        "compile_s": {
            "median": statistics.median(seconds),
            "p95": sorted(seconds)[len(seconds) * 95 // 100],
            "worst": max(seconds),
        },
    }


def _keyword(reason: str) -> str:
    """The keyword that a refusal names, or else its beginning."""
    named = re.search(r"has the keyword (\S+?),? (?:which|in|with)|malformed at \S*?(\w+):", reason)
    return next(filter(None, named.groups())) if named else reason.partition("cannot be called: ")[2][:60]


def validity(llm: LLM, questions: dict[str, dict[str, Any]], count: int) -> dict[str, int]:
    """Calls of the tools of questions drawn from all, at temperatures 0 and 1."""
    found = Counter(calls=0, valid=0, cut=0, refused=0)
    for tools in random.Random(0).sample(list(questions.values()), count):
        grammar = ToolCalls(tools, required=True, parallel=False).grammar
        ask = [{"role": "user", "content": f"Call one of these functions: {', '.join(tools)}"}]
        sampling: dict[str, Any] = {"grammar": grammar, "seed": 1, "max_tokens": 300}
        try:
            handles = [llm.submit_chat(ask, temperature=temperature, **sampling) for temperature in (0.0, 1.0)]
        except ValueError:
            found["refused"] += 1
            continue
        for handle in handles:
            reply = handle.result()
            if reply.finish_reason != "stop":
                found["cut"] += 1
                continue
            found["calls"] += 1
            call = json.loads(reply.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            found["valid"] += jsonschema.Draft202012Validator(tools[call["name"]]).is_valid(call["arguments"])
    return dict(found)


def tokens_per_second(llm: LLM, batch: int, ask: str, sampling: dict[str, Any]) -> tuple[float, float]:
    """Of `batch` replies together from the first token on, and the tokens of each model run for one reply."""
    messages = [[{"role": "user", "content": f"{ask} ({i})"}] for i in range(batch)]
    llm.batch_generate(["."] * batch, max_tokens=1)  # the engine's thread is awake, the kernels' memory there
    steps = llm.stats().steps
    handles = [llm.submit_chat(one, seed=i, **sampling) for i, one in enumerate(messages)]
    replies = [handle.result() for handle in handles]
    steps = llm.stats().steps - steps
    timings = [reply.timings for reply in replies if reply.timings is not None]
    seconds = max(t.total_s for t in timings) - min(t.ttft_s for t in timings)
    tokens = sum(len(reply.token_ids) for reply in replies)
    return tokens / seconds, tokens / batch / steps


def speed(llm: LLM, rounds: int, new_tokens: int) -> dict[str, Any]:
    """Medians of `rounds` rounds, each with and without a grammar in turn."""
    found: dict[str, Any] = {}
    calls = ToolCalls(_BOOKING, required=True).grammar
    workloads = {
        "JSON, greedy": (_ASK_PEOPLE, _PEOPLE, 0.0),
        "JSON, sampled": (_ASK_PEOPLE, _PEOPLE, 0.8),
        "calls, greedy": (_ASK_BOOKING, calls, 0.0),
    }
    for name, (ask, grammar, temperature) in workloads.items():
        for batch in (1, 8):
            # Calls may not be ended after the first; no reply may be ended by the model.
            same: dict[str, Any] = {"temperature": temperature, "max_tokens": new_tokens, "ignore_eos": True}
            bound, free, ratios, per_run = [], [], [], []
            for turn in range(rounds + 1):
                one, runs = tokens_per_second(llm, batch, ask, same | {"grammar": grammar})
                other, _ = tokens_per_second(llm, batch, ask, same)
                if turn:  # the first is for warming up
                    bound.append(one)
                    free.append(other)
                    ratios.append(one / other)
                    per_run.append(runs)
            found[f"{name}, batch {batch}"] = {
                "with_tokens_per_second": statistics.median(bound),
                "without_tokens_per_second": statistics.median(free),
                "ratio": statistics.median(ratios),
                "tokens_per_run": statistics.median(per_run),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, parts=("coverage", "validity", "speed"))
    parser.add_argument("--new-tokens", type=int, default=200, help="of each reply in 'speed'")
    parser.add_argument("--questions", type=int, default=100, help="in 'validity'")
    parser.add_argument("--bfcl", type=Path, help="the wheel of bfcl-eval, for 'coverage' and 'validity'")
    options = parser.parse_args()
    if options.bfcl is None and set(options.parts) != {"speed"}:
        parser.error("--bfcl is missing: pip download --no-deps bfcl-eval, or ask for --parts speed")
    try:
        busy = require_idle(options.allow_busy)
    except ValueError as error:
        parser.error(str(error))

    result = result_head("grammar", options.model, busy) | {"weights": options.weights}
    result["versions"] |= versions("llguidance", "jsonschema")
    questions = read_questions(options.bfcl) if options.bfcl else {}
    with load(options.model, engine=EngineConfig(weights=options.weights), progress=False) as llm:
        if "coverage" in options.parts:
            result["coverage"] = found = coverage(llm, questions)
            print(f"{found['functions']:,} functions of {found['questions']:,} questions as grammars of calls:")
            for name, bar in (("median", " (bar: at most 20 ms)"), ("p95", ""), ("worst", "")):
                print(f"  compile, {name:<7} {found['compile_s'][name] * 1000:8.1f} ms{bar}")
            print(f"  the vocabulary, once {found['vocabulary_s']:.2f} s")
            print(f"  refused: {found['refused_functions']:.2%} of the functions,", end=" ")
            print(f"{found['refused_questions']:.2%} of the questions (bar: at most 3 %)")
            for reason, count in found["reasons"].items():
                print(f"    {count:5} {reason}")
        if "validity" in options.parts:
            result["validity"] = found = validity(llm, questions, options.questions)
            print(f"calls for {options.questions} questions, at temperatures 0 and 1:")
            print(f"  {found['valid']} of {found['calls']} are valid, {found['cut']} more were cut by max_tokens,")
            print(f"  {found['refused']} questions were refused")
        if "speed" in options.parts:
            result["speed"] = found = speed(llm, options.rounds, options.new_tokens)
            print(f"{options.new_tokens} tokens with a grammar and without, medians of {options.rounds} rounds:")
            for name, one in found.items():
                print(
                    f"  {name:<24} {one['with_tokens_per_second']:7.1f} and {one['without_tokens_per_second']:7.1f} "
                    f"tokens/s, {one['ratio']:.3f} times; {one['tokens_per_run']:.2f} tokens per model run"
                )
            print("  (bar: at least 0.92 times for JSON, more than 1 for calls)")
    print(f"written to {keep(result, options.out)}")


if __name__ == "__main__":
    main()
