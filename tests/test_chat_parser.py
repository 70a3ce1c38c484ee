"""The parser of replies: what it reads, in each dialect, and that it reads the same however the tokens are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_support import TAGS, counted_ids, ids_of, read, tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openk3.chat.parser import ReplyDelta, ReplyParser
from openk3.chat.reply import Reply
from openk3.engine.request import Delta

NAMES = ("weather", "search", "get_time")
DIALECTS = ("qwen", "qwen-text", "native", "mistral")
MANY = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def parser(dialect: str, **options: Any) -> ReplyParser:
    read_by = tokenizer(dialect)
    options = {"tools": NAMES, "new_id": counted_ids()} | options
    return ReplyParser(read_by, read_by.dialect.marks, read_by.dialect.control.ids, **options)


def whole(dialect: str, *parts: str, cut: bool = False, **options: Any) -> Reply:
    """The reply, read at once, and token by token, which must be the same."""
    ids = ids_of(dialect, *parts)
    reply = read(parser(dialect, **options), ids, cut=cut)
    assert read(parser(dialect, **options), ids, range(1, len(ids)), cut=cut) == reply
    return reply


def calls(reply: Reply) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in reply.calls]


# What is generated

MARKERS = [*TAGS, "<|im_end|>", "<|call|>", "<|argument|>", "[TOOL_CALLS]", "```", "```json\n", '"', "\\", "{", "}"]
characters = st.characters(codec="utf-8", exclude_characters="\r")
texts = st.lists(st.one_of(st.text(characters, max_size=8), st.sampled_from(MARKERS)), max_size=5).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(texts, values, max_size=4)
written = st.tuples(arguments, st.sampled_from([None, 1]), st.booleans()).map(
    lambda drawn: json.dumps(drawn[0], indent=drawn[1], ensure_ascii=drawn[2])
)
calls_made = st.lists(st.tuples(st.sampled_from(NAMES), written), max_size=4)
# As the text of an answer: without white ends, and nothing that could be a call without marks or a mark that is text.
answers = st.text(characters, max_size=12).map(str.strip).filter(lambda text: not set("<{[`") & set(text))


def reply_parts(dialect: str, reasoning: str, answer: str, made: list[tuple[str, str]]) -> list[str]:
    parts: list[str] = []
    if dialect == "native":
        parts += ["<|think|>", reasoning] if reasoning else []
        parts += ["<|response|>", answer] if answer else []
        for i, (name, text) in enumerate(made):
            parts += ["<|tools|>"] if i == 0 else []
            parts += ["<|call|>", name, "<|argument|>", text]
        return parts
    if dialect == "mistral":
        body = ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in made)
        return [answer, *(["[TOOL_CALLS]", f" [{body}]"] if made else [])]
    parts += ["<think>", f"\n{reasoning}\n", "</think>", "\n\n"] if reasoning else []
    parts += [answer] if answer else []
    for name, text in made:
        parts += ["\n", "<tool_call>", f'\n{{"name": "{name}", "arguments": {text}}}\n', "</tool_call>"]
    return parts


@pytest.mark.parametrize("dialect", DIALECTS)
@MANY
@given(st.data())
def test_whatever_is_written_is_read_in_any_pieces(dialect: str, data: st.DataObject) -> None:
    reasoning = "" if dialect == "mistral" else data.draw(answers)
    answer, made = data.draw(answers), data.draw(calls_made)
    ids = ids_of(dialect, *reply_parts(dialect, reasoning, answer, made))
    reply = read(parser(dialect), ids)
    new = next((i for i, call in enumerate(made) if call in made[:i]), len(made))
    assert (reply.content, reply.reasoning, calls(reply)) == (answer, reasoning, made[:new])
    assert len({call.id for call in reply.calls}) == new
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=12))
    for places in (cuts, range(1, len(ids))):
        assert read(parser(dialect), ids, places) == reply
        assert read(parser(dialect, valid=True), ids, places) == reply


pieces = st.lists(
    st.one_of(
        st.sampled_from(
            [*MARKERS, "<|think|>", "<|response|>", "<|tools|>", "<|citation|>", " ", "\n", ",", "]", "[", "`"]
        ),
        st.sampled_from(
            ['{"name": "search"', '"arguments": {', '"a": "', "weather", '{"name": "weather", "arguments": {}}']
        ),
        st.text(characters, max_size=4),
    ),
    max_size=14,
)


@pytest.mark.parametrize("dialect", [*DIALECTS, "plain"])
@MANY
@given(st.data())
def test_whatever_comes_is_read_the_same_in_any_pieces(dialect: str, data: st.DataObject) -> None:
    """Replies that keep to nothing: no order of marks, broken calls, cut anywhere."""
    options = {
        "tools": data.draw(st.sampled_from([(), NAMES])),
        "stop": data.draw(st.sampled_from([(), ("a", "\n\n"), ("}",)])),
        "thinking": data.draw(st.booleans()),
        "max_calls": data.draw(st.sampled_from([None, 1])),
    }
    ids = ids_of(dialect, *data.draw(pieces))
    cut = data.draw(st.booleans())
    reply = read(parser(dialect, **options), ids, cut=cut)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=12))
    for places in (cuts, range(1, len(ids))):
        assert read(parser(dialect, **options), ids, places, cut=cut) == reply
    for call in reply.calls if not cut and not options["stop"] else ():
        assert call.name in NAMES
        assert isinstance(call.parsed, dict)
    if dialect in ("qwen-text", "plain"):
        marks = tokenizer(dialect).dialect.marks.meaning
        assert not [mark for mark in marks if mark in reply.reasoning]


@MANY
@given(st.text(), st.lists(st.integers(0, 60), max_size=8))
def test_without_tools_and_marks_the_answer_is_the_text(text: str, cuts: list[int]) -> None:
    ids = ids_of("plain", text)
    reply = read(parser("plain", tools=()), ids, [place for place in cuts if place <= len(ids)])
    assert reply == Reply(content=text) or any(tag in text for tag in TAGS)


# What is read


def test_an_answer_before_calls_and_one_after(dialect: str = "qwen") -> None:
    call = '\n{"name": "search", "arguments": {"q": "a"}}\n'
    reply = whole(dialect, "Let me see.\n\n", "<tool_call>", call, "</tool_call>", "\n", "Wait.")
    assert (reply.content, calls(reply)) == ("Let me see.Wait.", [("search", '{"q": "a"}')])
    assert reply.calls[0].parsed == {"q": "a"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"name": "get_time"}', "{}"),
        ('{"name": "get_time", "arguments": {}}', "{}"),
        ('{"name": "get_time", "arguments": null}', "{}"),
        ('{"name": "get_time", "arguments": ""}', "{}"),
        ('{"name": "get_time", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"arguments": {"a": {"b": [1, "}"]}}, "name": "get_time"}', '{"a": {"b": [1, "}"]}}'),
        ('{"name": "get_time", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "get_time", "arguments": {"a": "two\nlines"}}', '{"a": "two\\nlines"}'),
        ('{"type": "function", "id": 3, "name": "get\\u005ftime", "arguments": {"\\"": "\\\\"}}', '{"\\"": "\\\\"}'),
        ('{"name": "search", "name": "get_time", "arguments": {"a": 1}, "arguments": {"a": 2}}', '{"a": 2}'),
    ],
)
def test_forms_of_a_call(body: str, expected: str) -> None:
    for reply in (
        whole("qwen", "<tool_call>", body, "</tool_call>"),
        whole("qwen-text", f"<tool_call>{body}</tool_call>"),
    ):
        assert (reply.content, calls(reply)) == ("", [("get_time", expected)])
    assert calls(whole("plain", body)) == [("get_time", expected)]


@pytest.mark.parametrize(
    "body",
    [
        "get_time()",
        '{"name": "unknown", "arguments": {}}',
        '{"name": "get_time", "arguments": {"a": }}',
        '{"name": "get_time", "arguments": {"a": NaN}}',
        '{"name": "get_time", "arguments": [1]}',
        '{"name": "get_time", "arguments": "[1]"}',
        '{"name": ["get_time"]}',
        '{"name": "get_time"',
        '{"arguments": {}}',
        "{" * 3000,
    ],
)
def test_what_is_no_call_is_shown_as_text(body: str) -> None:
    assert whole("qwen", "<tool_call>", body, "</tool_call>") == Reply(content=body)
    assert whole("plain", body) == Reply(content=body)


@pytest.mark.parametrize(
    ("text", "content", "made"),
    [
        ('```json\n{"name": "search", "arguments": {"q": "```"}}\n```', "", [("search", '{"q": "```"}')]),
        ('  ```\n\n{"name": "search"}\n```\n', "", [("search", "{}")]),
        ('```json\n{"name": "search"}\n```\n\nThat is it.', "That is it.", [("search", "{}")]),
        ('```json\n{"name": "search"}\n{"name": "weather"}\n```', "", [("search", "{}"), ("weather", "{}")]),
        ('```\n{"name": "search"}\n```\n```\n{"name": "weather"}\n```', "", [("search", "{}"), ("weather", "{}")]),
        ('[{"name": "search"}, {"name": "weather"}]', "", [("search", "{}"), ("weather", "{}")]),
        ('```json\n[\n{"name": "search"},\n{"name": "weather"}\n]\n```', "", [("search", "{}"), ("weather", "{}")]),
        ('{"name": "search"}\n{"answer": 42}', '{"answer": 42}', [("search", "{}")]),
        ("```python\nx = {}\n```", "```python\nx = {}\n```", []),
        ('```json\n{"answer": 42}\n```', '```json\n{"answer": 42}\n```', []),
        ('Like this: {"name": "search"}', 'Like this: {"name": "search"}', []),
        ("[1, 2]\n", "[1, 2]\n", []),
        ("``", "``", []),
    ],
)
def test_calls_without_marks(text: str, content: str, made: list[tuple[str, str]]) -> None:
    reply = whole("plain", text)
    assert (reply.content, calls(reply)) == (content, made)
    assert whole("plain", text, tools=()) == Reply(content=text)


def test_an_answer_that_is_no_call_is_not_held_back() -> None:
    reads = parser("plain")
    assert reads.feed(ids_of("plain", '{"answer": 4')).content == '{"answer": 4'
    assert parser("plain").feed(ids_of("plain", "Hello")).content == "Hello"


def test_a_spelled_mark_divides_nothing_where_the_mark_is_a_token() -> None:
    text = '<think>not</think> <tool_call>{"name": "search"}</tool_call>'
    assert whole("qwen", text) == Reply(content=text)
    assert calls(whole("qwen-text", text)) == [("search", "{}")]


@pytest.mark.parametrize("tools", [(), NAMES])
def test_reasoning(tools: Any) -> None:
    parts = ("<think>", "\nHm.\n\nYes\n", "</think>", "\n", "\n", "42")
    assert whole("qwen", *parts, tools=tools) == Reply("42", "Hm.\n\nYes")
    assert whole("qwen", *parts[1:], tools=tools, thinking=True) == Reply("42", "Hm.\n\nYes")
    assert whole("qwen", *parts[:2], tools=tools, cut=True) == Reply("", "Hm.\n\nYes")
    assert whole("qwen-text", "".join(parts), tools=tools) == Reply("42", "Hm.\n\nYes")


def test_other_control_tokens_are_never_seen() -> None:
    assert whole("qwen", "a", "<|im_start|>", "b", "</tool_call>", "c", tools=()) == Reply(content="abc")
    assert whole("qwen", "<tool_call>", "x", "</tool_call>", tools=()) == Reply(content="x")
    assert whole("native", "<|heading|>", "Rain", "<|citation|>", "3", "<|end_citation|>", ".") == Reply("Rain[3].")


def test_a_reply_that_was_cut_in_a_call() -> None:
    parts = ("<tool_call>", '{"name": "search", "arguments": {"q": "a b')
    reply = whole("qwen", *parts, cut=True)
    assert calls(reply) == [("search", '{"q": "a b')]
    with pytest.raises(ValueError, match="the arguments of search are incomplete: the reply was cut"):
        _ = reply.calls[0].parsed
    assert whole("qwen", *parts) == Reply(content=parts[1])  # it ended there by itself
    assert calls(whole("native", "<|call|>", "search", "<|argument|>", '{"q"', cut=True)) == [("search", '{"q"')]
    assert whole("native", "<|call|>", "search", "<|argument|>", '{"q"') == Reply(content='search{"q"')
    assert whole("native", "<|call|>", "sear", cut=True) == Reply(content="sear")
    assert calls(whole("native", "<|call|>", "search")) == [("search", "{}")]


@pytest.mark.parametrize("valid", [False, True])
def test_the_same_call_again_ends_what_is_read(valid: bool) -> None:
    def call(query: str) -> tuple[str, ...]:
        return ("<tool_call>", f'{{"name": "search", "arguments": {{"q": "{query}"}}}}', "</tool_call>", "\n")

    reply = whole("qwen", *call("a"), *call("ab"), *call("a"), *call("c"), "So.", valid=valid)
    assert (reply.content, calls(reply)) == ("", [("search", '{"q": "a"}'), ("search", '{"q": "ab"}')])
    cut = whole("qwen", *call("ab"), *call("a")[:1], '{"name": "search", "arguments": {"q": "a', cut=True, valid=valid)
    assert calls(cut) == [("search", '{"q": "ab"}'), ("search", '{"q": "a')]


def test_only_so_many_calls() -> None:
    text = '{"name": "search"}'
    reply = whole(
        "qwen", "a", "<tool_call>", text, "</tool_call>", "<tool_call>", text, "</tool_call>", "b", max_calls=1
    )
    assert (reply.content, calls(reply)) == ("a", [("search", "{}")])


def test_stop_texts_end_what_is_read() -> None:
    assert whole("qwen", "one STOP two", stop=("STOP",)) == Reply(content="one ")
    assert whole("qwen", "<think>", "one STOP", "</think>", "two", stop=("STOP",)) == Reply(reasoning="one")


def test_valid_calls_are_handed_on_as_they_are_written() -> None:
    ids = ids_of("qwen", "<tool_call>", '{"name": "search", "arguments": {"q": "abc"}}', "</tool_call>")
    seen: dict[bool, list[ReplyDelta]] = {}
    for valid in (False, True):
        reads = parser("qwen", valid=valid)
        seen[valid] = [delta for i in ids if (delta := reads.feed([i]))]
    assert len(seen[False]) == 1
    assert len(seen[True]) == len('{"q": "abc"}')
    assert seen[True][0].calls[0].name == "search"
    assert all(call.name is None for delta in seen[True][1:] for call in delta.calls)


def test_ids_are_new_in_the_conversation() -> None:
    drawn = iter(["a", "b", "a", "b", "c"])
    text = '{"name": "search"}'
    reply = whole_once(parser("plain", new_id=lambda: next(drawn), used_ids={"a"}), f'{text}\n{{"name": "weather"}}')
    assert [call.id for call in reply.calls] == ["b", "c"]


def whole_once(reads: ReplyParser, text: str) -> Reply:
    return read(reads, ids_of("plain", text))


def test_the_engines_last_piece() -> None:
    """The token that ended the reply is no part of it; a text that did so, and what follows, neither."""
    end = tokenizer("qwen").eos_token_ids[0]
    ids = tuple(ids_of("qwen", "ab"))

    def last(**fields: Any) -> ReplyDelta:
        return parser("qwen", stop=("b",) if fields.get("stop_match") == "b" else ()).read(Delta("r", **fields))

    assert last(token_ids=(*ids, end), finish_reason="stop").content == "ab"
    assert last(token_ids=ids, finish_reason="stop").content == "ab"  # as a grammar ends it
    assert last(token_ids=ids, finish_reason="length").content == "ab"
    assert last(token_ids=ids, finish_reason="stop", stop_match=ids[-1]).content == "a"
    assert last(token_ids=ids, finish_reason="stop", stop_match="b").content == "a"


def test_the_finish_reason() -> None:
    reads = parser("plain")
    assert reads.finish_reason("stop") == "stop"
    reads.feed(ids_of("plain", '{"name": "search"}'))
    assert reads.finish_reason("stop") == "tool_calls"
    assert reads.finish_reason("length") == "length"


def test_a_call_in_the_chat_again() -> None:
    reply = whole("qwen", "<think>", "Hm", "</think>", "<tool_call>", '{"name": "search"}', "</tool_call>")
    function = {"name": "search", "arguments": "{}"}
    assert reply.message() == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm",
        "tool_calls": [{"id": "call0", "type": "function", "function": function}],
    }
    assert json.loads(json.dumps(reply.message())) == reply.message()
