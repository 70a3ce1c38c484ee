"""Calls of tools as a grammar: text before them, marks that are text or special tokens, and valid arguments."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from engine_support import RUNNERS, ByteTokenizer, byte_level, generate, random_tokens, small_engine
from grammars import NAME, SCHEMAS, UNSUPPORTED
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_grammar import walk

from openk3.engine import SamplingParams
from openk3.engine.grammar.compiler import GrammarCompiler
from openk3.engine.grammar.matcher import Matcher
from openk3.engine.grammar.tools import CallForm, ToolCalls

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": NAME, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
        "required": ["city"],
    },
    "get_time": {"type": "object", "properties": {}},
    'naïve "tool"': {
        "$ref": "#/$defs/what",
        "$defs": {
            "what": {
                "type": "object",
                "properties": {"leaf": {"$ref": "#/$defs/leaf"}},
                "required": ["leaf"],
                "additionalProperties": False,
            },
            "leaf": {"enum": ["</tool_call>", "\n", None]},
        },
    },
}
BEGIN, END = 1, 2


class MarkTokenizer(ByteTokenizer):
    """A byte tokenizer with special tokens for the marks, in place of two control characters."""

    def __init__(self) -> None:
        self.backend = byte_level({0: "<|end|>", BEGIN: "<tool_call>", END: "</tool_call>"})  # type: ignore[misc]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        marks = {0: b"<|end|>", BEGIN: b"<tool_call>", END: b"</tool_call>"}
        shown = {} if skip_special_tokens else marks
        return b"".join(shown.get(i, b"") if i in marks else bytes([i]) for i in ids).decode("utf-8", "replace")


PLAIN, MARKED = GrammarCompiler(ByteTokenizer(), 256), GrammarCompiler(MarkTokenizer(), 256)
COMPILERS = {"marks of text": PLAIN, "special tokens": MARKED}


def shown(compiler: GrammarCompiler, tokens: list[int]) -> str:
    return (MarkTokenizer() if compiler is MARKED else ByteTokenizer()).decode(tokens, skip_special_tokens=False)


def mark(compiler: GrammarCompiler, name: str = "<tool_call>") -> list[int]:
    return [{"<tool_call>": BEGIN, "</tool_call>": END}[name]] if compiler is MARKED else list(name.encode())


def check_calls(text: str, tools: dict[str, Any] = TOOLS) -> list[Any]:
    """The calls that `text` is, all of them valid."""
    # A mark may also stand in a value, but a line of JSON does not break.
    bodies = re.findall(r"<tool_call>\n(.*)\n</tool_call>", text)
    assert text == "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    calls = [json.loads(body) for body in bodies]
    for call in calls:
        assert list(call) == ["name", "arguments"]
        jsonschema.validate(call["arguments"], tools[call["name"]])
    return calls


@pytest.mark.parametrize("compiler", COMPILERS.values(), ids=COMPILERS)
def test_blind_choices_make_valid_calls(compiler: GrammarCompiler) -> None:
    names = set()
    for seed in range(60):
        matcher = compiler.matcher(ToolCalls(TOOLS, required=True, parallel=False).grammar)
        (call,) = check_calls(shown(compiler, walk(matcher, random.Random(seed))))
        names.add(call["name"])
        assert matcher.ended
    assert names == set(TOOLS)


# Those with references mean their own root by it.
@pytest.mark.parametrize("name", [name for name in SCHEMAS if "$ref" not in json.dumps(SCHEMAS[name])])
def test_arguments_of_every_kind(name: str) -> None:
    schema = {"type": "object", "properties": {"value": SCHEMAS[name]}, "required": ["value"]}
    for seed in range(8):
        matcher = PLAIN.matcher(ToolCalls({"f": schema}, required=True, parallel=False).grammar)
        check_calls(shown(PLAIN, walk(matcher, random.Random(seed))), {"f": schema})


@settings(max_examples=60, deadline=None)
@given(st.text("<tol_ca>é\n{", max_size=30), st.sampled_from(list(COMPILERS.values())))
def test_any_text_may_come_first_but_for_the_mark(text: str, compiler: GrammarCompiler) -> None:
    assume("<tool_call>" not in text)
    matcher = compiler.matcher(ToolCalls(TOOLS).grammar)
    for byte in text.encode():
        assert matcher.forced is None and matcher.allows(byte)
        matcher.consume(byte)
    assert matcher.accepting
    for token in mark(compiler):
        matcher.consume(token)
    written = []
    while matcher.forced is not None:
        written.append(matcher.forced)
        matcher.consume(matcher.forced)
    assert bytes(written).decode() == '\n{"name": "'
    assert not matcher.accepting


def test_an_answer_may_spell_the_mark_where_it_is_a_token() -> None:
    matcher = MARKED.matcher(ToolCalls(TOOLS).grammar)
    for byte in b"I say <tool_call>.":
        matcher.consume(byte)
    assert matcher.forced is None and matcher.accepting
    assert matcher.allows(BEGIN) and not matcher.allows(END)


def follow(compiler: GrammarCompiler, calls: ToolCalls, tokens: list[int]) -> Matcher:
    matcher = compiler.matcher(calls.grammar)
    for token in tokens:
        assert matcher.allows(token)
        matcher.consume(token)
    return matcher


@pytest.mark.parametrize("compiler", COMPILERS.values(), ids=COMPILERS)
def test_what_may_follow_a_call(compiler: GrammarCompiler) -> None:
    call = [*mark(compiler), *b'\n{"name": "get_time", "arguments": {}}\n', *mark(compiler, "</tool_call>")]
    for required in (False, True):
        one = follow(compiler, ToolCalls(TOOLS, parallel=False, required=required), call)
        assert one.ended and one.accepting
        several = follow(compiler, ToolCalls(TOOLS, required=required), call)
        assert several.accepting and not several.ended
        assert {int(i) for i in np.flatnonzero(several.allowed_V)} == {0, ord("\n")}
        follow(compiler, ToolCalls(TOOLS, required=required), [*call, *b"\n", *call, *b"\n", *call])
    assert follow(compiler, ToolCalls(TOOLS), [*b"One moment.\n", *call]).accepting
    assert not compiler.matcher(ToolCalls(TOOLS, required=True).grammar).accepting
    assert compiler.matcher(ToolCalls(TOOLS, required=True).grammar).forced == mark(compiler)[0]
    assert compiler.matcher(ToolCalls(TOOLS).grammar).accepting  # the reply may be empty


def test_other_marks() -> None:
    form = CallForm("[CALL]", " ", suffix="}[/CALL]")
    calls = ToolCalls({"f": TOOLS["get_time"]}, form=form, required=True, parallel=False)
    text = shown(PLAIN, walk(PLAIN.matcher(calls.grammar), random.Random(0)))
    assert text == '[CALL] {"name": "f", "arguments": {}}[/CALL]'
    nested = CallForm("[<tool_call>", suffix="</tool_call>]")
    matcher = MARKED.matcher(ToolCalls({"f": TOOLS["get_time"]}, form=nested, required=True).grammar)
    assert [matcher.forced, matcher.ended] == [ord("["), False]


def test_arguments_that_no_property_lists_are_not_written() -> None:
    for schema, closed in (
        (TOOLS["get_weather"], True),
        ({"type": "object"}, False),
        (TOOLS["get_weather"] | {"additionalProperties": True}, False),
        (TOOLS["get_weather"] | {"required": ["city", "country"]}, False),
        ({"properties": {}, "allOf": [TOOLS["get_weather"]]}, False),
    ):
        assert (ToolCalls({"f": schema}).arguments_schema("f").get("additionalProperties") is False) == closed
        matcher = follow(PLAIN, ToolCalls({"f": schema}), list(b'<tool_call>\n{"name": "f", "arguments": '))
        assert matcher.forced == ord("{")
        matcher.consume(ord("{"))


# In the engine


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_random_weights_call_tools(runner: str, temperature: float) -> None:
    for seed in range(5):
        grammar = ToolCalls(TOOLS, required=True).grammar
        # Without a push towards its end, a random model calls for ever.
        params = SamplingParams(
            temperature=temperature, seed=seed, grammar=grammar, max_tokens=600, logit_bias={0: 100, ord('"'): 20}
        )
        reply = generate(small_engine(runner=runner), random_tokens(9, seed), params)
        assert reply.finish_reason == "stop"
        assert check_calls(reply.text)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_reply_without_calls_is_as_without_the_grammar(temperature: float) -> None:
    bias = {"logit_bias": dict.fromkeys((*range(32), ord("<"), *range(127, 256)), -100)}
    fields: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 40, "ignore_eos": True} | bias
    free = generate(small_engine(), random_tokens(9), SamplingParams(**fields))
    bound = generate(small_engine(), random_tokens(9), SamplingParams(grammar=ToolCalls(TOOLS).grammar, **fields))
    assert free.token_ids == bound.token_ids
    assert free.finish_reason == bound.finish_reason == "length"


@pytest.mark.parametrize("stop", ['"', "get", "/tool", "}"])
def test_a_stop_text_within_a_call_cuts_it(stop: str) -> None:
    grammar = ToolCalls({"get_time": TOOLS["get_time"]}, required=True).grammar
    reply = generate(small_engine(), random_tokens(9), SamplingParams(grammar=grammar, stop=(stop,), max_tokens=100))
    assert (reply.finish_reason, reply.stop_match) == ("length", stop)


def test_a_stop_text_before_any_call_is_an_ordinary_end() -> None:
    params = SamplingParams(temperature=0, grammar=ToolCalls(TOOLS).grammar, stop=("aaa",), logit_bias={ord("a"): 100})
    reply = generate(small_engine(), random_tokens(9), params)
    assert (reply.text, reply.finish_reason, reply.stop_match) == ("", "stop", "aaa")


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToolCalls({}), "tools is empty: calls need a tool at least"),
        (lambda: ToolCalls({"": {}}), "a tool has the name '': it must be text"),
        (lambda: ToolCalls({"f": {"type": "string"}}), "the arguments of the tool 'f' are no object"),
        (lambda: ToolCalls({"f": []}), "the arguments of the tool 'f' are no object"),  # type: ignore[dict-item]
        (lambda: ToolCalls({"f": {}}, form=CallForm()), "form.mark is empty: calls that may follow text need one"),
        (lambda: ToolCalls({"f": {}}, form="x"), "form is a str: it must be a CallForm"),  # type: ignore[arg-type]
        (lambda: CallForm(1), "form.mark is 1: it must be text"),  # type: ignore[arg-type]
        (lambda: CallForm(middle=" "), "form.middle is ' ': it must be a text that divides name and arguments"),
        (lambda: ToolCalls({"f": {"const": {1}}}).grammar, "the tools is not JSON"),
    ],
)
def test_what_is_no_tool(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_the_tool_and_the_keyword_are_named(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": UNSUPPORTED[keyword]}}
    with pytest.raises(ValueError, match=f"the tool 'bad' cannot be called: the JSON schema .*{keyword}.*support"):
        PLAIN.compile(ToolCalls(TOOLS | {"bad": schema}).grammar)
