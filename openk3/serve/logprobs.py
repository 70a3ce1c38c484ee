"""Log probabilities in the two forms of the API: objects per token for chats, parallel lists for completions.

Both need the bytes of a token, for a token may be part of a character: decoded by itself such a token is U+FFFD and
its bytes are lost. They are recovered from the vocabulary, where the two kinds of tokenizers spell them out:
byte-level BPE writes every byte as a printable character (Radford et al. 2019, GPT-2's ``bytes_to_unicode``),
SentencePiece as ``<0xE2>``.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openk3.chat.tokenizer import Tokenizer
    from openk3.engine.request import TokenLogprob

# JSON has no minus infinity; this is what OpenAI's API writes for it.
_LOWEST = -9999.0


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return the ``logprobs`` object of a chat choice or chunk."""

    def one(entry: TokenLogprob) -> dict[str, Any]:
        data = token_bytes(tokenizer, entry)
        return {
            "token": entry.token,
            "logprob": max(entry.logprob, _LOWEST),
            "bytes": None if data is None else list(data),
        }

    content = [one(entry) | {"top_logprobs": [one(other) for other in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Makes the ``logprobs`` objects of one completion choice, piece by piece; ``text_offset`` counts from the
    choice's start.

    The lists of all pieces together are those of the whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        tokens: list[str] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for entry in entries:
            name = self._name(entry)
            tokens.append(name)
            values.append(max(entry.logprob, _LOWEST))
            # The chosen token is always there, even if it is not among the most likely.
            top = {self._name(other): max(other.logprob, _LOWEST) for other in entry.top}
            tops.append(top | {name: values[-1]})
            offsets.append(self._offset)
            data = token_bytes(self._tokenizer, entry)
            self._offset += len(self._decoder.decode(entry.token.encode() if data is None else data))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, entry: TokenLogprob) -> str:
        """The token's text, or ``bytes:\\xe2\\x82`` for part of a character: as object keys tokens must differ."""
        data = token_bytes(self._tokenizer, entry) if "\ufffd" in entry.token else None
        return entry.token if data is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(tokenizer: Tokenizer, entry: TokenLogprob) -> bytes | None:
    """Return the UTF-8 bytes that the token stands for; None if its vocabulary does not tell."""
    if "\ufffd" not in entry.token:
        return entry.token.encode()
    spelled = tokenizer.backend.id_to_token(entry.token_id) or ""
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", spelled):
        return bytes.fromhex(match.group(1))
    alphabet = _byte_alphabet()
    return bytes(alphabet[c] for c in spelled) if spelled and all(c in alphabet for c in spelled) else None


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 bytes stand for themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
