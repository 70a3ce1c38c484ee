"""What the SDK hands back: a whole `Response`, or a `Stream` of pieces that cancels its request when it is let go.

A generator would do for streaming but for two holes: it validates nothing before its first step, and one that is
dropped before that step never runs its clean-up, so its request would live on. A `Stream` belongs to a request that was
accepted, and cancels it when it is closed, left by `with`, or garbage-collected, which in CPython is at once after
`break`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from openk3.engine.handle import Handle
from openk3.engine.request import Delta, Timings, TokenLogprob

if TYPE_CHECKING:
    from openk3.chat.parser import CallDelta, ReplyParser
    from openk3.chat.reply import ToolCall


class GenerationError(RuntimeError):
    """The engine failed on a request that was valid; the message says how."""


@dataclass(frozen=True)
class Usage:
    """Token counts of one request; `cached_tokens` of the prompt were taken from the prefix cache, and
    `reasoning_tokens` of the completion were the model's thoughts, in a chat.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Response:
    """A whole answer.

    Attributes:
        text: the generated text, without the stop string that ended it; of a chat, the answer alone.
        token_ids: every generated id, the one that ended it included.
        finish_reason: "stop" (end of text or a stop string), "length" (max_tokens or the context is used up, or a stop
            string came before the text had the form that `grammar=` asked for), "cancelled", or "tool_calls" (the model
            waits for the results of its calls).
        timings: seconds to the first token, seconds in all, tokens per second while decoding.
        logprobs: one entry per token where `logprobs=` was asked for, else None.
        reasoning: what the model thought before it answered, where it does that in tags.
        tool_calls: the functions it calls. Where the reply was cut, the last may be incomplete.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    timings: Timings
    logprobs: list[TokenLogprob] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message that a chat goes on with, calls and reasoning included."""
        from openk3.chat.reply import Reply

        return Reply(self.text, self.reasoning, self.tool_calls).message()


@dataclass(frozen=True)
class Piece:
    """A part of an answer, as it is generated. `finish_reason`, `usage` and `timings` are set on the last one only.

    `tool_calls` are pieces of calls, with id and name in the first of each.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()


def piece_of(delta: Delta, parser: ReplyParser | None = None) -> Piece:
    """The piece that one step of the engine amounts to; with a `parser`, as it reads a chat's.

    Raises:
        GenerationError: the engine reports that the request failed.
    """
    _check(delta)
    last = delta.finish_reason is not None
    piece = Piece(
        text=delta.text,
        token_ids=list(delta.token_ids),
        logprobs=_logprobs(delta),
        finish_reason=delta.finish_reason,
        usage=_usage(delta) if last else None,
        timings=delta.timings if last else None,
    )
    if parser is None:
        return piece
    read = parser.read(delta)
    reason = None if delta.finish_reason is None else parser.finish_reason(delta.finish_reason)
    return replace(
        piece,
        text=read.content,
        reasoning=read.reasoning,
        tool_calls=read.calls,
        finish_reason=reason,
        usage=piece.usage and replace(piece.usage, reasoning_tokens=parser.reasoning_tokens),
    )


def response_of(whole: Delta, parser: ReplyParser | None = None) -> Response:
    """The whole answer, given all deltas of a finished request as one (`Handle.result`); read by `parser` if a chat's.

    Raises:
        GenerationError: the engine reports that the request failed.
    """
    _check(whole)
    assert whole.finish_reason is not None
    response = Response(
        text=whole.text,
        token_ids=list(whole.token_ids),
        finish_reason=whole.finish_reason,
        usage=_usage(whole),
        timings=whole.timings or Timings(0.0, 0.0, 0.0, 0.0),  # none if the engine closed before it ran
        logprobs=_logprobs(whole),
    )
    if parser is None:
        return response
    from openk3.chat.reply import Reply

    reply = Reply()
    reply.add(parser.read(whole))
    return replace(
        response,
        text=reply.content,
        reasoning=reply.reasoning,
        tool_calls=reply.calls,
        finish_reason=parser.finish_reason(whole.finish_reason),
        usage=replace(response.usage, reasoning_tokens=parser.reasoning_tokens),
    )


def _check(delta: Delta) -> None:
    if delta.finish_reason == "error":
        raise GenerationError(delta.error or "the engine failed on this request")


def _logprobs(delta: Delta) -> list[TokenLogprob] | None:
    return None if delta.logprobs is None else list(delta.logprobs)


def _usage(delta: Delta) -> Usage:
    return Usage(delta.prompt_tokens, delta.cached_tokens, delta.completion_tokens)


class Stream(Iterator[Piece]):
    """The pieces of one answer as they come. Usable in `for` and `with`; `break` and `close` cancel the request."""

    def __init__(self, handle: Handle, parser: ReplyParser | None = None) -> None:
        self._handle = handle
        self._parser = parser
        self._deltas = iter(handle)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        return piece_of(next(self._deltas), self._parser)

    def close(self) -> None:
        """Cancel the request if it still runs; the engine frees its memory within one step. May be called twice."""
        self._handle.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncStream(AsyncIterator[Piece]):
    """`Stream` for asyncio: `async for`, `async with`. Cancelling the task that waits on it cancels the request."""

    def __init__(self, handle: Handle, parser: ReplyParser | None = None) -> None:
        self._handle = handle
        self._parser = parser
        self._deltas = aiter(handle)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        try:
            delta = await anext(self._deltas)
        except StopAsyncIteration:
            raise
        except BaseException:  # asyncio.CancelledError is not an Exception
            self._handle.cancel()
            raise
        return piece_of(delta, self._parser)

    async def aclose(self) -> None:
        """Cancel the request if it still runs; the engine frees its memory within one step. May be called twice."""
        self._handle.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._handle.cancel()
