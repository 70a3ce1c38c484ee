"""Put the web chat on a FastAPI application.

NiceGUI is one application per process; the pages find the conversations and the model of the server they belong to in
the request's scope, where `Gate` puts them, so that several applications built in one process (as tests do) keep
apart.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from nicegui import core, ui
from starlette.datastructures import State

from openk3.serve.caller import caller
from openk3.serve.keys.ledger import Usage
from openk3.serve.web.gate import SCOPE_KEY, Gate
from openk3.serve.web.page import ChatPage
from openk3.serve.web.replies import Replies
from openk3.serve.web.store import Store
from openk3.serve.web.theme import LOGO, PRIMARY
from openk3.serve.web.usage_page import Sources, UsagePage
from openk3.serve.web.words import words_for

if TYPE_CHECKING:
    from openk3.llm import LLM

RECONNECT_TIMEOUT_S = 20.0


@dataclass(slots=True)
class WebChat:
    """What the pages of one server share. The store is opened when the server starts.

    `state` is the application's: its metrics, API keys and ledger.
    """

    store_path: Path
    get_llm: Callable[[], LLM | None]
    load_error: Callable[[], str | None]
    state: State
    replies: Replies | None = None

    def open(self) -> None:
        store = Store(self.store_path)
        store.recover()
        self.replies = Replies(store, self.get_llm, self._record)

    def _record(self, owner: str, model: str, usage: Usage) -> None:
        self.state.ledger.record(owner, "web", model, usage)

    async def close(self) -> None:
        if self.replies is not None:
            await self.replies.close()
            self.replies.store.close()
            self.replies = None


def mount(
    app: FastAPI,
    get_llm: Callable[[], LLM | None],
    store_path: Path,
    *,
    load_error: Callable[[], str | None] = lambda: None,
) -> None:
    """Serve the web chat at ``/`` of `app`. Call it after all other routes are registered: it takes what they leave.

    Args:
        app: the application, with metrics, keys and ledger in its state once it has started; its start-up opens the
            store, its shutdown stops replies and closes it.
        get_llm: returns the model, or None while it loads.
        store_path: SQLite file of the conversations, created if missing.
        load_error: returns a sentence for the user if the model could not be loaded, else None.

    Raises:
        StoreError: at start-up, when the file cannot be opened.
    """
    # NiceGUI looks at every object of the process for its server, and torch has deprecated ones among them.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"nicegui\.")
    chat = WebChat(store_path, get_llm, load_error, app.state)
    _define_pages()
    # First, so that it answers in place of the bare mount that run_with() adds behind it.
    app.mount("/", Gate(core.app, chat), name="web")
    if core.app.middleware_stack is not None:  # an earlier application of this process has already started NiceGUI
        core.app.user_middleware.clear()
        core.app.middleware_stack = None
    core.app.colors(primary=PRIMARY)
    ui.run_with(
        app,
        title="OpenK3",
        favicon=LOGO,
        dark=None,
        language=None,  # the page says itself which it is in
        tailwind=False,
        binding_refresh_interval=None,
        reconnect_timeout=RECONNECT_TIMEOUT_S,
        show_welcome_message=False,
    )
    _open_and_close_with(app, chat)


def _define_pages() -> None:
    @ui.page("/")
    def new_chat(request: Request) -> None:
        _build(request, None)

    @ui.page("/c/{conversation_id}")
    def chat(request: Request, conversation_id: str) -> None:
        _build(request, conversation_id)

    @ui.page("/usage")
    def usage(request: Request) -> None:
        chat: WebChat = request.scope[SCOPE_KEY]
        assert chat.replies is not None, "pages are served between start-up and shutdown"
        state, key = chat.state, caller().key
        key_id = None if key is None else key.id
        sources = Sources(chat.get_llm, state.metrics, chat.replies.store, state.keys, state.ledger, key_id)
        UsagePage(words_for(request.headers, request.cookies), sources)


def _build(request: Request, conversation_id: str | None) -> None:
    chat: WebChat = request.scope[SCOPE_KEY]
    assert chat.replies is not None, "pages are served between start-up and shutdown"
    words = words_for(request.headers, request.cookies)
    ChatPage(words, chat.replies, conversation_id, chat.load_error, caller().owner)


def _open_and_close_with(app: FastAPI, chat: WebChat) -> None:
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        chat.open()
        try:
            async with inner(app) as state:
                try:
                    yield state
                finally:
                    # Before the model closes, so that the replies end in order.
                    await chat.close()
        finally:
            await chat.close()

    app.router.lifespan_context = lifespan
