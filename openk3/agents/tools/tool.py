"""What a tool is: a name, a description and a schema that a model reads, and a function that a program runs.

A model's arguments are checked against the schema before the function sees them, and whatever goes wrong becomes a
result that the model can read and mend: the loop never fails because of a call.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

log = logging.getLogger("openk3.agents")

MAX_RESULT = 20_000  # characters; more would push the conversation out of most contexts
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class ToolResult:
    """What a call came to: text for the model; `is_error` if it says what went wrong."""

    text: str
    is_error: bool = False


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: 1 to 64 letters, digits, ``_`` and ``-``.
        description: what it does, when to use it, with examples: all that the model knows about it.
        parameters: JSON Schema of its arguments, an object.
        function: called with the arguments by name, in a thread; returns text, or a value that becomes JSON. What it
            raises is told to the model: a ValueError by its text.
        timeout_s: how long a call may take before the model is told that it took too long.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any] = field(repr=False)
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r} is not 1 to 64 letters (a-z, A-Z), digits, underscores and dashes")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s: {self.timeout_s!r} is not a positive number of seconds")

    @classmethod
    def of(cls, function: Callable[..., Any], *, timeout_s: float = 60.0) -> Tool:
        """Make a tool of a function: its name, its docstring, and a schema of its annotations.

        Raises:
            ValueError: it has no docstring, or a parameter without a type or one that JSON cannot hold.
        """
        from pydantic import ConfigDict, PydanticUserError, create_model

        name = getattr(function, "__name__", type(function).__name__)
        if not (doc := inspect.getdoc(function)):
            raise ValueError(f"{name}: give the function a docstring; it is all that the model knows about it")
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if parameter.annotation is parameter.empty:
                raise ValueError(f"{name}: give the parameter {parameter.name!r} a type")
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ValueError(f"{name}: the parameter {parameter.name!r} cannot be given by its name")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (parameter.annotation, default)
        try:
            schema = create_model(name, __config__=ConfigDict(extra="forbid"), **fields).model_json_schema()
        except PydanticUserError as error:
            raise ValueError(f"{name}: its parameters cannot be written as JSON: {error.message}") from None
        return cls(name, doc, schema, function, timeout_s)

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as a request to the model has it, in OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def call(self, arguments: str) -> ToolResult:
        """Run the function with a model's arguments, JSON of an object. Never raises."""
        try:
            given = _parsed(self.name, arguments, self._validator)
        except ValueError as error:
            return ToolResult(f"Error: {error}", is_error=True)
        try:
            return ToolResult(_text(self.function(**given)))
        except ValueError as error:
            return ToolResult(f"Error: {error}", is_error=True)
        except Exception as error:
            log.warning("the tool %s failed", self.name, exc_info=error)
            return ToolResult(f"Error: the tool failed: {type(error).__name__}: {error}"[:1000], is_error=True)

    @functools.cached_property
    def _validator(self) -> Any:
        from jsonschema import Draft202012Validator

        return Draft202012Validator(dict(self.parameters))


ToolLike: TypeAlias = Tool | Callable[..., Any] | str


def toolbox(tools: Iterable[ToolLike]) -> dict[str, Tool]:
    """Tools by their names. Functions become tools (`Tool.of`), and text is the name of a built-in one.

    Raises:
        ValueError: a name is there twice, is no built-in tool's, or a function cannot be made one.
    """
    from openk3.agents.tools import builtin

    box: dict[str, Tool] = {}
    for tool in tools:
        made = builtin(tool) if isinstance(tool, str) else tool if isinstance(tool, Tool) else _made(tool)
        if made.name in box:
            raise ValueError(f"tools: there are two tools of the name {made.name!r}")
        box[made.name] = made
    return box


def _made(function: object) -> Tool:
    if not callable(function):
        raise ValueError(f"tools: expected a Tool, a function or a built-in tool's name, got {function!r}"[:200])
    return Tool.of(function)


def unknown_tool(name: str, known: Sequence[str]) -> ToolResult:
    """What a model is told that called a tool that is not there."""
    return ToolResult(f"Error: there is no tool {name!r}; there are {', '.join(known) or 'none'}", is_error=True)


def _parsed(name: str, arguments: str, validator: Any) -> dict[str, Any]:
    try:
        given = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of {name} are not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"the arguments of {name} are not a JSON object")
    wrong = sorted(validator.iter_errors(given), key=lambda error: list(map(str, error.absolute_path)))
    if wrong:
        said = "; ".join(
            (".".join(map(str, error.absolute_path)) + ": " if error.absolute_path else "") + error.message[:200]
            for error in wrong[:3]
        )
        raise ValueError(f"the arguments of {name} are wrong: {said}")
    return given


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_RESULT else text[:MAX_RESULT] + "\n… (cut)"
