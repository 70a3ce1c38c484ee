"""Calls of tools: free text, then calls between marks, each of a tool that there is, with arguments valid for it.

A call is written as chat templates print those of earlier turns (the form of Hermes and Qwen)::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Everything but the text before it, the choice of the tool and the values is forced, and costs no sampling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from openk3.engine.grammar.spec import Grammar, to_json

# Where one of these is, the properties of an object are not all listed in "properties".
_MORE_PROPERTIES = {
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"),
    *("patternProperties", "additionalProperties", "unevaluatedProperties"),
}


@dataclass(frozen=True)
class ToolCalls:
    """What a reply that may call tools has to look like; `grammar` is what `SamplingParams` takes.

    Attributes:
        tools: the names of the tools, and of each the JSON Schema of its arguments, an object. Where that lists
            properties and says nothing of others, others are not written, although they would be valid.
        begin: what a call begins with. Without the spaces at its end, it cannot occur in the text before; where the
            vocabulary has a special token for it, that token is meant.
        end: what a call ends with.
        required: whether the reply is calls alone, one at least. Else it is text, which may be empty, and calls may
            follow.
        parallel: whether several calls may follow each other, each on a new line. The reply ends after the last.

    Raises:
        ValueError: no tools, a name or mark without text, or schemas that are not JSON objects.
    """

    tools: Mapping[str, Mapping[str, Any]]
    begin: str = "<tool_call>\n"
    end: str = "\n</tool_call>"
    required: bool = False
    parallel: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.tools, Mapping) or not self.tools:
            raise ValueError("tools is empty: calls need a tool at least")
        for name, schema in self.tools.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"a tool has the name {name!r}: it must be text")
            if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
                raise ValueError(f"the arguments of the tool {name!r} are no object: give a JSON schema of type object")
        for field in ("begin", "end"):
            mark = getattr(self, field)
            if not isinstance(mark, str) or not mark.strip():
                raise ValueError(f"{field} is {mark!r}: it must be a text that marks calls, such as '<tool_call>'")

    @property
    def grammar(self) -> Grammar:
        """
        Raises:
            ValueError: the schemas are too large, or hold what is not JSON.
        """
        return Grammar("tool_calls", to_json("the tools", vars(self) | {"tools": dict(self.tools)}))

    @classmethod
    def from_source(cls, source: str) -> Self:
        """What `grammar` was made of.

        Raises:
            ValueError: the source is of another making.
        """
        try:
            return cls(**json.loads(source))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"the source of a tool_calls grammar is not of ToolCalls.grammar: {error}") from None

    def arguments_schema(self, name: str) -> dict[str, Any]:
        """What the arguments of a tool are kept to."""
        schema = {"type": "object", **self.tools[name]}
        listed = schema.get("properties")
        if isinstance(listed, Mapping) and not _MORE_PROPERTIES & schema.keys():
            required = schema.get("required", ())
            if isinstance(required, (list, tuple)) and all(name in listed for name in required):
                schema["additionalProperties"] = False
        return schema

    def to_lark(self, special: Mapping[str, int]) -> str:
        """The reply in llguidance's Lark, in which `@arguments_<i>` stands for the arguments of the i-th tool.

        Args:
            special: the special tokens of the vocabulary, which cannot be written by their characters.
        """
        pieces = _split(self.begin.rstrip(), special)
        trigger, inside = pieces[0], self.begin[len(pieces[0]) :]
        heads = (f'{{"name": {_quoted(name)}, "arguments": ' for name in self.tools)
        calls = (f'{_literal(head, special)} @arguments_{i} "}}"' for i, head in enumerate(heads))
        body = f"{_literal(inside, special)} ({' | '.join(calls)}) {_literal(self.end, special)}"
        more = r' ("\n" call)*' if self.parallel else ""
        rules = [
            "%llguidance {}",
            f"start: call{more}" if self.required else f"start: TEXT? | first{more}",
            f"call: {_literal(trigger, special)} {body}",
            f"TEXT: /(?s:.+)/ & ~(/(?s:.*)/ {_quoted(trigger)} /(?s:.*)/)",
        ]
        if trigger in special:
            rules.append(f"first: TEXT? {_literal(trigger, special)} {body}")
        else:
            rules.append(f"first: opening {body}\nopening[lazy]: ANY {_quoted(trigger)}\nANY: /(?s:.*)/")
        return "\n".join(rules)


def _split(text: str, special: Mapping[str, int]) -> list[str]:
    """`text` in pieces, so that every special token in it is one; of two that begin together, the longer."""
    pieces = [""]
    while text:
        token = max((token for token in special if text.startswith(token)), key=len, default=None)
        if token is not None:
            pieces += [token, ""]
        else:
            pieces[-1] += text[0]
        text = text[len(token or text[0]) :]
    return [piece for piece in pieces if piece]


def _literal(text: str, special: Mapping[str, int]) -> str:
    """`text` as a rule of the grammar."""
    pieces = _split(text, special)
    return " ".join(f"<[{special[piece]}]>" if piece in special else _quoted(piece) for piece in pieces)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
