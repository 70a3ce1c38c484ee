"""Calls of tools: how a reply writes them down, and what they are kept to.

A call is written as chat templates print those of earlier turns, for instance (the form of Hermes and Qwen)::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Everything but the choice of the tool and the values is forced, and costs no sampling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from openk3.engine.grammar.spec import Grammar

# Where one of these is, the properties of an object are not all listed in "properties".
_MORE_PROPERTIES = {
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"),
    *("patternProperties", "additionalProperties", "unevaluatedProperties"),
}

# Calls of one reply. More than anybody wants; without a bound a small model may call until its tokens are used up.
MOST_CALLS = 16


@dataclass(frozen=True)
class CallForm:
    """How calls are written: `mark`, `opening`, calls with `separator` between them, `closing`; and each call as
    `prefix`, the name, `middle`, the arguments in JSON, `suffix`.

    Attributes:
        mark: the special token or text that calls begin with, which no text before them holds; may be empty.
    """

    mark: str = ""
    opening: str = ""
    prefix: str = '{"name": "'
    middle: str = '", "arguments": '
    suffix: str = "}"
    separator: str = "\n"
    closing: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(getattr(self, field.name), str):
                raise ValueError(f"form.{field.name} is {getattr(self, field.name)!r}: it must be text")
        if not self.middle.strip():
            raise ValueError(f"form.middle is {self.middle!r}: it must be a text that divides name and arguments")

    def head(self, name: str) -> str:
        """What stands before the arguments of a call."""
        written = json.dumps(name, ensure_ascii=False)[1:-1] if self.prefix.endswith('"') else name
        return self.prefix + written + self.middle


# Of Hermes and Qwen, which more models have seen than any other.
TAGGED_CALLS = CallForm(mark="<tool_call>", prefix='\n{"name": "', suffix="}\n</tool_call>", separator="\n<tool_call>")


@dataclass(frozen=True)
class ToolCalls:
    """The calls that a reply may hold; `grammar` is what `SamplingParams` takes.

    Attributes:
        tools: the names of the tools, and of each the JSON Schema of its arguments, an object. Where that lists
            properties and says nothing of others, others are not written, although they would be valid.
        required: whether the reply is calls alone, one at least. Else it is text, which may be empty, and calls may
            follow.
        parallel: whether several calls may follow each other, up to 16. The reply ends after the last.
        form: how they are written.
        plain: whether there may also be calls without marks, bare or in a fence of Markdown, as small models write
            them: a reply that begins like one is kept to it from its arguments on.

    Raises:
        ValueError: no tools, a name or mark without text, or schemas that are not JSON objects.
    """

    tools: Mapping[str, Mapping[str, Any]]
    required: bool = False
    parallel: bool = True
    form: CallForm = TAGGED_CALLS
    plain: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.tools, Mapping) or not self.tools:
            raise ValueError("tools is empty: calls need a tool at least")
        for name, schema in self.tools.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"a tool has the name {name!r}: it must be text")
            if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
                raise ValueError(f"the arguments of the tool {name!r} are no object: give a JSON schema of type object")
        if not isinstance(self.form, CallForm):
            raise ValueError(f"form is a {type(self.form).__name__}: it must be a CallForm")
        if not self.form.mark and not self.required and not self.plain:
            raise ValueError("form.mark is empty: calls that may follow text need one")

    @property
    def grammar(self) -> Grammar:
        """
        Raises:
            ValueError: the schemas are too large, or hold what is not JSON.
        """
        from openk3.engine.grammar.reply import ReplyForm

        return ReplyForm(calls=self).grammar

    def as_json(self) -> dict[str, Any]:
        """What `from_json` makes it of again."""
        return vars(self) | {"tools": dict(self.tools), "form": asdict(self.form)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """
        Raises:
            TypeError, ValueError: the value is of another making.
        """
        return cls(**{**value, "form": CallForm(**value["form"])})

    def arguments_schema(self, name: str) -> dict[str, Any]:
        """What the arguments of a tool are kept to."""
        schema = {"type": "object", **self.tools[name]}
        listed = schema.get("properties")
        if isinstance(listed, Mapping) and not _MORE_PROPERTIES & schema.keys():
            required = schema.get("required", ())
            if isinstance(required, (list, tuple)) and all(name in listed for name in required):
                schema["additionalProperties"] = False
        return schema
