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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from openk3.agents.calls import FinishedCall, run_calls
from openk3.agents.rounds import ANSWER, Rounds
from openk3.agents.tools.tool import Tool
from openk3.chat.reply import ToolCall
from openk3.serve.access import log_failure
from openk3.serve.keys.ledger import Usage
from openk3.serve.web.prompt import model_messages
from openk3.serve.web.records import Attachment, ConversationGoneError, Message, StoreError
from openk3.serve.web.running import Running
from openk3.serve.web.settings import ChatSettings
from openk3.serve.web.store import Store
from openk3.serve.web.toolbox import tools_for
from openk3.serve.web.words import EN, SpokenError

if TYPE_CHECKING:
    from openk3.llm import LLM
    from openk3.responses import AsyncStream

log = logging.getLogger("openk3.serve")

SAVE_INTERVAL_S = 1.0
PUBLISH_INTERVAL_S = 0.08

Change = Literal["list", "thread", "reply"]
Verdict = Literal["allow", "always", "deny"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something changed: the list of conversations, the messages of one, or (`reply` given) one growing answer."""

    change: Change
    conversation_id: str = ""
    reply: Message | None = None


Listener = Callable[[Event], None]


class ModelNotReadyError(SpokenError):
    """A reply was asked for before the model had loaded."""


class Replies:
    """Start, stop and watch the replies of all conversations in `store`, written by the LLM that `get_llm` returns.

    `record` is told what each round of the model has used: for whom (the id of their key, "" without), of which model.
    """

    def __init__(
        self, store: Store, get_llm: Callable[[], LLM | None], record: Callable[[str, str, Usage], None]
    ) -> None:
        self.store = store
        self.get_llm = get_llm
        self._record = record
        self._running: dict[str, Running] = {}
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
        """The messages of the branch that is shown, with the running reply as far as it has come."""
        running = self._running.get(conversation_id)
        messages = self.store.messages(conversation_id)
        return [running.reply if running and running.reply.id == m.id else m for m in messages]

    def running(self, conversation_id: str) -> bool:
        """Whether a reply is being written in this conversation."""
        return conversation_id in self._running

    # doing

    def send(self, conversation_id: str, text: str, attachments: Sequence[Attachment] = (), owner: str = "") -> None:
        """Add a user message and start the reply. Raises `ModelNotReadyError` and what `Store.begin_turn` raises."""
        llm = self._ready_llm()
        self._start(llm, self.store.begin_turn(conversation_id, text, attachments), owner)

    def regenerate(self, conversation_id: str, reply_id: int | None = None, owner: str = "") -> None:
        """Answer anew, beside `reply_id` or the last reply. Raises `ModelNotReadyError` and as `Store.begin_again`."""
        llm = self._ready_llm()
        self._start(llm, self.store.begin_again(conversation_id, reply_id), owner)

    def edit(self, message_id: int, text: str, owner: str = "") -> None:
        """Ask another version of a user message. Raises `ModelNotReadyError` and as `Store.begin_edited`."""
        llm = self._ready_llm()
        self._start(llm, self.store.begin_edited(message_id, text), owner)

    def select(self, conversation_id: str, message_id: int) -> None:
        """Show the branch of a message. Raises as `Store.select`."""
        self.store.select(message_id)
        self.publish(Event("thread", conversation_id))

    def decide(self, conversation_id: str, call_id: str, verdict: Verdict) -> None:
        """Let a call that waits for approval run, this time or from now on, or deny it.

        Raises `ConversationGoneError` if it does not wait any more.
        """
        running = self._running.get(conversation_id)
        if running is None or not running.decide(call_id, verdict != "deny"):
            raise ConversationGoneError("call_gone")
        name = running.call(call_id).name
        conversation = self.store.conversation(conversation_id)
        if verdict == "always" and conversation is not None:
            self.store.save_settings(conversation_id, conversation.settings.permitted(name, True))

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

    def pin(self, conversation_id: str, pinned: bool) -> None:
        """Keep a conversation at the top of the list, or no longer."""
        self.store.pin(conversation_id, pinned)
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
            raise ModelNotReadyError("not_ready")
        return llm

    def _start(self, llm: LLM, reply: Message, owner: str) -> None:
        conversation = self.store.conversation(reply.conversation_id)
        if conversation is None:
            raise ConversationGoneError("gone")
        history = [m for m in self.store.messages(reply.conversation_id) if m.id < reply.id]
        running = Running(reply, llm.name, owner)
        running.task = asyncio.get_running_loop().create_task(self._write(llm, conversation.settings, history, running))
        # In a callback, because a task that is cancelled before its first step never enters its body.
        running.task.add_done_callback(lambda _: self._finish(running))
        self._running[reply.conversation_id] = running
        self.publish(Event("thread", reply.conversation_id))
        self.publish(Event("list"))

    async def _write(self, llm: LLM, settings: ChatSettings, history: list[Message], running: Running) -> None:
        """Write one reply to its end, whatever that is."""
        try:
            await self._converse(llm, settings, history, running)
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
            running.end("failed", EN.model_failed)

    async def _converse(self, llm: LLM, settings: ChatSettings, history: list[Message], running: Running) -> None:
        """Let the model write, run what it calls, and let it write again, until it has answered."""
        files = [file for message in history for file in message.attachments]
        box = await asyncio.to_thread(tools_for, settings.tools, files)
        options: dict[str, Any] = {"reasoning_effort": settings.effort or None, **settings.sampling()}
        before = model_messages(settings, history)
        rounds = Rounds()
        goes_on = True
        while goes_on:
            if box:
                options["tools"] = [tool.definition for tool in box.values()]
                options["tool_choice"] = "none" if rounds.must_answer else "auto"
                options["grammar"] = ANSWER if rounds.must_answer else None
                options["parallel_tool_calls"] = False  # one question at a time; small models write a dozen calls
            running.begin_round()
            messages = [*before, *rounds.messages, *rounds.reminder]
            # In a thread, because it tokenizes the whole prompt.
            stream = await asyncio.to_thread(llm.achat_stream, messages, **options)
            running.stream = stream
            try:
                async with aclosing(stream):
                    await self._read(stream, running)
            finally:
                running.stream = None
                self._record(running.owner, Path(llm.name).name, running.used())
            calls = rounds.add_reply(running.said, running.stats.finish_reason or "stop")
            if goes_on := rounds.goes_on:
                rounds.add_results(await self._run_calls(running, calls, box))
                running.tell(rounds.messages)

    async def _read(self, stream: AsyncStream, running: Running) -> None:
        saved = published = time.monotonic()
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
                    raise asyncio.CancelledError

    async def _run_calls(self, running: Running, calls: list[ToolCall], box: dict[str, Tool]) -> list[FinishedCall]:
        """Run the calls of a round, each as soon as it is allowed."""
        finished = []

        async def approve(call: ToolCall) -> bool:
            allowed = self._is_allowed(running, call)
            if not allowed:
                question = running.ask(call.id)
                self._show(running)
                allowed = await question
            running.settle(call.id, status="running" if allowed else "denied")
            self._show(running)
            return allowed

        async with aclosing(run_calls(calls, box, approve)) as results:
            async for done in results:
                finished.append(done)
                status = "denied" if not done.approved else "failed" if done.result.is_error else "done"
                seconds = done.seconds if done.approved else None
                running.settle(done.call.id, status=status, result=done.result.text, seconds=seconds)
                self._show(running)
        return finished

    def _is_allowed(self, running: Running, call: ToolCall) -> bool:
        # Read each time: "always" may have been said a moment ago, for an earlier call.
        conversation = self.store.conversation(running.reply.conversation_id)
        return conversation is not None and call.name in conversation.settings.allowed

    def _show(self, running: Running) -> None:
        """Save a running reply and show it."""
        self.store.save_reply(running.reply)
        self.publish(Event("reply", running.reply.conversation_id, running.reply))

    def _finish(self, running: Running) -> None:
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
