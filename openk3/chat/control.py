"""Control tokens: what only a template may write, whatever the text of a message says.

A checkpoint's control tokens (``<|im_end|>``, ``<tool_call>``) are found in a text by their spelling, and a template
pastes messages into its own text before anything is tokenized. So a message that holds the spelling would hold the
token. Here every such place in a message is marked before the template sees it, and the text it writes is cut at the
marks: a spelling that is cut in two is not found, while all other text is tokenized as it always was. Nothing is
marked, and so nothing can change, where no message holds the spelling of a control token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer as Backend


class ControlTokens:
    """The control tokens of one vocabulary.

    Attributes:
        ids: their ids by spelling.
    """

    def __init__(self, backend: Backend, spellings: Iterable[str]) -> None:
        known = {text: backend.token_to_id(text) for text in spellings}
        self.ids: dict[str, int] = {text: i for text, i in known.items() if i is not None and len(text) > 1}
        self._backend = backend
        self._spelled = re.compile(_pattern(self.ids), re.DOTALL) if self.ids else None
        # Digits, which no filter of a template changes; too many of them to be guessed by who writes a message.
        self._mark = "".join(str(secrets.randbelow(10)) for _ in range(40))

    def guard(self, value: Any) -> Any:
        """A JSON value with the spellings of control tokens marked in all of its texts, keys included."""
        if isinstance(value, str):
            return self._guard_text(value)
        if isinstance(value, dict):
            return {self._guard_text(key): self.guard(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.guard(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """The ids of a text made of guarded values. Control tokens come only from what was not marked."""
        first, *rest = text.split(self._mark)
        ids: list[int] = self._backend.encode(first, add_special_tokens=False).ids
        for part in rest:
            ids += self._encode_rest(part)
        return ids

    def _guard_text(self, text: str) -> str:
        if self._spelled is None:
            return text
        if (normalizer := self._backend.normalizer) is not None:
            # Some vocabularies look for their tokens in normalized text, where a lookalike becomes a spelling.
            normalized: str = normalizer.normalize_str(text)
            if len(self._spelled.findall(normalized)) > len(self._spelled.findall(text)):
                text = normalized
        return self._spelled.sub(lambda match: match.group() + self._mark, text)

    def _encode_rest(self, text: str) -> list[int]:
        # With something before it, for some tokenizers put a space before the beginning of a text.
        before: list[int] = self._backend.encode("\n", add_special_tokens=False).ids
        ids: list[int] = self._backend.encode(f"\n{text}", add_special_tokens=False).ids
        if ids[: len(before)] == before:
            return ids[len(before) :]
        alone: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return alone


def control_spellings(backend: Backend, template: str) -> set[str]:
    """Which added tokens are control tokens: those declared special, and those whose spelling says so.

    ``<tool_call>`` and ``<think>`` are often not declared special, so that they show when they are decoded; but then
    the template writes them. Added tokens also hold plain text in some vocabularies: runs of spaces and newlines,
    ``<table>``.
    """

    def is_control(text: str, special: bool) -> bool:
        return special or (not text.isspace() and (text in template or (text.startswith("<|") and text.endswith("|>"))))

    added = backend.get_added_tokens_decoder().values()
    return {token.content for token in added if is_control(token.content, token.special)}


def _pattern(texts: Iterable[str]) -> str:
    """Matches the first character of every spelling."""
    by_first = groupby(sorted(texts), key=lambda text: text[0])
    return "|".join(f"{re.escape(c)}(?={'|'.join(re.escape(text[1:]) for text in group)})" for c, group in by_first)
