"""Is every call valid, and every answer? Checked by jsonschema, over other people's schemas.

    pip download --no-deps bfcl-eval
    pip download --no-deps --no-binary :all: jsonschema
    python bench/validity.py --model qwen2.5-coder-0.5b \\
        --bfcl bfcl_eval-2026.3.23-py3-none-any.whl --suite jsonschema-4.26.0.tar.gz

`calls`: every question of the Berkeley Function Calling Leaderboard (simple, multiple, parallel and live), its
functions as `tools` with `tool_choice` "required". The model's vocabulary is used and the model is not: tokens are
chosen blindly among those that may come, and the reply is read whole and token by token.

`suite`: every schema of the JSON-Schema-Test-Suite, Draft 2020-12, that has an instance. Where a grammar cannot keep
all of it, replies are drawn until one is valid, up to four, as the engine does.

`model`: a sample of the questions with the model itself, at temperatures 0 and 1, streamed and not.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from bfcl import Question, read_set
from referencing.jsonschema import EMPTY_REGISTRY
from results import add_options, keep, positive, result_head, run

from openk3.chat.messages import validate_messages, validate_tools
from openk3.chat.reply import Reply, ToolCall
from openk3.chat.tokenizer import Tokenizer
from openk3.chat.turn import Turn, prepare_turn
from openk3.engine import EngineConfig
from openk3.engine.grammar.compiler import GrammarCompiler
from openk3.engine.grammar.matcher import Matcher
from openk3.engine.grammar.spec import Grammar
from openk3.engine.grammar.verify import check_of
from openk3.llm import LLM, load

SETS = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_relevance", "live_irrelevance"),
)
MOST_TOKENS = 3000
MOST_TRIES = 4


class BlindWriter:
    """Chooses tokens as no model would: any that may come, and rather often one that brings the end nearer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        closing = ['"', "}", "]", '"}', "}}", "]}", ",", "0", "1", "true", "null", "{}", "[]", '""']
        ids = [tokenizer.backend.token_to_id(text) for text in closing]
        self._closing = np.array([i for i in ids if i is not None])

    def write(self, matcher: Matcher, chosen: random.Random) -> list[int] | None:
        """The tokens of a reply; None if it found no end."""
        ids: list[int] = []
        while not matcher.ended and len(ids) < MOST_TOKENS:
            token = matcher.forced
            if token is None:
                allowed_V = matcher.allowed_V
                ends = [i for i in self._tokenizer.eos_token_ids if allowed_V[i]]
                if ends and chosen.random() < 0.3:
                    return ids
                near = self._closing[allowed_V[self._closing]]
                among = near if len(near) and chosen.random() < 0.4 else np.flatnonzero(allowed_V)
                token = int(among[chosen.randrange(len(among))])
                if token in ends:
                    return ids
            matcher.consume(token)
            ids.append(token)
        return ids if matcher.ended else None


def turn_of(tokenizer: Tokenizer, question: Question) -> Turn:
    messages, tools = validate_messages(question.messages), validate_tools(question.tools)
    return prepare_turn(tokenizer, messages, tools, tool_choice="required")


def read(turn: Turn, ids: Sequence[int], pieces: bool) -> Reply:
    reply, parser = Reply(), turn.parser()
    for part in [[i] for i in ids] if pieces else [list(ids)]:
        reply.add(parser.feed(part))
    reply.add(parser.finish())
    return reply


def all_valid(question: Question, calls: Sequence[ToolCall]) -> bool:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in question.tools}
    return bool(calls) and all(
        call.name in schemas
        and jsonschema.Draft202012Validator(schemas[call.name]).is_valid(json.loads(call.arguments))
        for call in calls
    )


def blind_calls(tokenizer: Tokenizer, compiler: GrammarCompiler, wheel: Path) -> dict[str, Any]:
    counts, refusals = Counter[str](), Counter[str]()
    writer, invalid = BlindWriter(tokenizer), []
    for name in SETS:
        for question in read_set(wheel, name):
            if not question.tools:
                continue
            counts["questions"] += 1
            try:
                turn = turn_of(tokenizer, question)
                assert turn.grammar is not None
                grammar, unkept = compiler.keepable(turn.grammar)
            except ValueError as error:
                refusals[essence(str(error))] += 1
                continue
            counts["lenient"] += bool(unkept)
            for number in range(2):
                ids = writer.write(compiler.matcher(grammar), random.Random(f"{question.id} {number}"))
                if ids is None:
                    counts["without an end"] += 1
                    continue
                whole, pieces = read(turn, ids, pieces=False), read(turn, ids, pieces=True)
                same = [(c.name, c.arguments) for c in whole.calls] == [(c.name, c.arguments) for c in pieces.calls]
                counts["replies"] += 1
                counts["calls"] += len(whole.calls)
                if same and not whole.content and all_valid(question, whole.calls):
                    counts["valid"] += 1
                else:
                    invalid.append(tokenizer.decode(ids, skip_special_tokens=False))
    return {**counts, "refused": refusals.total(), "refusals": dict(refusals.most_common()), "invalid": invalid[:10]}


def essence(error: str) -> str:
    """A refusal without what belongs to one schema alone."""
    keyword = re.search(r"has the keyword (\S+?),? (?:which|in|with)|malformed at \S*?(\w+):", error)
    if keyword is not None:
        return next(filter(None, keyword.groups()))
    return error.partition("cannot be called: ")[2][:80] or error[:80]


