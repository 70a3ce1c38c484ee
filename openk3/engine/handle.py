"""One request's reply as its client sees it: a growing list of deltas, readable from any thread and from asyncio."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from openk3.engine.request import Delta


class Handle:
    """A submitted request.

    Iterate over it, `for delta in handle` or `async for delta in handle`, or take the whole reply with `result()` or
    `await aresult()`. Every iteration starts at the first delta; the last one carries the finish reason. An error in
    the engine arrives as a last delta too and is not raised.

    There is no lock: Ctrl-C may strike between any two instructions of a thread that waits here, and a lock would then
    be left held, or be released without being held. Deltas are only added. Whoever waits leaves a call in `_wakers`
    and then looks for its delta once more, so that none arrives unseen; it may be called for the delta before.

    Attributes:
        request_id: what the deltas carry.
    """

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._deltas: list[Delta] = []
        self._wakers: deque[Callable[[], None]] = deque()

    def cancel(self) -> None:
        """Ask the engine to stop; it does within a step and sends a last delta. Harmless when the reply has ended."""
        if not self.done:
            self._cancel()

    @property
    def done(self) -> bool:
        """Whether the last delta is there."""
        return bool(self._deltas) and self._deltas[-1].finish_reason is not None

    def push(self, delta: Delta) -> None:
        """Add a delta and wake whoever waits for it. For the engine's thread."""
        self._deltas.append(delta)
        while self._wakers:
            self._wakers.popleft()()

    def __iter__(self) -> Iterator[Delta]:
        position = 0
        while True:
            self._wait_for(position)
            delta = self._deltas[position]
            yield delta
            if delta.finish_reason is not None:
                return
            position += 1

    async def __aiter__(self) -> AsyncIterator[Delta]:
        position = 0
        while True:
            await self._await(position)
            delta = self._deltas[position]
            yield delta
            if delta.finish_reason is not None:
                return
            position += 1

    def _wait_for(self, position: int, timeout_s: float | None = None) -> None:
        """Return when the delta at `position` is there.

        Raises:
            queue.Empty: it did not arrive within `timeout_s` seconds.
        """
        while position == len(self._deltas):
            bell: queue.SimpleQueue[None] = queue.SimpleQueue()
            self._wakers.append(partial(bell.put, None))
            if position == len(self._deltas):
                bell.get(timeout=timeout_s)

    async def _await(self, position: int) -> None:
        """`_wait_for` without blocking the event loop."""
        loop = asyncio.get_running_loop()
        while position == len(self._deltas):
            bell: asyncio.Future[None] = loop.create_future()
            self._wakers.append(partial(_wake, loop, bell))
            if position == len(self._deltas):
                await bell

    def result(self, timeout_s: float | None = None) -> Delta:
        """The whole reply as one delta, waited for.

        Raises:
            TimeoutError: it did not end within `timeout_s` seconds; the request goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self.done:
                self._wait_for(len(self._deltas), None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"request {self.request_id} did not end within {timeout_s} s") from None
        return merge(self._deltas)

    async def aresult(self) -> Delta:
        """The whole reply as one delta, awaited."""
        return merge([delta async for delta in self])


def _wake(loop: asyncio.AbstractEventLoop, bell: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_ring, bell)
    except RuntimeError:  # the client's event loop is closed: nobody waits there any more
        return


def _ring(bell: asyncio.Future[None]) -> None:
    if not bell.done():
        bell.set_result(None)


def merge(deltas: Sequence[Delta]) -> Delta:
    """All deltas of a reply as one."""
    with_logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(i for delta in deltas for i in delta.token_ids),
        logprobs=tuple(entry for entries in with_logprobs for entry in entries) if with_logprobs else None,
    )
