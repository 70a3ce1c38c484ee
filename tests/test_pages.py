"""The page pool against a naive twin, hashes, and pinned prefixes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from openk3.engine.pages import PagePool, extend_page_hashes, pages_for
from openk3.engine.pins import PinTable

PAGES = 7


def hashes_of(tokens: list[int], page_size: int = 2) -> list[bytes]:
    hashes: list[bytes] = []
    extend_page_hashes(hashes, tokens, page_size, len(tokens) // page_size)
    return hashes


class NaivePool:
    """The pool's rules written down directly: one record per page, searched from front to back."""

    def __init__(self) -> None:
        self.references = [0] * PAGES
        self.hashes: list[bytes | None] = [None] * PAGES
        self.released_at = [0] * PAGES
        self.evictions = 0
        self.clock = 0

    def cached(self) -> list[int]:
        return [p for p in range(PAGES) if self.references[p] == 0 and self.hashes[p] is not None]

    def free(self) -> list[int]:
        return [p for p in range(PAGES) if self.references[p] == 0 and self.hashes[p] is None]

    def match(self, hashes: list[bytes]) -> list[int]:
        found = []
        for page_hash in hashes:
            if page_hash not in self.hashes:
                break
            found.append(self.hashes.index(page_hash))
        return found

    def allocate(self, pages: list[int], count: int) -> None:
        """`pages` is what the real pool chose: check that it was allowed to, then do the same."""
        assert len(set(pages)) == count
        forgotten = max(0, count - len(self.free()))
        self.evictions += forgotten
        oldest = sorted(self.cached(), key=lambda p: self.released_at[p])[:forgotten]
        assert set(pages) <= set(self.free()) | set(oldest)
        for page in pages:
            self.references[page], self.hashes[page] = 1, None

    def acquire(self, pages: list[int]) -> None:
        for page in pages:
            self.references[page] += 1

    def register(self, page: int, page_hash: bytes) -> None:
        if page_hash not in self.hashes:
            self.hashes[page] = page_hash

    def release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.references[page] -= 1
            self.clock += 1
            self.released_at[page] = self.clock


class PoolMachine(RuleBasedStateMachine):
    """Requests as the scheduler makes them: match and acquire a prefix, allocate the rest, fill it, release."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.naive = PagePool(PAGES, 2), NaivePool()
        self.held: list[list[int]] = []

    @rule(target=tables, tokens=st.lists(st.integers(0, 1), max_size=8), register=st.booleans())
    def start(self, tokens: list[int], register: bool) -> list[int]:
        hashes = hashes_of(tokens)
        hits = self.pool.match(hashes)
        assert hits == self.naive.match(hashes)
        self.pool.acquire(hits)
        self.naive.acquire(hits)
        missing = pages_for(len(tokens), 2) - len(hits)
        if missing > self.pool.num_available:
            self.pool.release(hits)
            self.naive.release(hits)
            return []
        new = self.pool.allocate(missing)
        self.naive.allocate(new, missing)
        if register:
            for page, page_hash in zip(new, hashes[len(hits) :], strict=False):
                self.pool.register(page, page_hash)
                self.naive.register(page, page_hash)
        table = hits + new
        self.held.append(table)
        return table

    @rule(table=consumes(tables))
    def end(self, table: list[int]) -> None:
        for i, held in enumerate(self.held):
            if held is table:
                del self.held[i]
                self.pool.release(table)
                self.naive.release(table)
                return

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity(self.held)
        assert self.pool.num_free == len(self.naive.free())
        assert self.pool.num_cached == len(self.naive.cached())
        assert self.pool.num_evictions == self.naive.evictions
        assert self.pool.num_used == sum(count > 0 for count in self.naive.references)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_hash_covers_everything_before_it() -> None:
    one, other = hashes_of([1, 2, 3, 4]), hashes_of([9, 2, 3, 4])
    assert one[1] != other[1]
    assert hashes_of([1, 2, 3, 4, 5]) == one
    assert hashes_of([1, 2, 5, 4])[0] == one[0]


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning() -> None:
    pool = PagePool(4, 2)
    hashes = hashes_of([1, 2, 3, 4, 5, 6])
    pages = pool.allocate(3)
    for page, page_hash in zip(pages, hashes, strict=True):
        pool.register(page, page_hash)
    pool.release(pages)
    pool.allocate(2)
    assert pool.match(hashes) == pages[:2]


def test_integrity_notices_what_is_wrong() -> None:
    pool = PagePool(4, 2)
    pages = pool.allocate(2)
    pool.check_integrity([pages])
    with pytest.raises(AssertionError, match="references"):
        pool.check_integrity([])
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity([pages])


def filled_pool(tokens: list[int], num_pages: int = 8) -> tuple[PagePool, list[bytes]]:
    pool, hashes = PagePool(num_pages, 2), hashes_of(tokens)
    pages = pool.allocate(len(hashes))
    for page, page_hash in zip(pages, hashes, strict=True):
        pool.register(page, page_hash)
    pool.release(pages)
    return pool, hashes


def test_pinned_pages_survive_memory_pressure_until_they_expire() -> None:
    pool, hashes = filled_pool([1, 2, 3, 4, 5])
    pins = PinTable(pool, reserved_pages=4)
    pinned = pins.pin([1, 2, 3, 4, 5], hashes, ttl_s=10, now=100)
    assert (pinned.num_tokens, pinned.num_cached_tokens, pins.num_pages) == (5, 4, 2)
    taken = pool.allocate(pool.num_available)
    assert len(taken) == 6
    assert len(pool.match(hashes)) == 2
    pins.expire(109.9)
    assert len(pins) == 1
    pins.expire(110)
    assert len(pins) == 0
    assert (pool.num_available, pins.num_pages) == (2, 0)
    assert pins.unpin(pinned.id) is False


def test_pins_that_share_pages_count_them_once() -> None:
    pool, hashes = filled_pool([1, 2, 3, 4])
    pins = PinTable(pool, reserved_pages=6)
    first, second = (pins.pin([1, 2, 3, 4], hashes, ttl_s=1, now=0) for _ in range(2))
    assert pins.num_pages == 2
    assert pins.unpin(first.id)
    assert pins.num_pages == 2
    assert pins.unpin(second.id)
    assert pins.num_pages == 0
    pool.check_integrity([])


def test_a_pin_that_leaves_too_little_is_refused() -> None:
    pool, hashes = filled_pool([1, 2, 3, 4, 5, 6])
    pins = PinTable(pool, reserved_pages=6)
    with pytest.raises(ValueError, match="needs 3 more pages of 2 tokens and would leave 5 of 8 for requests") as error:
        pins.pin([1, 2, 3, 4, 5, 6], hashes, ttl_s=1, now=0)
    assert "unpin another prefix, raise kv_cache_bytes" in str(error.value)
    pool.check_integrity([])