def read_suite(archive: Path) -> Iterator[tuple[str, Any]]:
    """Name and schema of each case of the suite that has a valid instance; remote references and all."""
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda one: one.name):
            found = re.search(r"json/tests/draft2020-12/(?:optional/(?!format))?([\w-]+)\.json$", member.name)
            data = tar.extractfile(member) if found else None
            if found is None or data is None:
                continue
            for case in json.loads(data.read()):
                if any(test["valid"] for test in case["tests"]):
                    yield f"{found[1]}: {case['description']}", case["schema"]


def suite(tokenizer: Tokenizer, compiler: GrammarCompiler, archive: Path) -> dict[str, Any]:
    counts, refusals, by_keyword = Counter[str](), Counter[str](), Counter[str]()
    writer, invalid, never = BlindWriter(tokenizer), [], []
    for name, schema in read_suite(archive):
        counts["schemas"] += 1
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(
            schema, registry=EMPTY_REGISTRY
        )
        try:
            grammar, unkept = compiler.keepable(Grammar.json_schema(schema))
            check = check_of(grammar.source)
        except ValueError as error:
            refusals[essence(str(error))] += 1
            continue
        if unkept:
            by_keyword[essence(unkept)] += 1
        for number in range(4):
            chosen = random.Random(f"{name} {number}")
            for _ in range(MOST_TRIES if unkept else 1):
                ids = writer.write(compiler.matcher(grammar), chosen)
                text = None if ids is None else tokenizer.decode(ids, skip_special_tokens=False)
                if text is not None and (not unkept or not check(json.loads(text))):
                    break
                text = None
            if text is None:
                counts["without a valid end" if unkept else "without an end"] += 1
                never.append(name)
                continue
            counts["replies"] += 1
            try:
                valid = validator.is_valid(json.loads(text))
            except re.error:  # a pattern of ECMA 262 that Python does not know
                counts["judged by jsonschema_rs"] += 1
                valid = not check(json.loads(text))
            if valid:
                counts["valid"] += 1
            else:
                invalid.append(f"{name}: {text[:200]}")
    return {
        **counts,
        "refused": refusals.total(),
        "refusals": dict(refusals.most_common()),
        "checked_for": dict(by_keyword.most_common()),
        "never": sorted(set(never)),
        "invalid": invalid[:10],
    }


def with_the_model(llm: LLM, wheel: Path, count: int) -> dict[str, Any]:
    questions = [question for name in SETS for question in read_set(wheel, name) if question.tools]
    counts, invalid = Counter[str](), []
    for question in random.Random(1).sample(questions, count):
        for temperature in (0.0, 1.0):
            for stream in (False, True):
                asked: dict[str, Any] = {
                    "tools": question.tools,
                    "tool_choice": "required",
                    "temperature": temperature,
                    "seed": 1,
                    "max_tokens": 600,
                }
                counts["replies"] += 1
                try:
                    calls, reason = (streamed if stream else at_once)(llm, question.messages, asked)
                except ValueError:
                    counts["refused"] += 1
                    continue
                if reason == "length":
                    counts["cut"] += 1
                    calls = calls[:-1]  # those before it are complete
                if all_valid(question, calls) or (not calls and reason == "length"):
                    counts["valid"] += 1
                else:
                    invalid.append(question.id)
    return {**counts, "invalid": invalid}


def at_once(llm: LLM, messages: Any, asked: dict[str, Any]) -> tuple[list[ToolCall], str]:
    reply = llm.chat(messages, **asked)
    return reply.tool_calls, reply.finish_reason


def streamed(llm: LLM, messages: Any, asked: dict[str, Any]) -> tuple[list[ToolCall], str]:
    calls: list[ToolCall] = []
    reason = ""
    for piece in llm.chat_stream(messages, **asked):
        for part in piece.tool_calls:
            if part.id is not None:
                calls.append(ToolCall(part.id, part.name or "", ""))
            calls[part.index].arguments += part.arguments
        reason = piece.finish_reason or reason
    return calls, reason


def shown(part: str, found: dict[str, Any]) -> None:
    print(f"{part}: " + ", ".join(f"{value} {name}" for name, value in found.items() if isinstance(value, int)))
    for name in ("refusals", "checked_for"):
        for reason, number in found.get(name, {}).items():
            print(f"  {name} {number:5} {reason}")
    for text in found["invalid"]:
        print(f"  INVALID {text}")


def benchmark(options: argparse.Namespace) -> None:
    result = result_head("validity", options.model, 0.0)
    with load(options.model, engine=EngineConfig(weights=options.weights), progress=False) as llm:
        compiler = GrammarCompiler(llm.tokenizer, llm.config.vocab_size)
        for part in options.parts:
            if part == "calls":
                result[part] = blind_calls(llm.tokenizer, compiler, options.bfcl)
            elif part == "suite":
                result[part] = suite(llm.tokenizer, compiler, options.suite)
            else:
                result[part] = with_the_model(llm, options.bfcl, options.questions)
            shown(part, result[part])
    print(f"written to {keep(result, options.out)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, parts=("calls", "suite", "model"))
    parser.add_argument("--bfcl", type=Path, help="the wheel of bfcl-eval")
    parser.add_argument("--suite", type=Path, help="the source archive of jsonschema")
    parser.add_argument("--questions", type=positive, default=25, help="for 'model'")
    run(parser, benchmark)


if __name__ == "__main__":
    main()
