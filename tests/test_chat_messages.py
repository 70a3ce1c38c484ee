"""What the message check lets through, what it refuses, and the words it refuses with."""

from collections import UserDict
from typing import Any

import pytest

from openk3.chat.messages import validate_messages, validate_tools


def user(content: object, **fields: object) -> dict[str, object]:
    return {"role": "user", "content": content, **fields}


def call(arguments: object, name: object = "weather") -> dict[str, object]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (None, r"^messages: expected a list of messages, got nothing \(null\)$"),
        ("hello", "^messages: expected a list of messages, got text$"),
        ({"role": "user"}, "^messages: expected a list of messages, got an object$"),
        ([], "^messages: the list is empty"),
        (["hello"], r"^messages\[0\]: expected an object with role and content, got text$"),
        ([{"content": "x"}], r"^messages\[0\]\.role: missing; give one of system, user, assistant, tool$"),
        (
            [user("a"), {"role": "assistant", "content": "b"}, {"role": "robot", "content": "c"}],
            r"^messages\[2\]\.role: 'robot' is not one of system, user, assistant, tool$",
        ),
        ([{"role": 7, "content": "c"}], r"^messages\[0\]\.role: 7 is not one of"),
        ([{"role": ["user"], "content": "c"}], r"^messages\[0\]\.role: \['user'\] is not one of"),
        ([{"role": "user"}], r"^messages\[0\]\.content: missing"),
        ([user(None)], r"^messages\[0\]\.content: missing"),
        ([{"role": "assistant", "content": None}], r"^messages\[0\]\.content: missing"),
        ([{"role": "assistant", "tool_calls": []}], r"^messages\[0\]\.content: missing"),
        ([user(5)], r"^messages\[0\]\.content: expected text or a list of text parts, got int$"),
        ([user(b"x")], r"^messages\[0\]\.content: expected text or a list of text parts, got bytes$"),
        ([user({"text": "x"})], r"^messages\[0\]\.content: expected text or a list of text parts, got an object$"),
        ([user([])], r"^messages\[0\]\.content: the list of parts is empty"),
        ([user([3])], r"^messages\[0\]\.content\[0\]: expected a text part, got int$"),
        (
            [user([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}])],
            r"^messages\[0\]\.content\[1\]\.type: 'image_url' is not supported; this model reads only 'text' parts$",
        ),
        ([user([{"type": "text"}])], r"^messages\[0\]\.content\[0\]\.text: missing$"),
        ([user([{"type": "text", "text": 1}])], r"^messages\[0\]\.content\[0\]\.text: expected text, got int$"),
        ([user("ab\ud800")], r"^messages\[0\]\.content: broken text: character 2 is a lone surrogate \(U\+D800\)"),
        ([user("x", name="\udfff")], r"^messages\[0\]\.name: broken text"),
        ([user("x", name=3)], r"^messages\[0\]\.name: expected text, got int$"),
        ([user("x", tool_calls=[call({})])], r"^messages\[0\]\.tool_calls: only an assistant message can call tools"),
        (
            [{"role": "assistant", "tool_calls": "x"}],
            r"^messages\[0\]\.tool_calls: expected a list of calls, got text$",
        ),
        ([{"role": "assistant", "tool_calls": [1]}], r"^messages\[0\]\.tool_calls\[0\]: expected an object, got int$"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c1"}]}],
            r"^messages\[0\]\.tool_calls\[0\]\.function: expected an object with name and arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [call({}, name="")]}],
            r"^messages\[0\]\.tool_calls\[0\]\.function\.name: missing$",
        ),
        (
            [{"role": "assistant", "tool_calls": [call('{"city": ')]}],
            r"^messages\[0\]\.tool_calls\[0\]\.function\.arguments: not valid JSON: ",
        ),
        (
            [{"role": "assistant", "tool_calls": [call("[1]")]}],
            r"^messages\[0\]\.tool_calls\[0\]\.function\.arguments: expected a JSON object, got a list$",
        ),
        ([user("x", extra=object())], r"^messages\[0\]\.extra: expected a JSON value, got object$"),
    ],
)
def test_refused(messages: object, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        validate_messages(messages)


def test_deep_nesting_is_refused_and_does_not_overflow() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="nested more than 64 levels"):
        validate_messages([user("x", extra=deep)])
    for arguments in ('{"a":' * 100_000 + "1" + "}" * 100_000, '{"a": ' + "1" * 5000 + "}"):
        with pytest.raises(ValueError, match=r"^messages\[0\]\.tool_calls\[0\]\.function\.arguments: "):
            validate_messages([{"role": "assistant", "tool_calls": [call(arguments)]}])


def test_copy_is_plain_and_independent() -> None:
    class Text(str):
        pass

    original = UserDict({"role": "user", "content": Text("hi"), "name": None, "meta": {"k": (1, 2.5, True, None)}})
    (checked,) = validate_messages((original,))
    assert checked == {"role": "user", "content": "hi", "meta": {"k": [1, 2.5, True, None]}}
    assert type(checked["content"]) is str


def test_parts_are_joined_by_newlines() -> None:
    (checked,) = validate_messages([user([{"type": "text", "text": "a"}, "b", {"type": "text", "text": ""}])])
    assert checked["content"] == "a\nb\n"


def test_tool_calls() -> None:
    chat = [
        {"role": "assistant", "content": None, "tool_calls": [call('{"city": "北京"}'), call({"a": [1]}), call("")]},
        {"role": "tool", "content": "4 °C", "tool_call_id": "c1"},
    ]
    checked = validate_messages(chat)
    assert checked[0]["content"] == ""
    arguments = [entry["function"]["arguments"] for entry in checked[0]["tool_calls"]]
    assert arguments == [{"city": "北京"}, {"a": [1]}, {}]
    assert checked[1] == {"role": "tool", "content": "4 °C", "tool_call_id": "c1"}
    assert chat[0]["tool_calls"][0]["function"]["arguments"] == '{"city": "北京"}'  # type: ignore[index]


def test_null_tool_calls_beside_content() -> None:
    (checked,) = validate_messages([{"role": "assistant", "content": "hi", "tool_calls": None, "refusal": None}])
    assert checked == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ("x", "^tools: expected a list of tools, got text$"),
        ([1], r"^tools\[0\]: expected an object, got int$"),
        ([{"type": "retrieval"}], r"^tools\[0\]\.type: 'retrieval' is not supported"),
        ([{"type": "function"}], r"^tools\[0\]\.function: expected an object, got nothing \(null\)$"),
        ([{"type": "function", "function": {}}], r"^tools\[0\]\.function\.name: missing$"),
        (
            [{"type": "function", "function": {"name": "f", "x": {1}}}],
            r"^tools\[0\]\.function\.x: expected a JSON value",
        ),
    ],
)
def test_tools_refused(tools: object, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        validate_tools(tools)


def test_tools_kept() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert validate_tools(tools) == tools
    assert validate_tools([]) is None
    assert validate_tools(None) is None
