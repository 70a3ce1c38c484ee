"""How many threads compute a step, when other processes want the cores too.

The threads of a step meet some hundred times per token. When another process takes one of their cores, all wait for
whoever has lost it, at every meeting: two threads are then slower than one. A thread that waits for long goes to sleep
(`openk3.kernels.team`). That happens once or twice in a step when a client reads its reply on one of the cores, or when
every core is shared with a busy process, which slows all threads alike. Where a busy process shares some cores only, it
happens at every other meeting. Then one thread computes short steps alone for a while, until all try again. Results
have the same bits with any number of threads.
"""

from __future__ import annotations

# Steps of more rows spend their time between the meetings, where threads share the work whatever each one's speed is.
SHORT_STEP_ROWS = 16
_MANY = 20  # sleeps in a step that tell of threads disturbing each other; more say nothing more
_DISTURBED = 2.5 * _MANY  # sleeps of late, older ones counting less, that end their working together
_FADING = 0.8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0


class Crew:
    """Decides for each step. `now` is monotonic time in seconds."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._sleeps = 0.0
        self._quiet_steps = 0
        self._pause_s = _FIRST_PAUSE_S
        self._alone_until = 0.0

    def threads(self, rows: int, now: float) -> int:
        """Threads for a step of `rows` rows."""
        return 1 if rows <= SHORT_STEP_ROWS and now < self._alone_until else self._num_threads

    def observe(self, rows: int, threads: int, sleeps: int, now: float) -> None:
        """Note how often threads slept in a step that `threads` of them computed."""
        if rows > SHORT_STEP_ROWS or threads == 1:
            return
        self._sleeps = _FADING * self._sleeps + min(sleeps, _MANY)
        self._quiet_steps = 0 if sleeps >= _MANY else self._quiet_steps + 1
        if self._quiet_steps > 50:
            self._pause_s = _FIRST_PAUSE_S
        if self._sleeps >= _DISTURBED:
            self._alone_until, self._sleeps = now + self._pause_s, 0.0
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
