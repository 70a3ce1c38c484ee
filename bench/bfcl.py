"""The functions of the Berkeley Function Calling Leaderboard as tools, from the wheel that its questions come in.

    pip download --no-deps bfcl-eval

Its types are those of Python, Java and JavaScript; as JSON Schema they are what the leaderboard itself makes of them
(`bfcl_eval/constants/type_mappings.py`), except that "any" stays any.
"""

from __future__ import annotations

import json
import zipfile
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
