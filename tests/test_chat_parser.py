"""The parser of replies: what it reads, in each dialect, and that it reads the same however the tokens are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_support import TAGS, counted_ids, read, tokenizer
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


def ids_of(dialect: str, *parts: str) -> list[int]:
    """Tokens of a reply: in parts that are a mark as a whole, the mark; else text, whatever it spells."""
    control = tokenizer(dialect).dialect.control
    ids: list[int] = []
    for part in parts:
        ids += [control.ids[part]] if part in control.ids else control.encode(control.guard(part))
    return ids


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
    assert (reply.content, reply.reasoning, calls(reply)) == (answer, reasoning, made)
    assert len({call.id for call in reply.calls}) == len(made)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=12))
    for places in (cuts, range(1, len(ids))):
        assert read(parser(dialect), ids, places) == reply
        assert read(parser(dialect, valid=True), ids, places) == reply


pieces = st.lists(
    st.one_of(
        st.sampled_from([*MARKERS, "<|think|>", "<|response|>", "<|tools|>", "<|citation|>", " ", "\n", ",", "]", "[", "`"]),
        st.sampled_from(['{"name": "search"', '"arguments": {', '"a": "', "weather", '{"name": "weather", "arguments": {}}']),
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
