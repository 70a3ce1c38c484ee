"""Answers being written: one task per conversation, owned by the server and not by a browser tab.

A page asks for a reply and then only watches. So a reload, a lost connection or a second tab changes nothing about
the answer: whoever looks sees the same text grow, and it is saved every second and at its end. `Replies` is used from
one event loop; the LLM does its work on its own thread behind `achat_stream`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from openk3.serve.access import log_failure
from openk3.serve.web.prompt import model_messages
from openk3.serve.web.settings import ChatSettings
from openk3.serve.web.store import Attachment, ConversationGoneError, Message, ReplyStats, Status, Store, StoreError

if TYPE_CHECKING:
    from openk3.llm import LLM
    from openk3.responses import AsyncStream, Piece

log = logging.getLogger("openk3.serve")

SAVE_INTERVAL_S = 1.0
PUBLISH_INTERVAL_S = 0.08

Change = Literal["list", "thread", "reply"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something changed: the list of conversations, the messages of one, or (`reply` given) one growing answer."""

    change: Change
    conversation_id: str = ""
    reply: Message | None = None


Listener = Callable[[Event], None]


class ModelNotReadyError(Exception):
    """A reply was asked for before the model had loaded."""


@dataclass(slots=True)
class _Running:
    """A reply on its way: `reply` is how far it has come, `stream` is None while the prompt is being tokenized."""

    reply: Message
    stats: ReplyStats
    task: asyncio.Task[None] = field(init=False)
    stream: AsyncStream | None = None
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    def take(self, piece: Piece) -> None:
        """Add what has arrived."""
        if self.first_token is None and piece.token_ids:
            self.first_token = time.monotonic()
        stats = replace(self.stats, completion_tokens=self.stats.completion_tokens + len(piece.token_ids))
        if piece.finish_reason is not None:
            stats = replace(stats, finish_reason=piece.finish_reason)
        if piece.usage is not None:
            usage = piece.usage
            stats = replace(
                stats,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
            )
        if piece.timings is not None and self.first_token is not None:
            speed = piece.timings.tokens_per_second or None  # 0 stands for replies too short to have a speed
            stats = replace(stats, ttft_s=piece.timings.ttft_s, tokens_per_second=speed)
        self.stats = stats
        self.reply = replace(self.reply, content=self.reply.content + piece.text)

    def end(self, status: Status, error: str = "") -> None:
        """Settle how it ended; what the engine did not report is filled in from the clock here."""
        if self.first_token is not None and self.stats.ttft_s is None:
            rest = self.stats.completion_tokens - 1
            speed = rest / max(time.monotonic() - self.first_token, 1e-6) if rest > 0 else None
            self.stats = replace(self.stats, ttft_s=self.first_token - self.started, tokens_per_second=speed)
        stats = self.stats if self.first_token is not None else None
        self.reply = replace(self.reply, status=status, error=error, stats=stats)


