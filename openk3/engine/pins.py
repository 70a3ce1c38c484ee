"""Pinned prefixes: pages of prompts that a client wants kept, however full the cache gets, until a time it names."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from openk3.engine.pages import PagePool


@dataclass(frozen=True)
class PinnedPrefix:
    """A prefix that stays in the cache.

    Attributes:
        id: what `unpin` takes.
        token_ids: the tokens pinned.
        num_tokens: their number.
        num_cached_tokens: those of them in whole pages, which is what later requests need not compute.
        expires_at: Unix time after which it is given up.
    """

    id: str
    token_ids: tuple[int, ...]
    num_tokens: int
    num_cached_tokens: int
    expires_at: float


class PinTable:
    """Holds one reference to every page of every pinned prefix.

    At least `reserved_pages` pages always stay unpinned, enough for the longest request, so pins can slow requests down
    but never block them.
    """

    def __init__(self, pool: PagePool, reserved_pages: int) -> None:
        self._pool = pool
        self._reserved_pages = reserved_pages
        self._pins: dict[str, tuple[list[int], float]] = {}
        self._holders: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_pages(self) -> int:
        """Distinct pages pinned."""
        return len(self._holders)

    @property
    def held_pages(self) -> list[list[int]]:
        """The pages of each pin, for `PagePool.check_integrity`."""
        return [pages for pages, _ in self._pins.values()]

    @property
    def next_expiry(self) -> float | None:
        """Monotonic time of the next expiry."""
        return min((deadline for _, deadline in self._pins.values()), default=None)

    def check_room(self, page_keys: Sequence[bytes]) -> None:
        """Whether the prefix with these pages may be pinned now.

        Raises:
            ValueError: it would leave too little for requests.
        """
        new = sum(self._pool.find(key) not in self._holders for key in page_keys)
        left = self._pool.num_pages - self.num_pages - new
        if left < self._reserved_pages:
            size = self._pool.page_size
            raise ValueError(
                f"pinning this prefix needs {new} more pages of {size} tokens and would leave {max(left, 0)} of "
                f"{self._pool.num_pages} for requests, but the longest request needs {self._reserved_pages}: unpin "
                f"another prefix, raise kv_cache_bytes (or num_pages), or lower max_model_len"
            )

    def pin(self, token_ids: Sequence[int], page_keys: Sequence[bytes], ttl_s: float, now: float) -> PinnedPrefix:
        """Hold the pages of a prefix that has just been computed, for `ttl_s` seconds from `now` (monotonic).

        Args:
            page_keys: of all pages that a request that begins with the prefix needs.

        Raises:
            ValueError: it would leave too little for requests.
        """
        self.check_room(page_keys)
        # By key, not by the request's own pages: an equal page that was there before is the one later requests find.
        pages = self._pool.match(page_keys)
        assert len(pages) == len(page_keys)
        self._pool.acquire(pages)
        self._holders.update(pages)
        pin_id = f"pin-{uuid.uuid4().hex}"
        self._pins[pin_id] = (pages, now + ttl_s)
        return PinnedPrefix(
            id=pin_id,
            token_ids=tuple(token_ids),
            num_tokens=len(token_ids),
            num_cached_tokens=len(token_ids) // self._pool.page_size * self._pool.page_size,
            expires_at=time.time() + ttl_s,
        )

    def unpin(self, pin_id: str) -> bool:
        """Give a prefix up; its pages stay cached until their memory is needed. False if there is no such pin."""
        pages, _ = self._pins.pop(pin_id, (None, 0.0))
        if pages is None:
            return False
        self._holders.subtract(pages)
        self._holders = +self._holders
        self._pool.release(pages)
        return True

    def expire(self, now: float) -> None:
        """Give up every prefix whose time has come (`now` is monotonic)."""
        for pin_id in [pin_id for pin_id, (_, deadline) in self._pins.items() if deadline <= now]:
            self.unpin(pin_id)
