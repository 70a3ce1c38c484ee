"""Turns: in every dialect a reply is kept to its calls, whatever chooses its tokens, and read as what it is."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from chat_support import allowed, chat_llm, has_model_say, ids_of, read, tokenizer, tool
from grammars import NAME

from openk3.chat import Tokenizer, validate_messages, validate_tools
from openk3.chat.reply import Reply
from openk3.chat.turn import Turn, prepare_turn
from openk3.engine.grammar.compiler import GrammarCompiler
from openk3.engine.grammar.matcher import Matcher
from openk3.engine.grammar.spec import Grammar

DIALECTS = ("qwen", "qwen-text", "plain", "mistral", "native", "llama")
USER = {"role": "user", "content": "Paris?"}
WEATHER = tool("get_weather", city=NAME, days={"type": "integer", "minimum": 1, "maximum": 14})
WEATHER["function"]["parameters"]["required"] = ["city"]
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
SCHEMAS = {"get_weather": WEATHER["function"]["parameters"], "get_time": {"type": "object", "maxProperties": 0}}
CITY = {"type": "object", "properties": {"city": NAME}, "required": ["city"], "additionalProperties": False}


@cache
def compiler(dialect: str) -> GrammarCompiler:
    return GrammarCompiler(tokenizer(dialect), 320)


def turn(dialect: str, **options: Any) -> Turn:
    tools = validate_tools(options.pop("tools", TOOLS))
    return prepare_turn(tokenizer(dialect), validate_messages(options.pop("messages", [USER])), tools, **options)


def matcher(dialect: str, asked: Turn) -> Matcher:
    assert asked.grammar is not None
    return compiler(dialect).matcher(asked.grammar)


def follow(dialect: str, asked: Turn, *parts: str) -> Matcher:
    """Where a reply stands that begins with `parts` (see `ids_of`)."""
    follows = matcher(dialect, asked)
    for token in ids_of(dialect, *parts):
        assert follows.allows(token), (parts, tokenizer(dialect).decode([token], False))
        follows.consume(token)
    return follows


def walk(dialect: str, follows: Matcher, chosen: random.Random, most: int = 3000) -> list[int]:
    """Tokens chosen blindly among those that are allowed, until the reply ends."""
    ids: list[int] = []
    while not follows.ended and len(ids) < most:
        token = int(chosen.choice(np.flatnonzero(follows.allowed_V)))
        if token in tokenizer(dialect).eos_token_ids:
            break
        follows.consume(token)
        ids.append(token)
    return ids


def refuses(dialect: str, asked: Turn, *parts: str) -> bool:
    """Whether the last token of `parts` cannot be, while all before it can."""
    *before, last = ids_of(dialect, *parts)
    follows = matcher(dialect, asked)
    for token in before:
        assert follows.allows(token)
        follows.consume(token)
    return not follows.allows(last)


def written(reads: Tokenizer, asked: Turn, ids: list[int]) -> Reply:
    """The reply as it is read, at once and token by token."""
    whole = read(asked.parser(), ids)
    pieces = read(asked.parser(), ids, range(1, len(ids)))
    assert [(c.name, c.arguments) for c in pieces.calls] == [(c.name, c.arguments) for c in whole.calls]
    assert (pieces.content, pieces.reasoning) == (whole.content, whole.reasoning)
    return whole


def check(reply: Reply) -> None:
    for call in reply.calls:
        jsonschema.validate(call.parsed, SCHEMAS[call.name])


MARKS = {"qwen": "<tool_call>", "mistral": "[TOOL_CALLS]", "native": "<|tools|>"}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_valid_whatever_is_chosen(dialect: str, parallel: bool) -> None:
    asked = turn(dialect, tool_choice="required", parallel_tool_calls=parallel, reasoning_effort="none")
    seen = set()
    for seed in range(25):
        ids = walk(dialect, matcher(dialect, asked), random.Random(seed))
        reply = written(tokenizer(dialect), asked, ids)
        assert 1 <= len(reply.calls) <= (16 if parallel else 1)
        assert (reply.content, reply.reasoning) == ("", "")
        check(reply)
        seen |= {call.name for call in reply.calls}
    assert seen == set(SCHEMAS)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_named_function_is_called_once(dialect: str) -> None:
    choice = {"type": "function", "function": {"name": "get_time"}}
    asked = turn(dialect, tool_choice=choice, reasoning_effort="none")
    follows, ids = matcher(dialect, asked), []
    while not follows.ended:  # there is nothing to choose
        assert follows.forced is not None
        ids.append(follows.forced)
        follows.consume(follows.forced)
    (call,) = written(tokenizer(dialect), asked, ids).calls
    assert (call.name, call.arguments) == ("get_time", "{}")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_can_be_called(mode: str) -> None:
    asked = turn("qwen", tool_choice=allowed(mode, "get_time"))
    assert asked.prompt_ids == turn("qwen").prompt_ids  # the model sees all of them
    assert refuses("qwen", asked, "<tool_call>", '\n{"name": "get_w')
    assert follow("qwen", asked, "<tool_call>", '\n{"name": "get_t').forced == ord("i")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_text_is_free_and_a_call_is_not(dialect: str) -> None:
    asked = turn(dialect)
    for text in ("Hello", '{"name": "Ann"}', '[1, "get_time"]', "```json\n{}\n```", '{"name": "get_time"}', "{" * 40):
        assert follow(dialect, asked, text).accepting
    assert matcher(dialect, asked).accepting
    calls = {
        "qwen": ("<tool_call>", '\n{"name": "get_weather", "arguments": {"'),
        "qwen-text": ('<tool_call>\n{"name": "get_weather", "arguments": {"',),
        "plain": ('<tool_call>\n{"name": "get_weather", "arguments": {"',),
        "mistral": ("[TOOL_CALLS]", ' [{"name": "get_weather", "arguments": {"'),
        "native": ("<|tools|>", "<|call|>", "get_weather", "<|argument|>", '{"'),
    }
    if dialect in calls:
        for before in ("", "Let me see.\n"):
            assert not follow(dialect, asked, before, *calls[dialect]).accepting
            assert refuses(dialect, asked, before, *calls[dialect], "t")
            assert refuses(dialect, asked, before, *calls[dialect], 'city": 1')
    if dialect != "native":
        for lead in ("", " \n", "```json\n", "```\n", "[", "```json\n[\n  "):
            for key in ("arguments", "parameters"):
                call = f'{lead}{{\n  "name" : "get_weather",\n  "{key}": {{\n    "'
                assert not follow(dialect, asked, call).accepting
                assert refuses(dialect, asked, f"{call}t")
                assert follow(dialect, asked, call, 'city": "Rome"\n  }\n}').accepting


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"name": "get_time", "arguments": {}}', ["get_time"]),
        ('```json\n{"name": "get_weather", "parameters": {\n  "city": "é"\n}}\n```\n', ["get_weather"]),
        ('[{"name": "get_time", "arguments": {}}, {"name": "get_time", "arguments": {}}]', ["get_time"] * 2),
        ('```json\n[{"name": "get_time", "arguments": {}}\n]\n```', ["get_time"]),
        ('```json\n{"name": "get_time", "arguments": {}}\n{"name": "get_weather", "arguments": {"city": "A"}}\n```',
         ["get_time", "get_weather"]),
    ],
)  # fmt: skip
def test_calls_without_marks(text: str, names: list[str]) -> None:
    for dialect in ("qwen", "llama"):
        asked = turn(dialect)
        assert follow(dialect, asked, text).accepting
        reply = written(tokenizer(dialect), asked, ids_of(dialect, text))
        assert ([call.name for call in reply.calls], reply.content) == (names, "")
        check(reply)


GET_TIME = '{"name": "get_time", "arguments": {}}'


@pytest.mark.parametrize(
    ("text", "content", "number"),
    [
        (f'{GET_TIME}\n{{"response": "It is late."}}', '{"response": "It is late."}', 1),
        (f"```json\n{GET_TIME}\n```\n\nThat is it.", "That is it.", 1),
        (f"```json\n{GET_TIME}\n{GET_TIME}\n```\nSo.", "So.", 2),
        # Where the grammar leaves calls, so does the parser.
        (f"```\n{GET_TIME}\n```\n{GET_TIME}", GET_TIME, 1),
        (f"[{GET_TIME}] {GET_TIME}", GET_TIME, 1),
        (f"{GET_TIME} ```json\n{GET_TIME}\n```", f"```json\n{GET_TIME}\n```", 1),
    ],
)
def test_text_after_calls_without_marks(text: str, content: str, number: int) -> None:
    asked = turn("qwen")
    assert follow("qwen", asked, text).accepting
    reply = written(tokenizer("qwen"), asked, ids_of("qwen", text))
    assert (reply.content.strip("] \n"), len(reply.calls)) == (content, number)
    single = turn("qwen", parallel_tool_calls=False)
    assert follow("qwen", single, GET_TIME).ended


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "get_weather"}',
        '{"arguments": {"city": 1}, "name": "get_weather"}',
        '{"type": "function", "name": "get_weather", "arguments": {"town": "x"}}',
        '{"name": "get\\u005fweather", "arguments": {}}',
        '{"name": "get_weather", "arguments": "{}"}'.replace('"arguments"', '"args"'),
        '{"name" : ' + " " * 40 + '"get_weather", "arguments": {}}',
        "Like this: " + '{"name": "get_weather", "arguments": {}}',
    ],
)
def test_what_no_grammar_sees_is_no_call(text: str) -> None:
    """It would be read as one, by a parser that nothing stands behind."""
    asked = turn("qwen")
    assert follow("qwen", asked, text).accepting
    assert written(tokenizer("qwen"), asked, ids_of("qwen", text)) == Reply(content=text)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_blind_choices_are_read_as_valid_calls_or_text(dialect: str) -> None:
    asked = turn(dialect)
    marks = {*tokenizer(dialect).dialect.marks.meaning}
    for seed in range(40):
        chosen = random.Random(seed)
        begin = chosen.choice(['{"name": "get_weather", "arguments": ', '```json\n{"name": "get_time",', ""])
        follows = follow(dialect, asked, begin)
        mark = tokenizer(dialect).dialect.control.ids.get(MARKS.get(dialect, ""))
        ids = ids_of(dialect, begin)
        if not begin and mark is not None:
            follows.consume(mark)
            ids.append(mark)
        ids += walk(dialect, follows, chosen, most=400)
        reply = written(tokenizer(dialect), asked, ids)
        if follows.accepting:
            check(reply)
            assert begin == "" or dialect == "native" or reply.calls or '"get_time"' in begin
        assert not [mark for mark in marks if mark in reply.reasoning]


# Reasoning first


@pytest.mark.parametrize("dialect", ["qwen", "native"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_reasoning_is_free_and_what_follows_is_not(dialect: str, choice: str) -> None:
    begin, end = ("<think>", "</think>") if dialect == "qwen" else ("<|think|>", "<|response|>")
    asked = turn(dialect, tool_choice=choice)
    thought = 'Hm <tool_call> {"name": "get_weather", "arguments": 1} '
    follows = follow(dialect, asked, begin, thought)
    assert not follows.accepting
    if dialect == "qwen":
        tail = (end, "\n\n", "<tool_call>", '\n{"name": "get_time", "arguments": {}}\n', "</tool_call>")
    else:
        tail = ("<|tools|>", "<|call|>", "get_time", "<|argument|>", "{}")  # which ends the reasoning too
    parts = (begin, thought, *tail)
    assert follow(dialect, asked, *parts).accepting
    reply = written(tokenizer(dialect), asked, ids_of(dialect, *parts))
    assert (reply.reasoning, [call.name for call in reply.calls]) == (thought.strip(), ["get_time"])
    if choice == "required":
        assert refuses(dialect, asked, begin, "Hm", end, "x")
        assert refuses(dialect, asked, "x")
    else:
        assert follow(dialect, asked, begin, "Hm", end, "No.").accepting


@pytest.mark.parametrize("dialect", ["qwen", "native", "qwen-text"])
def test_the_form_of_an_answer_holds_after_reasoning(dialect: str) -> None:
    begin, end = ("<|think|>", "<|response|>") if dialect == "native" else ("<think>", "</think>")
    for tools in ([], TOOLS):
        asked = turn(dialect, tools=tools, grammar=Grammar.json_schema(CITY))
        for parts in (
            (begin, "Rome? {", end, '{"city": "Rome"}'),
            ('{"city": "Rome"}',),
            ((end,) if dialect == "native" else ()) + ('{"city": "Rome"}',),
        ):
            parts = ("".join(parts),) if dialect == "qwen-text" else parts
            assert follow(dialect, asked, *parts).accepting
            assert written(tokenizer(dialect), asked, ids_of(dialect, *parts)).content == '{"city": "Rome"}'
        assert refuses(dialect, asked, *([begin, "Hm", end] if dialect != "qwen-text" else [begin + "Hm" + end]), "x")
        assert refuses(dialect, asked, '{"c', "x")
    asked = turn(dialect, tools=[], grammar=Grammar.json_schema(CITY), reasoning_effort="none")
    assert matcher(dialect, asked).forced == ord("{")


def test_an_answer_of_a_form_or_calls() -> None:
    asked = turn("qwen", grammar=Grammar.json_schema({"type": "object", "properties": {"name": NAME}}))
    call = ("<tool_call>", '\n{"name": "get_time", "arguments": {}}\n', "</tool_call>")
    assert [c.name for c in written(tokenizer("qwen"), asked, ids_of("qwen", *call)).calls] == ["get_time"]
    assert follow("qwen", asked, *call).accepting
    assert refuses("qwen", asked, "H")
    text = '{"name": "get_time", "arguments": {}}'  # an answer, as it has the form
    assert written(tokenizer("qwen"), asked, ids_of("qwen", text)) == Reply(content=text)
    with pytest.raises(ValueError, match=r"^grammar: an answer of a certain form beside calls that have no mark"):
        turn("llama", grammar=Grammar.json_object())


def test_reasoning_tokens_are_counted() -> None:
    asked = turn("qwen")
    for ids, count in (
        (ids_of("qwen", "<think>", "\nHm\n", "</think>", "\n\n", "No."), 5),
        (ids_of("qwen", "No."), 0),
    ):
        for cuts in ((), range(1, len(ids))):
            parser = asked.parser()
            read(parser, ids, cuts)
            assert parser.reasoning_tokens == count


# In the engine


@pytest.mark.parametrize("dialect", ["native", "plain"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_random_weights_call_tools(dialect: str, temperature: float) -> None:
    llm = chat_llm(dialect)
    end = llm.tokenizer.eos_token_ids[0]
    options: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": 1500, "logit_bias": {end: 100}}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "reasoning_effort": "none"} | options
        reply = llm.chat([USER], **asked)
        assert (reply.finish_reason, reply.text) == ("tool_calls", "")
        check(Reply(calls=reply.tool_calls))
        pieces = list(llm.chat_stream([USER], **asked))
        parts = [piece for one in pieces for piece in one.tool_calls]
        arguments = [call.arguments for call in reply.tool_calls]
        for index, text in enumerate(arguments):
            assert "".join(part.arguments for part in parts if part.index == index) == text
        assert len(parts) > len(arguments)  # they come as they are written


UNIQUE = tool("pick", bits={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2})
UNIQUE["function"]["parameters"]["required"] = ["bits"]


def test_what_no_grammar_keeps_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model says it right at the third time."""
    strict = json.loads(json.dumps(UNIQUE))
    strict["function"]["parameters"]["properties"]["bits"]["uniqueItems"] = True
    llm, said = chat_llm("plain"), []
    ids = ids_of("plain", '<tool_call>\n{"name": "pick", "arguments": {"bits": [true, ')

    def chosen(logits: Any, params: Any, seed: int, tokens: Any, prompt_length: int, *_: Any) -> int:
        place = len(tokens) - prompt_length
        if place < len(ids):
            return ids[place]
        if place == len(ids):
            said.append(params.temperature)
        rest = ids_of("plain", ("false" if len(said) == right else "true") + "]}}\n</tool_call>")
        return [*rest, *llm.tokenizer.eos_token_ids][place - len(ids)]

    monkeypatch.setattr("openk3.engine.engine.sample_token", chosen)
    right = 3
    asked: dict[str, Any] = {
        "tools": [strict],
        "tool_choice": "required",
        "temperature": 0,
        "parallel_tool_calls": False,
    }
    (call,) = llm.chat([USER], **asked).tool_calls
    assert (call.parsed, said) == ({"bits": [True, False]}, [0, 0.7, 0.7])
    said.clear()
    (only,) = llm.chat_stream([USER], **asked)
    assert "".join(part.arguments for part in only.tool_calls) == '{"bits": [true, false]}'
    said.clear()
    right = 9
    with pytest.raises(RuntimeError, match=r"no reply was valid of 4 .*pick: bits: .*the keyword uniqueItems"):
        llm.chat([USER], **asked)
    assert len(said) == 4


