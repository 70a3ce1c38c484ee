"""One request's reply as its client sees it: a growing list of deltas, readable from any thread and from asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from openk3.engine.request import Delta


class Handle:
    """A submitted request.

    Iterate over it, `for delta in handle` or `async for delta in handle`, or take the whole reply with `result()` or
    `await aresult()`. Every iteration starts at the first delta; the last one carries the finish reason. An error in
    the engine arrives as a last delta too and is not raised.

    Attributes:
        request_id: what the deltas carry.
    """

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._deltas: list[Delta] = []
        self._arrival = threading.Condition()
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

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
        with self._arrival:
            self._deltas.append(delta)
            self._arrival.notify_all()
            sleepers, self._sleepers = self._sleepers, []
        for loop, future in sleepers:
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # the client's event loop is closed: nobody waits there any more
                continue

    def __iter__(self) -> Iterator[Delta]:
        position = 0
        while True:
            with self._arrival:
                self._arrival.wait_for(lambda: position < len(self._deltas))  # noqa: B023 (called before it changes)
                delta = self._deltas[position]
            yield delta
            if delta.finish_reason is not None:
                return
            position += 1

    async def __aiter__(self) -> AsyncIterator[Delta]:
        position = 0
        while True:
            delta = await self._wait_for(position)
            yield delta
            if delta.finish_reason is not None:
                return
            position += 1

    async def _wait_for(self, position: int) -> Delta:
        while True:
            with self._arrival:
                if position < len(self._deltas):
                    return self._deltas[position]
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._sleepers.append((loop, future))
            await future

    def result(self, timeout_s: float | None = None) -> Delta:
        """The whole reply as one delta, waited for.

        Raises:
            TimeoutError: it did not end within `timeout_s` seconds; the request goes on.
        """
        with self._arrival:
            if not self._arrival.wait_for(lambda: self.done, timeout_s):
                raise TimeoutError(f"request {self.request_id} did not end within {timeout_s} s")
        return merge(self._deltas)

    async def aresult(self) -> Delta:
        """The whole reply as one delta, awaited."""
        return merge([delta async for delta in self])


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def merge(deltas: Sequence[Delta]) -> Delta:
    """All deltas of a reply as one."""
    with_logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(i for delta in deltas for i in delta.token_ids),
        logprobs=tuple(entry for entries in with_logprobs for entry in entries) if with_logprobs else None,
    )
