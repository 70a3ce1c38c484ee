"""The middle of the page: the messages of the open conversation, or a welcome where there are none yet.

The browser holds the latest messages only, and gets the earlier ones as the reader scrolls up. What it holds is
remembered here, so that a change sends only the blocks that are not there yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from openk3.serve.web.message_view import ReplyRenderer, View, user_view
from openk3.serve.web.records import Message, ToolUse
from openk3.serve.web.widgets import Text, box, button, set_attributes
from openk3.serve.web.words import Words

PAGE_SIZE = 40
EARLIER_SIZE = 20  # so few that none is noticed as the reader scrolls


class Thread:
    """Shows messages and follows their changes; `run` runs a script in the browser."""

    def __init__(self, words: Words, run: Callable[[str], None]) -> None:
        self._words = words
        self._run = run
        self._shown: dict[int, View] = {}
        self._renderers: dict[int, ReplyRenderer] = {}
        self._messages: Sequence[Message] = ()
        self._first_id = 0
        self._asked: set[str] = set()
        with box("div", "scroller", tabindex="-1") as self._scroller:
            self._welcome = box("div", "welcome", hidden=True)
            self._earlier = button("", self.show_earlier, classes="quiet earlier")
            box("div", "thread", role="log", aria_label=words.messages, aria_live="off")
        self._announcer = Text("div", "", "visually-hidden", role="status", aria_live="polite")
        with self._welcome:
            self._build_welcome()

    def _build_welcome(self) -> None:
        words = self._words
        Text("h2", words.welcome, "welcome-title")
        Text("p", words.welcome_text, "welcome-text")
        with box("ul", "suggestions", aria_label=words.suggestions):
            for text in (words.suggestion_1, words.suggestion_2, words.suggestion_3, words.suggestion_4):
                with box("li"):
                    choice = Text("button", text, "suggestion", type="button")
                    choice.on("click", js_handler="(event) => openk3.setDraft(event.target.textContent)")

    def open(self, messages: Sequence[Message], reveal: int | None = None) -> None:
        """Show another conversation, from its latest messages on, or from `reveal` if that is earlier."""
        self._shown.clear()
        self._renderers.clear()
        self._first_id = messages[-PAGE_SIZE].id if len(messages) > PAGE_SIZE else 0
        if reveal is not None:
            self._first_id = min(self._first_id, max(0, reveal - PAGE_SIZE // 2))
        self._run("openk3.thread.clear()")
        self.show(messages)

    def show_earlier(self) -> None:
        """Show the messages before those that are shown."""
        earlier = [message.id for message in self._messages if message.id < self._first_id]
        self._first_id = earlier[-EARLIER_SIZE] if len(earlier) > EARLIER_SIZE else 0
        self.show(self._messages)

    def show(self, messages: Sequence[Message]) -> None:
        """Follow the open conversation, which now has `messages`."""
        before = {message.id: message.status for message in self._messages}
        self._messages = messages
        shown = [message for message in messages if message.id >= self._first_id]
        patches = [patch for message in shown if (patch := self._patch(message)) is not None]
        order = [message.id for message in shown]
        for message_id in self._shown.keys() - set(order):
            del self._shown[message_id]
            self._renderers.pop(message_id, None)
        self._run(f"openk3.thread.show({json.dumps(order)}, {json.dumps(patches)})")
        for message in shown:
            if before.get(message.id) == "streaming" != message.status:
                self._announce(message)
        hidden = len(messages) - len(shown)
        self._earlier.set_text(self._words.say("show_earlier", count=hidden))
        set_attributes(self._earlier, hidden=None if hidden else True)
        set_attributes(self._welcome, hidden=True if messages else None)

    def show_state(self, *, busy: bool) -> None:
        """While `busy` (a reply is being written) nothing can be edited or regenerated."""
        set_attributes(self._scroller, data_busy="true" if busy else None)

    def grow(self, reply: Message) -> None:
        """Show how far a running reply has come."""
        if reply.id in self._shown and (patch := self._patch(reply)) is not None:
            self._run(f"openk3.thread.grow({json.dumps(patch)})")
        asking = {part.id for part in reply.work if isinstance(part, ToolUse) and part.status == "asking"}
        if asking - self._asked:
            self._asked |= asking
            self._announcer.set_text(self._words.approval_said)

    def _patch(self, message: Message) -> dict[str, Any] | None:
        """What the browser lacks of a message; None if nothing."""
        if message.role == "user":
            view = user_view(message, self._words)
        else:
            view = self._renderers.setdefault(message.id, ReplyRenderer()).view(message, self._words)
        old = self._shown.get(message.id)
        if view == old:
            return None
        self._shown[message.id] = view
        have = old.blocks if old else ()
        blocks = {i: html for i, html in enumerate(view.blocks) if i >= len(have) or have[i] != html}
        patch: dict[str, Any] = {"id": view.id, "blocks": blocks, "count": len(view.blocks), "busy": view.busy}
        if old is None:
            patch |= {"kind": view.kind, "label": view.label}
        if old is None or old.foot != view.foot:
            patch["foot"] = view.foot
        return patch

    def _announce(self, message: Message) -> None:
        words = self._words
        said = {"complete": words.finished_said, "stopped": words.stopped_said, "failed": words.failed_said}
        self._announcer.set_text(said.get(message.status, ""))
