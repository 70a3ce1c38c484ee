"""Attention over paged keys and values, with windows, shared among the threads of a team.

Keys are taken in chunks of `CHUNK` positions, counted from position 0 whatever the window is. Each chunk gives a
partial result (the maximum of its scores, the sum of their exponentials, the weighted sum of its values), and partial
results are joined in order of position (online softmax, arXiv:1805.02867). The query heads that share a key/value head,
and several consecutive queries of a prompt, share the loads of a key. None of this changes the order of any sum, so a
query's result has the same bits alone, in a batch, or in a prompt cut at any place.

A page holds the keys of a head as columns, `[K, P]`, and its values as rows, `[P, K]`: both the scores of 16 keys and
16 numbers of a result are then 16 lanes of a chain of multiply-adds.

An item of work is a tile of queries with one key/value head; where a tile is a large part of a step, its chunks are
divided into several items, whose partial results `join_parts` puts together.

Shapes: M query rows of a step, H query heads, G key/value heads, J = H / G, K head_dim (a multiple of 16), P page_size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from openk3.kernels.code import LANES
from openk3.kernels.machine import UPDATE_ROWS, UPDATE_VECTORS
from openk3.kernels.team import SERIAL, take, variant
from openk3.kernels.vectors import UPDATE_SIZES, exponentiate, updates

CHUNK = 256
# Scores of a row: a page of fewer than 16 positions writes beyond its own.
SCORES = CHUNK + LANES
# Columns of a tile.
ROW, QUERIES, POSITION, TABLE, PART = range(5)
TILE_SIZE = 5
# What is known of the cache.
KEYS, VALUES, PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM, HALF = range(7)
CACHE_SIZE = 7
# A partial result is `[K]` sums of values, then the maximum and the sum of exponentials.
PART_EXTRA = 2


def queries_per_tile(heads: int, kv_heads: int) -> int:
    """Consecutive queries of a prompt that make whole tiles of rows: one row per query and head of a group."""
    return UPDATE_ROWS // math.gcd(UPDATE_ROWS, heads // kv_heads)


def _make_update(vectors: int, half: bool) -> Any:
    """The update of any number of rows up to UPDATE_ROWS; see `openk3.kernels.vectors`."""
    tiles = [*updates[vectors, half], *updates[vectors, half]]
    sizes = [*UPDATE_SIZES, *[1 << 30] * 6]
    tile_1, tile_2, tile_3, tile_4, tile_5, tile_6 = (tiles * 3)[:6]
    _, size_2, size_3, size_4, size_5, _ = sizes[:6]

    @variant(f"{vectors}_{'half' if half else 'float'}")
    def update(rows, factors, f_stride, matrix, m_stride, count, ahead, out, out_stride):
        if rows == 1:
            tile_1(factors, f_stride, matrix, m_stride, count, ahead, out, out_stride)
        elif rows <= size_2:
            tile_2(factors, f_stride, matrix, m_stride, count, ahead, out, out_stride)
        elif rows <= size_3:
            tile_3(factors, f_stride, matrix, m_stride, count, ahead, out, out_stride)
        elif rows <= size_4:
            tile_4(factors, f_stride, matrix, m_stride, count, ahead, out, out_stride)
        elif rows <= size_5:
            tile_5(factors, f_stride, matrix, m_stride, count, ahead, out, out_stride)
        else:
            tile_6(factors, f_stride, matrix, m_stride, count, ahead, out, out_stride)

    return update


_update, _update_half = _make_update(1, False), _make_update(1, True)
_update_wide, _update_wide_half = _make_update(UPDATE_VECTORS, False), _make_update(UPDATE_VECTORS, True)


@njit(**SERIAL)
def _score(q, rows, head_dim, keys_at, page_size, half, ahead, scores):
    """The products of `rows` rows at `q` with the keys of a whole page; `scores` is where the page's first one goes."""
    size = 2 if half else 4
    for first in range(0, page_size, LANES):
        at, next_at, out = keys_at + size * first, ahead + size * first, scores + 4 * first
        if half:
            _update_half(rows, q, head_dim, at, page_size, head_dim, next_at, out, SCORES)
        else:
            _update(rows, q, head_dim, at, page_size, head_dim, next_at, out, SCORES)


@njit(**SERIAL)
def _mix(weights, rows, head_dim, values_at, run, half, ahead, out):
    """Add `run` values that lie one after the other, times their weights, to `rows` rows of `out`."""
    size = 2 if half else 4
    lane = 0
    while lane < head_dim:
        at, next_at, target = values_at + size * lane, ahead + size * lane, out + 4 * lane
        if head_dim - lane >= UPDATE_VECTORS * LANES:
            if half:
                _update_wide_half(rows, weights, SCORES, at, head_dim, run, next_at, target, head_dim)
            else:
                _update_wide(rows, weights, SCORES, at, head_dim, run, next_at, target, head_dim)
            lane += UPDATE_VECTORS * LANES
        else:
            if half:
                _update_half(rows, weights, SCORES, at, head_dim, run, next_at, target, head_dim)
            else:
                _update(rows, weights, SCORES, at, head_dim, run, next_at, target, head_dim)
            lane += LANES


