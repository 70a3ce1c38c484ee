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
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from openk3.engine.grammar.matcher import Compiled, Matcher, essence
from openk3.engine.grammar.reply import ReplyForm
from openk3.engine.grammar.schema import check_schema
from openk3.engine.grammar.spec import Grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from openk3.engine.detokenizer import TokenizerLike

_Result = TypeVar("_Result")

_REMEMBERED = 64
_REMEMBERED_CHARACTERS = 1_000_000  # of their sources; a long forced text takes 400 bytes for each

# Without a bound a small model may write spaces until its tokens are used up.
_LOOSE_JSON = {"whitespace_pattern": r" |\n {0,24}"}
# As chat templates print the calls of earlier turns. With one way to write what lies between values, it is forced.
_ONE_LINE_JSON = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}

# At one place of a text: as many as a schema may have values. A step then takes some 10 ms at most.
_MOST_ALTERNATIVES = 20_000

# Of the lexer for one byte. 128 tools, any of which may be called at some places, take 300,000.
_LEXER_WORK = 500_000

# llguidance goes into rules that refer to others by recursion. With the stack that a thread usually has, some thousand
# of them end the process.
_STACK_BYTES = 256 * 1024**2
_stack_lock = threading.Lock()

# What llguidance says where it does not say which keyword it is about.
_KEYWORDS = {
    "Unknown format": "format",
    "oneOf constraints": "oneOf",
    "patternProperty regexes": "patternProperties",
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
        self._unkept: OrderedDict[Grammar, str] = OrderedDict()  # of those that had to be made lenient, why

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
        compiled = _with_deep_stack(lambda: self._make(grammar, vocabulary))
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > _REMEMBERED or self._size() > _REMEMBERED_CHARACTERS:
                self._compiled.popitem(last=False)
        return compiled

    def keepable(self, grammar: Grammar) -> tuple[Grammar, str]:
        """`grammar`, compiled; if need be without the keywords of JSON Schemas that cannot be kept.

        Returns:
            The grammar that can be used, and what it leaves out; that is empty where it is `grammar` itself.

        Raises:
            ValueError: as `compile`, where leaving out keywords does not help.
        """
        lenient = replace(grammar, lenient=True)
        with self._lock:
            unkept = self._unkept.get(grammar)
        try:
            if unkept is None:
                self.compile(grammar)
                return grammar, ""
            self.compile(lenient)
        except ValueError as error:
            try:
                self.compile(lenient)
            except ValueError:
                raise error from None
            unkept = str(error)
            with self._lock:
                self._unkept[grammar] = unkept
                if len(self._unkept) > _REMEMBERED:
                    self._unkept.popitem(last=False)
        return lenient, unkept

    def matcher(self, grammar: Grammar, *, ignore_eos: bool = False) -> Matcher:
        """A matcher at the beginning of a reply.

        Raises:
            ValueError: as `compile`.
        """
        return Matcher(self.compile(grammar), ignore_eos)

    def _size(self) -> int:
        return sum(len(grammar.source) for grammar in self._compiled)

    def _make(self, grammar: Grammar, vocabulary: LLTokenizer) -> Compiled:
        from llguidance import LLMatcher, LLParserLimits

        source = _source(grammar, self._tokenizer, vocabulary)
        limits = LLParserLimits(
            max_items_in_row=_MOST_ALTERNATIVES,
            step_max_items=10 * _MOST_ALTERNATIVES,
            step_lexer_fuel=_LEXER_WORK,
            verbose_errors=False,
        )
        start = LLMatcher(vocabulary, source, log_level=0, limits=limits)
        start.compute_bitmask()  # what it learns of its lexer here, every copy knows
        known = tuple(i for i in self._tokenizer.eos_token_ids if i < self._vocab_size)
        compiled = Compiled(vocabulary, start, known, self._vocab_size)
        strict = not grammar.lenient and grammar.kind in ("json_schema", "reply")
        if problem := _problem(compiled, warnings=strict):
            if grammar.kind == "reply":
                self._blame_part(grammar, vocabulary)
            raise ValueError(_refusal(grammar, problem))
        if Matcher(compiled, ignore_eos=True).allowed_V[list(known)].any():
            raise ValueError(f"the grammar ({grammar.kind}) allows nothing but an empty reply: ask for some text")
        return compiled

    def _blame_part(self, grammar: Grammar, vocabulary: LLTokenizer) -> None:
        """
        Raises:
            ValueError: the answer, or the arguments of a tool, cannot be kept by themselves; the message names the
                first.
        """
        form = ReplyForm.from_source(grammar.source)
        if form.answer is not None:
            self._make(replace(form.answer, lenient=grammar.lenient), vocabulary)
        for name in form.calls.tools if form.calls is not None else ():
            try:
                self._make(Grammar("json_schema", _arguments(form, name), grammar.lenient), vocabulary)
            except ValueError as error:
                raise ValueError(f"the tool {name!r} cannot be called: {error}") from None


def _problem(compiled: Compiled, warnings: bool) -> str:
    """Why no reply can begin with a grammar, or (`warnings`) what of it is not kept to the letter; empty if neither."""
    if compiled.start.is_error():
        return compiled.start.get_error()
    if warnings and (found := compiled.start.get_grammar_warnings()):
        return "; ".join(found)
    matcher = Matcher(compiled)
    try:
        if matcher.forced is None:
            matcher.allowed_V  # noqa: B018 (it raises)
        else:
            matcher.consume(matcher.forced)
    except RuntimeError as error:
        return str(error)
    return ""


def _source(grammar: Grammar, tokenizer: TokenizerLike, vocabulary: LLTokenizer) -> str:
    """`grammar` as llguidance reads it.

    Raises:
        ValueError: a JSON schema that is refused.
    """
    if grammar.kind != "reply":
        return json.dumps({"grammars": [_by_itself(grammar)]})
    form = ReplyForm.from_source(grammar.source)
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if vocabulary.is_special_token(i)}
    parts = [{"lark_grammar": form.to_lark(special)}]
    if form.answer is not None:
        parts.append({"name": "answer", **_by_itself(replace(form.answer, lenient=grammar.lenient))})
    for i, name in enumerate(form.calls.tools if form.calls is not None else ()):
        try:
            schema = check_schema(_arguments(form, name), grammar.lenient)
        except ValueError as error:
            raise ValueError(f"the tool {name!r} cannot be called: {error}") from None
        parts.append({"name": f"arguments_{i}", **_json_grammar(schema, _ONE_LINE_JSON, grammar.lenient)})
        if form.is_plain:
            parts.append({"name": f"plain_{i}", **_json_grammar(schema, _LOOSE_JSON, grammar.lenient)})
    return json.dumps({"grammars": parts})


