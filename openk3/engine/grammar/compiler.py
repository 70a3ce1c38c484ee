"""Grammars made ready for one vocabulary, once, and kept for the requests that ask for the same again.

Whatever cannot be kept to the letter is refused here. llguidance bounds the size of a grammar, the work of each step
and the states of its lexer; `spec` and `schema` bound what it is given, so that no grammar takes more than a few
seconds.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from openk3.engine.grammar.matcher import Compiled, Matcher, essence
from openk3.engine.grammar.schema import check_schema
from openk3.engine.grammar.spec import Grammar
from openk3.engine.grammar.tools import ToolCalls

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from openk3.engine.detokenizer import TokenizerLike

_REMEMBERED = 64

# Without a bound a small model may write spaces until its tokens are used up.
_LOOSE_JSON = {"whitespace_pattern": r" |\n {0,24}"}
# As chat templates print the calls of earlier turns. With one way to write what lies between values, it is forced.
_ONE_LINE_JSON = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


# What llguidance says where it does not say which keyword it is about.
_KEYWORDS = {
    "Unknown format": "format",
    "oneOf constraints": "oneOf",
    "regex parse error": "pattern",
    "Pointer '": "$ref",
    "Resource '": "$ref",
    "circular references": "$ref",
    "integer range": "minimum or maximum",
    "float range": "minimum or maximum",
}


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
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()

    def compile(self, grammar: Grammar) -> Compiled:
        """`grammar`, compiled now or remembered. The first of all reads the vocabulary, which takes about a second.

        Raises:
            ValueError: it cannot be compiled, or allows no text at all; the message says why, and names the keyword of
                a JSON Schema that is not supported.
        """
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            if self._vocabulary is None:
                self._vocabulary = _read_vocabulary(self._tokenizer, self._vocab_size)
            vocabulary = self._vocabulary
        compiled = self._make(grammar, vocabulary)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _REMEMBERED:
                self._compiled.popitem(last=False)
        return compiled

    def matcher(self, grammar: Grammar, *, ignore_eos: bool = False) -> Matcher:
        """A matcher at the beginning of a reply.

        Raises:
            ValueError: as `compile`.
        """
        return Matcher(self.compile(grammar), ignore_eos)

    def _make(self, grammar: Grammar, vocabulary: LLTokenizer) -> Compiled:
        from llguidance import LLMatcher, LLParserLimits

        source = _source(grammar, self._tokenizer, vocabulary)
        start = LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
        problem = start.get_error()
        if not problem and grammar.kind in ("json_schema", "tool_calls"):
            problem = "; ".join(start.get_grammar_warnings())  # what it does not keep to the letter
        known = tuple(i for i in self._tokenizer.eos_token_ids if i < self._vocab_size)
        compiled = Compiled(vocabulary, start, known, self._vocab_size)
        try:
            first_V = None if problem else Matcher(compiled, ignore_eos=True).allowed_V
        except RuntimeError as error:
            problem = str(error)
        if problem:
            if grammar.kind == "tool_calls":
                self._blame_tool(grammar, vocabulary)
            raise ValueError(_refusal(grammar, problem))
        assert first_V is not None
        if first_V[list(known)].any():
            raise ValueError(f"the grammar ({grammar.kind}) allows nothing but an empty reply: ask for some text")
        start.compute_bitmask()  # what it learns of its lexer, every copy knows
        return compiled

    def _blame_tool(self, grammar: Grammar, vocabulary: LLTokenizer) -> None:
        """
        Raises:
            ValueError: the arguments of a tool cannot be kept by themselves; the message names the first.
        """
        for name, schema in ToolCalls.from_source(grammar.source).tools.items():
            try:
                self._make(Grammar.json_schema(schema), vocabulary)
            except ValueError as error:
                raise ValueError(f"the tool {name!r} cannot be called: {error}") from None


def _source(grammar: Grammar, tokenizer: TokenizerLike, vocabulary: LLTokenizer) -> str:
    """`grammar` as llguidance reads it.

    Raises:
        ValueError: a JSON schema that is refused.
    """
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, grammar.texts)))
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.source)
    if grammar.kind == "json_schema":
        return _grammars(_json_grammar(check_schema(grammar.source), _LOOSE_JSON))
    if grammar.kind == "json_object":
        return _grammars(_json_grammar({"type": "object"}, _LOOSE_JSON))
    calls = ToolCalls.from_source(grammar.source)
    arguments = []
    for i, name in enumerate(calls.tools):
        try:
            schema = check_schema(json.dumps(calls.arguments_schema(name)))
        except ValueError as error:
            raise ValueError(f"the tool {name!r} cannot be called: {error}") from None
        arguments.append({"name": f"arguments_{i}", **_json_grammar(schema, _ONE_LINE_JSON)})
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if vocabulary.is_special_token(i)}
    return _grammars({"lark_grammar": calls.to_lark(special)}, *arguments)


def _json_grammar(schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return {"json_schema": {**schema, "x-guidance": options}}


def _grammars(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars})


def _refusal(grammar: Grammar, problem: str) -> str:
    """What is wrong with a grammar, for its author."""
    problem = essence(problem)
    if grammar.kind != "json_schema":
        return f"the grammar ({grammar.kind}) cannot be used: {problem}"
    if (unknown := re.search(r"Unimplemented keys: \[(.*)\]", problem)) is not None:
        names = unknown[1].replace('"', "")
        return f"the JSON schema has the keyword {names}, which is not supported: remove it"
    for sign, keyword in _KEYWORDS.items():
        if sign in problem:
            return f"the JSON schema has the keyword {keyword} in a way that is not supported: {problem}"
    return f"the JSON schema is not supported: {problem}"


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
