"""The chat page: puts the list, the thread, the composer and the settings together and says what each action does.

One `ChatPage` is one browser tab. It keeps no conversation of its own: what it shows is read from `Replies` (and
through it from the store) whenever that announces a change, which is why several tabs agree.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nicegui import events, ui

from openk3.serve.web import theme
from openk3.serve.web.composer import Composer
from openk3.serve.web.message_view import MessageActions
from openk3.serve.web.replies import Event, ModelNotReadyError, Replies
from openk3.serve.web.settings import ChatSettings
from openk3.serve.web.settings_panel import SettingsPanel
from openk3.serve.web.sidebar import Sidebar
from openk3.serve.web.store import Conversation, Message, StoreError
from openk3.serve.web.thread import Thread
from openk3.serve.web.uploads import too_large
from openk3.serve.web.widgets import Text, box, icon_button, set_attributes

if TYPE_CHECKING:
    from openk3.llm import LLM

MAX_MESSAGE_LENGTH = 200_000
APOLOGY = "Something went wrong here. The server's log says what; nothing you wrote is lost."


class ChatPage:
    """One tab. `load_error` returns a sentence if the model could not be loaded, else None."""

    def __init__(self, replies: Replies, conversation_id: str | None, load_error: Callable[[], str | None]) -> None:
        self.replies = replies
        self.store = replies.store
        self._load_error = load_error
        self._opened_at = time.monotonic()
        self.conversation: Conversation | None = None
        self.draft_settings = ChatSettings()
        self.client = ui.context.client
        theme.apply()
        self._build()
        self._listen()
        self.open(conversation_id, push=False)
        self._watch_model()

    # layout

    def _build(self) -> None:
        Text("a", "Skip to the message box", "skip-link", href="#composer-text")
        with box("div", "shell"):
            self._sidebar = Sidebar(new_chat=self._new_chat, rename=self._rename, delete=self._delete)
            box("div", "backdrop").on("click", js_handler="() => openk3.closePanels()")
            with box("div", "main"):  # the page around it is the main landmark already
                self._build_topbar()
                self._build_loading()
                actions = MessageActions(copy=self._copy, regenerate=self._regenerate, edit=self._edit)
                self._thread = Thread(actions, suggest=lambda text: self._run(f"openk3.setDraft({json.dumps(text)})"))
                with box("div", "jump-place"):
                    icon_button("Jump to the latest message", "arrow_downward", script="openk3.pin()", classes="jump")
                self._composer = Composer(self.notify, self._count_tokens)
            self._settings = SettingsPanel(self._apply_setting, self._reset_settings)
        with box("div", "drop-hint", aria_hidden="true"):
            Text("div", "Drop text files to attach them", "drop-card", data_icon="upload_file")

    def _build_topbar(self) -> None:
        with box("header", "topbar"):
            menu = icon_button(
                "Open conversation list", "menu", script="openk3.panel('sidebar', true)", classes="narrow-only"
            )
            set_attributes(menu, aria_controls="sidebar")
            self._title = Text("h1", "New chat", "title")
            with box("span", "model-chip", title="The model that answers"):
                self._model = Text("span", "loading…", "model-name")
                self._model_context = Text("span", "", "model-context")
            icon_button("Switch between dark and light", "dark_mode", script="openk3.toggleTheme()", classes="theme")
            gear = icon_button("Settings", "tune", script="openk3.panel('settings')", classes="settings-toggle")
            set_attributes(gear, aria_controls="settings")

    def _build_loading(self) -> None:
        with box("div", "loading", role="status", hidden=True) as self._loading:
            self._loading_text = Text("span", "Loading the model…", "loading-text")
            with box("span", "progress", aria_hidden="true") as self._progress:
                box("span", "progress-bar")

    def _listen(self) -> None:
        ui.on("chat_send", lambda event: self._send(event))
        ui.on("chat_stop", lambda: self._stop(), args=[])
        ui.on("chat_new", lambda: self._new_chat(), args=[])
        ui.on("chat_open", lambda event: self.open(str(event.args)))
        ui.on("chat_navigate", lambda event: self.open(str(event.args) or None, push=False))
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
            name = Path(llm.name).name.removesuffix(".gguf")
            self._model.set_text(name)
            self._model_context.set_text(f"{_short(llm.max_model_len)} context")
            self._settings.show_model(name, llm.max_model_len)
            self._show_state()
            return True
        seconds = time.monotonic() - self._opened_at
        waited = f" for {seconds:.0f} s" if seconds >= 3 else ""
        loading = f"Loading the model{waited}. The first start downloads it, which takes longer."
        self._loading_text.set_text(f"The model could not be loaded: {error}" if error else loading)
        return error is not None

    def _count_tokens(self, text: str) -> int | None:
        llm: LLM | None = self.replies.get_llm()
        return None if llm is None else len(llm.tokenizer.encode(text))

    # showing

    def open(self, conversation_id: str | None, *, push: bool = True) -> None:
        """Show a conversation, or an empty new one; `push` adds it to the browser's history."""
        self.conversation = self.store.conversation(conversation_id) if conversation_id else None
        if conversation_id and self.conversation is None:
            self.notify("That conversation does not exist any more.")
        self.draft_settings = ChatSettings()
        self._settings.show(self.settings)
        self._thread.open(self._messages())
        self._show_state()
        self._show_list()
        self._show_location(push)
        self._run("openk3.pin()")

    def _show_location(self, push: bool) -> None:
        path = f"/c/{self.conversation.id}" if self.conversation else "/"
        title = self.conversation.title if self.conversation else "New chat"
        self._title.set_text(title)
        self._run(f"openk3.location({json.dumps(path)}, {json.dumps(title)}, {json.dumps(push)})")

    def _messages(self) -> list[Message]:
        return self.replies.messages(self.conversation.id) if self.conversation else []

    def _show_thread(self) -> None:
        self._thread.show(self._messages())
        self._show_state()

    def _show_state(self) -> None:
        """Show below the text box whether a reply is running and how full the context is."""
        llm = self.replies.get_llm()
        running = self.conversation is not None and self.replies.running(self.conversation.id)
        self._composer.show_state(ready=llm is not None, busy=running)
        measured = (m.stats for m in reversed(self._messages()) if m.stats and m.stats.prompt_tokens is not None)
        stats = next(measured, None)
        used = None if stats is None else (stats.prompt_tokens or 0) + stats.completion_tokens
        self._composer.show_context(used, llm.max_model_len if llm else None)

    def _show_list(self) -> None:
        conversations = self.store.conversations()
        running = {c.id for c in conversations if self.replies.running(c.id)}
        self._sidebar.show(conversations, self.conversation.id if self.conversation else None, running)

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
                self.notify("The conversation was deleted.")
            else:
                self._show_thread()

    def notify(self, text: str) -> None:
        """Show one sentence to the user for a few seconds."""
        with self.client:
            ui.notify(text, position="top", timeout=6000, classes="toast", close_button="OK")

    def _run(self, script: str) -> None:
        self.client.run_javascript(script)

    def _failed(self, error: Exception) -> None:
        self.notify(str(error) if isinstance(error, StoreError | ModelNotReadyError) else APOLOGY)

    # actions

    @property
    def settings(self) -> ChatSettings:
        """The settings of the open conversation as they are stored, or those of the one about to begin."""
        if self.conversation is None:
            return self.draft_settings
        fresh = self.store.conversation(self.conversation.id)
        return fresh.settings if fresh else self.conversation.settings

    def _send(self, event: events.GenericEventArguments) -> None:
        text = str(event.args).encode("utf-8", "replace").decode().strip()
        attachments = self._composer.attachments
        if not text and not attachments:
            return
        if len(text) > MAX_MESSAGE_LENGTH:
            self.notify(f"A message may have {MAX_MESSAGE_LENGTH:,} characters. Attach long texts as a file instead.")
            return
        if self.replies.get_llm() is None:
            self.notify("The model is still loading. Your text stays here; send it in a moment.")
            return
        if self.conversation is None:
            self.conversation = self.store.create(text or attachments[0].name, self.draft_settings)
            self._show_location(push=True)
        try:
            self.replies.send(self.conversation.id, text, attachments)
        except (StoreError, ModelNotReadyError) as error:
            self.notify(str(error))
            return
        with self.client:
            self._composer.clear()
        self._run("openk3.pin()")

    async def _stop(self) -> None:
        if self.conversation:
            await self.replies.stop(self.conversation.id)

    def _regenerate(self) -> None:
        if self.conversation:
            try:
                self.replies.regenerate(self.conversation.id)
            except (StoreError, ModelNotReadyError) as error:
                self.notify(str(error))

    def _edit(self, message_id: int, text: str) -> bool:
        text = text.encode("utf-8", "replace").decode().strip()
        if not text:
            self.notify("The message is empty. Write something, or cancel.")
            return False
        try:
            self.replies.edit(message_id, text[:MAX_MESSAGE_LENGTH])
        except (StoreError, ModelNotReadyError) as error:
            self.notify(str(error))
            return False
        return True

    def _copy(self, text: str) -> None:
        self._run(f"openk3.copy({json.dumps(text)})")

    def _new_chat(self) -> None:
        self.open(None)
        self._run("openk3.focus()")

    def _rename(self, conversation: Conversation, name: str) -> None:
        try:
            self.replies.rename(conversation.id, name)
        except ValueError:
            self.notify("A conversation needs a name.")

    async def _delete(self, conversation: Conversation) -> None:
        if self.conversation and self.conversation.id == conversation.id:
            self.open(None, push=False)
        await self.replies.delete(conversation.id)

    def _apply_setting(self, name: str, raw: str) -> str | None:
        try:
            settings = self.settings.changed(name, raw)
        except ValueError as error:
            return str(error)
        self._keep_settings(settings)
        return None

    def _reset_settings(self) -> None:
        self._keep_settings(ChatSettings())
        self._settings.show(ChatSettings())

    def _keep_settings(self, settings: ChatSettings) -> None:
        if self.conversation is None:
            self.draft_settings = settings
        else:
            self.store.save_settings(self.conversation.id, settings)

    def _file_too_large(self, event: events.GenericEventArguments) -> None:
        self.notify(too_large(str(event.args["name"]), int(event.args["size"])))


def _short(tokens: int) -> str:
    return (
        f"{tokens / 1_048_576:.0f}M" if tokens >= 1_048_576 else f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)
    )
