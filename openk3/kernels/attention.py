"""Attention over paged keys and values, with windows, on all threads.

Keys are taken in chunks of `CHUNK` positions, counted from position 0 whatever the window is. Each chunk gives a
partial result (the maximum of its scores, the sum of their exponentials, the weighted sum of its values), and partial
results are joined in order of position (online softmax, arXiv:1805.02867). Several consecutive queries of a prompt
share the loads of a key. Neither changes the order of any sum, so a query's result has the same bits alone, in a batch,
or in a prompt cut at any place.

Shapes: M query rows of a step, H query heads, G key/value heads, K head_dim (a multiple of 16), P page_size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from openk3.kernels.linear import PARALLEL, SERIAL
from openk3.kernels.vectors import (
    LANES,
    MIX_VECTORS,
    TILE_COLUMNS,
    TILE_ROWS,
    dot_f32,
    dot_f32_row,
    exp_and_sum,
    mix_single,
    mix_single_narrow,
    mix_tile,
    mix_tile_narrow,
)

CHUNK = 128
TILE = TILE_COLUMNS

dot_single, dot_tile = dot_f32[0], dot_f32[TILE - 1]


@njit(**SERIAL)
def _score(q, q_stride, queries, key, run, head_dim, scores):
    """Products of `queries` (1 or TILE) query rows at `q` with `run` keys that lie one after the other at `key`."""
    i = 0
    while i + TILE_ROWS <= run:
        if queries == TILE:
            dot_tile(key + 4 * i * head_dim, q, q_stride, head_dim, scores + 4 * i, CHUNK)
        else:
            dot_single(key + 4 * i * head_dim, q, q_stride, head_dim, scores + 4 * i, CHUNK)
        i += TILE_ROWS
    while i < run:
        for c in range(queries):
            key_at, q_at = key + 4 * i * head_dim, q + 4 * c * q_stride
            dot_f32_row(key_at, q_at, q_stride, head_dim, scores + 4 * (c * CHUNK + i), CHUNK)
        i += 1


@njit(**SERIAL)
def _mix(weights, queries, value, run, head_dim, out):
    """Add `run` values that lie one after the other at `value`, times their weights, to the rows of `out`."""
    lane = 0
    while lane < head_dim:
        at, target = value + 4 * lane, out + 4 * lane
        if head_dim - lane >= MIX_VECTORS * LANES:
            if queries == TILE:
                mix_tile(weights, CHUNK, at, head_dim, run, target, head_dim)
            else:
                mix_single(weights, CHUNK, at, head_dim, run, target, head_dim)
            lane += MIX_VECTORS * LANES
        else:
            if queries == TILE:
                mix_tile_narrow(weights, CHUNK, at, head_dim, run, target, head_dim)
            else:
                mix_single_narrow(weights, CHUNK, at, head_dim, run, target, head_dim)
            lane += LANES


@njit(**SERIAL | {"fastmath": True})
def _scale_and_find_top(scores, scale):
    """Multiply in place and return the maximum, which has the same bits in any order."""
    top = scores[0] * scale
    for j in range(scores.size):
        scores[j] *= scale
        top = max(top, scores[j])
    return top


@njit(**SERIAL)
def _hide_and_exponentiate(scores, queries, base, position, window, scale, best, total):
    """Turn products into exponentials below the chunk's maximum, with zeros for what a query does not see."""
    for c in range(queries):
        last = position + c
        first = 0 if window == 0 else max(0, last - window + 1)
        begin, end = min(CHUNK, max(0, first - base)), min(CHUNK, last + 1 - base)
        if begin >= end:
            best[c] = -np.inf
            scores[c] = 0
            total[c] = 0
        else:
            best[c] = _scale_and_find_top(scores[c, begin:end], scale)
            scores[c, :begin] = -np.inf
            scores[c, end:] = -np.inf
            total[c] = exp_and_sum(scores[c].ctypes.data, CHUNK, best[c])


