"""A reply on its way: how far it has come, what it costs, and which of its calls wait for a yes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from openk3.chat.parser import ReplyDelta
from openk3.chat.reply import Reply
from openk3.serve.keys.ledger import Usage
from openk3.serve.web.records import OPEN, Message, ReplyStats, Said, Status, Thinking, ToolUse, Work

if TYPE_CHECKING:
    from openk3.chat.parser import CallDelta
    from openk3.responses import AsyncStream, Piece


class Running:
    """Takes the pieces of a reply, which may be several rounds of the model with calls of tools between them.

    Attributes:
        reply: the message as far as it has come.
        owner: whose it is, as the ledger knows them.
        stats: what it has cost so far.
        said: what the model has said in this round.
        stream: the round that is being written; None while the prompt is tokenized or a tool runs.
    """

    def __init__(self, reply: Message, model: str, owner: str) -> None:
        self.reply = reply
        self.owner = owner
        self.stats = ReplyStats(model=model)
        self.task: asyncio.Task[None]
        self.said = Reply()
        self.stream: AsyncStream | None = None
        self._round = -1
        self._tokens_before = 0
        self._timed_tokens = 0
        self._decode_s = 0.0
        self._thinking_since: float | None = None
        self._started = time.monotonic()
        self._first_token: float | None = None
        self._questions: dict[str, asyncio.Future[bool]] = {}

    # what the model writes

    def begin_round(self) -> None:
        """The model is about to write; for the second and later rounds, with the results of its calls."""
        self._round += 1
        self.said = Reply()
        self._tokens_before = self.stats.completion_tokens
        self._usage: Usage | None = None
        self.stats = replace(self.stats, finish_reason=None)

    def take(self, piece: Piece) -> None:
        """Add what has arrived."""
        if self._first_token is None and piece.token_ids:
            self._first_token = time.monotonic()
        self.stats = replace(self.stats, completion_tokens=self.stats.completion_tokens + len(piece.token_ids))
        self.said.add(ReplyDelta(piece.text, piece.reasoning, piece.tool_calls))
        if piece.reasoning:
            self._think(piece.reasoning)
        if piece.text:
            self._end_thinking()
            self.reply = replace(self.reply, content=self.reply.content + piece.text)
        for call in piece.tool_calls:
            self._call(call)
        if piece.finish_reason is not None:
            self._end_round(piece)

    def _end_round(self, piece: Piece) -> None:
        self._end_thinking()
        stats = replace(self.stats, finish_reason=piece.finish_reason)
        if (usage := piece.usage) is not None:
            self._usage = Usage(1, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
            stats = replace(
                stats,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=self._tokens_before + usage.completion_tokens,
                context_tokens=usage.prompt_tokens + usage.completion_tokens,
            )
        if piece.timings is not None and self._first_token is not None:
            if stats.ttft_s is None:
                stats = replace(stats, ttft_s=piece.timings.ttft_s)
            tokens = stats.completion_tokens - self._tokens_before - 1
            if tokens > 0 and piece.timings.tokens_per_second:  # 0 stands for rounds too short to have a speed
                self._timed_tokens += tokens
                self._decode_s += tokens / piece.timings.tokens_per_second
                stats = replace(stats, tokens_per_second=self._timed_tokens / self._decode_s)
        self.stats = stats

    def used(self) -> Usage:
        """What this round has used; of one that was broken off, what is known of it."""
        return self._usage or Usage(1, completion_tokens=self.stats.completion_tokens - self._tokens_before)

    def _think(self, text: str) -> None:
        last = self.reply.work[-1] if self.reply.work else None
        if self._thinking_since is not None and isinstance(last, Thinking):
            self._put_last(replace(last, text=last.text + text))
        else:
            self._set_aside()
            self._thinking_since = time.monotonic()
            self._append(Thinking(text))

    def _end_thinking(self) -> None:
        if self._thinking_since is not None:
            last = self.reply.work[-1]
            assert isinstance(last, Thinking)
            self._put_last(replace(last, seconds=time.monotonic() - self._thinking_since))
            self._thinking_since = None

    def _call(self, delta: CallDelta) -> None:
        self._end_thinking()
        if delta.id is not None:
            self._set_aside()
            self._append(ToolUse(delta.id, delta.name or "", delta.arguments, self._round))
        else:
            last = self.reply.work[-1]
            assert isinstance(last, ToolUse)
            self._put_last(replace(last, arguments=last.arguments + delta.arguments))

    def _set_aside(self) -> None:
        """Text that something follows is not the answer."""
        if self.reply.content.strip():
            self._append(Said(self.reply.content.strip()))
        self.reply = replace(self.reply, content="")

    def _append(self, part: Work) -> None:
        self.reply = replace(self.reply, work=(*self.reply.work, part))

    def _put_last(self, part: Work) -> None:
        self.reply = replace(self.reply, work=(*self.reply.work[:-1], part))

    # calls

    def call(self, call_id: str) -> ToolUse:
        """The call of this id. KeyError if there is none."""
        for part in self.reply.work:
            if isinstance(part, ToolUse) and part.id == call_id:
                return part
        raise KeyError(call_id)

    def settle(self, call_id: str, **changes: Any) -> None:
        """Note what has become of a call."""
        work = (
            replace(part, **changes) if isinstance(part, ToolUse) and part.id == call_id else part
            for part in self.reply.work
        )
        self.reply = replace(self.reply, work=tuple(work))

    def tell(self, messages: list[dict[str, Any]]) -> None:
        """Note the results that the model is told; calls that it repeated get theirs only here."""
        told = {m["tool_call_id"]: m["content"] for m in messages if m["role"] == "tool"}
        for part in self.reply.work:
            if isinstance(part, ToolUse) and part.status == "written" and part.id in told:
                self.settle(part.id, status="done", result=told[part.id])

    def ask(self, call_id: str) -> asyncio.Future[bool]:
        """Ask about a call; the future is done when somebody decides."""
        self.settle(call_id, status="asking")
        question = self._questions[call_id] = asyncio.get_running_loop().create_future()
        return question

    def decide(self, call_id: str, allowed: bool) -> bool:
        """Answer the question about a call; False if it is not asked."""
        question = self._questions.get(call_id)
        if question is None or question.done():
            return False
        question.set_result(allowed)
        return True

    # the end

    def end(self, status: Status, error: str = "") -> None:
        """Settle how it ended; what the engine did not report is filled in from the clock here."""
        self._end_thinking()
        for part in self.reply.work:
            if isinstance(part, ToolUse) and part.status in OPEN:
                self.settle(part.id, status="skipped")
        if self._first_token is not None and self.stats.ttft_s is None:
            rest = self.stats.completion_tokens - 1
            speed = rest / max(time.monotonic() - self._first_token, 1e-6) if rest > 0 else None
            ttft_s = self._first_token - self._started
            self.stats = replace(self.stats, ttft_s=ttft_s, tokens_per_second=speed)
        stats = self.stats if self._first_token is not None else None
        self.reply = replace(self.reply, status=status, error=error, stats=stats)