def _by_itself(grammar: Grammar) -> dict[str, Any]:
    """A grammar of any kind but "reply" as an entry of llguidance's list."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        (entry,) = json.loads(LLMatcher.grammar_from_regex(grammar.source))["grammars"]
        return {"lark_grammar": entry["lark_grammar"]}
    if grammar.kind == "choice":
        # A terminal, as the parser bounds the alternatives of a rule.
        return {"lark_grammar": "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, grammar.texts))}
    if grammar.kind == "lark":
        return {"lark_grammar": grammar.source}
    if grammar.kind == "json_object":
        return _json_grammar({"type": "object"}, _LOOSE_JSON, grammar.lenient)
    return _json_grammar(check_schema(grammar.source, grammar.lenient), _LOOSE_JSON, grammar.lenient)


def _json_grammar(schema: dict[str, Any], options: dict[str, Any], lenient: bool) -> dict[str, Any]:
    return {"json_schema": {**schema, "x-guidance": {**options, "lenient": lenient}}}


def _arguments(form: ReplyForm, name: str) -> str:
    assert form.calls is not None
    return json.dumps(form.calls.arguments_schema(name))


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


def _with_deep_stack(work: Callable[[], _Result]) -> _Result:
    """What `work` returns or raises, in a thread of its own. Its stack takes addresses, and memory only where used."""
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    with _stack_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="openk3-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return outcome.result()
