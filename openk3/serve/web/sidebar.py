"""The list of conversations at the left, and the search in it; on a phone it slides in over the chat.

It also asks the two questions that belong to it: a conversation's new name, and whether to delete one for good.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from datetime import date, datetime, timedelta

from nicegui import ui

from openk3.serve.web.markup import Markup, action, element
from openk3.serve.web.records import Conversation, Found
from openk3.serve.web.theme import LOGO
from openk3.serve.web.widgets import Handler, Text, box, button, icon_button, set_attributes, value_of
from openk3.serve.web.words import Words

PAGE_SIZE = 60
SNIPPET = 90


def age_group(when: float, today: date, words: Words) -> str:
    """The heading under which a conversation last used at `when` (Unix seconds) is listed."""
    day = datetime.fromtimestamp(when).date()
    if day >= today:
        return words.today
    if day == today - timedelta(days=1):
        return words.yesterday
    return words.last_7_days if day > today - timedelta(days=7) else words.earlier


def snippet(text: str, searched: str) -> str:
    """The part of `text` around the first of the words that were searched for, in one line."""
    folded = text.casefold()
    places = [place for word in searched.casefold().split() if (place := folded.find(word)) >= 0]
    start = max(0, min(places, default=0) - SNIPPET // 3)
    part = " ".join(text[start : start + SNIPPET].split())
    return ("…" if start else "") + part + ("…" if start + SNIPPET < len(text) else "")


class Sidebar:
    """Conversation links, each with a menu; links work in new tabs too. `run` runs a script in the browser."""

    def __init__(self, words: Words, run: Callable[[str], None], *, new_chat: Handler) -> None:
        self._words = words
        self._run = run
        self._client = ui.context.client
        self._shown: object = None
        self._limit = PAGE_SIZE
        with box("aside", "sidebar", id="sidebar", aria_label=words.conversations):
            with box("div", "sidebar-head"):
                with box("span", "brand"):
                    ui.html(LOGO, tag="span").classes("logo")
                    Text("span", "OpenK3")
                close = "openk3.panel('sidebar', false)"
                icon_button(words.close_list, "close", script=close, classes="narrow-only")
            button(words.new_chat, new_chat, classes="new-chat", icon="edit_square")
            with box("div", "search", data_icon="search"):
                field = box("input", "search-text", type="search", id="search", enterkeyhint="search")
                set_attributes(field, aria_label=words.search_conversations, placeholder=words.search)
                set_attributes(field, autocomplete="off", spellcheck="false")
                Text("kbd", "Ctrl K", "shortcut")
            box("nav", "conversations", aria_label=words.conversation_list)
            with box("div", "sidebar-foot"):
                Text("a", words.usage, "foot-link", href="/usage", data_icon="monitoring")
                box("span", "spacer")
                language = Text("button", words.other_language, "foot-link", type="button", id="language")
                set_attributes(language, aria_label=f"{words.language}: {words.other_language}")
                icon_button(words.shortcuts, "keyboard", script="openk3.help()", classes="wide-only")
        _menu(words)

    def show(
        self,
        listed: Sequence[Conversation] | Sequence[Found],
        current: str | None,
        running: Collection[str],
        searched: str = "",
    ) -> None:
        """List conversations, or what was found when `searched`; `current` is open, `running` are being answered."""
        html = self._html(listed, current, running, searched)
        if html != self._shown:
            self._shown = html
            self._run(f"openk3.thread.list({json.dumps(html)})")

    def show_all(self) -> None:
        """From now on list every conversation."""
        self._limit = 1_000_000

    def _html(
        self,
        listed: Sequence[Conversation] | Sequence[Found],
        current: str | None,
        running: Collection[str],
        searched: str,
    ) -> str:
        words = self._words
        today = date.today()
        parts: list[Markup] = []
        rows: list[Markup] = []
        heading = ""

        def close_group() -> None:
            if rows:
                parts.append(element("h2", heading, class_="group"))
                parts.append(element("ul", *rows))
                rows.clear()

        for item in listed[: self._limit]:
            conversation = item.conversation if isinstance(item, Found) else item
            age = words.pinned if conversation.pinned else age_group(conversation.updated_at, today, words)
            group = words.found if searched else age
            if group != heading:
                close_group()
                heading = group
            text = snippet(item.text, searched) if isinstance(item, Found) and item.text else ""
            message_id = item.message_id if isinstance(item, Found) else None
            is_current = conversation.id == current
            rows.append(self._row(conversation, is_current, conversation.id in running, text, message_id))
        close_group()
        if not parts:
            nothing = words.say("nothing_found", words=searched) if searched else words.none_yet
            parts.append(element("p", nothing, class_="empty"))
        if len(listed) > self._limit:
            label = words.say("show_all", count=len(listed))
            parts.append(element("button", label, type="button", class_="button quiet more", data_do="show_all"))
        return Markup("").join(parts)

    def _row(
        self, conversation: Conversation, is_current: bool, is_running: bool, text: str, message_id: int | None
    ) -> Markup:
        words = self._words
        title = [element("span", conversation.title, class_="conversation-title")]
        if text:
            title.append(element("span", text, class_="conversation-snippet"))
        marks = []
        if is_running:
            marks.append(element("span", words.is_running, class_="visually-hidden"))
            marks.append(element("span", class_="running-dot", aria_hidden="true"))
        link = element(
            "a",
            element("span", *title, class_="conversation-text"),
            *marks,
            class_="conversation-link",
            href=f"/c/{conversation.id}",
            title=conversation.title,
            data_conversation=conversation.id,
            data_message=message_id,
            aria_current="page" if is_current else None,
        )
        menu = action(
            words.say("more_actions", title=conversation.title),
            "more_horiz",
            "menu",
            classes="small",
            data_pinned="true" if conversation.pinned else None,
            aria_haspopup="menu",
        )
        actions = element("span", menu, class_="conversation-actions")
        return element("li", link, actions, class_="conversation", data_row=conversation.id)

    async def ask_name(self, conversation: Conversation) -> str | None:
        """Ask for a new name; None if the user keeps the old one."""
        words = self._words
        with self._client, ui.dialog() as dialog, box("div", "dialog", role="document"):
            Text("h2", words.rename_title, "dialog-title")
            field = box("input", "input", type="text", aria_label=words.new_name, maxlength="200", autofocus="true")
            set_attributes(field, **{"^value": conversation.title})
            with box("div", "dialog-buttons"):
                button(words.cancel, dialog.close, classes="quiet")
                save = button(words.save, classes="primary")
            for control, kind in ((save, "click"), (field, "keydown.enter")):
                control.on(kind, lambda event: dialog.submit(str(event.args)), js_handler=value_of(field.id))
        set_attributes(dialog, aria_label=words.rename_title)
        name: str | None = await dialog
        dialog.delete()
        return name

    async def confirm_delete(self, conversation: Conversation) -> bool:
        """Ask whether to delete a conversation."""
        words = self._words
        with self._client, ui.dialog() as dialog, box("div", "dialog", role="document"):
            Text("h2", words.delete_title, "dialog-title")
            Text("p", words.say("delete_text", title=conversation.title), "dialog-text")
            with box("div", "dialog-buttons"):
                button(words.cancel, dialog.close, classes="quiet")
                button(words.delete, lambda: dialog.submit(True), classes="danger")
        set_attributes(dialog, aria_label=words.delete_title)
        sure = await dialog
        dialog.delete()
        return bool(sure)


def _menu(words: Words) -> None:
    """The menu of a conversation; the script puts it beside the button that was pressed."""
    items = (
        ("rename", words.rename, "edit"),
        ("pin", words.pin, "keep"),
        ("markdown", words.export_markdown, "markdown"),
        ("json", words.export_json, "data_object"),
        ("delete", words.delete, "delete"),
    )
    with box("div", "menu", id="conversation-menu", popover="auto", role="menu"):
        for do, label, icon in items:
            Text("button", label, "menu-item", type="button", role="menuitem", data_icon=icon, data_menu=do)
