"""The middle of the page: the messages of the open conversation, or a welcome where there are none yet.

Of a long conversation the page holds the latest messages only, until the user asks for the earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from openk3.serve.web.message_view import MessageActions, ReplyView, UserView
from openk3.serve.web.store import Message
from openk3.serve.web.widgets import Text, box, button, set_attributes

PAGE_SIZE = 40

SUGGESTIONS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that merges two sorted lists.",
    "Suggest five names for a small bakery.",
    "What should I ask before I sign a lease?",
)


class Thread:
    """Shows messages and follows their changes; `suggest` receives a suggestion that the user picked."""

    def __init__(self, actions: MessageActions, suggest: Callable[[str], None]) -> None:
        self._actions = actions
        self._suggest = suggest
        self._views: dict[int, UserView | ReplyView] = {}
        self._messages: Sequence[Message] = ()
        self._first_id = 0
        with box("div", "scroller", tabindex="-1"):
            self._welcome = box("div", "welcome")
            self._earlier = button("", self._show_earlier, classes="quiet earlier")
            self._column = box("div", "thread", role="log", aria_label="Messages", aria_live="off")
        self._announcer = Text("div", "", "visually-hidden", role="status", aria_live="polite")
        self._build_welcome()

    def _build_welcome(self) -> None:
        with self._welcome:
            Text("h2", "What can I do for you?", "welcome-title")
            Text("p", "Everything stays on the machine that runs OpenK3.", "welcome-text")
            with box("ul", "suggestions", aria_label="Suggestions"):
                for text in SUGGESTIONS:
                    with box("li"):
                        choice = Text("button", text, "suggestion", type="button")
                        choice.on("click", partial(self._suggest, text), args=[])

    def open(self, messages: Sequence[Message]) -> None:
        """Show another conversation, from its latest messages on."""
        self._column.clear()
        self._views.clear()
        self._first_id = messages[-PAGE_SIZE].id if len(messages) > PAGE_SIZE else 0
        self.show(messages)

    def _show_earlier(self) -> None:
        earlier = [message.id for message in self._messages if message.id < self._first_id]
        self._column.clear()
        self._views.clear()
        self._first_id = earlier[-PAGE_SIZE] if len(earlier) > PAGE_SIZE else 0
        self.show(self._messages)

    def show(self, messages: Sequence[Message]) -> None:
        """Follow the open conversation, which now has `messages`; views of messages that are shown already stay."""
        self._messages = messages
        shown = [message for message in messages if message.id >= self._first_id]
        wanted = {message.id for message in shown}
        for message_id in [i for i in self._views if i not in wanted]:
            self._views.pop(message_id).root.delete()
        busy = any(message.status == "streaming" for message in messages)
        for message in shown:
            view = self._views.get(message.id)
            if view is None:
                with self._column:
                    view = (UserView if message.role == "user" else ReplyView)(message, self._actions)
                self._views[message.id] = view
            elif view.message.status == "streaming" and message.status != "streaming":
                self._announce(message)
            view.update(message, last=message is messages[-1], busy=busy)
        hidden = len(messages) - len(shown)
        self._earlier.set_text(f"Show earlier messages ({hidden:,})")
        set_attributes(self._earlier, hidden=None if hidden else True)
        set_attributes(self._welcome, hidden=True if messages else None)
        set_attributes(self._column, hidden=None if messages else True)

    def grow(self, reply: Message) -> None:
        """Show how far a running reply has come."""
        if view := self._views.get(reply.id):
            view.update(reply, last=True, busy=True)

    def _announce(self, message: Message) -> None:
        words = {"complete": "Answer finished.", "stopped": "Answer stopped.", "failed": "The answer failed."}
        self._announcer.set_text(words.get(message.status, ""))
