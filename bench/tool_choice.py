"""How often a model calls the right function with the right arguments: kept to a grammar, free, and under llama.cpp.

    python bench/tool_choice.py --model qwen2.5-coder-0.5b --bfcl bfcl_eval-2026.3.23-py3-none-any.whl

The questions are those of the Berkeley Function Calling Leaderboard: one function ("simple_python"), one of several
("multiple"), several calls ("parallel"), and none ("irrelevance"). No model of ours was trained on them. All are asked
with `tool_choice` "auto", greedily:

`constrained`: as a server does it, calls kept to the functions' schemas.
`free`: the same prompt and the same reader of replies, without a grammar.
`llama.cpp`: the same weights under llama-cpp-python, in a Python that has it (`--llama-python`).
`required`: as `constrained`, where a call has to be made; not for "irrelevance".

Accuracy is no matter of time: the machine need not be idle.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from bfcl import Question, is_right, read_set
from machine import cores
from results import add_options, keep, positive, result_head, run

from openk3.chat.messages import validate_messages, validate_tools
from openk3.chat.reply import Reply
from openk3.chat.turn import Turn, prepare_turn
from openk3.engine import EngineConfig
from openk3.engine.request import SamplingParams
from openk3.llm import LLM, load
from openk3.weights.store import downloads_dir

SETS = ("simple_python", "multiple", "parallel", "irrelevance")
WAYS = ("constrained", "free", "required", "llama.cpp")
MAX_TOKENS = 400

Calls = list[tuple[str, dict[str, Any]]] | None  # None: a reply that was cut, or in which a call is broken


def calls_of(llm: LLM, questions: Sequence[Question], way: str) -> list[Calls]:
    """What the model calls, sixteen questions at a time."""

    def ask(question: Question) -> Calls:
        choice = "required" if way == "required" else "auto"
        turn = prepare_turn(
            llm.tokenizer, validate_messages(question.messages), validate_tools(question.tools), tool_choice=choice
        )
        turn = freed(turn) if way == "free" else turn
        whole = turn.submit(llm.loop, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)).result()
        reply = Reply()
        reply.add(turn.parser().read(whole))
        try:
            return [(call.name, call.parsed) for call in reply.calls]
        except ValueError:
            return None

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, questions))


def freed(turn: Turn) -> Turn:
    """The same turn without its grammar, its reply read as one that nothing keeps to anything."""
    return replace(turn, grammar=None, _options={**turn._options, "valid": False, "plain": True})


def calls_of_llama(gguf: Path, python: str, questions: Sequence[Question]) -> list[Calls]:
    worker = [python, str(Path(__file__).parent / "llama_chat.py"), str(gguf), "--threads", str(cores())]
    lines = [
        json.dumps({"messages": question.messages, "tools": question.tools, "max_tokens": MAX_TOKENS})
        for question in questions
    ]
    done = subprocess.run(worker, input="\n".join(lines), capture_output=True, text=True, check=True)
    return [_message_calls(json.loads(line)) for line in done.stdout.splitlines()]


def _message_calls(message: dict[str, Any]) -> Calls:
    if "error" in message:
        return None
    try:
        return [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
    except ValueError:
        return None


def judged(questions: Sequence[Question], made: Sequence[Calls]) -> dict[str, Any]:
    right = [calls is not None and is_right(q, calls) for q, calls in zip(questions, made, strict=True)]
    return {
        "right": sum(right),
        "called": sum(bool(calls) for calls in made),
        "broken": sum(calls is None for calls in made),
        "wrong_ids": [q.id for q, fine in zip(questions, right, strict=True) if not fine],
    }


def measured(llm: LLM, options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Set, way and what came of it, as it comes."""
    for name in options.sets:
        questions = read_set(options.bfcl, name)
        questions = random.Random(0).sample(questions, min(options.questions, len(questions)))
        for way in options.ways:
            if way == "required" and name == "irrelevance":
                continue
            if way == "llama.cpp":
                gguf = downloads_dir() / f"{options.model}.gguf"
                made = calls_of_llama(gguf, options.llama_python, questions)
            else:
                made = calls_of(llm, questions, way)
            yield name, way, judged(questions, made) | {"questions": len(questions)}


def benchmark(options: argparse.Namespace) -> None:
    result = result_head("tool_choice", options.model, 0.0) | {"weights": options.weights}
    found: dict[str, dict[str, Any]] = {}
    with load(options.model, engine=EngineConfig(weights=options.weights), progress=False) as llm:
        for name, way, one in measured(llm, options):
            found.setdefault(name, {})[way] = one
            print(
                f"{name:<14} {way:<12} {one['right']:4} of {one['questions']} right"
                f"  ({one['called']} called, {one['broken']} broken)",
                flush=True,
            )
            path = keep(result | {"sets": found}, options.out)
    print(f"written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--bfcl", type=Path, required=True, help="the wheel of bfcl-eval")
    parser.add_argument("--questions", type=positive, default=50, help="of each set, drawn from it")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that has llama-cpp-python")
    run(parser, benchmark)


if __name__ == "__main__":
    main()
