"""The memory of the key/value cache, as numbered pages: who holds which, and which still hold something useful.

A page is in exactly one of three states. *Used*: at least one holder (a request's block table or a pinned prefix)
counts on it. *Cached*: nobody holds it, but its tokens are known by hash and a later request may take it back.
*Free*: its contents mean nothing. `check_integrity` proves that the three add up. The pool knows numbers only; the
runner owns the tensors.

A page's hash covers its own tokens and, through its parent's hash, all tokens before it, so equal hashes mean equal
prefixes (the scheme of vLLM's automatic prefix caching). Only full pages are hashed and shared, and a shared page is
never written again.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openk3.config import ModelConfig


_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def page_bytes(config: ModelConfig, layers: int, page_size: int, kv_format: str) -> int:
    """Memory of one page of so many layers, keys and values, in a dtype given by name."""
    return 2 * layers * config.num_key_value_heads * page_size * config.head_dim * _BYTES[kv_format]


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def extend_page_hashes(hashes: list[bytes], tokens: Sequence[int], page_size: int, num_pages: int) -> None:
    """Append to `hashes` until it covers the first `num_pages` full pages of `tokens`."""
    for page in range(len(hashes), num_pages):
        parent = hashes[-1] if hashes else b""
        content = array("q", tokens[page * page_size : (page + 1) * page_size])
        assert len(content) == page_size
        hashes.append(blake2b(parent + content.tobytes(), digest_size=16).digest())


class PagePool:
    """A fixed number of pages with reference counts and a least-recently-used cache of the released ones.

    Holders own references, not pages: `allocate` and `acquire` add one to each page, `release` takes it back. A holder
    may write to a page only between `allocate` and `register`.

    Attributes:
        num_evictions: times a cached page was forgotten because its memory was needed.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_evictions = 0
        self._references = [0] * num_pages
        # Taken from the end, so that warm pages are used again before untouched memory is.
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out: free ones, and cached ones by forgetting them."""
        return len(self._free) + len(self._cached)

    def find(self, page_hash: bytes) -> int | None:
        """The page known by a hash. It is not held until `acquire`."""
        return self._page_of.get(page_hash)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix of `hashes`. They are not held until `acquire`."""
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Hold pages that `match` or another holder named."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` pages with no contents, forgetting the least recently used cached ones as needed.

        The caller has checked `num_available`.
        """
        assert count <= self.num_available, f"{count} pages asked for, {self.num_available} available"
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self.num_evictions += 1
                del self._page_of[self._hash_of.pop(page)]
            self._references[page] = 1
            pages.append(page)
        return pages

    def register(self, page: int, page_hash: bytes) -> None:
        """Make a full, held page known by its hash. Where another page is already known by it, nothing changes."""
        assert self._references[page] > 0 and page not in self._hash_of
        if page_hash not in self._page_of:
            self._page_of[page_hash] = page
            self._hash_of[page] = page_hash

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference to each page of a prefix, in its order.

        Pages nobody holds any more are cached if they are known by hash and free otherwise.
        """
        # The end of a prefix is of no use without its beginning, so it is the first to be forgotten.
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is released but not held"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Prove that free + cached + used == total and that references are exactly those of `holders`.

        Raises:
            AssertionError: the books do not balance.
        """
        expected = Counter(page for pages in holders for page in pages)
        actual = {page: count for page, count in enumerate(self._references) if count}
        assert actual == dict(expected), f"references {actual} but holders have {dict(expected)}"
        free, cached, used = set(self._free), set(self._cached), set(actual)
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & cached or free & used or cached & used), "a page is in two states"
        assert len(free) + len(cached) + len(used) == self.num_pages, "a page is lost"
        assert cached <= self._hash_of.keys() and not free & self._hash_of.keys(), "hashes and states disagree"
        assert {h: p for p, h in self._hash_of.items()} == self._page_of, "the two hash tables disagree"
