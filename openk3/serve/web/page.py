"""The chat page: puts the list, the thread, the composer and the settings together and says what each action does.

One `ChatPage` is one browser tab. It keeps no conversation of its own: what it shows is read from `Replies` (and
through it from the store) whenever that announces a change, which is why several tabs agree.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nicegui import background_tasks, events, ui

from openk3.serve.web import theme
from openk3.serve.web.composer import Composer
from openk3.serve.web.export import as_json, as_markdown, file_name
from openk3.serve.web.help import help_dialog
from openk3.serve.web.pickers import ModelPicker, ToolPicker
from openk3.serve.web.records import Conversation, Message
from openk3.serve.web.replies import Event, Replies
from openk3.serve.web.settings import ChatSettings, SettingError
from openk3.serve.web.settings_panel import SettingsPanel
from openk3.serve.web.sidebar import Sidebar
from openk3.serve.web.thread import Thread
from openk3.serve.web.uploads import too_large
from openk3.serve.web.widgets import Text, box, icon_button, set_attributes
from openk3.serve.web.words import SpokenError, Words

if TYPE_CHECKING:
    from openk3.llm import LLM

MAX_MESSAGE_LENGTH = 200_000
MAX_COUNTED = 1_000_000  # characters of a file whose tokens are counted: that takes a second per million


class ChatPage:
    """One tab. `load_error` returns a sentence if the model could not be loaded, else None; `owner` is the reader's
    key's id, "" without one."""

    def __init__(
        self,
        words: Words,
        replies: Replies,
        conversation_id: str | None,
        load_error: Callable[[], str | None],
        owner: str,
    ) -> None:
        self.words = words
        self.replies = replies
        self.store = replies.store
        self._owner = owner
        self._load_error = load_error
        self._opened_at = time.monotonic()
        self._searched = ""
        self._first_scripts: list[str] | None = []
        self.conversation: Conversation | None = None
        self.draft_settings = ChatSettings()
        self.client = ui.context.client
        theme.apply(words)
        self._build()
        self._listen()
        self.open(conversation_id, push=False)
        self._watch_model()
        theme.run_at_start(self._first_scripts or ())
        self._first_scripts = None

    # layout

    def _build(self) -> None:
        words = self.words
        Text("a", words.skip, "skip-link", href="#composer-text")
        with box("div", "shell"):
            self._sidebar = Sidebar(words, self._run, new_chat=self._new_chat)
            box("div", "backdrop").on("click", js_handler="() => openk3.closePanels()")
            with box("div", "main"):  # the page around it is the main landmark already
                self._build_topbar()
                self._build_loading()
                self._thread = Thread(words, self._run)
                with box("div", "jump-place"):
                    icon_button(words.jump, "arrow_downward", script="openk3.pin()", classes="jump")
                self._composer = Composer(words, self.notify, self._count_tokens)
                with self._composer.tools_place:
                    self._tools = ToolPicker(words, self._switch_tool, self._permit_tool)
            self._settings = SettingsPanel(words, self._apply_setting, self._reset_settings)
        help_dialog(words)
        with box("div", "drop-hint", aria_hidden="true"):
            Text("div", words.drop, "drop-card", data_icon="upload_file")

    def _build_topbar(self) -> None:
        words = self.words
        with box("header", "topbar"):
            menu = icon_button(words.open_list, "menu", script="openk3.panel('sidebar', true)", classes="narrow-only")
            set_attributes(menu, aria_controls="sidebar")
            self._title = Text("h1", words.new_chat, "title")
            self._model = ModelPicker(
                words, lambda effort: self._keep_settings(self.settings.changed("effort", effort))
            )
            icon_button(words.theme, "dark_mode", script="openk3.toggleTheme()", classes="theme")
            gear = icon_button(words.settings, "tune", script="openk3.panel('settings')", classes="settings-toggle")
            set_attributes(gear, aria_controls="settings")

    def _build_loading(self) -> None:
        with box("div", "loading", role="status", hidden=True) as self._loading:
            self._loading_text = Text("span", self.words.loading_model, "loading-text")
            with box("span", "progress", aria_hidden="true") as self._progress:
                box("span", "progress-bar")

    def _listen(self) -> None:
        ui.on("chat_send", lambda event: self._send(event))
        ui.on("chat_stop", lambda: self._stop(), args=[])
        ui.on("chat_new", lambda: self._new_chat(), args=[])
        ui.on("chat_open", self._open_link)
        ui.on("chat_navigate", lambda event: self.open(str(event.args) or None, push=False))
        ui.on("chat_message", self._message_action)
        ui.on("chat_conversation", self._conversation_action)
        ui.on("chat_search", self._search)
        ui.on("chat_show_all", self._show_all, args=[])
        ui.on("chat_file_too_large", self._file_too_large)
        ui.on_exception(self._failed)
        self.client.on_delete(self.replies.subscribe(self._follow))

    # model

    def _watch_model(self) -> None:
        if not self._show_model():
            timer = ui.timer(0.5, lambda: timer.cancel() if self._show_model() else None)

    def _show_model(self) -> bool:
        """Show the state of the model; True once it will not change any more."""
        llm, error = self.replies.get_llm(), self._load_error()
        set_attributes(self._loading, hidden=True if llm else None, data_kind="error" if error and not llm else None)
        set_attributes(self._progress, hidden=True if error else None)
        if llm is not None:
            thinks = llm.tokenizer.dialect.marks.thinks
            self._model.show_model(Path(llm.name).name.removesuffix(".gguf"), llm.max_model_len, thinks)
            self._show_state()
            return True
        seconds = time.monotonic() - self._opened_at
        words = self.words
        loading = words.say("loading_long", seconds=seconds) if seconds >= 3 else words.loading_model
        self._loading_text.set_text(words.say("load_failed", reason=error) if error else loading)
        return error is not None

    def _count_tokens(self, text: str) -> int | None:
        llm: LLM | None = self.replies.get_llm()
        return None if llm is None or len(text) > MAX_COUNTED else len(llm.tokenizer.encode(text))

    # showing

    def open(self, conversation_id: str | None, *, push: bool = True, reveal: int | None = None) -> None:
        """Show a conversation, or an empty new one; `push` adds it to the browser's history.

        `reveal` is a message to show, on whatever branch it is.
        """
        self.conversation = self.store.conversation(conversation_id) if conversation_id else None
        if conversation_id and self.conversation is None:
            self.notify(self.words.does_not_exist)
        self.draft_settings = ChatSettings()
        self._show_settings()
        if self.conversation and reveal is not None and all(m.id != reveal for m in self._messages()):
            self.replies.select(self.conversation.id, reveal)
        self._thread.open(self._messages(), reveal)
        self._show_state()
        self._show_list()
        self._show_location(push)
        self._run("openk3.pin()" if reveal is None else f"openk3.thread.reveal({reveal})")

    def _show_location(self, push: bool) -> None:
        path = f"/c/{self.conversation.id}" if self.conversation else "/"
        title = self.conversation.title if self.conversation else self.words.new_chat
        self._title.set_text(title)
        self._run(f"openk3.location({json.dumps(path)}, {json.dumps(title)}, {json.dumps(push)})")

    def _messages(self) -> list[Message]:
        return self.replies.messages(self.conversation.id) if self.conversation else []

    def _show_thread(self) -> None:
        messages = self._messages()
        self._thread.show(messages)
        self._show_state(messages)

    def _show_state(self, messages: list[Message] | None = None) -> None:
        """Show below the text box whether a reply is running and how full the context is."""
        llm = self.replies.get_llm()
        running = self.conversation is not None and self.replies.running(self.conversation.id)
        self._composer.show_state(ready=llm is not None, busy=running)
        self._thread.show_state(busy=running)
        used = (m.stats.used_tokens for m in reversed(messages or self._messages()) if m.stats)
        known = next((tokens for tokens in used if tokens is not None), None)
        self._composer.show_context(known, llm.max_model_len if llm else None)

    def _show_settings(self) -> None:
        settings = self.settings
        self._settings.show(settings)
        self._model.show(settings)
        self._tools.show(settings)

    def _show_list(self) -> None:
        if self._searched:
            background_tasks.create(self._show_found(self._searched))
            return
        conversations = self.store.conversations()
        running = {c.id for c in conversations if self.replies.running(c.id)}
        self._sidebar.show(conversations, self.conversation.id if self.conversation else None, running)

    async def _search(self, event: events.GenericEventArguments) -> None:
        self._searched = " ".join(str(event.args).split())[:200]
        self._show_list()

    async def _show_found(self, searched: str) -> None:
        found = await asyncio.to_thread(self.store.search, searched)
        if searched == self._searched:
            running = {item.conversation.id for item in found if self.replies.running(item.conversation.id)}
            self._sidebar.show(found, self.conversation.id if self.conversation else None, running, searched)

    def _show_all(self) -> None:
        self._sidebar.show_all()
        self._show_list()

    def _follow(self, event: Event) -> None:
        """A change somewhere, perhaps made in another tab."""
        if event.change == "list":
            fresh = self.store.conversation(self.conversation.id) if self.conversation else None
            if self.conversation and fresh and fresh.title != self.conversation.title:
                self.conversation = fresh
                self._show_location(push=False)
            self._show_list()
        elif self.conversation is not None and event.conversation_id == self.conversation.id:
            if event.change == "reply" and event.reply is not None:
                self._thread.grow(event.reply)
            elif self.store.conversation(self.conversation.id) is None:
                self.open(None, push=False)
                self.notify(self.words.deleted)
            else:
                self._show_thread()

    def notify(self, text: str) -> None:
        """Show one sentence to the user for a few seconds."""
        with self.client:
            ui.notify(text, position="top", timeout=6000, classes="toast", close_button=self.words.ok)

    def _run(self, script: str) -> None:
        """Run a script in the browser; while the page is built, put it into the page, which then need not wait."""
        if self._first_scripts is not None:
            self._first_scripts.append(script)
        else:
            self.client.run_javascript(script)

    def _failed(self, error: Exception) -> None:
        self.notify(error.say(self.words) if isinstance(error, SpokenError) else self.words.apology)

    # actions

    @property
    def settings(self) -> ChatSettings:
        """The settings of the open conversation as they are stored, or those of the one about to begin."""
        if self.conversation is None:
            return self.draft_settings
        fresh = self.store.conversation(self.conversation.id)
        return fresh.settings if fresh else self.conversation.settings

    def _send(self, event: events.GenericEventArguments) -> None:
        text = _text(event.args)
        attachments = self._composer.attachments
        if not text and not attachments:
            return
        if len(text) > MAX_MESSAGE_LENGTH:
            self.notify(self.words.say("message_too_long", limit=MAX_MESSAGE_LENGTH))
            return
        if self.replies.get_llm() is None:
            self.notify(self.words.not_ready)
            return
        if self.conversation is None:
            self.conversation = self.store.create(text or attachments[0].name, self.draft_settings)
            self._show_location(push=True)
        try:
            self.replies.send(self.conversation.id, text, attachments, self._owner)
        except SpokenError as error:
            self.notify(error.say(self.words))
            return
        with self.client:
            self._composer.clear()
        self._run("openk3.pin()")

    async def _stop(self) -> None:
        if self.conversation:
            await self.replies.stop(self.conversation.id)

    def _message_action(self, event: events.GenericEventArguments) -> None:
        """A button of a message was pressed."""
        if self.conversation is None:
            return
        conversation_id, values = self.conversation.id, event.args
        message_id = int(values["id"])
        try:
            match values["do"]:
                case "copy":
                    self._copy(message_id)
                case "regenerate":
                    self.replies.regenerate(conversation_id, message_id, self._owner)
                case "select":
                    self.replies.select(conversation_id, int(values["to"]))
                case "edited":
                    self._edit(message_id, str(values["text"]))
                case "allow" | "always" | "deny" as verdict:
                    self.replies.decide(conversation_id, str(values["to"]), verdict)
                    self._tools.show(self.settings)
        except SpokenError as error:
            self.notify(error.say(self.words))

    def _copy(self, message_id: int) -> None:
        for message in self._messages():
            if message.id == message_id:
                self._run(f"openk3.copy({json.dumps(message.content)})")

    def _edit(self, message_id: int, raw: str) -> None:
        text = _text(raw)
        if not text:
            self.notify(self.words.message_empty)
            return
        self.replies.edit(message_id, text[:MAX_MESSAGE_LENGTH], self._owner)
        self._run("openk3.thread.close()")

    def _open_link(self, event: events.GenericEventArguments) -> None:
        """A row of the list was picked; one that a search found leads to the message."""
        message_id = event.args.get("message")
        self.open(str(event.args["id"]), reveal=None if message_id is None else int(message_id))

    def _new_chat(self) -> None:
        self.open(None)
        self._run("openk3.focus()")

    async def _conversation_action(self, event: events.GenericEventArguments) -> None:
        """An item of a conversation's menu was picked."""
        conversation = self.store.conversation(str(event.args["id"]))
        if conversation is None:
            self.notify(self.words.does_not_exist)
            return
        match event.args["do"]:
            case "rename":
                await self._rename(conversation)
            case "pin":
                self.replies.pin(conversation.id, not conversation.pinned)
            case "markdown":
                text = as_markdown(conversation, self.replies.messages(conversation.id), self.words)
                self._download(text, file_name(conversation, "md"), "text/markdown")
            case "json":
                text = as_json(conversation, self.store.tree(conversation.id))
                self._download(text, file_name(conversation, "json"), "application/json")
            case "delete":
                if await self._sidebar.confirm_delete(conversation):
                    await self._delete(conversation)

    def _download(self, text: str, name: str, media_type: str) -> None:
        with self.client:
            ui.download.content(text, name, media_type)

    async def _rename(self, conversation: Conversation) -> None:
        name = await self._sidebar.ask_name(conversation)
        if name is not None:
            try:
                self.replies.rename(conversation.id, name)
            except ValueError:
                self.notify(self.words.needs_a_name)

    async def _delete(self, conversation: Conversation) -> None:
        if self.conversation and self.conversation.id == conversation.id:
            self.open(None, push=False)
        await self.replies.delete(conversation.id)

    def _switch_tool(self, name: str, on: bool) -> None:
        self._keep_settings(self.settings.switched(name, on))
        self._tools.show(self.settings)

    def _permit_tool(self, name: str, always: bool) -> None:
        self._keep_settings(self.settings.permitted(name, always))

    def _apply_setting(self, name: str, raw: str) -> str | None:
        try:
            settings = self.settings.changed(name, raw)
        except SettingError as error:
            return error.say(self.words)
        self._keep_settings(settings)
        return None

    def _reset_settings(self) -> None:
        self._keep_settings(ChatSettings())
        self._show_settings()

    def _keep_settings(self, settings: ChatSettings) -> None:
        if self.conversation is None:
            self.draft_settings = settings
        else:
            self.store.save_settings(self.conversation.id, settings)

    def _file_too_large(self, event: events.GenericEventArguments) -> None:
        self.notify(too_large(str(event.args["name"]), int(event.args["size"])).say(self.words))


def _text(raw: Any) -> str:
    """What was typed, without what no file could keep."""
    return str(raw).encode("utf-8", "replace").decode().strip()