def test_what_cannot_be_kept_nor_checked_is_refused_before_anything_runs() -> None:
    bad = tool("far", x={"$ref": "https://example.org/x.json"})
    for choice in ("auto", "required"):
        with pytest.raises(ValueError, match=r"^tools: the tool 'far' cannot be called: .* keyword \$ref"):
            chat_llm("plain").chat([USER], tools=[TIME, bad], tool_choice=choice)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^tools: the arguments of the tool 'f' are no object"):
        function = {"name": "f", "parameters": {"type": "string"}}
        chat_llm("plain").chat([USER], tools=[{"type": "function", "function": function}])


def test_the_answer_after_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = chat_llm("qwen")
    has_model_say(monkeypatch, "qwen", "sunny.")
    begun = {"role": "assistant", "content": "It is ", "partial": True}
    reply = llm.chat([USER, begun], tools=TOOLS)
    assert (reply.text, reply.finish_reason) == ("sunny.", "stop")
    assert reply.usage.prompt_tokens == len(turn("qwen", messages=[USER, begun]).prompt_ids)


def test_as_many_tools_as_there_may_be() -> None:
    """With more text around them than a grammar may have."""
    words = {"description": "word " * 400, "title": "Title", "examples": ["x"] * 50}
    tools = []
    for i in range(128):
        named = {f"{name}_{i}": {"type": "string", **words} for name in ("city", "title", "description")}
        tools.append(tool(f"function_number_{i}", **named, kind={"enum": ["a", "b", "c"]}))
    for choice in ("auto", "required"):
        asked = turn("qwen", tools=tools, tool_choice=choice)
        begun = ("<tool_call>", '\n{"name": "function_number_99", "arguments": {"')
        assert not follow("qwen", asked, *begun, 'title_99": "').accepting
        assert refuses("qwen", asked, *begun, "title_98")
