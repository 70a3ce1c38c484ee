"""The Berkeley Function Calling Leaderboard, from the wheel that its questions come in: its functions as tools, and
which calls are right.

    pip download --no-deps bfcl-eval

Its types are those of Python, Java and JavaScript; as JSON Schema they are what the leaderboard itself makes of them
(`bfcl_eval/constants/type_mappings.py`), except that "any" stays any.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TYPES: dict[str, str | None] = {
    **dict.fromkeys(("integer", "byte", "short", "long", "Bigint"), "integer"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("string", "char", "String"), "string"),
    **dict.fromkeys(("boolean", "bool", "Boolean"), "boolean"),
    **dict.fromkeys(("array", "list", "tuple", "ArrayList", "Array", "Queue", "Stack"), "array"),
    **dict.fromkeys(("object", "dict", "HashMap", "Hashtable"), "object"),
    **dict.fromkeys(("any", "Any"), None),
}


def read_questions(wheel: Path) -> dict[str, dict[str, Any]]:
    """The tools of each question, and of each set that questions share: names and schemas of arguments."""
    found: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(archive.namelist()):
            folder, _, name = path.rpartition("/")
            if not name.endswith(".json") or "format_sensitivity" in name:
                continue
            if folder == "bfcl_eval/data":
                for line in archive.read(path).decode().splitlines():
                    question = json.loads(line)
                    if functions := question.get("function"):
                        found[question["id"]] = _tools(functions)
            elif folder == "bfcl_eval/data/multi_turn_func_doc":
                found[name] = _tools([json.loads(line) for line in archive.read(path).decode().splitlines()])
    return found


@dataclass(frozen=True)
class Question:
    """One question of a set.

    Attributes:
        tools: the functions in OpenAI's form; names have underscores where OpenAI allows no dot.
        answers: the calls that are right, each by the name of the function, and of each argument the values that are;
            an empty text among them says that it may be left out. None where no call is right.
    """

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answers: list[dict[str, dict[str, list[Any]]]]


def read_set(wheel: Path, name: str) -> list[Question]:
    """The questions of a set such as "simple_python", "parallel" or "irrelevance"."""
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(f"bfcl_eval/data/BFCL_v4_{name}.json").decode().splitlines()
        path = f"bfcl_eval/data/possible_answer/BFCL_v4_{name}.json"
        known = archive.read(path).decode().splitlines() if path in archive.namelist() else []
    answers = {one["id"]: one["ground_truth"] for one in map(json.loads, known)}
    return [_question(json.loads(line), answers) for line in lines]


def _question(question: dict[str, Any], answers: Mapping[str, list[dict[str, Any]]]) -> Question:
    tools = [
        {
            "type": "function",
            "function": {
                "name": plain_name(function["name"]),
                "description": function["description"],
                "parameters": _schema(function["parameters"]),
            },
        }
        for function in question["function"]
    ]
    right = [{plain_name(name): given for name, given in one.items()} for one in answers.get(question["id"], ())]
    return Question(question["id"], question["question"][0], tools, right)


def plain_name(name: str) -> str:
    """A function's name as OpenAI allows them."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64]


def is_right(question: Question, calls: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Whether the calls, in any order, are those that the question asks for, as the leaderboard sees it."""
    if len(calls) != len(question.answers):
        return False
    required = {t["function"]["name"]: t["function"]["parameters"].get("required", ()) for t in question.tools}
    left = list(calls)
    for answer in question.answers:
        ((name, given),) = answer.items()
        found = next((c for c in left if c[0] == name and _fits(c[1], given, required[name])), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _fits(arguments: Mapping[str, Any], given: Mapping[str, list[Any]], required: Sequence[str]) -> bool:
    if not all(name in given and _among(value, given[name]) for name, value in arguments.items()):
        return False
    return all(name in arguments or (name not in required and "" in values) for name, values in given.items())


def _among(value: Any, right: Sequence[Any]) -> bool:
    if isinstance(value, dict):
        return any(isinstance(one, dict) and _fits(value, one, ()) for one in right)
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return any(
            isinstance(one, list)
            and len(one) == len(value)
            and all(_among(part, [wanted]) for part, wanted in zip(value, one, strict=True))
            for one in right
        )
    return any(_standard(value) == _standard(one) and isinstance(value, bool) == isinstance(one, bool) for one in right)


def _standard(value: Any) -> Any:
    """A value for comparison; of texts neither case, spaces nor most punctuation count."""
    if isinstance(value, str):
        return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')
    return [_standard(part) for part in value] if isinstance(value, list) else value


def _tools(functions: list[dict[str, Any]]) -> dict[str, Any]:
    return {function["name"]: _schema(function["parameters"]) for function in functions}


def _schema(value: Any) -> Any:
    """A schema whose "type" is a type of JSON, where it is known."""
    if isinstance(value, list):
        return [_schema(part) for part in value]
    if not isinstance(value, dict):
        return value
    schema = {}
    for keyword, part in value.items():
        if keyword == "properties" and isinstance(part, dict):
            schema[keyword] = {name: _schema(one) for name, one in part.items()}
        elif keyword == "type" and isinstance(part, str):
            kind = _TYPES.get(part, part)
            schema |= {} if kind is None else {"type": kind}
        elif keyword in ("enum", "const", "default"):
            schema[keyword] = part
        else:
            schema[keyword] = _schema(part)
    return schema
