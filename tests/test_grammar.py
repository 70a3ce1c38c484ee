"""Grammars by themselves: what a request may ask for, what is refused, and which tokens are allowed, the plain way."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
from engine_support import EOS, ByteTokenizer, byte_level
from grammars import ENDLESS, SCHEMAS, UNSUPPORTED
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from openk3.engine import SamplingParams
from openk3.engine.grammar import compiler as compiler_module
from openk3.engine.grammar.compiler import GrammarCompiler
from openk3.engine.grammar.matcher import Matcher
from openk3.engine.grammar.spec import MAX_SOURCE, Grammar
from openk3.engine.sampler import sample_token

WORDS = ['{"', '":', '", "', "true", "false", "null", "abc", "bca", "cab", "yes", "no", ' "', "]}", "12", "\\n"]


class WordTokenizer(ByteTokenizer):
    """One token per byte and some for several, in a vocabulary with more ids than tokens."""

    def __init__(self) -> None:
        self.backend = byte_level({EOS: "<|end|>"}, WORDS)  # type: ignore[misc]
        self.vocab_size = self.backend.get_vocab_size() + 5

    def bytes_of(self, token: int) -> bytes:
        text = self.backend.id_to_token(token)
        alphabet = _alphabet()
        return b"" if text is None or token == EOS else bytes(alphabet[char] for char in text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.bytes_of, ids)).decode()


def _alphabet() -> dict[str, int]:
    from openk3.serve.logprobs import _byte_alphabet

    return _byte_alphabet()


BYTES = GrammarCompiler(ByteTokenizer(), 256)
WORD_TOKENIZER = WordTokenizer()
COMPILER = GrammarCompiler(WORD_TOKENIZER, WORD_TOKENIZER.vocab_size)


def walk(matcher: Matcher, rng: random.Random, most: int = 3000) -> list[int]:
    """Tokens chosen blindly among those that are allowed, until the text ends."""
    tokens: list[int] = []
    while not matcher.ended:
        token = int(rng.choice(np.flatnonzero(matcher.allowed_V)))
        if token == EOS:
            return tokens
        matcher.consume(token)
        tokens.append(token)
        assert len(tokens) < most
    return tokens


# The mask and its naive twin


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("abc\né🌊", min_size=1, max_size=6), min_size=1, max_size=5), st.integers(0, 2**32))
def test_a_mask_holds_the_tokens_that_lead_to_a_choice(texts: list[str], seed: int) -> None:
    """Each token of the vocabulary is tried: does any of the texts go on with it?"""
    goals = [text.encode() for text in texts]
    for compiler, bytes_of, size in (
        (BYTES, lambda t: bytes([t]) if t != EOS else b"", 256),
        (COMPILER, WORD_TOKENIZER.bytes_of, WORD_TOKENIZER.vocab_size),
    ):
        matcher, written, rng = compiler.matcher(Grammar.choice(texts)), b"", random.Random(seed)
        while True:
            longer = [goal for goal in goals if goal.startswith(written) and goal != written]
            expected = {
                token
                for token in range(size)
                if (piece := bytes_of(token)) and any(goal.startswith(written + piece) for goal in longer)
            }
            if written in goals:
                expected.add(EOS)
            allowed = {int(token) for token in np.flatnonzero(matcher.allowed_V)}
            assert all(matcher.allows(token) == (token in allowed) for token in range(size))
            # Text that must follow is written in the vocabulary's own way.
            assert allowed == expected or (matcher.forced in expected and allowed == {matcher.forced})
            assert matcher.ended == (not longer)
            assert matcher.accepting == (written in goals)
            if EOS in expected and (len(expected) == 1 or rng.random() < 0.3):
                break
            token = rng.choice(sorted(allowed - {EOS}))
            matcher.consume(token)
            written += bytes_of(token)
        assert matcher.accepts(written.decode())


@pytest.mark.parametrize("name", [*SCHEMAS, *(f"endless {name}" for name in ENDLESS)])
def test_blind_choices_make_valid_instances(name: str) -> None:
    """Whatever a model prefers: tokens chosen blindly give an instance of the schema, every time."""
    schema = ENDLESS[name.removeprefix("endless ")] if name.startswith("endless ") else SCHEMAS[name]
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for seed in range(25):
        matcher = COMPILER.matcher(Grammar.json_schema(schema))
        text = WORD_TOKENIZER.decode(walk(matcher, random.Random(seed)))
        validator.validate(json.loads(text))
        assert matcher.accepts(text)


def test_blind_choices_match_a_regular_expression_and_a_lark_grammar() -> None:
    pattern = r"([0-9]{2,4}|[a-f]+x)( - [^,\n]{1,3}){0,2}"
    lark = 'start: sum\nsum: NUMBER (" + " NUMBER)*\nNUMBER: /[0-9]{1,2}/'
    for seed in range(40):
        text = WORD_TOKENIZER.decode(walk(COMPILER.matcher(Grammar.regex(pattern)), random.Random(seed)))
        assert re.fullmatch(pattern, text)
        text = WORD_TOKENIZER.decode(walk(COMPILER.matcher(Grammar.lark(lark)), random.Random(seed)))
        assert re.fullmatch(r"\d{1,2}( \+ \d{1,2})*", text)


def test_any_object() -> None:
    for seed in range(10):
        matcher = COMPILER.matcher(Grammar.json_object())
        matcher.consume(ord("{"))
        rng = random.Random(seed)
        text = "{"
        while not matcher.ended and len(text) < 400:
            closing = [ord(char) for char in '}]"' if matcher.allowed_V[ord(char)]]
            token = rng.choice(closing or list(np.flatnonzero(matcher.allowed_V)))
            matcher.consume(int(token))
            text += WORD_TOKENIZER.decode([int(token)])
        assert isinstance(json.loads(text), dict)


def test_spaces_are_bounded() -> None:
    matcher = BYTES.matcher(Grammar.json_schema(SCHEMAS["object"]))
    matcher.consume(ord("{"))
    matcher.consume(ord("\n"))
    count = 0
    while matcher.allowed_V[ord(" ")]:
        matcher.consume(ord(" "))
        count += 1
    assert count == 24
    assert matcher.allowed_V[ord('"')]


# Where a reply stands


def test_the_end_is_allowed_where_the_text_may_end() -> None:
    matcher = BYTES.matcher(Grammar.regex("a+b?"))
    assert not matcher.allowed_V[EOS] and matcher.forced == ord("a")
    matcher.consume(ord("a"))
    assert {int(i) for i in np.flatnonzero(matcher.allowed_V)} == {EOS, ord("a"), ord("b")}
    assert matcher.accepting and not matcher.ended and matcher.forced is None
    matcher.consume(ord("b"))
    assert matcher.ended and matcher.forced is None
    assert list(np.flatnonzero(matcher.allowed_V)) == [EOS]
    endless = BYTES.matcher(Grammar.regex("a+b?"), ignore_eos=True)
    endless.consume(ord("a"))
    assert {int(i) for i in np.flatnonzero(endless.allowed_V)} == {ord("a"), ord("b")}


def test_a_vocabulary_without_bytes_is_refused() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))  # type: ignore[misc]
    with pytest.raises(ValueError, match="cannot be kept to a grammar, because of its tokenizer: "):
        GrammarCompiler(tokenizer, 256).compile(Grammar.choice(["a"]))


def test_several_tokens_may_end_a_text() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_ids = (EOS, 7, 999)  # beyond what the model gives logits for
    tokenizer.backend = byte_level({EOS: "<|end|>", 7: "<|turn|>"})  # type: ignore[misc]
    matcher = GrammarCompiler(tokenizer, 256).matcher(Grammar.regex("a+"))
    assert not matcher.allowed_V[[EOS, 7]].any()
    matcher.consume(ord("a"))
    assert matcher.allowed_V[[EOS, 7]].all()


def test_no_token_ends_a_text() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_ids = ()
    matcher = GrammarCompiler(tokenizer, 256).matcher(Grammar.regex("a+b?"))
    matcher.consume(ord("a"))
    assert {int(i) for i in np.flatnonzero(matcher.allowed_V)} == {ord("a"), ord("b")}


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    matcher = BYTES.matcher(Grammar.choice(["yes"]))
    with pytest.raises(RuntimeError, match="the grammar does not allow token 110 here"):
        matcher.consume(ord("n"))


def test_tokens_outside_the_grammar_are_never_chosen() -> None:
    matcher = BYTES.matcher(Grammar.choice(["yes", "no"]))
    logits = np.arange(256, dtype=np.float32)
    assert sample_token(logits, SamplingParams(temperature=0), 0, [1], 1, matcher) == ord("y")
    drawn = {sample_token(logits, SamplingParams(temperature=50), seed, [1], 1, matcher) for seed in range(200)}
    assert drawn == {ord("y"), ord("n")}
    assert logits[5] == 5
    params = SamplingParams(temperature=2, top_k=1, logit_bias={ord("y"): -100, 9: 100}, presence_penalty=1)
    assert sample_token(logits, params, 0, [1, ord("y")], 1, matcher) == ord("n")


def test_the_best_token_needs_no_mask_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Matcher] = []
    compute = Matcher._compute_mask
    monkeypatch.setattr(Matcher, "_compute_mask", lambda self: (computed.append(self), compute(self))[1])
    matcher = BYTES.matcher(Grammar.choice(["yes", "no"]))
    logits = np.zeros(256, np.float32)
    logits[ord("n")] = 1
    assert sample_token(logits, SamplingParams(temperature=0), 0, [1], 1, matcher) == ord("n")
    assert not computed
    logits[ord("x")] = 2
    assert sample_token(logits, SamplingParams(temperature=0), 0, [1], 1, matcher) == ord("n")
    assert computed == [matcher]


def test_a_forced_token_needs_no_logits() -> None:
    matcher = BYTES.matcher(Grammar.choice(["yes"]))
    assert sample_token(np.full(256, np.nan, np.float32), SamplingParams(), 0, [1], 1, matcher) == ord("y")


# Compiled once


def test_compiled_grammars_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_REMEMBERED", 2)
    compiler = GrammarCompiler(ByteTokenizer(), 256)
    first = compiler.compile(Grammar.json_schema({"type": "object"}))
    assert compiler.compile(Grammar.json_schema({"type": "object"})) is first
    compiler.compile(Grammar.regex("a"))
    assert compiler.compile(Grammar.json_schema({"type": "object"})) is first
    compiler.compile(Grammar.regex("b"))
    assert list(compiler._compiled) == [Grammar.json_schema({"type": "object"}), Grammar.regex("b")]


def test_matchers_of_one_grammar_do_not_share_their_state() -> None:
    one, other = (BYTES.matcher(Grammar.choice(["yes", "no"])) for _ in range(2))
    one.consume(ord("y"))
    assert other.allowed_V[ord("n")]
    other.consume(ord("n"))
    assert one.forced == ord("e")


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("xml", "x"), "grammar.kind is 'xml': it must be one of json_schema, json_object, regex"),  # type: ignore[arg-type]
        (lambda: Grammar("regex", 5), "grammar.source is a int: it must be text"),  # type: ignore[arg-type]
        (lambda: Grammar("regex", ""), "grammar.source is empty: a regex needs one"),
        (lambda: Grammar("regex", "\ud800"), "grammar.source holds half of a surrogate pair"),
        (lambda: Grammar("regex", "a" * (MAX_SOURCE + 1)), "grammar.source has 200,001 characters: at most"),
        (lambda: Grammar("json_object", "{}"), "grammar.source is given: a json_object has none"),
        (lambda: Grammar.choice([]), "the choice is []: it must be a list of texts, none of them empty"),
        (lambda: Grammar.choice(["a", ""]), 'the choice is ["a",""]: it must be a list of texts'),
        (lambda: Grammar.choice("abc"), "the choice is a str: it must be a list of texts"),
        (lambda: Grammar("choice", "{"), "the choice is {: it must be a list of texts"),
        (lambda: Grammar.json_schema([1]), "the JSON schema is a list: it must be a mapping, or true or false"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema({"const": float("nan")}), "the JSON schema is not JSON: Out of range float"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "the JSON schema is not JSON: Object of type set"),
    ],
)
def test_what_is_no_grammar(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_unsupported_keywords_are_named(keyword: str) -> None:
    for schema in (UNSUPPORTED[keyword], {"type": "array", "items": UNSUPPORTED[keyword]}):
        with pytest.raises(ValueError, match=f"the JSON schema .*{keyword}.*support"):
            BYTES.compile(Grammar.json_schema(schema))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{", "the JSON schema is malformed: Expecting property name"),
        ("[]", "the JSON schema is malformed: it is an array, not an object"),
        ('{"type": "strin"}', "the JSON schema is malformed at $.type: 'strin' is not valid"),
        ('{"properties": {"a": {"minimum": "x"}}}', "the JSON schema is malformed at $.properties.a.minimum: 'x' is"),
        ('{"required": "a"}', "the JSON schema is malformed at $.required: 'a' is not of type 'array'"),
        ('{"items":' * 400 + "{}" + "}" * 400, "the JSON schema is"),
        ('{"$ref": "#/$defs/none"}', "has the keyword $ref in a way that is not supported: Pointer '/$defs/none'"),
        ('{"$ref": "https://example.com/schema"}', "has the keyword $ref in a way that is not supported: Resource "),
        ('{"$ref": "#"}', "the JSON schema is not supported: it allows no text that the vocabulary can write"),
        ("false", "the JSON schema is false: nothing is valid under it"),
        ('{"type": "integer", "minimum": 3, "maximum": 2}', "the JSON schema is not supported: "),
        (
            '{"type": "string", "pattern": "(?=a)b"}',
            "the JSON schema has the keyword pattern in a way that is not supported: regex parse error: look-around",
        ),
        ('{"const": 1e999}', "the JSON schema is malformed: Out of range float values are not JSON compliant"),
        ('{"$schema": {}}', "the JSON schema is malformed at $['$schema']: {} is not of type"),
        ('{"enum": [' + "0," * 20_000 + "0]}", "the JSON schema is too large: it has 20,003 values, at most 20,000"),
        (
            '{"anyOf": [' + "{}," * 2_000 + "{}]}",
            "too large: it has 2,002 schemas, at most 2,000 are possible, simplify",
        ),
        (
            json.dumps({"items": {"patternProperties": {f"^{i}$": {} for i in range(33)}}}),
            "too large: it has 33 patternProperties in one object, at most 32 are possible, simplify it",
        ),
    ],
)
def test_schemas_that_cannot_be_kept(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BYTES.compile(Grammar("json_schema", source))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex("(a"), "the grammar (regex) cannot be used: "),
        (Grammar.regex("a{0}"), "the grammar (regex) allows nothing but an empty reply: ask for some text"),
        (Grammar.lark("begin: /a/"), "the grammar (lark) cannot be used: "),
        (Grammar.lark("start: missing"), "the grammar (lark) cannot be used: "),
        (Grammar.lark("start: /a/ /"), "the grammar (lark) cannot be used: "),
    ],
)
def test_grammars_that_cannot_be_used(grammar: Grammar, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BYTES.compile(grammar)


def _chain(link: Any, length: int = 1600) -> dict[str, Any]:
    """A schema that refers to another, and so on."""
    parts = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": parts | {f"d{length}": {"type": "boolean"}}}


def _power(length: int) -> str:
    """A rule of 2 ** `length` letters."""
    return "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(length)) + f'a{length}: "x"'


HOSTILE: dict[str, Any] = {
    "items without end": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9},
    "text without end": {"type": "string", "minLength": 10**6},
    "pattern with many states": {"type": "string", "pattern": "^(a|b)*a(a|b){300}$"},
    "pattern of a million letters": {"type": "string", "pattern": "((a{100}){100}){100}"},
    "pattern within another": {"type": "string", "pattern": "^(a|b)*c(a|b)*$", "minLength": 5000, "maxLength": 10000},
    "product of choices": {"allOf": [{"anyOf": [{"required": [f"{i} {j}"]} for j in range(12)]} for i in range(12)]},
    "doubling": _chain(lambda part: {"type": "object", "properties": {"a": part, "b": part}, "required": ["a", "b"]}),
    "doubling conjunction": _chain(lambda part: {"allOf": [part, part]}),
    "doubling choice": _chain(lambda part: {"anyOf": [part, part]}),
    "nested arrays": _chain(lambda part: {"type": "array", "items": part, "minItems": 1}),
    "nested names": _chain(lambda part: part),
    "itself": {"$ref": "#"},
    "itself and more": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    "endless": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "many texts": {"enum": [f"text {i}" for i in range(15_000)]},
    "many values": {"enum": [{"a": i} if i % 2 else i for i in range(9_000)]},
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1_900)}},
    "many objects": {"anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(900)]},
    "large multiple": {"type": "integer", "multipleOf": 10**9 + 7},
    "large range": {"type": "integer", "minimum": -(10**400), "maximum": 10**400},
    "deep instance": {"const": json.loads("[" * 300 + "]" * 300)},
    "long instance": {"const": "x" * 190_000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_or_followed(name: str) -> None:
    follow(Grammar.json_schema(HOSTILE[name]))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.lark(_power(8_000)),
        Grammar.lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
        Grammar.lark("start: start start | start"),
        Grammar.lark('start: ("a"{1,1000000}){1,1000000}'),
        Grammar.regex("(" * 90_000 + "a" + ")" * 90_000),
        Grammar.regex("a{100}{100}{100}"),
        Grammar.choice([f"text {i}" for i in range(12_000)]),
    ],
    ids=lambda grammar: grammar.source[:20],
)
def test_hostile_grammars_are_refused_or_followed(grammar: Grammar) -> None:
    follow(grammar)


def follow(grammar: Grammar) -> None:
    """Compile a grammar and go some way, where it can be used; else it says why. From a thread with a small stack."""

    def go() -> None:
        try:
            matcher = COMPILER.matcher(grammar)
        except ValueError as error:
            assert re.match("the (JSON schema|grammar) ", str(error))
            return
        rng = random.Random(0)
        for _ in range(25):
            if matcher.ended:
                break
            token = matcher.forced
            if token is None:
                token = int(rng.choice(np.flatnonzero(matcher.allowed_V)))
            if token == EOS:
                break
            matcher.consume(token)

    usual = threading.stack_size(512 * 1024)
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(go).result()
    finally:
        threading.stack_size(usual)
