"""The list of conversations at the left; on a phone it slides in over the chat.

It also asks the two questions that belong to it: a conversation's new name, and whether to delete one for good.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from datetime import date, datetime, timedelta
from functools import partial

from nicegui import ui

from openk3.serve.web.store import Conversation
from openk3.serve.web.theme import LOGO
from openk3.serve.web.widgets import Handler, Text, box, button, icon_button, set_attributes, value_of

PAGE_SIZE = 60

Rename = Callable[[Conversation, str], None]
Delete = Callable[[Conversation], Awaitable[None]]


def age_group(when: float, today: date) -> str:
    """The heading under which a conversation last used at `when` (Unix seconds) is listed."""
    day = datetime.fromtimestamp(when).date()
    if day >= today:
        return "Today"
    if day == today - timedelta(days=1):
        return "Yesterday"
    return "Last 7 days" if day > today - timedelta(days=7) else "Earlier"


class Sidebar:
    """Conversation links with rename and delete; links work in new tabs like any other."""

    def __init__(self, *, new_chat: Handler, rename: Rename, delete: Delete) -> None:
        self._rename = rename
        self._delete = delete
        self._client = ui.context.client
        self._shown: object = None
        self._limit = PAGE_SIZE
        with box("aside", "sidebar", id="sidebar", aria_label="Conversations"):
            with box("div", "sidebar-head"):
                with box("span", "brand"):
                    ui.html(LOGO, tag="span").classes("logo")
                    Text("span", "OpenK3")
                icon_button(
                    "Close conversation list", "close", script="openk3.panel('sidebar', false)", classes="narrow-only"
                )
            with button("New chat", new_chat, classes="new-chat", icon="edit_square"):
                Text("kbd", "Ctrl K", "shortcut")
            self._nav = box("nav", "conversations", aria_label="Conversation list")

    def show(self, conversations: Iterable[Conversation], current: str | None, running: Collection[str]) -> None:
        """List `conversations`; `current` is open, `running` have a reply in progress."""
        everything = list(conversations)
        listed = everything[: self._limit]
        shown = [(c.id, c.title, age_group(c.updated_at, date.today()), c.id in running) for c in listed], current
        if shown == self._shown:
            return  # rebuilding would take the keyboard focus away
        self._shown = shown
        self._nav.clear()
        today = date.today()
        heading, rows = None, None
        with self._nav:
            for conversation in listed:
                group = age_group(conversation.updated_at, today)
                if group != heading or rows is None:
                    heading = group
                    Text("h2", group, "group")
                    rows = box("ul")
                with rows:
                    self._row(conversation, conversation.id == current, conversation.id in running)
            if rows is None:
                Text("p", "No conversations yet.", "empty")
            if len(everything) > len(listed):
                more = partial(self._show_all, everything, current, running)
                button(f"Show all {len(everything):,}", more, classes="quiet more")

    def _show_all(self, everything: list[Conversation], current: str | None, running: Collection[str]) -> None:
        self._limit = len(everything)
        self.show(everything, current, running)

    def _row(self, conversation: Conversation, is_current: bool, is_running: bool) -> ui.element:
        with box("li", "conversation") as row:
            link = box("a", "conversation-link", data_conversation=conversation.id, title=conversation.title)
            set_attributes(link, href=f"/c/{conversation.id}", aria_current="page" if is_current else None)
            with link:
                Text("span", conversation.title, "conversation-title")
                if is_running:
                    Text("span", "is being answered", "visually-hidden")
                    box("span", "running-dot", aria_hidden="true")
            with box("span", "conversation-actions"):
                self._action(f"Rename {conversation.title}", "edit", lambda: self._ask_name(conversation))
                self._action(f"Delete {conversation.title}", "delete", lambda: self._confirm_delete(conversation))
        return row

    @staticmethod
    def _action(label: str, icon_name: str, handler: Handler) -> None:
        control = icon_button(label, icon_name, handler, classes="small")
        set_attributes(control, title=label.split(" ", 1)[0])

    async def _ask_name(self, conversation: Conversation) -> None:
        # In the page's context: the row whose button was pressed may be redrawn while the dialog is open.
        with self._client, ui.dialog() as dialog, box("div", "dialog", role="document"):
            Text("h2", "Rename conversation", "dialog-title")
            field = box("input", "input", type="text", aria_label="New name", maxlength="200", autofocus="true")
            set_attributes(field, **{"^value": conversation.title})
            with box("div", "dialog-buttons"):
                button("Cancel", dialog.close, classes="quiet")
                save = button("Save", classes="primary")
            for control, kind in ((save, "click"), (field, "keydown.enter")):
                control.on(kind, lambda event: dialog.submit(str(event.args)), js_handler=value_of(field.id))
        set_attributes(dialog, aria_label="Rename conversation")
        name = await dialog
        dialog.delete()
        if name is not None:
            self._rename(conversation, name)

    async def _confirm_delete(self, conversation: Conversation) -> None:
        with self._client, ui.dialog() as dialog, box("div", "dialog", role="document"):
            Text("h2", "Delete conversation?", "dialog-title")
            Text("p", f"“{conversation.title}” and its messages will be gone for good.", "dialog-text")
            with box("div", "dialog-buttons"):
                button("Cancel", dialog.close, classes="quiet")
                button("Delete", lambda: dialog.submit(True), classes="danger")
        set_attributes(dialog, aria_label="Delete conversation")
        sure = await dialog
        dialog.delete()
        if sure:
            await self._delete(conversation)
