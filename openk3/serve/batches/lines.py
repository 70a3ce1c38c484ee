"""The lines of a batch's input file: ``{"custom_id", "method": "POST", "url", "body"}``, one JSON object each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.serve.errors import cut, shown

MAX_LINES = 50_000
MAX_LINE_BYTES = 32 << 20
_FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input, counted from 0 without blank ones; either a request's `body` as JSON, or what is wrong."""

    number: int
    custom_id: str | None
    body: bytes = b""
    error: str | None = None


def read_lines(path: Path, endpoint: str) -> Iterator[Line]:
    """The lines of the file, checked as far as it takes to send each to the endpoint."""
    number = 0
    seen: set[str] = set()
    with path.open("rb") as file:
        while raw := file.readline(MAX_LINE_BYTES + 1):
            if len(raw) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE_BYTES)
                yield Line(number, None, error=f"the line is longer than {MAX_LINE_BYTES:,} bytes")
            elif raw.strip():
                yield _read(raw.removeprefix(b"\xef\xbb\xbf"), number, endpoint, seen)
            else:
                continue
            number += 1


def _read(raw: bytes, number: int, endpoint: str, seen: set[str]) -> Line:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return Line(number, None, error=cut(f"the line is not valid JSON: {error}", 300))
    if not isinstance(line, dict):
        return Line(number, None, error="the line is not a JSON object")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Line(number, None, error="'custom_id' is missing, or not a string")
    known = custom_id in seen
    seen.add(custom_id)
    wrong = f"'custom_id' {shown(custom_id)} is used by an earlier line" if known else _wrong(line, endpoint)
    if wrong is not None:
        return Line(number, custom_id, error=wrong)
    return Line(number, custom_id, json.dumps(line["body"]).encode())


def _wrong(line: dict[str, Any], endpoint: str) -> str | None:
    """What is wrong with a line that has an id."""
    if unknown := sorted(set(line) - _FIELDS):
        return f"unknown field {shown(unknown[0])}"
    if line.get("method") != "POST":
        return f"'method' is {shown(line.get('method'))}: it must be \"POST\""
    if line.get("url") != endpoint:
        return f"'url' is {shown(line.get('url'))}: the batch is for {shown(endpoint)}"
    body = line.get("body")
    if not isinstance(body, dict):
        return "'body' is missing, or not an object"
    if body.get("stream"):
        return "'body.stream' is not possible in a batch"
    return None
