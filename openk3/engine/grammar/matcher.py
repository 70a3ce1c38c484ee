"""A grammar for one vocabulary, and where one reply stands in it: which tokens may come next.

llguidance (https://github.com/guidance-ai/llguidance) does the work: an Earley parser over a lexer of regular
expressions' derivatives, walked together with the trie of the vocabulary. What it allows next depends on the tokens of
the reply alone, so batching, chunking and preemption cannot change a reply. Where it knows the text that must follow, it
allows only that text's own tokens, and there is nothing to choose.

Shapes: V vocab_size.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from openk3.engine.grammar.schema import check_schema
from openk3.engine.grammar.spec import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from openk3.engine.detokenizer import TokenizerLike

Mask = NDArray[np.bool_]

_REMEMBERED = 64

# Without a bound a small model may write spaces until its tokens are used up.
_JSON_OPTIONS = {"whitespace_pattern": r" |\n {0,24}"}


class GrammarCompiler:
    """Makes the matchers of one vocabulary and remembers the grammars that were used last. For any thread.

    Args:
        tokenizer: the vocabulary, and the tokens that end a text.
        vocab_size: ids that the model gives logits for, of which the tokenizer may know fewer.
    """

    def __init__(self, tokenizer: TokenizerLike, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()

    def compile(self, grammar: Grammar) -> None:
        """Compile `grammar` now, so that `matcher` finds it.

        Raises:
            ValueError: it cannot be compiled, or allows no text at all; the message says why, and names the keyword of
                a JSON Schema that is not supported.
        """
        self._get(grammar)

    def matcher(self, grammar: Grammar, *, ignore_eos: bool = False) -> Matcher:
        """A matcher at the beginning of a reply.

        Args:
            ignore_eos: do not let the model end the text; it ends where nothing can follow.

        Raises:
            ValueError: as `compile`.
        """
        return Matcher(self._get(grammar), ignore_eos)

    def _get(self, grammar: Grammar) -> _Compiled:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            if self._vocabulary is None:
                self._vocabulary = _read_vocabulary(self._tokenizer, self._vocab_size)
            vocabulary = self._vocabulary
        compiled = _compile(grammar, vocabulary, self._tokenizer.eos_token_ids, self._vocab_size)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _REMEMBERED:
                self._compiled.popitem(last=False)
        return compiled


class Matcher:
    """Where one reply stands in its grammar. For one request, and one thread at a time.

    Attributes:
        allowed_V: the tokens that may come next; the end of the text is one where the reply may end here.
        forced: the only one of them, if there is only one.
        ended: whether the text is complete and nothing can follow; then no token is allowed, or only the end.
    """

    def __init__(self, compiled: _Compiled, ignore_eos: bool = False) -> None:
        self._compiled = compiled
        self._ignore_eos = ignore_eos
        self._matcher = compiled.start.deep_copy()
        self._look(compiled.first_V)

    @property
    def accepting(self) -> bool:
        """Whether the text so far is all that the grammar asks for."""
        return self._matcher.is_accepting()

    def consume(self, token: int) -> None:
        """Go on with a token, which must not be one that ends the text.

        Raises:
            RuntimeError: the token is not allowed, or the grammar became too complex to follow.
        """
        if not self._matcher.consume_token(token):
            raise RuntimeError(f"the grammar does not allow token {token} here: {self._matcher.get_error()}")
        self._look(_allowed_next(self._matcher, self._compiled))

    def constrain(self, logits_V: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits, with minus infinity for the tokens that are not allowed."""
        return np.where(self.allowed_V, logits_V, np.float32(-np.inf))

    def accepts(self, text: str) -> bool:
        """Whether `text` as a whole is what the grammar asks for, however it is cut into tokens."""
        matcher = self._compiled.start.deep_copy()
        tokens = self._compiled.vocabulary.greedy_tokenize(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def _look(self, text_V: Mask) -> None:
        """Note what may come next: tokens of the text, and the end where it may end."""
        self.ended = not text_V.any()
        self.allowed_V = text_V
        if self.accepting and not self._ignore_eos:
            self.allowed_V = text_V.copy()
            self.allowed_V[self._compiled.eos_ids] = True
        only_one = np.count_nonzero(self.allowed_V) == 1
        self.forced = int(self.allowed_V.argmax()) if only_one else None


@dataclass(frozen=True)
class _Compiled:
    """A grammar before the first token. `first_V` are the tokens that a text can begin with."""

    vocabulary: LLTokenizer
    start: LLMatcher
    eos_ids: tuple[int, ...]
    vocab_size: int
    first_V: Mask


def _allowed_next(matcher: LLMatcher, compiled: _Compiled) -> Mask:
    """The tokens, other than those that end a text, that the text can go on with.

    Raises:
        RuntimeError: the parser gave up, or no token can follow an incomplete text.
    """
    if matcher.is_stopped() and not matcher.is_error():
        return np.zeros(compiled.vocab_size, dtype=np.bool_)
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error():
        raise RuntimeError(f"the grammar cannot be followed any further: {_first_line(matcher.get_error())}")
    text_V = np.unpackbits(bits, bitorder="little")[: compiled.vocab_size].view(np.bool_)
    text_V[[i for i in compiled.vocabulary.eos_tokens if i < compiled.vocab_size]] = False
    if not matcher.is_accepting() and not text_V.any():
        raise RuntimeError("the grammar asks for text that the vocabulary cannot write")
    return text_V


def _compile(grammar: Grammar, vocabulary: LLTokenizer, eos_ids: tuple[int, ...], vocab_size: int) -> _Compiled:
    from llguidance import LLMatcher, LLParserLimits

    source = _llguidance_source(grammar)
    start = LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
    problem = start.get_error() if start.is_error() else ""
    if not problem and grammar.kind == "json_schema":
        problem = "; ".join(start.get_grammar_warnings())  # what it does not keep to the letter
    if problem:
        raise ValueError(_refusal(grammar, problem))
    known = tuple(i for i in eos_ids if i < vocab_size)
    bare = _Compiled(vocabulary, start, known, vocab_size, np.zeros(vocab_size, dtype=np.bool_))
    try:
        first_V = _allowed_next(start.deep_copy(), bare)
    except RuntimeError as error:
        raise ValueError(_refusal(grammar, str(error))) from None
    if not first_V.any():
        raise ValueError(f"the grammar ({grammar.kind}) allows nothing but an empty reply: ask for some text")
    return _Compiled(vocabulary, start, known, vocab_size, first_V)


def _llguidance_source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, grammar.texts)))
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.source)
    schema = grammar.source if grammar.kind == "json_schema" else '{"type":"object"}'
    check_schema(schema)
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)


def _refusal(grammar: Grammar, problem: str) -> str:
    """What is wrong with a grammar, for its author."""
    problem = _first_line(problem)
    if grammar.kind != "json_schema":
        return f"the grammar ({grammar.kind}) cannot be used: {problem}"
    keywords = re.search(r"Unimplemented keys: \[(.*)\]", problem)
    if keywords is None:
        return f"the JSON schema is not supported: {problem}"
    names = keywords[1].replace('"', "")
    return f"the JSON schema has the keyword {names}, which is not supported: remove it"


def _first_line(message: str, limit: int = 300) -> str:
    line = message.strip().partition("\n")[0]
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _read_vocabulary(tokenizer: TokenizerLike, vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    size = max(vocab_size, tokenizer.backend.get_vocab_size(with_added_tokens=True))
    eos_ids = [i for i in tokenizer.eos_token_ids if i < size]
    try:
        return LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=eos_ids or None)
    except ValueError as error:
        raise ValueError(
            f"replies of this checkpoint cannot be kept to a grammar, because of its tokenizer: {error}"
        ) from None
