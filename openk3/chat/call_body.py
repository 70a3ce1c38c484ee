"""One call as a model writes it, read as it arrives: an object with name and arguments, or the two by themselves."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import NoReturn

_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", *_ARGUMENTS, "type", "id"}


class CallObject:
    """A JSON object that is still being written; it begins with the first character pushed, a brace.

    It follows strings and nesting, so it knows where the object ends and where its members begin, whatever is inside of
    strings. Whether all of it is JSON is known at its end.

    Attributes:
        text: what was pushed, up to the end of the object.
        ended: whether the object is complete.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._members: dict[str, tuple[int, int | None]] = {}  # key to where its value begins and ends in `text`
        self._depth = 0
        self._string_at: int | None = None  # where the string that we are in began
        self._escaped = False
        self._key: str | None = None  # the key whose value we are in or before
        self._in_value = False

    def push(self, text: str) -> str:
        """Take more text; returns what follows the object, once it has ended."""
        for i, char in enumerate(text):
            self._step(char, i, text)
            if self.ended:
                self.text += text[: i + 1]
                return text[i + 1 :]
        self.text += text
        return ""

    @property
    def name(self) -> str | None:
        """The function's name, once it is complete."""
        start, end = self._members.get("name", (0, None))
        value = None if end is None else _loads(self.text[start:end])
        return value if isinstance(value, str) else None

    @property
    def arguments_so_far(self) -> str:
        """The arguments as they are written, as far as they have come; nothing unless they are an object."""
        key = next((key for key in _ARGUMENTS if key in self._members), None)
        if key is None:
            return ""
        start, end = self._members[key]
        return self.text[start:end] if self.text[start] == "{" else ""

    def may_be_call(self, names: Container[str]) -> bool:
        """Whether the object can still become a call of one of `names`."""
        return self._members.keys() <= _KEYS and (self.name is None or self.name in names)

    def call(self, names: Container[str]) -> tuple[str, str] | None:
        """Name and arguments (JSON of an object) of the complete object; None if it is not a call of one of `names`."""
        value = _loads(self.text) if self.ended else None
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(name, str) or name not in names:
            return None
        key = next((key for key in _ARGUMENTS if key in value), None)
        arguments = checked_arguments(self.arguments_so_far) if self.arguments_so_far else None
        if arguments is None:
            arguments = "{}" if key is None else _as_object(value[key])
        return None if arguments is None else (name, arguments)

    def _step(self, char: str, i: int, text: str) -> None:
        """Take character `i` of the `text` that is being pushed."""
        at = len(self.text) + i
        if self._string_at is not None:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                if self._depth == 1 and not self._in_value:
                    start = self._string_at
                    written = self.text[start:] + text[max(0, start - len(self.text)) : i + 1]
                    key = _loads(written)
                    self._key = key if isinstance(key, str) else ""
                elif self._depth == 1:
                    self._end_value(at + 1)
                self._string_at = None
        elif self._depth == 1 and char in ",}":
            self._end_value(at)
            self._key, self._in_value = None, False
            self.ended = char == "}"
        elif self._depth == 1 and self._key is not None and not self._in_value and not char.isspace() and char != ":":
            self._members[self._key] = (at, None)
            self._in_value = True
            self._nest(char, at)
        else:
            self._nest(char, at)

    def _nest(self, char: str, at: int) -> None:
        if char == '"':
            self._string_at = at
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._end_value(at + 1)
            self.ended = self._depth <= 0

    def _end_value(self, at: int) -> None:
        if self._key is not None and self._in_value:
            start, end = self._members[self._key]
            self._members[self._key] = (start, at if end is None else end)


class NamedCall:
    """A call whose name and arguments are divided by a mark.

    Attributes:
        name: the function's name, as far as it has come.
        arguments_so_far: its arguments, likewise.
    """

    def __init__(self) -> None:
        self.name = ""
        self.arguments_so_far = ""

    @property
    def text(self) -> str:
        return self.name + self.arguments_so_far

    def call(self, names: Container[str]) -> tuple[str, str] | None:
        """Name and arguments, given that all of it is there; None if it is not a call of one of `names`."""
        arguments = checked_arguments(self.arguments_so_far.strip() or "{}")
        return (self.name, arguments) if arguments is not None and self.name in names else None


def checked_arguments(text: str) -> str | None:
    """`text` if it is a JSON object; the object in valid JSON if only strings hold raw line ends; else None."""
    if isinstance(_loads(text, strict=True), dict):
        return text
    value = _loads(text)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


def _as_object(value: object) -> str | None:
    """JSON of an object, which some models write as null, nothing, or a string of JSON."""
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        value = _loads(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


def _loads(text: str, strict: bool = False) -> object:
    """The value of JSON text; None if it is none. Not strict: strings may hold raw line ends, as small models write."""
    try:
        value: object = json.loads(text, strict=strict, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
