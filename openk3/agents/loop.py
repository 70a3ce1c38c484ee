"""A model and its tools: chat, run what it calls, tell it the results, until it answers.

    for event in run(model, messages, tools=["calculator", my_function]):
        match event:
            case TextPiece(text=text):
                print(text, end="")
            case CallFinished(done=done):
                print(done.call.name, done.result.text)
            case Finished(text=text):
                ...

The rules are those of `openk3.agents.rounds`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from openk3.agents.calls import Approve, FinishedCall, run_calls, run_calls_here
from openk3.agents.rounds import ANSWER, MAX_ROUNDS, Rounds
from openk3.agents.tools.tool import Tool, ToolLike, toolbox
from openk3.chat.parser import ReplyDelta, random_call_id
from openk3.chat.reply import Reply, ToolCall
from openk3.responses import Usage

if TYPE_CHECKING:
    from openk3.llm import LLM, Messages
    from openk3.responses import Piece


@dataclass(frozen=True)
class TextPiece:
    """A piece of what the model says, or thinks."""

    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class CallStarted:
    """The model calls a tool; it runs if it is allowed to."""

    call: ToolCall


@dataclass(frozen=True)
class CallFinished:
    """A call has its result."""

    done: FinishedCall


@dataclass(frozen=True)
class Finished:
    """The last event.

    Attributes:
        text: the answer: the text of the last reply.
        messages: all that came after the given chat, to go on with.
        finish_reason: "stop", "length" (of the tokens or the context there is no more), or "cancelled".
        usage: tokens of all rounds together.
        rounds, calls, failures, retries: replies; calls that were run; those that came to an error; calls of a tool
            that had failed before.
    """

    text: str
    messages: list[dict[str, Any]]
    finish_reason: str
    usage: Usage
    rounds: int
    calls: list[FinishedCall]
    failures: int
    retries: int


Event: TypeAlias = TextPiece | CallStarted | CallFinished | Finished


def run(
    model: LLM,
    messages: Messages,
    *,
    tools: Iterable[ToolLike],
    approve: Callable[[ToolCall], bool] | None = None,
    max_rounds: int = MAX_ROUNDS,
    max_total_tokens: int | None = None,
    **options: Any,
) -> Iterator[Event]:
    """Chat with tools until the model answers, and yield what happens.

    Args:
        messages: the chat, as for `LLM.chat`.
        tools: tools, plain functions with annotations and a docstring, or names of built-in tools.
        approve: asked before each call; False denies it, and the model is told.
        max_rounds: how many replies there may be; in the last the model may not call.
        max_total_tokens: how many tokens it may generate in all of them.
        options: as for `LLM.chat`. A `tool_choice` holds for the first reply.

    Raises:
        ValueError: as `LLM.chat`, and for tools that are none; before anything runs.
        GenerationError: the engine failed.
    """
    conversation = _Conversation(messages, tools, max_rounds, max_total_tokens, options)
    return _run(model, conversation, approve, model.chat_stream(**conversation.request()))


def _run(model: LLM, conversation: _Conversation, approve: Any, stream: Any) -> Iterator[Event]:
    while stream is not None:
        with stream:
            for piece in stream:
                yield from conversation.read(piece)
        calls = conversation.end_round()
        yield from map(CallStarted, calls)
        finished = run_calls_here(calls, conversation.box, approve)
        yield from map(CallFinished, finished)
        stream = conversation.next_stream(finished, model.chat_stream)
    yield conversation.finished()


async def arun(
    model: LLM,
    messages: Messages,
    *,
    tools: Iterable[ToolLike],
    approve: Approve | None = None,
    max_rounds: int = MAX_ROUNDS,
    max_total_tokens: int | None = None,
    **options: Any,
) -> AsyncGenerator[Event, None]:
    """`run` for asyncio; `approve` may be asynchronous. Errors of the arguments are raised at the first step."""
    conversation = _Conversation(messages, tools, max_rounds, max_total_tokens, options)
    stream: Any = model.achat_stream(**conversation.request())
    while stream is not None:
        async with stream:
            async for piece in stream:
                for event in conversation.read(piece):
                    yield event
        calls = conversation.end_round()
        for call in calls:
            yield CallStarted(call)
        finished = []
        async for done in run_calls(calls, conversation.box, approve):
            finished.append(done)
            yield CallFinished(done)
        stream = conversation.next_stream(finished, model.achat_stream)
    yield conversation.finished()


class _Conversation:
    """What `run` and `arun` have in common: all but waiting."""

    def __init__(
        self,
        messages: Messages,
        tools: Iterable[ToolLike],
        max_rounds: int,
        max_total_tokens: int | None,
        options: dict[str, Any],
    ) -> None:
        if max_total_tokens is not None and (not isinstance(max_total_tokens, int) or max_total_tokens < 1):
            raise ValueError(f"max_total_tokens: {max_total_tokens!r} is not a positive number of tokens")
        self.box: dict[str, Tool] = toolbox(tools)
        self._given = list(messages)
        self._definitions = [tool.definition for tool in self.box.values()]
        self._options = options
        self._left = max_total_tokens
        self._rounds = Rounds(max_rounds)
        self._reply = Reply()
        self._end: Piece | None = None
        self._usage = Usage(0, 0, 0)
        self._finish_reason = "stop"

    def request(self) -> dict[str, Any]:
        """The arguments of the next chat."""
        options = dict(self._options)
        if self._left is not None:
            options["max_tokens"] = min(self._left, options.get("max_tokens") or self._left)
        if self._rounds.must_answer:
            options["tool_choice"] = "none"
            if self._rounds.rounds and options.get("grammar") is None:
                options["grammar"] = ANSWER
        elif self._rounds.rounds:
            options.pop("tool_choice", None)
        messages = [*self._given, *self._rounds.messages, *self._rounds.reminder]
        return {"messages": messages, "tools": self._definitions, **options}

    def read(self, piece: Piece) -> Iterator[TextPiece]:
        self._reply.add(ReplyDelta(piece.text, piece.reasoning, piece.tool_calls))
        self._end = piece
        if piece.text or piece.reasoning:
            yield TextPiece(piece.text, piece.reasoning)

    def end_round(self) -> list[ToolCall]:
        assert self._end is not None and self._end.usage is not None and self._end.finish_reason is not None
        used = self._end.usage
        self._usage = Usage(
            self._usage.prompt_tokens + used.prompt_tokens,
            self._usage.cached_tokens + used.cached_tokens,
            self._usage.completion_tokens + used.completion_tokens,
        )
        if self._left is not None:
            self._left -= used.completion_tokens
        self._finish_reason = self._end.finish_reason
        if not self._reply.calls and not self._rounds.must_answer and (call := _attempted_call(self._reply.content)):
            self._reply, self._finish_reason = Reply("", self._reply.reasoning, [call]), "tool_calls"
        return self._rounds.add_reply(self._reply, self._finish_reason)

    def next_stream(self, finished: list[FinishedCall], chat: Callable[..., Any]) -> Any:
        """The stream of the next round; None if that was the last one."""
        if not self._rounds.goes_on:
            return None
        self._rounds.add_results(finished)
        self._finish_reason = "length"
        if self._left is not None and self._left < 1:
            return None
        request = self.request()
        self._reply = Reply()
        try:
            return chat(**request)
        except ValueError:  # it was all right before the results came: now it is too long
            return None

    def finished(self) -> Finished:
        rounds, reply = self._rounds, self._reply
        answer = [] if rounds.goes_on else [Reply(reply.content, reply.reasoning).message()]
        return Finished(
            reply.content,
            rounds.messages + answer,
            self._finish_reason,
            self._usage,
            rounds.rounds,
            rounds.finished,
            rounds.failures,
            rounds.retries,
        )


def _attempted_call(text: str) -> ToolCall | None:
    """The call of a tool that does not exist, which is no call to the parser of replies: it knows the tools' names.

    As the model meant it as one, it is told so, rather than the user shown JSON.
    """
    text = text.strip()
    if not text.startswith("{"):
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if said.keys() != {"name", "arguments"} or not isinstance(said["name"], str) or not said["name"]:
        return None
    if not isinstance(said["arguments"], dict):
        return None
    return ToolCall(random_call_id(), said["name"], json.dumps(said["arguments"], ensure_ascii=False))
