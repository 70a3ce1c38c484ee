"""The engine in a thread of its own, so that any number of threads and event loops can use it at once.

Clients never touch the engine: they leave commands in an inbox, which the thread empties between two steps, and read
what the thread pushes into their handles. Whatever happens, every handle gets a last delta: a failed step ends the
requests it touched, a fault of the engine itself ends all of them, and so does closing.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from openk3.engine.engine import Engine, EngineStats
from openk3.engine.handle import Handle, merge
from openk3.engine.pins import PinnedPrefix
from openk3.engine.request import Delta, Request, SamplingParams

__all__ = ["EngineLoop", "Handle"]

logger = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 86_400.0  # a lock refuses to wait for centuries, which is how long some prefixes may be pinned


# Replies to one request, if each but the last is refused. The model's best reply comes first; the others are drawn.
_MOST_TRIES = 4
_LEAST_TEMPERATURE = 0.7


@dataclass
class _Trial:
    """A reply that is looked at before its client sees it.

    Attributes:
        accept: says what is wrong with a whole reply, nothing if it is right.
        deltas: what there is of the reply.
    """

    request: Request
    accept: Callable[[Delta], str]
    number: int = 1
    deltas: list[Delta] = field(default_factory=list)


class EngineLoop:
    """Runs `engine` in a background thread until `close`. Every method may be called from any thread.

    Attributes:
        engine: the engine that runs; its methods belong to the thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._stats = engine.stats()
        self._wake = threading.Condition()
        # Guarded by `_wake`:
        self._inbox: deque[Callable[[], None]] = deque()
        self._handles: dict[str, Handle] = {}
        self._closing = False
        self._ended = False
        # Belongs to the thread: the handles of those requests that have left the inbox.
        self._started: dict[str, Handle] = {}
        self._trials: dict[str, _Trial] = {}
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="openk3-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        request_id: str | None = None,
        accept: Callable[[Delta], str] | None = None,
    ) -> Handle:
        """Start a request.

        Args:
            prompt_ids: token ids of the whole prompt.
            priority: requests with a larger number go first and may displace those with a smaller one, for as long as
                there are any.
            request_id: must be unique among the requests in the engine; None makes one up.
            accept: says what is wrong with a reply that has ended by itself; nothing if it is right. The reply then
                comes as one delta. Of one that is wrong no client hears: others are drawn, and if the fourth is wrong
                too, that is an error. It runs in the engine's thread.

        Raises:
            ValueError: the prompt is empty, too long or outside the vocabulary, or the id is in use.
            RuntimeError: the engine is closed, or in another process since a fork.
        """
        request = self.engine.make_request(prompt_ids, params, priority=priority, request_id=request_id)
        return self._submit(request, None if accept is None else _Trial(request, accept))

    def pin(self, prompt_ids: Sequence[int], ttl_s: float) -> PinnedPrefix:
        """Compute a prefix and keep it in the cache for `ttl_s` seconds. Waits until it is computed.

        Raises:
            ValueError: a bad prompt or time, prefix caching is off, or requests would be left with too few pages.
            RuntimeError: the engine is closed or failed.
        """
        request = self.engine.make_pin_request(prompt_ids, ttl_s)
        end = self._submit(request).result()
        if isinstance(request.failure, ValueError):
            raise request.failure
        if request.pinned is None:
            raise RuntimeError(f"the prefix was not pinned: {end.error or 'the engine was closed'}")
        return request.pinned

    def unpin(self, pinned: PinnedPrefix | str) -> None:
        """Give up a pinned prefix (or its id) before its time; harmless when it is gone."""
        pin_id = pinned if isinstance(pinned, str) else pinned.id
        with self._wake:
            self._post(lambda: self._unpin(pin_id))

    def stats(self) -> EngineStats:
        """The engine after its latest step or command."""
        return self._stats

    @property
    def max_model_len(self) -> int:
        """Longest request, prompt and reply together, in tokens."""
        return self.engine.max_model_len

    @property
    def closed(self) -> bool:
        """Whether requests are refused: after `close`, or after a fault the engine could not recover from."""
        return self._closing or self._ended

    def close(self) -> None:
        """End all requests ("cancelled"), stop the thread and wait for it. Harmless when repeated."""
        atexit.unregister(self.close)
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, request: Request, trial: _Trial | None = None) -> Handle:
        if os.getpid() != self._pid:  # threads do not survive a fork: nobody would ever answer
            raise RuntimeError("the engine stayed in the process that was forked: load the model in this one")
        handle = Handle(request.request_id, lambda: self._cancel(request.request_id))
        with self._wake:
            if self.closed:
                raise RuntimeError("the engine is closed")
            if request.request_id in self._handles:
                raise ValueError(f"request_id {request.request_id!r} is in use by another request")
            self._handles[request.request_id] = handle
            self._post(lambda: self._add(request, handle, trial))
        return handle

    def _cancel(self, request_id: str) -> None:
        with self._wake:
            self._post(lambda: self._deliver(self.engine.cancel(request_id)))

    def _post(self, command: Callable[[], None]) -> None:
        """Leave a command for the thread; the caller holds `_wake`."""
        self._inbox.append(command)
        self._wake.notify()

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._wait_for_work():
                self._work()
        except BaseException as fault:
            logger.exception("the engine stopped")
            error = fault
        finally:
            self._end(error)

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the loop is to end."""
        with self._wake:
            if not self._inbox and not self.engine.has_requests and not self._closing:
                expiry = self.engine.next_expiry
                left = _LONGEST_SLEEP_S if expiry is None else max(0.0, expiry - time.monotonic())
                self._wake.wait(min(left, _LONGEST_SLEEP_S))
            return not self._closing

    def _work(self) -> None:
        """Obey all commands, then do one step."""
        try:
            for command in iter(self._next_command, None):
                command()
            self._deliver(*self.engine.step())
        except Exception as fault:
            logger.exception("the engine failed and starts over; its requests end")
            self._deliver(*self.engine.reset(fault))
            # Whoever is left was lost by the fault itself.
            message = f"the engine failed: {type(fault).__name__}: {fault}"
            self._deliver(*[Delta(name, finish_reason="error", error=message) for name in self._started])

    def _next_command(self) -> Callable[[], None] | None:
        with self._wake:
            return self._inbox.popleft() if self._inbox else None

    def _add(self, request: Request, handle: Handle, trial: _Trial | None) -> None:
        self._started[request.request_id] = handle
        if trial is not None:
            self._trials[request.request_id] = trial
        try:
            self.engine.add(request)
        except ValueError as error:
            request.failure = error
            self._deliver(Delta(request.request_id, finish_reason="error", error=f"{type(error).__name__}: {error}"))

    def _unpin(self, pin_id: str) -> None:
        self.engine.unpin(pin_id)

    def _deliver(self, *deltas: Delta | None) -> None:
        self._stats = self.engine.stats()  # first, so that a client that sees a reply's end sees it here too
        for delta in map(self._tried, deltas):
            if delta is None:
                continue
            handle = self._started[delta.request_id]
            if delta.finish_reason is not None:
                del self._started[delta.request_id]
                with self._wake:
                    del self._handles[delta.request_id]
            handle.push(delta)

    def _tried(self, delta: Delta | None) -> Delta | None:
        """What a client is to see of a delta: all of it, unless its request has an `accept`."""
        trial = None if delta is None else self._trials.get(delta.request_id)
        if trial is None or delta is None:
            return delta
        trial.deltas.append(delta)
        if delta.finish_reason is None:
            return None
        del self._trials[delta.request_id]
        whole = merge(trial.deltas)
        try:
            problem = trial.accept(whole) if delta.finish_reason == "stop" else ""
            if not problem:
                return whole
            if trial.number < _MOST_TRIES:
                self._try_again(trial)
                return None
            error = f"no reply was valid of {_MOST_TRIES} that were tried; of the last one, {problem}"
        except Exception as fault:
            logger.exception("request %s failed", delta.request_id)
            error = f"{type(fault).__name__}: {fault}"
        return replace(whole, text="", token_ids=(), logprobs=None, finish_reason="error", error=error)

    def _try_again(self, trial: _Trial) -> None:
        old = trial.request
        drawn = replace(
            old.params,
            seed=(old.seed + 1) % 2**64,
            temperature=max(old.params.temperature, _LEAST_TEMPERATURE),
        )
        new = self.engine.make_request(old.prompt_ids, drawn, priority=old.priority, request_id=old.request_id)
        new.arrived_at = old.arrived_at
        self._trials[new.request_id] = _Trial(new, trial.accept, trial.number + 1)
        self.engine.add(new)

    def _end(self, error: BaseException | None) -> None:
        """Give every open handle its last delta; from here on submitting is refused."""
        with self._wake:
            self._ended = True
            handles, self._handles = self._handles, {}
        ends = [(handle, self._last_delta(request_id, error)) for request_id, handle in handles.items()]
        self._stats = self.engine.stats()
        for handle, delta in ends:
            handle.push(delta)

    def _last_delta(self, request_id: str, error: BaseException | None) -> Delta:
        if error is None:
            try:
                # One that is still in the inbox is unknown to the engine and has no more to tell.
                return self.engine.cancel(request_id) or Delta(request_id, finish_reason="cancelled")
            except Exception as fault:
                error = fault
        message = f"the engine stopped: {type(error).__name__}: {error}"
        return Delta(request_id, finish_reason="error", error=message)
