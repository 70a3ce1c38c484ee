"""How many prompt tokens a step may compute beside replies, so that a long prompt does not stall those who read them.

Everyone whose reply is being generated waits for the whole step, prompt tokens included. The pacer learns from the
times of past steps what a step takes that only generates, and what a prompt token adds, and allows as many as bring a
step to about `TARGET` times the former. Prompts thus get half of the time whatever they cost, and their first token
comes about twice as late as it would on an idle engine (the aim of Sarathi-Serve's stall-free batching,
arXiv:2403.02310, with the budget learned instead of set).

Three rules keep it safe without a model of the machine:
- a step without prompts is the measure, so where none of about this many replies was seen lately, the next step is one;
- a prompt token costs at most twice as much at twice the context, so what was measured bounds what was not;
- the number of tokens grows by half at most from one measurement to the next.

Results do not depend on how prompts are cut, so times may decide. Nothing here reads a clock: whoever runs the steps
tells how long they took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openk3.engine.scheduler import Chunk

TARGET = 2.0
SMALLEST_CHUNK = 4  # whatever it takes: fewer tokens would share the loads of weights and keys too badly

_REMEMBERED = 3  # times of each kind; their median ignores a hiccup
_MEASURE_EVERY = 32  # steps
_FORGET_AFTER = 4 * _MEASURE_EVERY


class Pacer:
    """Learns from `observe` and answers with `limit`.

    Args:
        fixed: the answer, whatever the times are; None learns it.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self._steps = 0
        # Steps without prompts, by number of replies: when, and how many seconds.
        self._plain: dict[int, deque[tuple[int, float]]] = {}
        # Steps with both, by the bits of the longest context: prompt tokens, and the seconds that each of them added.
        self._mixed: dict[int, deque[tuple[int, float]]] = {}

    def limit(self, replies: int, context: int) -> int:
        """Prompt tokens that a step may compute beside `replies` (at least 1) replies.

        Args:
            context: tokens before them in their own sequence.

        Returns:
            0 where the step is to be the measure; from when it was observed, at least `SMALLEST_CHUNK`.
        """
        if self._fixed is not None:
            return self._fixed
        plain = self._plain_seconds(replies)
        if plain is None:
            return 0
        if not self._mixed:
            return SMALLEST_CHUNK
        nearest = max((b for b in self._mixed if b <= context.bit_length()), default=min(self._mixed))
        samples = self._mixed[nearest]
        seconds = median(seconds for _, seconds in samples) * 2.0 ** max(0, context.bit_length() - nearest)
        most = max(tokens for tokens, _ in samples) * 3 // 2
        allowed = (TARGET - 1) * plain
        tokens = most if most * seconds <= allowed else int(allowed / seconds)
        return max(SMALLEST_CHUNK, tokens)

    def observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Learn that a step of these chunks took so long."""
        self._steps += 1
        prompts = [chunk for chunk in chunks if not chunk.reply]
        tokens = sum(chunk.count for chunk in prompts)
        replies = len(chunks) - len(prompts)
        if not replies:
            return
        if not prompts:
            self._plain.setdefault(replies, deque(maxlen=_REMEMBERED)).append((self._steps, seconds))
            return
        plain = self._plain_seconds(replies)
        if plain is not None:
            bits = max(chunk.start for chunk in prompts).bit_length()
            added = max(0.0, seconds - plain) / tokens
            self._mixed.setdefault(bits, deque(maxlen=_REMEMBERED)).append((tokens, added))

    def _plain_seconds(self, replies: int) -> float | None:
        """What a step of about this many replies takes; None if none was seen lately."""
        near = [
            number
            for number, samples in self._plain.items()
            if abs(number - replies) * 4 <= replies and self._steps - samples[-1][0] < _MEASURE_EVERY
        ]
        if not near:
            return None
        samples = self._plain[min(near, key=lambda number: abs(number - replies))]
        return median(seconds for step, seconds in samples if self._steps - step < _FORGET_AFTER)
