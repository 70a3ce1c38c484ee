"""The bounded queue before the engine: how many may wait, and how long the next one had better stay away.

The engine itself would take any number of requests. Waiting for minutes in a queue of thousands helps nobody, so beyond
a limit the server says 503 at once, with a ``Retry-After`` that is reckoned from how fast it has got rid of requests
lately. Requests of batches, which nobody waits for, are kept few by the batch runner and do not count.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from openk3.serve.errors import ApiError

MAX_QUEUE = 256
_LONGEST_WAIT_S = 60
# Until enough requests have ended to tell.
_GUESS_S = 5
_REMEMBERED = 64


class RequestQueue:
    """Counts the choices that are in the engine, running or waiting; for the event loop's thread.

    Args:
        max_waiting: how many may wait, beside those that the engine computes.
    """

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_waiting = max_waiting
        self.inside = 0
        self.refused = 0
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)

    def enter(self, count: int, seats: int) -> None:
        """Let a request with so many choices in; every one of them has to `leave`.

        A request that is larger than the whole queue may enter when nobody waits.

        Raises:
            ApiError: 503, too many are waiting.
        """
        needed = min(count, max(self.max_waiting, 1))
        if self.inside and self.inside + needed - seats > self.max_waiting:
            waiting = max(0, self.inside - seats)
            self.refused += 1
            seconds = self.retry_after_s(waiting)
            raise ApiError(
                503,
                f"The server is busy: {waiting:,} requests are waiting already. Try again in {seconds} seconds.",
                code="server_overloaded",
                headers={"Retry-After": str(seconds)},
            )
        self.inside += count

    def leave(self, count: int = 1) -> None:
        self.inside -= count
        self._ends.extend([self._clock()] * count)

    def retry_after_s(self, waiting: int) -> int:
        """Seconds in which half of those who wait should be gone, by the pace of the latest ends."""
        if len(self._ends) < 2:
            return _GUESS_S
        interval = (self._clock() - self._ends[0]) / len(self._ends)
        return min(max(math.ceil(interval * waiting / 2), 1), _LONGEST_WAIT_S)
