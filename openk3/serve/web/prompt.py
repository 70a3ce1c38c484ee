"""From stored messages to the messages the model reads.

Attached files are written into the user's turn ahead of the question, each in a fence longer than any fence inside
it; where the model can search the files, long ones are only named. Replies that failed before their first word are left
out, and user turns that thereby touch are joined: many chat templates insist on strict alternation. Calls of tools are
told with their results, each round of them as an assistant's turn of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from openk3.agents.tools.search_documents import NAME as SEARCH
from openk3.serve.web.records import Attachment, Message, Said, Thinking, ToolUse
from openk3.serve.web.settings import ChatSettings

LONG_FILE = 6_000  # characters; shorter ones are cheaper read than searched


def file_block(attachment: Attachment, searchable: bool = False) -> str:
    """One attached file as the model sees it: its name and its text between fences."""
    if searchable and len(attachment.text) > LONG_FILE:
        return f"File `{attachment.name}`: {len(attachment.text)} characters. Look things up in it with {SEARCH}."
    longest = max((len(run) for run in re.findall(r"`{3,}", attachment.text)), default=2)
    fence = "`" * (longest + 1)
    return f"File `{attachment.name}`:\n{fence}\n{attachment.text.rstrip(chr(10))}\n{fence}"


def user_text(message: Message, searchable: bool = False) -> str:
    """A user message with its files, files first."""
    files = (file_block(attachment, searchable) for attachment in message.attachments)
    return "\n\n".join([*files, *([message.content] if message.content else [])])


def model_messages(settings: ChatSettings, messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The chat as `LLM.chat` takes it: the system message if there is one, then turn by turn."""
    turns: list[dict[str, Any]] = []
    if settings.system_prompt:
        turns.append({"role": "system", "content": settings.system_prompt})
    for message in messages:
        if message.role == "assistant":
            turns += reply_messages(message)
        elif content := user_text(message, SEARCH in settings.tools):
            if turns and turns[-1]["role"] == "user":
                turns[-1] = {"role": "user", "content": f"{turns[-1]['content']}\n\n{content}"}
            else:
                turns.append({"role": "user", "content": content})
    return turns


@dataclass
class _Round:
    """What the model said at once: text, reasoning, calls."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolUse] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        content = "\n\n".join(self.text)
        if not self.calls:
            return [{"role": "assistant", "content": content}] if content else []
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if self.reasoning:
            message["reasoning_content"] = "\n\n".join(self.reasoning)
        functions = [{"name": call.name, "arguments": call.arguments} for call in self.calls]
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(self.calls, functions, strict=True)
        ]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": call.result or "This call was not run."}
            for call in self.calls
        ]
        return [message, *results]


def reply_messages(reply: Message) -> list[dict[str, Any]]:
    """A reply as the model reads it again: its rounds of calls with their results, then the answer."""
    rounds = [_Round()]
    for part in reply.work:
        calls = rounds[-1].calls
        if calls and not (isinstance(part, ToolUse) and part.round == calls[-1].round):
            rounds.append(_Round())
        if isinstance(part, Thinking):
            rounds[-1].reasoning.append(part.text)
        elif isinstance(part, Said):
            rounds[-1].text.append(part.text)
        elif not _is_cut(part):
            rounds[-1].calls.append(part)
    if rounds[-1].calls:
        rounds.append(_Round())
    if reply.content:
        rounds[-1].text.append(reply.content)
    return [message for said in rounds for message in said.messages()]


def _is_cut(call: ToolUse) -> bool:
    """Whether the reply ended in the middle of the call, so that it cannot be told again."""
    try:
        return not isinstance(json.loads(call.arguments), dict)
    except ValueError:
        return True
