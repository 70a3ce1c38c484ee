"""From tokens to text that can be shown at once: nothing that is sent ever has to be taken back.

Two things make the newest text uncertain. A character may be spread over several tokens, and a stop text may have
begun without being complete. Both are held back, in that order: `TextDecoder` releases whole characters, `StopFinder`
releases what cannot be part of a stop text any more, `TextStream` joins the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (yet) a character


class TokenizerLike(Protocol):
    """What the engine needs of a tokenizer; `openk3.chat.tokenizer.Tokenizer` is one."""

    backend: Backend  # for grammars, which need the bytes of every token
    eos_token_ids: tuple[int, ...]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def text_of(self, token_id: int) -> str | None:
        """What a token adds to a text of whole characters; None where that depends on its neighbours."""
        ...


class TextDecoder:
    """Decodes token by token; the pieces and `flush` together equal decoding all tokens at once.

    (One exception: vocabularies with byte tokens, such as Llama 2's, decode a run of byte tokens as a whole, so when
    a run turns out not to be UTF-8 after its beginning was sent, that beginning stays.)

    Text depends on neighbours: some decoders drop a space at the very beginning. So the tokens since the last release
    are decoded together with those of the release before, and what those give by themselves is taken off (the method
    of vLLM and text-generation-inference), unless the tokenizer knows what the token adds whatever they are.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # those of the last release that gave text, then those not released yet
        self._released = 0  # how many of `_ids` are of the former kind
        self._released_text = ""  # what they give by themselves

    def push(self, token_id: int) -> str:
        """The text that is certain with this token, possibly none."""
        known = self._tokenizer.text_of(token_id) if self._released == len(self._ids) else None
        if known is not None:
            if known:
                self._ids, self._released, self._released_text = [token_id], 1, known
            return known
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith(REPLACEMENT) else self._release(text)

    def flush(self) -> str:
        """The text that is left at the end, with U+FFFD for incomplete characters."""
        return self._release(self._tokenizer.decode(self._ids))

    def _release(self, text: str) -> str:
        pending = self._ids[self._released :]
        if text.startswith(self._released_text):
            new = text[len(self._released_text) :]
        else:
            new = self._tokenizer.decode(pending)
        if new:
            self._ids = pending
            self._released = len(pending)
            self._released_text = self._tokenizer.decode(pending)
        return new


class StopFinder:
    """Finds the first stop text in a stream of pieces, however they are cut.

    First is the one that ends first; of those that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """The text that is certain not to be of a stop text, and the stop text that was found."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return text[:start], stop
        held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """The text that was held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with and goes beyond."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """The text of one reply, token by token."""

    def __init__(self, tokenizer: TokenizerLike, stops: Sequence[str]) -> None:
        self._decoder = TextDecoder(tokenizer)
        self._finder = StopFinder(stops)

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text to send after this token, and the stop text that ends the reply, if one does."""
        return self._finder.push(self._decoder.push(token_id))

    def finish(self) -> tuple[str, str | None]:
        """The text to send when no token follows, and the stop text found in it."""
        text, stop = self._finder.push(self._decoder.flush())
        return (text, stop) if stop is not None else (text + self._finder.flush(), None)
