"""A conversation as a file to keep: Markdown to read, with the branch that is shown; JSON with every branch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from openk3.serve.web.prompt import file_block
from openk3.serve.web.records import Conversation, Message, Said, Thinking, Work, work_to_dict
from openk3.serve.web.words import Words


def file_name(conversation: Conversation, suffix: str) -> str:
    """A name for the file that every system takes."""
    stem = re.sub(r"[^\w\- ]+", "", conversation.title).strip()[:60].strip() or "conversation"
    return f"{stem}.{suffix}"


def as_markdown(conversation: Conversation, messages: Iterable[Message], words: Words) -> str:
    """The messages of the branch that is shown, one heading each; thinking and calls are quoted before the answer."""
    parts = [f"# {conversation.title}"]
    for message in messages:
        parts.append(f"## {words.you if message.role == 'user' else words.answer}")
        parts += [file_block(file) for file in message.attachments]
        parts += [_work(part, words) for part in message.work]
        if message.content:
            parts.append(message.content)
        if message.error:
            parts.append(f"*{message.error}*")
    return "\n\n".join(parts) + "\n"


def _work(part: Work, words: Words) -> str:
    if isinstance(part, Said):
        return part.text
    if isinstance(part, Thinking):
        return _quoted(f"**{words.thought}**\n\n{part.text}")
    return _quoted(f"**{part.name}** `{part.arguments}`\n\n{part.result or words.tool_skipped}")


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def as_json(conversation: Conversation, tree: Iterable[Message]) -> str:
    """All messages of all branches; `parent_id` makes the tree, `head_id` says which branch is shown."""
    return json.dumps(
        {
            "format": "openk3.conversation",
            "version": 1,
            "title": conversation.title,
            "created_at": _time(conversation.created_at),
            "updated_at": _time(conversation.updated_at),
            "settings": asdict(conversation.settings),
            "head_id": conversation.head_id,
            "messages": [_message(message) for message in tree],
        },
        ensure_ascii=False,
        indent=2,
    )


def _message(message: Message) -> dict[str, Any]:
    values: dict[str, Any] = {
        "id": message.id,
        "parent_id": message.parent_id,
        "role": message.role,
        "created_at": _time(message.created_at),
        "status": message.status,
    }
    if message.attachments:
        values["attachments"] = [asdict(file) for file in message.attachments]
    if message.work:
        values["work"] = [work_to_dict(part) for part in message.work]
    values["content"] = message.content
    if message.error:
        values["error"] = message.error
    if message.stats is not None:
        values["stats"] = asdict(message.stats)
    return values


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
