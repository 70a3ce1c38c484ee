"""Calls and results in a chat that do not fit each other, and the message that says so."""

from __future__ import annotations

from typing import Any

import pytest

from openk3.chat import validate_messages
from openk3.chat.history import check_tool_history, used_call_ids


def asks(*ids: Any) -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "4"}


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("chat", "error"),
    [
        ([USER, asks("a")], r"^messages\[1\]\.tool_calls: no result for 'a'; each call needs a message of role 'tool'"),
        ([USER, asks("a", "b"), result("b"), USER], r"^messages\[1\]\.tool_calls: no result for 'a'; "),
        ([asks("a"), asks("b"), result("b")], r"^messages\[0\]\.tool_calls: no result for 'a'; "),
        (
            [result("a")],
            r"^messages\[0\]: a tool message must follow the assistant message whose tool_calls it answers$",
        ),
        ([USER, result("a")], r"^messages\[1\]: a tool message must follow"),
        ([asks("a"), result("a"), USER, result("a")], r"^messages\[3\]: a tool message must follow"),
        ([asks("a"), result("z")], r"^messages\[1\]\.tool_call_id: 'z' is the id of no call .* its calls are 'a'$"),
        ([asks("a"), result(None)], r"^messages\[1\]\.tool_call_id: missing; "),
        (
            [asks("a", "b"), result("a"), result("a")],
            r"^messages\[2\]\.tool_call_id: the call 'a' has a result already$",
        ),
        ([asks("a", "a"), result("a")], r"^messages\[0\]\.tool_calls\[1\]\.id: 'a' is the id of an earlier call"),
        ([asks("a"), result("a"), asks("a"), result("a")], r"^messages\[2\]\.tool_calls\[0\]\.id: 'a' is the id of an"),
        ([asks(None), result("a")], r"^messages\[0\]\.tool_calls\[0\]\.id: missing; give the id"),
        ([asks(""), result("")], r"^messages\[0\]\.tool_calls\[0\]\.id: missing; "),
        ([asks(3), result("3")], r"^messages\[0\]\.tool_calls\[0\]\.id: missing; "),
    ],
)
def test_refused(chat: list[Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        check_tool_history(validate_messages(chat))


def test_accepted() -> None:
    chat = validate_messages(
        [
            USER,
            asks("a", "b"),
            result("b"),
            result("a"),
            asks("c"),
            result("c"),
            USER,
            {"role": "assistant", "content": "!"},
        ]
    )
    check_tool_history(chat)
    assert used_call_ids(chat) == {"a", "b", "c"}
