"""What a request may ask of the form of its reply. Nothing here needs the library that keeps the reply to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "reply"]

MAX_SOURCE = 200_000


@dataclass(frozen=True)
class Grammar:
    """A form that a whole reply is to have. Usually made by one of the class methods.

    Attributes:
        kind: "json_schema", a JSON value that is valid under a schema; "json_object", any JSON object; "regex", a text
            that a regular expression (Rust's syntax) matches from its beginning to its end; "choice", one of several
            texts; "lark", a context-free grammar in llguidance's variant of Lark's syntax, with the rule "start";
            "reply", what `openk3.engine.grammar.reply.ReplyForm` makes, such as text with calls of tools.
        source: the schema as JSON, the expression, the texts as a JSON array, or the grammar; empty for "json_object".
            Properties of JSON objects come in the order in which the schema lists them.
        lenient: keywords of JSON Schemas that cannot be kept are left out, and not refused; whoever asks for that
            checks the reply. What is wrong with a schema otherwise is refused all the same.

    Raises:
        ValueError: another kind, or a source of another shape. Whether the source means anything is found out where
            it is compiled.
    """

    kind: GrammarKind
    source: str = ""
    lenient: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ValueError(f"grammar.kind is {self.kind!r}: it must be one of {', '.join(get_args(GrammarKind))}")
        if not isinstance(self.source, str):
            raise ValueError(f"grammar.source is a {type(self.source).__name__}: it must be text")
        if len(self.source) > MAX_SOURCE:
            raise ValueError(
                f"grammar.source has {len(self.source):,} characters: at most {MAX_SOURCE:,} are possible, shorten it"
            )
        if not self.source.isascii():
            try:
                self.source.encode()
            except UnicodeEncodeError:
                raise ValueError("grammar.source holds half of a surrogate pair: it must be valid Unicode") from None
        if self.kind == "json_object":
            if self.source:
                raise ValueError("grammar.source is given: a json_object has none, use json_schema to ask for more")
        elif not self.source:
            raise ValueError(f"grammar.source is empty: a {self.kind} needs one")
        if self.kind == "choice":
            self.texts  # noqa: B018 (raises what is wrong)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that is valid under `schema` (Draft 2020-12, or the one that its ``$schema`` names).

        Raises:
            ValueError: a schema that is not JSON itself, or too large.
        """
        if not isinstance(schema, (Mapping, bool)):
            raise ValueError(f"the JSON schema is a {type(schema).__name__}: it must be a mapping, or true or false")
        return cls("json_schema", to_json("the JSON schema", dict(schema) if isinstance(schema, Mapping) else schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that `pattern` matches from its beginning to its end."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of `texts`.

        Raises:
            ValueError: not a list of texts, an empty list, or an empty text.
        """
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
            raise ValueError(f"the choice is a {type(texts).__name__}: it must be a list of texts")
        return cls("choice", to_json("the choice", list(texts)))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A text that a Lark grammar derives from its rule "start"."""
        return cls("lark", grammar)

    @property
    def texts(self) -> list[str]:
        """The texts of a "choice".

        Raises:
            ValueError: its source is not a JSON array of texts, none of them empty.
        """
        try:
            texts = json.loads(self.source)
        except (ValueError, RecursionError):
            texts = None
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"the choice is {self.source[:80]}: it must be a list of texts, none of them empty")
        return texts


def to_json(name: str, value: object) -> str:
    """`value` as the source of a grammar.

    Raises:
        ValueError: JSON cannot hold it; `name` says whose fault it is.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
