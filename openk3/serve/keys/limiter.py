"""Limits per minute, as token buckets (https://en.wikipedia.org/wiki/Token_bucket).

A bucket holds a minute's worth and fills continuously. What a request costs in tokens is known only when it has ended,
so it may begin while there is anything left; its prompt is charged when it begins, its reply when it ends, and the
bucket may go below zero: then the next request waits for longer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from openk3.serve.keys.store import ApiKey


@dataclass(slots=True)
class Bucket:
    """`per_minute` units a minute; full at first."""

    per_minute: int
    clock: Callable[[], float]
    level: float = field(init=False)
    _filled_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.level, self._filled_at = float(self.per_minute), self.clock()

    def fill(self) -> None:
        """Bring the level up to date."""
        now = self.clock()
        self.level = min(self.per_minute, self.level + (now - self._filled_at) * self.per_minute / 60)
        self._filled_at = now

    def seconds_to(self, level: float) -> float:
        """How long it takes until the bucket holds so much; 0 if it does."""
        self.fill()
        return max(0.0, (level - self.level) * 60 / self.per_minute)

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.level))


class Limiter:
    """The buckets of every key that has limits. They are kept in memory: a restart fills them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def bucket(self, key: ApiKey, kind: str) -> Bucket | None:
        """The key's bucket of ``requests`` or ``tokens``, up to date; None without a limit."""
        limit = key.requests_per_minute if kind == "requests" else key.tokens_per_minute
        if limit is None:
            return None
        bucket = self._buckets.get((key.id, kind))
        if bucket is None or bucket.per_minute != limit:
            bucket = self._buckets[key.id, kind] = Bucket(limit, self._clock)
        bucket.fill()
        return bucket

    def headers(self, key: ApiKey) -> dict[str, str]:
        """``x-ratelimit-*`` as OpenAI's API has them."""
        headers = {}
        for kind in ("requests", "tokens"):
            if (bucket := self.bucket(key, kind)) is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{kind}"] = str(bucket.remaining)
                headers[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_to(bucket.per_minute):.3f}s"
        return headers
