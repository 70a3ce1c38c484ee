"""From stored messages to the messages the model reads.

Attached files are written into the user's turn ahead of the question, each in a fence longer than any fence inside
it. Replies that failed before their first word are left out, and user turns that thereby touch are joined: many chat
templates insist on strict alternation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from openk3.serve.web.settings import ChatSettings
from openk3.serve.web.store import Attachment, Message


def file_block(attachment: Attachment) -> str:
    """One attached file as the model sees it: its name and its text between fences."""
    longest = max((len(run) for run in re.findall(r"`{3,}", attachment.text)), default=2)
    fence = "`" * (longest + 1)
    return f"File `{attachment.name}`:\n{fence}\n{attachment.text.rstrip(chr(10))}\n{fence}"


def user_text(message: Message) -> str:
    """A user message with its files, files first."""
    return "\n\n".join([*map(file_block, message.attachments), *([message.content] if message.content else [])])


def model_messages(settings: ChatSettings, messages: Iterable[Message]) -> list[dict[str, str]]:
    """The chat as `LLM.chat` takes it: the system message if there is one, then user and assistant turns by turns."""
    turns: list[dict[str, str]] = []
    if settings.system_prompt:
        turns.append({"role": "system", "content": settings.system_prompt})
    for message in messages:
        content = user_text(message) if message.role == "user" else message.content
        if not content:
            continue
        if turns and turns[-1]["role"] == message.role:
            turns[-1] = {"role": message.role, "content": f"{turns[-1]['content']}\n\n{content}"}
        else:
            turns.append({"role": message.role, "content": content})
    return turns