@njit(**SERIAL)
def _hide_and_exponentiate(scores, rows, base, count, positions, window, best, total):
    """Turn products into exponentials below the chunk's maximum, with zeros for what a row does not see."""
    width = (count + LANES - 1) // LANES * LANES
    for r in range(rows):
        last = positions[r]
        first = 0 if window == 0 else max(0, last - window + 1)
        begin, end = min(count, max(0, first - base)), min(count, last + 1 - base)
        if begin >= end:
            best[r] = -np.inf
            scores[r] = 0
            total[r] = 0
        else:
            at = scores[r].ctypes.data
            exponentiate(at, width, begin, end, best.ctypes.data + 4 * r, total.ctypes.data + 4 * r)


@njit(**SERIAL)
def page_at(cache, layer, page, head):
    """Bytes from the beginning of all keys (or all values) to those of a page's head."""
    size = 2 if cache[HALF] else 4
    return size * cache[PAGE_SIZE] * cache[HEAD_DIM] * ((layer * cache[PAGES] + page) * cache[KV_HEADS] + head)


@njit(**SERIAL)
def _attend_chunk(q, rows, positions, cache, layer, head, table, chunk, end, window, scores, part, best, total):
    """One chunk, of which positions below `end` exist: partial results of `rows` rows, into `part` `[rows, K]`."""
    head_dim, page_size, half = cache[HEAD_DIM], cache[PAGE_SIZE], cache[HALF] != 0
    base = chunk * CHUNK
    count = min(CHUNK, end - base)
    scores[:rows] = 0
    for j in range(0, count, page_size):
        at = page_at(cache, layer, table[(base + j) // page_size], head)
        # The next page is on its way while this one is worked on.
        ahead = page_at(cache, layer, table[min(base + j + page_size, end - 1) // page_size], head)
        if page_size < LANES:  # the page before has written here
            scores[:rows, j : j + LANES] = 0
        out = scores.ctypes.data + 4 * j
        _score(q.ctypes.data, rows, head_dim, cache[KEYS] + at, page_size, half, cache[KEYS] + ahead, out)
    _hide_and_exponentiate(scores, rows, base, count, positions, window, best, total)
    part[:rows] = 0
    for j in range(0, count, page_size):
        at = page_at(cache, layer, table[(base + j) // page_size], head)
        ahead = page_at(cache, layer, table[min(base + j + page_size, end - 1) // page_size], head)
        weights, run = scores.ctypes.data + 4 * j, min(page_size, count - j)
        _mix(weights, rows, head_dim, cache[VALUES] + at, run, half, cache[VALUES] + ahead, part.ctypes.data)


@njit(**SERIAL)
def _join(whole, whole_best, whole_total, part, best, total):
    """Add a partial result to what came before; gives the new maximum and sum."""
    if best == np.float32(-np.inf):
        return whole_best, whole_total
    top = max(whole_best, best)
    old, new = np.float32(math.exp(whole_best - top)), np.float32(math.exp(best - top))
    for i in range(whole.size):
        whole[i] = whole[i] * old + part[i] * new
    return top, whole_total * old + total * new


@njit(**SERIAL)
def chunks_of(tile, window):
    """The first chunk that a tile's queries see, and the one behind the last."""
    first = 0 if window == 0 else max(0, tile[POSITION] - window + 1) // CHUNK
    return first, (tile[POSITION] + tile[QUERIES] - 1) // CHUNK + 1


@njit(**SERIAL)
def attention(team, threads, qkv, heads, layer, cache, tiles, tables, window, scale, splits, out, parts, scratch):
    """This thread's part of a phase; where a tile is split, `join_parts` follows in the next one.

    Args:
        qkv: `[M, stride]`, each row beginning with its H query heads; float32, C-contiguous.
        cache: int64 `[CACHE_SIZE]`: the addresses of all layers' keys, `[L, pages, G, K, P]`, and values,
            `[L, pages, G, P, K]`, those numbers, and whether they are float16 instead of float32. 15 more numbers must
            be readable behind the keys.
        tiles: `[n, TILE_SIZE]` int64: first row, number of queries, first position, block table, and where among
            `parts` the results of the first query and chunk go (-1 where the tile is not split).
        tables: `[tables, pages per sequence]` int64, the block tables.
        window: positions a query sees, itself included; 0 for all.
        splits: items that each split tile is divided into.
        out: `[M, H * K]` float32.
        parts: `[sum of chunks * queries of split tiles, H, K + PART_EXTRA]` float32, query by query for each chunk.
        scratch: this thread's, `scratch_size(K)` float32.
    """
    G, head_dim = cache[KV_HEADS], cache[HEAD_DIM]
    J = heads // G
    R = UPDATE_ROWS
    q, rest = scratch[: R * head_dim].reshape(R, head_dim), scratch[R * head_dim :]
    part, rest = rest[: R * head_dim].reshape(R, head_dim), rest[R * head_dim :]
    whole, rest = rest[: R * head_dim].reshape(R, head_dim), rest[R * head_dim :]
    scores, rest = rest[: R * SCORES].reshape(R, SCORES), rest[R * SCORES :]
    best, total, whole_best, whole_total = rest[:R], rest[R : 2 * R], rest[2 * R : 3 * R], rest[3 * R : 4 * R]
    positions = np.empty(R, np.int64)
    # Head by head, so that a head's keys and values stay in the cache while all tiles pass them.
    per_head = tiles.shape[0] * splits
    items = G * per_head
    item = take(team, threads, 1)
    while item < items:
        g, tile, split = item // per_head, tiles[item % per_head // splits], item % splits
        item = take(team, threads, 1)
        if tile[PART] < 0 and split > 0:
            continue
        table, all_rows = tables[tile[TABLE]], tile[QUERIES] * J
        (first, last), end = chunks_of(tile, window), tile[POSITION] + tile[QUERIES]
        for begin in range(0, all_rows, R):
            rows = min(R, all_rows - begin)
            for r in range(rows):
                query, head = (begin + r) // J, g * J + (begin + r) % J
                positions[r] = tile[POSITION] + query
                for i in range(head_dim):
                    q[r, i] = qkv[tile[ROW] + query, head * head_dim + i] * scale
            if tile[PART] < 0:
                whole[:rows] = 0
                whole_best[:] = -np.inf
                whole_total[:] = 0
                for chunk in range(first, last):
                    _attend_chunk(
                        q, rows, positions, cache, layer, g, table, chunk, end, window, scores, part, best, total
                    )  # fmt: skip
                    for r in range(rows):
                        whole_best[r], whole_total[r] = _join(
                            whole[r], whole_best[r], whole_total[r], part[r], best[r], total[r]
                        )
                for r in range(rows):
                    query, head = (begin + r) // J, g * J + (begin + r) % J
                    inverse = np.float32(1) / whole_total[r]
                    for i in range(head_dim):
                        out[tile[ROW] + query, head * head_dim + i] = whole[r, i] * inverse
            else:
                number = last - first
                for chunk in range(first + number * split // splits, first + number * (split + 1) // splits):
                    _attend_chunk(
                        q, rows, positions, cache, layer, g, table, chunk, end, window, scores, part, best, total
                    )  # fmt: skip
                    for r in range(rows):
                        place = tile[PART] + (chunk - first) * tile[QUERIES] + (begin + r) // J
                        target = parts[place, g * J + (begin + r) % J]
                        target[:head_dim] = part[r]
                        target[head_dim] = best[r]
                        target[head_dim + 1] = total[r]


@njit(**SERIAL)
def join_parts(team, threads, tiles, heads, window, head_dim, parts, out):
    """Put the partial results of split tiles together, in `out`; this thread's part of a phase."""
    item = take(team, threads, 1)
    while item < tiles.shape[0]:
        tile = tiles[item]
        item = take(team, threads, 1)
        if tile[PART] < 0:
            continue
        first, last = chunks_of(tile, window)
        for query in range(tile[QUERIES]):
            for head in range(heads):
                whole = out[tile[ROW] + query, head * head_dim : (head + 1) * head_dim]
                whole[:] = 0
                whole_best, whole_total = np.float32(-np.inf), np.float32(0)
                for chunk in range(last - first):
                    source = parts[tile[PART] + chunk * tile[QUERIES] + query, head]
                    whole_best, whole_total = _join(
                        whole, whole_best, whole_total, source[:head_dim], source[head_dim], source[head_dim + 1]
                    )
                inverse = np.float32(1) / whole_total
                for i in range(head_dim):
                    whole[i] = whole[i] * inverse


def scratch_size(head_dim: int) -> int:
    """Float32 of scratch each thread needs."""
    return UPDATE_ROWS * (3 * head_dim + SCORES + 4)


def attention_oracle(
    query_HK: NDArray[Any], keys_GSK: NDArray[Any], values_GSK: NDArray[Any], window: int, scale: float
) -> NDArray[Any]:
    """The definition, for one query that follows S - 1 keys and is itself the last."""
    group, seen = query_HK.shape[0] // keys_GSK.shape[0], window or keys_GSK.shape[1]
    keys_HSK, values_HSK = keys_GSK.repeat(group, 0)[:, -seen:], values_GSK.repeat(group, 0)[:, -seen:]
    scores_HS = np.einsum("hk,hsk->hs", query_HK, keys_HSK) * scale
    weights_HS = np.exp(scores_HS - scores_HS.max(-1, keepdims=True))
    weights_HS /= weights_HS.sum(-1, keepdims=True)
    return np.einsum("hs,hsk->hk", weights_HS, values_HSK)