@njit(**SERIAL)
def _attend(q, q_stride, queries, position, keys, values, table, kv_head, window, scale, out, out_stride, scratch):
    """All chunks of `queries` consecutive positions, for one head; results go to `out`, `out_stride` floats apart."""
    page_size, head_dim = keys.shape[2], keys.shape[3]
    scores = scratch[: TILE * CHUNK].reshape(TILE, CHUNK)
    part = scratch[TILE * CHUNK : TILE * (CHUNK + head_dim)].reshape(TILE, head_dim)
    whole = scratch[TILE * (CHUNK + head_dim) : TILE * (CHUNK + 2 * head_dim)].reshape(TILE, head_dim)
    sums = scratch[TILE * (CHUNK + 2 * head_dim) :]
    best, total, whole_best, whole_total = (
        sums[:TILE],
        sums[TILE : 2 * TILE],
        sums[2 * TILE : 3 * TILE],
        sums[3 * TILE : 4 * TILE],
    )
    whole[:queries] = 0
    whole_best[:] = -np.inf
    whole_total[:] = 0
    end = position + queries
    first = 0 if window == 0 else max(0, position - window + 1)
    for chunk in range(first // CHUNK, (end - 1) // CHUNK + 1):
        base = chunk * CHUNK
        count = min(CHUNK, end - base)
        j = 0
        while j < count:
            page, slot = table[(base + j) // page_size], (base + j) % page_size
            run = min(page_size - slot, count - j)
            _score(
                q, q_stride, queries, keys[page, kv_head, slot:].ctypes.data, run, head_dim, scores.ctypes.data + 4 * j
            )
            j += run
        _hide_and_exponentiate(scores, queries, base, position, window, scale, best, total)
        part[:queries] = 0
        j = 0
        while j < count:
            page, slot = table[(base + j) // page_size], (base + j) % page_size
            run = min(page_size - slot, count - j)
            value = values[page, kv_head, slot:].ctypes.data
            _mix(scores.ctypes.data + 4 * j, queries, value, run, head_dim, part.ctypes.data)
            j += run
        for c in range(queries):
            if best[c] > np.float32(-np.inf):
                top = max(whole_best[c], best[c])
                old, new = np.float32(math.exp(whole_best[c] - top)), np.float32(math.exp(best[c] - top))
                for i in range(head_dim):
                    whole[c, i] = whole[c, i] * old + part[c, i] * new
                whole_total[c] = whole_total[c] * old + total[c] * new
                whole_best[c] = top
    for c in range(queries):
        for i in range(head_dim):
            out[c * out_stride + i] = whole[c, i] / whole_total[c]


@njit(**PARALLEL)
def attention(qkv, heads, keys, values, tiles, tables, window, scale, out, scratch):
    """
    Args:
        qkv: `[M, stride]`, each row beginning with its H query heads; float32, C-contiguous.
        keys, values: one layer's pages, `[pages, G, P, K]` float32.
        tiles: `[n, 4]` int64, one for 1 or TILE consecutive queries: first row, rows, first position, block table.
        tables: `[tables, pages per sequence]` int64, the block tables.
        window: positions a query sees, itself included; 0 for all.
        out: `[M, H * K]` float32.
        scratch: `[threads, scratch_size(K)]` float32.
    """
    threads, head_dim = scratch.shape[0], keys.shape[3]
    group = heads // keys.shape[1]
    stride, out_stride = qkv.shape[1], out.shape[1]
    flat = out.reshape(-1)
    for t in prange(threads):
        for item in range(t, tiles.shape[0] * heads, threads):
            tile, head = tiles[item // heads], item % heads
            row = tile[0]
            _attend(
                qkv.ctypes.data + 4 * (row * stride + head * head_dim),
                stride,
                tile[1],
                tile[2],
                keys,
                values,
                tables[tile[3]],
                head // group,
                window,
                scale,
                flat[row * out_stride + head * head_dim :],
                out_stride,
                scratch[t],
            )


def scratch_size(head_dim: int) -> int:
    """Float32 of scratch each thread needs."""
    return TILE * (CHUNK + 2 * head_dim + 4)


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
