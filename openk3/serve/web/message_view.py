"""One message on the page: a user's bubble or the model's answer, with its actions and, below an answer, what it cost.

A view is built once and then follows its message: buttons are shown and hidden rather than rebuilt, and of a growing
answer only the blocks that changed travel to the browser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nicegui import events, ui

from openk3.serve.web.render import StreamingMarkdown, render_blocks
from openk3.serve.web.store import Message, ReplyStats
from openk3.serve.web.widgets import Text, box, button, icon_button, set_attributes, value_of


@dataclass(frozen=True, slots=True)
class MessageActions:
    """What the buttons of a message do."""

    copy: Callable[[str], None]
    regenerate: Callable[[], None]
    edit: Callable[[int, str], bool]


def stats_text(stats: ReplyStats) -> str:
    """The line under an answer: speed, time to first token, and token counts, as far as they are known."""
    parts = []
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.ttft_s is not None:
        parts.append(f"first token {stats.ttft_s:.2f} s")
    if stats.prompt_tokens is not None:
        cached = f" ({stats.cached_tokens:,} cached)" if stats.cached_tokens else ""
        parts.append(f"{stats.prompt_tokens:,} prompt{cached}")
    parts.append(f"{stats.completion_tokens:,} answer tokens")
    return " · ".join(parts)


def notice_text(message: Message) -> str:
    """The sentence under an answer that did not end by itself; empty for one that did, or has not ended."""
    if message.status == "failed":
        return message.error
    if message.status == "stopped":
        return "Stopped."
    if message.status == "interrupted":
        return "Interrupted: the server went down while this answer was written. You can regenerate it."
    if message.status == "complete" and message.stats and message.stats.finish_reason == "length":
        return "The answer reached the token limit. Raise “Max tokens” in the settings for longer ones."
    if message.status == "complete" and not message.content:
        return "The model gave an empty answer."
    return ""


class UserView:
    """A user's message. `message` is what is shown at the moment."""

    def __init__(self, message: Message, actions: MessageActions) -> None:
        self.message = message
        self._actions = actions
        self._editor: ui.element | None = None
        self.root = box("article", "message message-user", aria_label="You")
        with self.root:
            self._bubble = box("div", "bubble")
            with self._bubble:
                if message.attachments:
                    self._build_chips()
                self._text = Text("div", message.content, "plain")
            self._bar = box("div", "message-bar")
            with self._bar:
                icon_button("Copy message", "content_copy", lambda: actions.copy(self.message.content))
                self._edit_button = icon_button("Edit message", "edit", self._open_editor)

    def _build_chips(self) -> None:
        with box("ul", "chips", aria_label="Attached files"):
            for attachment in self.message.attachments:
                with box("li", "chip", data_icon="description"):
                    Text("span", attachment.name, "chip-name")
                    if attachment.tokens is not None:
                        Text("span", f"{attachment.tokens:,} tokens", "chip-size")

    def update(self, message: Message, *, last: bool, busy: bool) -> None:
        """Show `message`; while `busy` (a reply is running in the conversation) it cannot be edited."""
        before, self.message = self.message, message
        if message.content != before.content:
            self._text.set_text(message.content)
        set_attributes(self._edit_button, hidden=busy or None)

    def _open_editor(self) -> None:
        with self.root:
            self._editor = box("div", "editor")
        with self._editor:
            area = Text("textarea", self.message.content, "editor-text", aria_label="Edit your message", rows="3")
            files = " Attached files stay." if self.message.attachments else ""
            Text("p", f"Saving removes everything after this message and asks again.{files}", "help")
            with box("div", "editor-buttons"):
                button("Cancel", self._close_editor, classes="quiet editor-cancel")
                save = button("Save and ask again", classes="primary")

        def submit(event: events.GenericEventArguments) -> None:
            if self._actions.edit(self.message.id, str(event.args)):
                self._close_editor()

        save.on("click", submit, js_handler=value_of(area.id))
        set_attributes(self._bubble, hidden=True)
        set_attributes(self._bar, hidden=True)
        self.root.client.run_javascript(f"openk3.edit('c{area.id}')")

    def _close_editor(self) -> None:
        if self._editor is not None:
            self._editor.delete()
            self._editor = None
            set_attributes(self._bubble, hidden=None)
            set_attributes(self._bar, hidden=None)


class ReplyView:
    """A model's answer, finished or growing. `message` is what is shown at the moment."""

    def __init__(self, message: Message, actions: MessageActions) -> None:
        self.message = message
        self._markdown = StreamingMarkdown()
        self._blocks: list[ui.html] = []
        self._waiting: ui.element | None = None
        self.root = box("article", "message message-assistant", aria_label="Answer")
        with self.root:
            self._prose = box("div", "prose", dir="auto")
            self._notice = Text("p", "", "notice", hidden=True)
            self._bar = box("div", "message-bar")
            with self._bar:
                self._copy = icon_button("Copy answer", "content_copy", lambda: actions.copy(self.message.content))
                self._again = icon_button("Regenerate answer", "refresh", actions.regenerate)
                self._stats = Text("span", "", "stats")
        # One block for all of a finished answer: each element costs time when a long conversation is opened.
        streaming = message.status == "streaming"
        self._show(self._markdown.update(message.content) if streaming else ["".join(render_blocks(message.content))])

    def update(self, message: Message, *, last: bool, busy: bool) -> None:
        """Show `message`; the `last` one can be regenerated unless `busy` (a reply is running)."""
        before, self.message = self.message, message
        if message != before:
            streaming = message.status == "streaming"
            self._show(self._markdown.update(message.content) if streaming else render_blocks(message.content))
        set_attributes(self._again, hidden=None if last and not busy else True)

    def _show(self, blocks: list[str]) -> None:
        message = self.message
        streaming, failed = message.status == "streaming", message.status == "failed"
        self._show_blocks(blocks)
        self._show_waiting(streaming and not message.content)
        notice = notice_text(message)
        self._notice.set_text(notice)
        set_attributes(
            self._notice,
            hidden=None if notice else True,
            role="alert" if failed else None,
            data_kind="error" if failed else None,
        )
        set_attributes(self._bar, hidden=True if streaming else None)
        set_attributes(self._copy, hidden=None if message.content else True)
        set_attributes(self.root, aria_busy="true" if streaming else None)
        self._stats.set_text(stats_text(message.stats) if message.stats and not streaming else "")

    def _show_blocks(self, blocks: list[str]) -> None:
        for element in self._blocks[len(blocks) :]:
            element.delete()
        del self._blocks[len(blocks) :]
        for element, html in zip(self._blocks, blocks, strict=False):
            if element.content != html:
                element.set_content(html)
        with self._prose:
            self._blocks += [ui.html(html, sanitize=True) for html in blocks[len(self._blocks) :]]

    def _show_waiting(self, shown: bool) -> None:
        if shown and self._waiting is None:
            with self._prose, box("div", "waiting") as self._waiting:
                Text("span", "Reading the prompt", "visually-hidden")
                for _ in range(3):
                    box("span", "dot")
        elif not shown and self._waiting is not None:
            self._waiting.delete()
            self._waiting = None
