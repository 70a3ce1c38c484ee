"""Where one reply stands in its grammar: which tokens must come next, may come next, and may end it.

llguidance (https://github.com/guidance-ai/llguidance) does the work: an Earley parser over a lexer of regular
expressions' derivatives, walked together with the trie of the vocabulary. What it allows next depends on the tokens of
the reply alone, so batching, chunking and preemption cannot change a reply.

Three questions, from cheap to dear. `forced` are tokens that must follow, as the vocabulary would write them by itself:
there is nothing to choose, and the engine need not ask the model. `allows` asks about one token, which is all it takes
where the model's best token is one that may come. `allowed_V` is the whole mask, for everything else; it may be
computed while the model runs, as it does not depend on the logits.

Shapes: V vocab_size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.bool_]

_NOTHING_FITS = "it allows no text that the vocabulary can write"


@dataclass(frozen=True)
class Compiled:
    """A grammar for a vocabulary, before the first token.

    Attributes:
        start: the parser that every reply gets a copy of.
        eos_ids: tokens that end a text, of those that the model knows.
        vocab_size: ids that the model gives logits for.
    """

    vocabulary: LLTokenizer
    start: LLMatcher
    eos_ids: tuple[int, ...]
    vocab_size: int


class Matcher:
    """Where one reply stands. For one request, and one thread at a time.

    Attributes:
        ended: whether the text is complete and nothing can follow.

    Args:
        ignore_eos: do not let the model end the text; it ends where nothing can follow.
    """

    def __init__(self, compiled: Compiled, ignore_eos: bool = False) -> None:
        self.ended = False
        self._compiled = compiled
        self._ignore_eos = ignore_eos
        self._parser = compiled.start.deep_copy()
        self._forced = deque(self._parser.compute_ff_tokens())
        self._mask_V: Mask | None = None

    @property
    def forced(self) -> int | None:
        """The token that must come next, where the grammar leaves nothing to choose."""
        return self._forced[0] if self._forced else None

    @property
    def accepting(self) -> bool:
        """Whether the text so far is all that the grammar asks for."""
        return self._parser.is_accepting()

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; one that ends the text may where the text may end."""
        if self._forced:
            return token == self._forced[0]
        if self._mask_V is not None:
            return bool(self._mask_V[token])
        if token in self._compiled.vocabulary.eos_tokens:  # those it assumes, which may not be ours
            return token in self._compiled.eos_ids and not self._ignore_eos and self.accepting
        return self._parser.validate_tokens([token]) == 1

    @property
    def allowed_V(self) -> Mask:  # noqa: N802 (a shape suffix)
        """The tokens that `allows` allows, computed once for each place in the text. Never none.

        Raises:
            RuntimeError: the grammar became too complex to follow, or the vocabulary cannot write what it asks for.
        """
        if self._mask_V is None:
            self._mask_V = self._compute_mask()
        return self._mask_V

    def _compute_mask(self) -> Mask:
        size = self._compiled.vocab_size
        if self._forced:
            return np.arange(size) == self._forced[0]
        bits = np.frombuffer(self._parser.compute_bitmask(), dtype=np.uint8)
        if self._parser.is_error():
            raise RuntimeError(f"the grammar cannot be followed any further: {essence(self._parser.get_error())}")
        mask_V = np.unpackbits(bits, bitorder="little")[:size].view(np.bool_)
        mask_V[[i for i in self._compiled.vocabulary.eos_tokens if i < size]] = False
        only_end = self.accepting and not mask_V.any()
        if self.accepting and (only_end or not self._ignore_eos):
            mask_V[list(self._compiled.eos_ids)] = True
        if not mask_V.any():
            raise RuntimeError(f"the grammar cannot be followed any further: {_NOTHING_FITS}")
        return mask_V

    def consume(self, token: int) -> None:
        """Go on with a token.

        Raises:
            RuntimeError: the token is not allowed, or the grammar became too complex to follow.
        """
        if not self._parser.consume_token(token):
            raise RuntimeError(f"the grammar does not allow token {token} here: {essence(self._parser.get_error())}")
        self._mask_V = None
        self.ended = self._parser.is_stopped()
        if self._forced:
            self._forced.popleft()
        if not self._forced and not self.ended:
            self._forced.extend(self._parser.compute_ff_tokens())

    def accepts(self, text: str) -> bool:
        """Whether `text` as a whole, special tokens written out, is what the grammar asks for."""
        parser = self._compiled.start.deep_copy()
        tokens = self._compiled.vocabulary.tokenize_str(text, parse_special=True)
        return parser.try_consume_tokens(tokens) == len(tokens) and parser.is_accepting()


def compute_masks(matchers: Iterable[Matcher]) -> None:
    """Have `allowed_V` ready. What is wrong with one, its owner finds out."""
    for matcher in matchers:
        with suppress(RuntimeError):
            matcher.allowed_V  # noqa: B018 (it is kept)


def essence(message: str, limit: int = 300) -> str:
    """What an error of the library says, in one line, without the state that it shows below."""
    first, *more = [line.strip() for line in message.partition("\n<")[0].strip().splitlines()] or [""]
    if first == "NoExtensionBias":
        return _NOTHING_FITS
    # A regular expression is shown below the first line, with what is wrong with it in the last.
    line = f"{first} {more[-1].removeprefix('error: ')}" if first.endswith(":") and more else first
    return line if len(line) <= limit else line[: limit - 1] + "…"
