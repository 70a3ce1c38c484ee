"""What a step's kernels read, from the chunks it consists of: embeddings, rotations, places in the cache, tiles.

A step of one token takes a few microseconds here, where the same in NumPy calls takes a twentieth of the whole step.

Shapes: M rows (tokens of the step), C chunks, D hidden_size, R = head_dim / 2, S sets of block tables, W pages in the
longest of them.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from openk3.kernels.attention import (
    HEAD_DIM,
    KV_HEADS,
    PAGE_SIZE,
    PART,
    POSITION,
    QUERIES,
    ROW,
    TABLE,
    TILE_SIZE,
    chunks_of,
)
from openk3.kernels.integers import INT4_GROUPS, INT8
from openk3.kernels.job import (
    BLOCK_TABLES,
    COS,
    LAST,
    NUM_LAST,
    NUM_PARTS,
    NUM_ROWS,
    NUM_TABLES,
    NUM_TILES,
    PAGES,
    SIN,
    SLOTS,
    SPLITS,
    TABLE_WIDTH,
    TILES,
    X,
)
from openk3.kernels.linear import BLOCK, COLUMNS, F32, FORMAT, GROUP, MINIMUM, SCALE, WEIGHT, block_bytes, scale_bytes
from openk3.kernels.memory import f32_at, f32_rows_at, half_at, i64_rows_at, u8_at
from openk3.kernels.team import SERIAL, entry

# A tile of attention is divided into up to so many items per key/value head, where those would be more than 1 /
# ITEMS_WANTED of a thread's share.
MOST_SPLITS = 8
ITEMS_WANTED = 8


@njit(**SERIAL)
def embed(op, token, multiplier, out):
    """Row `token` of the embedding, dequantized, times `multiplier`; the bits of `openk3.weights.formats.dequantize`.

    Args:
        op: `[OP_SIZE]`, as for `linear`.
        out: `[D]` float32.
    """
    D = op[COLUMNS]
    if op[FORMAT] == F32:
        row = f32_at(op[WEIGHT] + 4 * D * token, D)
        for k in range(D):
            out[k] = row[k] * multiplier
        return
    block, lane = token // BLOCK, token % BLOCK
    scales, minima = op[SCALE] + scale_bytes(op) * block, op[MINIMUM] + scale_bytes(op) * block
    four_bit = op[FORMAT] == INT4_GROUPS
    per_word = 8 if four_bit else 4
    values = u8_at(op[WEIGHT] + block_bytes(op) * block, block_bytes(op))
    for k in range(D):
        at = (k // per_word * BLOCK + lane) * 4 + k % 4
        group = 2 * (k // op[GROUP] * BLOCK + lane)
        if four_bit:
            nibble = np.int64(values[at]) >> (4 if k % 8 >= 4 else 0) & 15
            number = np.float32(nibble) * half_at(scales + group) + half_at(minima + group)
        elif op[FORMAT] == INT8:
            number = np.float32(np.int8(values[at])) * f32_at(scales, BLOCK)[lane]
        else:
            number = np.float32(np.int8(values[at])) * half_at(scales + group)
        out[k] = number * multiplier


@njit(**SERIAL)
def _fill_gaps(table):
    """Kernels read whole runs of pages and hide what lies before the window. Pages that were given back (below 0) may
    hold anything, NaN too, so the first one kept, which is whole, stands in for them."""
    kept = 0
    while kept < table.size and table[kept] < 0:
        kept += 1
    for i in range(kept):
        table[i] = table[kept]


@njit(**SERIAL)
def _turn(position, frequencies, factor, cos, sin):
    """Cosine and sine of each pair at a position, as `openk3.rotary.turns`."""
    for r in range(frequencies.size):
        angle = np.float32(position) * frequencies[r]
        cos[r] = np.float32(math.cos(angle)) * factor
        sin[r] = np.float32(math.sin(angle)) * factor


@entry
def plan(numbers, shape, embedding, multiplier, frequencies, factors, cache, tile_queries, threads, most_parts, job):
    """Fill in the job's sizes and inputs; the room for the inputs is there.

    Args:
        numbers: int64, one after the other: M tokens; for each chunk its first position, its number of tokens, and
            whether the logits after its last one are wanted; `[S, C, W]` block tables, -1 for pages given back.
        shape: M, C, S, W.
        embedding: `[1, OP_SIZE]`; multiplier: float32 on embeddings.
        frequencies: `[rotations, R]` float32; factors: `[rotations]` float32.
        cache: as for `attention`.
        tile_queries: consecutive queries of a tile.
        threads: among which the step is shared.
        most_parts: partial results of attention that there may be room for.

    Returns:
        partial results of attention that the step needs room for.
    """
    M, C, S, W = shape
    P, R, D = cache[PAGE_SIZE], cache[HEAD_DIM] // 2, embedding[0, COLUMNS]
    tokens, chunks, tables = numbers[:M], numbers[M : M + 3 * C], numbers[M + 3 * C : M + 3 * C + S * C * W]
    x = f32_rows_at(job[X], M, D)
    pages, slots = i64_rows_at(job[PAGES], S, M), i64_rows_at(job[SLOTS], 1, M)[0]
    last, tiles = i64_rows_at(job[LAST], 1, M)[0], i64_rows_at(job[TILES], M, TILE_SIZE)
    for i in range(S * C):
        _fill_gaps(tables[i * W : (i + 1) * W])
    row = num_tiles = num_last = num_parts = whole = 0
    splits = 1
    for c in range(C):
        start, count, samples = chunks[3 * c], chunks[3 * c + 1], chunks[3 * c + 2]
        for m in range(row, row + count):
            position = start + m - row
            embed(embedding[0], tokens[m], multiplier, x[m])
            for turn in range(factors.size):
                at = 4 * R * (turn * M + m)
                cos, sin = f32_at(job[COS] + at, R), f32_at(job[SIN] + at, R)
                _turn(position, frequencies[turn], factors[turn], cos, sin)
            for s in range(S):
                pages[s, m] = tables[(s * C + c) * W + position // P]
            slots[m] = position % P
        for done in range(0, count, tile_queries):
            tile = tiles[num_tiles]
            tile[ROW], tile[QUERIES] = row + done, min(tile_queries, count - done)
            tile[POSITION], tile[TABLE], tile[PART] = start + done, c, -1
            whole += chunks_of(tile, 0)[1]
            num_tiles += 1
        row += count
        if samples:
            last[num_last] = row - 1
            num_last += 1
    for i in range(num_tiles):
        pieces = chunks_of(tiles[i], 0)[1]
        parts = pieces * tiles[i, QUERIES]
        large = pieces > 1 and pieces * ITEMS_WANTED * threads > whole * cache[KV_HEADS]
        if large and num_parts + parts <= most_parts:
            tiles[i, PART] = num_parts
            num_parts += parts
            splits = max(splits, min(pieces, MOST_SPLITS))
    job[NUM_ROWS], job[NUM_LAST], job[NUM_TILES], job[NUM_PARTS] = M, num_last, num_tiles, num_parts
    job[SPLITS], job[NUM_TABLES], job[TABLE_WIDTH] = splits, C, W
    job[BLOCK_TABLES] = tables.ctypes.data
    return num_parts
