"""A reply that was read: answer, reasoning and calls, put together from the parser's pieces."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from openk3.chat.parser import CallDelta, ReplyDelta


@dataclass
class ToolCall:
    """A call of a function.

    Attributes:
        id: what the message with its result names as its ``tool_call_id``.
        name: the function.
        arguments: JSON of an object. Incomplete in the last call of a reply that was cut.
    """

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments as an object.

        Raises:
            ValueError: the reply was cut in the middle of them.
        """
        try:
            value: dict[str, Any] = json.loads(self.arguments)
        except ValueError:
            raise ValueError(f"the arguments of {self.name} are incomplete: the reply was cut") from None
        return value

    def as_message_part(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class Reply:
    """What a reply has come to."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: ReplyDelta) -> None:
        """Take one more piece."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.calls:
            self._add_call(call)

    def _add_call(self, call: CallDelta) -> None:
        if call.id is not None:
            self.calls.append(ToolCall(call.id, call.name or "", ""))
        self.calls[call.index].arguments += call.arguments

    def message(self) -> dict[str, Any]:
        """The assistant's message in OpenAI's form, to be put into the chat as it is.

        Its content is None beside calls if there is none. It has the reasoning as ``reasoning_content`` and the
        ``tool_calls`` where there are any.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.as_message_part() for call in self.calls]
        return message
