"""Calls and their results in a chat: each call has its own id, and each is answered once, right after it was made.

A template would render any order, and the model would read a conversation that never happened. Errors are ValueErrors
that name the message, as those of `openk3.chat.messages`.
"""

from __future__ import annotations

from collections.abc import Sequence

from openk3.chat.messages import Message


def check_tool_history(messages: Sequence[Message]) -> None:
    """Check the calls and results of a chat that passed `validate_messages`.

    Raises:
        ValueError: a call without an id or with one that was used before; a result for no call, for an unknown one, or
            for one that has its result; a call without a result.
    """
    used: set[str] = set()
    asked: dict[str, str] = {}  # ids of the calls of the last assistant message, each with its place
    waiting: list[str] = []
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            _check_result(message, f"messages[{i}]", asked, waiting)
            continue
        _check_answered(waiting, asked)
        asked = {}
        for k, call in enumerate(message.get("tool_calls", ())):
            place = f"messages[{i}].tool_calls[{k}].id"
            call_id = call.get("id")
            if not isinstance(call_id, str) or not call_id:
                raise ValueError(f"{place}: missing; give the id that the result's tool_call_id names")
            if call_id in used:
                raise ValueError(f"{place}: {call_id!r} is the id of an earlier call; ids are unique in a conversation")
            used.add(call_id)
            asked[call_id] = place
        waiting = list(asked)
    _check_answered(waiting, asked)


def used_call_ids(messages: Sequence[Message]) -> set[str]:
    """The ids that calls of this chat have."""
    return {str(call["id"]) for message in messages for call in message.get("tool_calls", ()) if call.get("id")}


def _check_result(message: Message, where: str, asked: dict[str, str], waiting: list[str]) -> None:
    call_id = message.get("tool_call_id")
    if not asked:
        raise ValueError(f"{where}: a tool message must follow the assistant message whose tool_calls it answers")
    if not call_id:
        raise ValueError(f"{where}.tool_call_id: missing; give the id of the call that this is the result of")
    if call_id not in asked:
        raise ValueError(
            f"{where}.tool_call_id: {call_id!r} is the id of no call in the assistant message before it; "
            f"its calls are {', '.join(map(repr, asked))}"
        )
    if call_id not in waiting:
        raise ValueError(f"{where}.tool_call_id: the call {call_id!r} has a result already")
    waiting.remove(call_id)


def _check_answered(waiting: Sequence[str], asked: dict[str, str]) -> None:
    if waiting:
        place = asked[waiting[0]].partition(".")[0]
        raise ValueError(
            f"{place}.tool_calls: no result for {', '.join(map(repr, waiting))}; each call needs a message of role "
            "'tool' with its tool_call_id, before any other message"
        )
