"""From a Responses request, and the conversation it goes on from, to the chat request that asks for the same.

A reply of the model is one message of a chat, but several items here: its reasoning, its text and each of its calls.
What the chat layer refuses it names by its own paths; `Translated.named_as_sent` gives the client those of its request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openk3.serve.errors import ApiError, shown
from openk3.serve.openai_types import ChatRequest
from openk3.serve.responses.store import ResponseStore, Stored
from openk3.serve.responses.types import (
    ITEMS,
    AllowedChoice,
    CallItem,
    InputItem,
    InputTokensRequest,
    Item,
    MessageItem,
    NamedChoice,
    ReasoningItem,
    ReferenceItem,
    ResponsesRequest,
    ResultItem,
)
from openk3.serve.validation import checked

_NAMES = (
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"tool_choice\.allowed_tools", "tool_choice"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"max_completion_tokens", "max_output_tokens"),
)


@dataclass
class Chat:
    """Messages as they are put together, and where each came from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, item: Item, place: str) -> None:
        """Take one more item."""
        if isinstance(item, MessageItem) and item.role != "assistant":
            self.message({"role": item.role, "content": item.text}, place)
        elif isinstance(item, ResultItem):
            self.message({"role": "tool", "tool_call_id": item.call_id, "content": item.text}, place)
        else:
            self._say(item, place)

    def message(self, message: dict[str, Any], place: str) -> None:
        """Take a message."""
        self.messages.append(message)
        self.places.append(place)

    def _say(self, item: Item, place: str) -> None:
        """Take a part of the model's reply: what follows its text is another reply, unless it belongs to its calls."""
        last = self.messages[-1] if self.messages else {}
        spoke = bool(last.get("content")) and "tool_calls" not in last
        if last.get("role") != "assistant" or (spoke and not isinstance(item, CallItem)):
            self.message(last := {"role": "assistant", "content": ""}, place)
        if isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, ReasoningItem):
            last["reasoning_content"] = last.get("reasoning_content", "") + item.text
        elif isinstance(item, MessageItem):
            last["content"] += item.text


@dataclass(frozen=True)
class Translated:
    """A chat request, and where each of its messages came from."""

    chat: ChatRequest
    places: Sequence[str]

    def named_as_sent(self, error: ApiError) -> ApiError:
        """The error with the path of the client's own field in place of the chat request's."""
        return _named_as_sent(error, self.places)

    def beginnings(self) -> list[int]:
        """Where the conversation may begin if it is too long: at the messages of the user, but not the first."""
        return [i for i, message in enumerate(self.chat.messages) if message["role"] == "user"][1:]

    def from_message(self, index: int) -> Translated:
        """The request with the system's messages alone before the message at `index`."""
        kept = [i for i, message in enumerate(self.chat.messages) if i >= index or message["role"] == "system"]
        messages = [self.chat.messages[i] for i in kept]
        return Translated(self.chat.model_copy(update={"messages": messages}), [self.places[i] for i in kept])


def translate(body: InputTokensRequest, before: Sequence[Stored], items: Sequence[Item]) -> Translated:
    """Say a Responses request in the words of chat completions.

    Args:
        before: the responses that it goes on from, the first first.
        items: its input, references resolved.

    Raises:
        ApiError: 400, for what only the chat request's own checks find.
    """
    chat = Chat()
    if body.instructions is not None:
        chat.message({"role": "system", "content": body.instructions}, "instructions")
    for stored in before:
        for item in ITEMS.validate_python(stored.items):
            chat.add(item, "previous_response_id")
    for i, item in enumerate(items):
        chat.add(item, f"input[{i}]")
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": chat.messages,
        "tools": [
            {
                "type": "function",
                "function": tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True),
            }
            for tool in body.tools or ()
        ],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "reasoning_effort": body.reasoning and body.reasoning.effort,
    }
    if isinstance(body, ResponsesRequest):
        fields |= {
            "stream": body.stream,
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
        }
    try:
        return Translated(checked(fields, ChatRequest), chat.places)
    except ApiError as error:
        raise _named_as_sent(error, chat.places) from None


def resolved(items: Sequence[InputItem], store: ResponseStore, owner: str) -> list[Item]:
    """The items, with the stored ones in place of references to them.

    Raises:
        ApiError: 404, there is no such item.
    """

    def found(item: ReferenceItem, place: str) -> Item:
        stored = store.item(item.id, owner)
        if stored is None:
            message = f"Invalid '{place}.id': there is no stored item {shown(item.id)}."
            raise ApiError(404, message, param=f"{place}.id", code="item_not_found")
        return ITEMS.validate_python([stored])[0]

    return [found(item, f"input[{i}]") if isinstance(item, ReferenceItem) else item for i, item in enumerate(items)]


def _tool_choice(body: InputTokensRequest) -> Any:
    def named(choice: NamedChoice) -> dict[str, Any]:
        return {"type": "function", "function": {"name": choice.name}}

    choice = body.tool_choice
    if isinstance(choice, AllowedChoice):
        allowed = {"mode": choice.mode, "tools": [named(tool) for tool in choice.tools]}
        return {"type": choice.type, "allowed_tools": allowed}
    return named(choice) if isinstance(choice, NamedChoice) else choice


def _response_format(body: InputTokensRequest) -> dict[str, Any] | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "json_schema": form.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)}


def _named_as_sent(error: ApiError, places: Sequence[str]) -> ApiError:
    if error.param is None:
        return error
    param = error.param
    if found := re.match(r"messages\[(\d+)\]", param):
        param = places[int(found.group(1))]
    elif param == "messages":
        param = "input"
    for pattern, replacement in _NAMES:
        param = re.sub(rf"^{pattern}", replacement, param)
    return error.renamed(param)
