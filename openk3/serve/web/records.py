"""What a conversation is made of: messages in a tree, attached files, and what a reply did before it answered.

A conversation's messages form a tree: editing a question or regenerating an answer adds a sibling, and the page shows
the path from the root to the conversation's head. A reply's `work` (thinking, calls of tools, text between them) comes
before its `content`, the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from openk3.serve.web.settings import ChatSettings
from openk3.serve.web.words import SpokenError

Role = Literal["user", "assistant"]
Status = Literal["complete", "streaming", "stopped", "interrupted", "failed"]
ToolStatus = Literal["written", "asking", "running", "done", "failed", "denied", "skipped"]

OPEN: tuple[ToolStatus, ...] = ("written", "asking", "running")  # of calls whose reply is being written

TITLE_LENGTH = 60


class StoreError(SpokenError):
    """The conversation file cannot be read or written; the text is one sentence for the user."""


class ConversationBusyError(StoreError):
    """A reply is already being written in this conversation."""


class ConversationGoneError(StoreError):
    """The conversation or message was deleted or changed meanwhile, for instance in another tab."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file on a user message: its name, its text and (where the model was loaded) its length in tokens."""

    name: str
    text: str
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ReplyStats:
    """What one answer cost. Times in seconds, speeds in tokens per second; None where it was not measured.

    A reply that calls tools reads its prompt several times: `prompt_tokens` and `cached_tokens` are those of the last
    time, `completion_tokens` those of all, `context_tokens` what prompt and reply take up together at the end.
    """

    completion_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_s: float | None = None
    tokens_per_second: float | None = None
    finish_reason: str | None = None
    model: str = ""
    context_tokens: int | None = None

    @property
    def used_tokens(self) -> int | None:
        """How much of the context is taken after this answer."""
        if self.context_tokens is None and self.prompt_tokens is not None:
            return self.prompt_tokens + self.completion_tokens
        return self.context_tokens


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning before an answer or a call; `seconds` once it has ended."""

    text: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """Text that came before a call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call of a tool and what came of it.

    `round` counts the replies of the model within one answer, for calls of one round were made without knowing each
    other's results. `arguments` is JSON, incomplete while it is written. `seconds` is how long the tool ran. From
    "written" a call goes on to "running" or, where the user is asked, to "asking" first; what never ran is "denied" or
    "skipped".
    """

    id: str
    name: str
    arguments: str
    round: int = 0
    status: ToolStatus = "written"
    result: str = ""
    seconds: float | None = None


Work = Thinking | Said | ToolUse
_KINDS: dict[str, type[Thinking] | type[Said] | type[ToolUse]] = {"thinking": Thinking, "said": Said, "tool": ToolUse}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `status` is "complete" for user messages; `stats` and `work` belong to replies.

    `siblings` are the ids of all versions of this message, itself included, the oldest first.
    """

    id: int
    conversation_id: str
    role: Role
    content: str
    attachments: tuple[Attachment, ...] = ()
    status: Status = "complete"
    error: str = ""
    stats: ReplyStats | None = None
    created_at: float = 0.0
    parent_id: int | None = None
    work: tuple[Work, ...] = ()
    siblings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of the list; times are Unix seconds. `head_id` is the last message of the path that is shown."""

    id: str
    title: str
    settings: ChatSettings
    created_at: float
    updated_at: float
    pinned: bool = False
    head_id: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A conversation that a search found; `message_id` and `text` of its newest message that matches, if any does."""

    conversation: Conversation
    message_id: int | None = None
    text: str = ""


def work_to_json(work: Iterable[Work]) -> str:
    """One line of JSON for the conversation file."""
    return json.dumps([work_to_dict(part) for part in work], ensure_ascii=False)


def work_to_dict(part: Work) -> dict[str, Any]:
    """One part as a JSON object, with its `kind`."""
    return {"kind": _NAMES[type(part)], **asdict(part)}


def work_from_json(text: str) -> tuple[Work, ...]:
    """Read `work_to_json`'s line."""
    return tuple(_KINDS[item.pop("kind")](**item) for item in json.loads(text))


def title_from(text: str) -> str:
    """Make a title from the first line that says something, cut at a word where possible."""
    line = next((" ".join(line.split()) for line in text.splitlines() if line.strip()), "")
    if len(line) <= TITLE_LENGTH:
        return line or "New chat"
    cut = line[: TITLE_LENGTH - 1]
    head, space, _ = cut.rpartition(" ")
    return (head if space and len(head) > TITLE_LENGTH // 2 else cut).rstrip() + "…"
