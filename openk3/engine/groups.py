"""Which layers share block tables, and which pages of a sequence each of them needs.

A layer with a window never reads what lies before it, so there its pages can be given back (ring pages), while layers
that see everything keep theirs. Layers are therefore put into groups, and a request has one block table per group. All
groups have the same number of layers, so that their pages have the same size and come from one pool: memory goes to
whichever group needs it (the scheme of vLLM's hybrid cache manager). A model without windows is one group.

Of a sequence of n tokens a group without a window needs all pages. One with a window needs those from `first_page` on,
counted from the last whole page, so that a later request that shares the whole pages finds what it needs too. In a
block table, `GIVEN_BACK` stands for the pages before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openk3.engine.pages import PagePool, pages_for

if TYPE_CHECKING:
    from openk3.config import ModelConfig

GIVEN_BACK = -1
_MOST_WASTE = 0.1  # of the cache's memory, by groups that are not full

Tables = list[list[int]]


@dataclass(frozen=True)
class LayerGroup:
    """Layers with a common block table.

    Attributes:
        layers: their indices; the i-th has the i-th part of every page.
        window: positions that the layer that sees most of them sees, itself included; None for all.
    """

    layers: tuple[int, ...]
    window: int | None


def layer_groups(config: ModelConfig, longest: int) -> list[LayerGroup]:
    """The groups of a model whose sequences have up to `longest` tokens. No group has more layers than the first."""
    windows = [w if w is not None and w < longest else None for w in config.layer_windows]
    full = [layer for layer, window in enumerate(windows) if window is None]
    sliding = sorted(set(range(len(windows))) - set(full), key=lambda layer: -(windows[layer] or 0))
    kinds = [kind for kind in (full, sliding) if kind]
    size = min(map(len, kinds))
    while size * sum(pages_for(len(kind), size) for kind in kinds) > len(windows) * (1 + _MOST_WASTE):
        size -= 1
    cut = [kind[i : i + size] for kind in kinds for i in range(0, len(kind), size)]
    return [LayerGroup(tuple(layers), windows[layers[0]]) for layers in cut]


def first_page(window: int | None, num_tokens: int, page_size: int) -> int:
    """The first page that whatever follows `num_tokens` tokens (or their last whole page) may read.

    Where pages are given back, the first one kept is a whole page of these tokens.
    """
    if window is None:
        return 0
    return max(0, num_tokens // page_size - pages_for(max(window - 1, page_size), page_size))


def most_pages(windows: Sequence[int | None], num_tokens: int, page_size: int, chunk: int) -> int:
    """Pages that a request of up to `num_tokens` tokens, computed up to `chunk` at a time, holds at most."""
    whole, step = pages_for(num_tokens, page_size), pages_for(chunk + page_size - 1, page_size)
    kept = [whole if w is None else step + pages_for(max(w - 1, page_size), page_size) for w in windows]
    return sum(min(whole, pages) for pages in kept)


def page_key(page_hash: bytes, group: int) -> bytes:
    """What a group's page is known by in the pool, given the hash of its tokens and all before them."""
    return page_hash + bytes([group]) if group else page_hash


def prefix_keys(windows: Sequence[int | None], page_hashes: Sequence[bytes], page_size: int) -> list[bytes]:
    """The keys of all pages that whatever follows these whole pages needs."""
    return [
        page_key(page_hash, group)
        for group, window in enumerate(windows)
        for page_hash in page_hashes[first_page(window, len(page_hashes) * page_size, page_size) :]
    ]


def match_prefix(pool: PagePool, windows: Sequence[int | None], page_hashes: Sequence[bytes]) -> Tables:
    """The block tables of the longest prefix of which every group has what it needs; nobody holds its pages yet."""
    whole = {
        group: pool.match(page_key(page_hash, group) for page_hash in page_hashes)
        for group, window in enumerate(windows)
        if window is None
    }
    count = min(map(len, whole.values()), default=len(page_hashes))
    while True:
        tables = [
            whole[group][:count] if window is None else _table(pool, group, window, page_hashes[:count])
            for group, window in enumerate(windows)
        ]
        shortest = min(map(len, tables))
        if shortest == count:
            return tables
        count = shortest


def _table(pool: PagePool, group: int, window: int, page_hashes: Sequence[bytes]) -> list[int]:
    """The block table of a prefix; where a page it needs is unknown, one as long as the longest that may be known."""
    first = first_page(window, len(page_hashes) * pool.page_size, pool.page_size)
    pages: list[int] = []
    for i in range(len(page_hashes) - 1, first - 1, -1):
        page = pool.find(page_key(page_hashes[i], group))
        if page is None:
            return [GIVEN_BACK] * i  # prefixes between this one and that need the page too
        pages.append(page)
    return [GIVEN_BACK] * first + pages[::-1]


def readable(table: list[int]) -> list[int]:
    """Block table entries for a kernel that reads whole runs of pages and hides what lies before the window.

    Pages that were given back may hold anything, NaN too, so the first one kept, which is whole, stands in for them.
    """
    if not table or table[0] != GIVEN_BACK:
        return table
    kept = next(page for page in table if page != GIVEN_BACK)
    return [kept if page == GIVEN_BACK else page for page in table]