class Replies:
    """Start, stop and watch the replies of all conversations in `store`, written by the LLM that `get_llm` returns."""

    def __init__(self, store: Store, get_llm: Callable[[], LLM | None]) -> None:
        self.store = store
        self.get_llm = get_llm
        self._running: dict[str, _Running] = {}
        self._listeners: list[Listener] = []
        self._closing = False

    # watching

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` at every change, on the event loop; returns the function that ends it."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def publish(self, event: Event) -> None:
        """Tell every listener; one that fails is logged and does not keep the others from hearing."""
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception as error:
                log_failure("a chat page", error)

    def messages(self, conversation_id: str) -> list[Message]:
        """The stored messages, with the running reply as far as it has come."""
        running = self._running.get(conversation_id)
        messages = self.store.messages(conversation_id)
        return [running.reply if running and running.reply.id == m.id else m for m in messages]

    def running(self, conversation_id: str) -> bool:
        """Whether a reply is being written in this conversation."""
        return conversation_id in self._running

    # doing

    def send(self, conversation_id: str, text: str, attachments: Sequence[Attachment] = ()) -> None:
        """Add a user message and start the reply. Raises `ModelNotReadyError` and what `Store.begin_turn` raises."""
        llm = self._ready_llm()
        self._start(llm, self.store.begin_turn(conversation_id, text, attachments))

    def regenerate(self, conversation_id: str) -> None:
        """Replace the last reply by a new one. Raises `ModelNotReadyError` and what `Store.begin_again` raises."""
        llm = self._ready_llm()
        self._start(llm, self.store.begin_again(conversation_id))

    def edit(self, message_id: int, text: str) -> None:
        """Change a user message, drop what follows and answer anew. Raises as `send`."""
        llm = self._ready_llm()
        self._start(llm, self.store.begin_edited(message_id, text))

    async def stop(self, conversation_id: str) -> None:
        """Stop the running reply, keeping what is there; no error if none runs."""
        running = self._running.get(conversation_id)
        if running is None:
            return
        if running.stream is None:
            running.task.cancel()
        else:
            await running.stream.aclose()  # the engine answers with a last piece, which brings the counts

    def rename(self, conversation_id: str, title: str) -> None:
        """Rename a conversation. ValueError for an empty title."""
        self.store.rename(conversation_id, title)
        self.publish(Event("list"))

    async def delete(self, conversation_id: str) -> None:
        """Stop the running reply and delete the conversation."""
        if running := self._running.get(conversation_id):
            running.task.cancel()
            await asyncio.wait([running.task])
        self.store.delete(conversation_id)
        self.publish(Event("thread", conversation_id))
        self.publish(Event("list"))

    async def close(self) -> None:
        """Stop all replies (they are kept as "interrupted") and wait until they are saved."""
        self._closing = True
        self._listeners.clear()  # the pages are going away, and must not be redrawn while they do
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # writing

    def _ready_llm(self) -> LLM:
        llm = self.get_llm()
        if llm is None:
            raise ModelNotReadyError("The model is still loading. Your text stays here; send it in a moment.")
        return llm

    def _start(self, llm: LLM, reply: Message) -> None:
        conversation = self.store.conversation(reply.conversation_id)
        if conversation is None:
            raise ConversationGoneError("This conversation was deleted in the meantime.")
        history = [m for m in self.store.messages(reply.conversation_id) if m.id < reply.id]
        running = _Running(reply, ReplyStats(model=llm.name))
        running.task = asyncio.get_running_loop().create_task(self._write(llm, conversation.settings, history, running))
        # In a callback, because a task that is cancelled before its first step never enters its body.
        running.task.add_done_callback(lambda _: self._finish(running))
        self._running[reply.conversation_id] = running
        self.publish(Event("thread", reply.conversation_id))
        self.publish(Event("list"))

    async def _write(self, llm: LLM, settings: ChatSettings, history: list[Message], running: _Running) -> None:
        """Write one reply to its end, whatever that is."""
        try:
            # In a thread, because it tokenizes the whole prompt.
            stream = await asyncio.to_thread(llm.achat_stream, model_messages(settings, history), **settings.sampling())
            running.stream = stream
            async with aclosing(stream):
                await self._read(stream, running)
            stopped = running.stats.finish_reason == "cancelled"
            running.end("complete" if not stopped else "interrupted" if llm.loop.closed else "stopped")
        except asyncio.CancelledError:
            running.end("interrupted" if self._closing else "stopped")
        except ValueError as error:
            running.end("failed", _sentence(error))
        except StoreError as error:
            running.end("failed", str(error))
        except Exception as error:
            log_failure("a reply", error)
            running.end("failed", "The model could not finish this answer. The server's log says why.")

    async def _read(self, stream: AsyncStream, running: _Running) -> None:
        saved = published = running.started
        async for piece in stream:
            running.take(piece)
            now = time.monotonic()
            if now - published >= PUBLISH_INTERVAL_S:
                published = now
                self.publish(Event("reply", running.reply.conversation_id, running.reply))
            if now - saved >= SAVE_INTERVAL_S:
                saved = now
                if not self.store.save_reply(running.reply):
                    log.info("a reply was deleted while it was written; stopping it")
                    return

    def _finish(self, running: _Running) -> None:
        """Save the final state of a reply and tell everybody."""
        if running.reply.status == "streaming":
            running.end("stopped")
        conversation_id = running.reply.conversation_id
        del self._running[conversation_id]
        try:
            self.store.save_reply(running.reply)
        except StoreError as error:
            log_failure("the end of a reply", error)
        self.publish(Event("thread", conversation_id))
        self.publish(Event("list"))


def _sentence(error: ValueError) -> str:
    text = " ".join(str(error).split())
    return text[:1].upper() + text[1:] if text else "The model refused this request."
