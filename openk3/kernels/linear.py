"""Products of activations with weight matrices in any of the stored formats, shared among the threads of a team.

A matrix is one row of an int64 table (an *op*): its format, where its weights, scales and bias lie, and its shape. An
item of work is one block of 16 rows (two, where AMX multiplies) and all rows of activations.

Shapes: M activation rows, K columns (a multiple of 16), N weight rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from openk3.kernels import amx, integers
from openk3.kernels.integers import INT4_GROUPS, INT8, INT8_GROUPS, quantize_row, stats_size
from openk3.kernels.machine import AMX, TOKEN_TILES
from openk3.kernels.memory import f32_at
from openk3.kernels.team import SERIAL, take, variant
from openk3.kernels.vectors import TILE_COLUMNS, TILE_ROWS, dot, dot_row

# Columns of an op; addresses are 0 where there is nothing. SCALE and MINIMUM are addresses of the first block's.
FORMAT, WEIGHT, SCALE, MINIMUM, BIAS, ROWS, COLUMNS, GROUP = range(8)
OP_SIZE = 8
F32 = 0

BLOCK = 16
# From so many rows of activations on, AMX tiles of 16 are filled well enough.
AMX_FROM = 5
# An item is up to so many bytes of weights: long runs of memory are read faster than short ones.
ITEM_BYTES = 98304

_stats_size = njit(**SERIAL)(stats_size)


@njit(**SERIAL)
def quantize_rows(x, columns, first, end, q, stats):
    """Quantize the first `columns` of rows `[first, end)` of `x`, for `integer_block` to read.

    Args:
        q, stats: addresses, of `2 * columns` bytes and `stats_size(columns)` int32 per row.
    """
    size = _stats_size(columns)
    for m in range(first, end):
        quantize_row(x[m].ctypes.data, columns, q + 2 * columns * m, stats + 4 * size * m)


@njit(**SERIAL)
def integers_of(q, stats, columns, m):
    """The addresses of row m's integers and stats, where rows have up to `columns` columns."""
    return q + 2 * columns * m, stats + 4 * _stats_size(columns) * m


def _make_tiles(kind: int) -> Any:
    """One block and all rows of activations, in tiles of up to TOKEN_TILES[-1] of them."""
    tiles = [integers._make_tile(kind, tokens) for tokens in TOKEN_TILES]
    tile_1, tile_2, tile_3, tile_4 = (tiles * 2)[:4]
    size_2, size_3, size_4 = ((*TOKEN_TILES, 1 << 30) * 2)[1:4]

    @variant(str(kind))
    def block(w, scale, minimum, bias, q, stats, M, columns, group, out, stride):
        step = 4 * _stats_size(columns)
        m = 0
        while m < M:
            left = M - m
            q_at, stats_at, out_at = q + 2 * columns * m, stats + step * m, out + 4 * stride * m
            if left >= size_4:
                tile_4(w, scale, minimum, bias, q_at, stats_at, step, columns, group, out_at, stride)
                m += size_4
            elif left >= size_3:
                tile_3(w, scale, minimum, bias, q_at, stats_at, step, columns, group, out_at, stride)
                m += size_3
            elif left >= size_2:
                tile_2(w, scale, minimum, bias, q_at, stats_at, step, columns, group, out_at, stride)
                m += size_2
            else:
                tile_1(w, scale, minimum, bias, q_at, stats_at, step, columns, group, out_at, stride)
                m += 1

    return block


_int8, _int8_groups, _int4_groups = (_make_tiles(kind) for kind in (INT8, INT8_GROUPS, INT4_GROUPS))


@njit(**SERIAL)
def block_bytes(op):
    """Bytes of a block's weights."""
    return BLOCK * op[COLUMNS] // (2 if op[FORMAT] == INT4_GROUPS else 1)


@njit(**SERIAL)
def scale_bytes(op):
    """Bytes of a block's scales."""
    return 4 * BLOCK if op[FORMAT] == INT8 else 2 * BLOCK * (op[COLUMNS] // op[GROUP])


@njit(**SERIAL)
def integer_block(op, number, q, stats, M, out, stride):
    """Block `number` of an op of integers with M rows of activations; `q`, `stats` and `out` are addresses.

    `out` is where the block's 16 results of the first row go, `stride` floats before those of the next.
    """
    w, scale = op[WEIGHT] + block_bytes(op) * number, op[SCALE] + scale_bytes(op) * number
    minimum = op[MINIMUM] + scale_bytes(op) * number
    bias = 0 if op[BIAS] == 0 else op[BIAS] + 4 * BLOCK * number
    if op[FORMAT] == INT8:
        _int8(w, scale, minimum, bias, q, stats, M, op[COLUMNS], op[GROUP], out, stride)
    elif op[FORMAT] == INT8_GROUPS:
        _int8_groups(w, scale, minimum, bias, q, stats, M, op[COLUMNS], op[GROUP], out, stride)
    else:
        _int4_groups(w, scale, minimum, bias, q, stats, M, op[COLUMNS], op[GROUP], out, stride)


@njit(**SERIAL)
def _amx_step(op):
    """Columns of an AMX tile for this op; 0 if its width does not fit."""
    if op[GROUP] % 64 == 0:
        return 64
    return 32 if op[GROUP] == 32 else 0


def _make_amx_blocks() -> Any:
    if not AMX:

        @njit(**SERIAL)
        def nothing(op, number, blocks, q, stats, M, out, stride, scratch):
            pass

        return nothing

    @njit(**SERIAL)
    def amx_blocks(op, number, blocks, q, stats, M, out, stride, scratch):
        """`blocks` (1 or 2) blocks from `number` on with M rows of activations, as `integer_block`."""
        columns, group, step = op[COLUMNS], op[GROUP], _amx_step(op)
        w_step, s_step = block_bytes(op), scale_bytes(op)
        w, scale, minimum = op[WEIGHT] + w_step * number, op[SCALE] + s_step * number, op[MINIMUM] + s_step * number
        bias = 0 if op[BIAS] == 0 else op[BIAS] + 4 * BLOCK * number
        bias_step = 0 if op[BIAS] == 0 else 4 * BLOCK
        room = scratch.ctypes.data
        if op[FORMAT] == INT4_GROUPS:
            expanded = room + amx.SCRATCH_BYTES
            amx.expand_nibbles(w, expanded, blocks * columns // 8)
            w, w_step = expanded, BLOCK * columns
        if blocks == 1:
            w_step = s_step = bias_step = 0
        size = 4 * _stats_size(columns)
        for m in range(0, M, amx.ROWS):
            tokens = min(amx.ROWS, M - m)
            q_at, stats_at, out_at = q + 2 * columns * m, stats + size * m, out + 4 * stride * m
            if op[FORMAT] == INT8:
                amx.products_int8(
                    w, w_step, scale, minimum, s_step, bias, bias_step, q_at, stats_at, size, tokens, columns, group,
                    step, out_at, stride, blocks, room,
                )  # fmt: skip
            elif op[FORMAT] == INT8_GROUPS:
                amx.products_int8_groups(
                    w, w_step, scale, minimum, s_step, bias, bias_step, q_at, stats_at, size, tokens, columns, group,
                    step, out_at, stride, blocks, room,
                )  # fmt: skip
            else:
                amx.products_int4_groups(
                    w, w_step, scale, minimum, s_step, bias, bias_step, q_at, stats_at, size, tokens, columns, group,
                    step, out_at, stride, blocks, room,
                )  # fmt: skip

    return amx_blocks


_amx_blocks = _make_amx_blocks()


def _make_amx_switch() -> Any:
    """`(switch_on(config address), switch_off())`, which do nothing where there is no AMX."""
    if AMX:

        @njit(**SERIAL)
        def on(config):
            amx.configure(config)

        @njit(**SERIAL)
        def off():
            amx.release()
    else:

        @njit(**SERIAL)
        def on(config):
            pass

        @njit(**SERIAL)
        def off():
            pass

    return on, off


_amx_on, _amx_off = _make_amx_switch()


@njit(**SERIAL)
def _float_rows(op, x, out, first, begin, end):
    """Rows `[begin, end)` of a float32 op: `out[:, first + begin : first + end]`."""
    M, x_stride = x.shape
    K, stride = op[COLUMNS], out.shape[1]
    rows = end - begin
    weights = op[WEIGHT] + 4 * K * begin
    for m in range(0, M, TILE_COLUMNS):
        columns = min(TILE_COLUMNS, M - m)
        x_at, out_at = x.ctypes.data + 4 * m * x_stride, out.ctypes.data + 4 * (m * stride + first + begin)
        r = 0
        while r + TILE_ROWS <= rows:
            w_at = weights + 4 * r * K
            if columns == 4:
                _dot_4(w_at, x_at, x_stride, K, out_at + 4 * r, stride)
            elif columns == 3:
                _dot_3(w_at, x_at, x_stride, K, out_at + 4 * r, stride)
            elif columns == 2:
                _dot_2(w_at, x_at, x_stride, K, out_at + 4 * r, stride)
            else:
                _dot_1(w_at, x_at, x_stride, K, out_at + 4 * r, stride)
            r += TILE_ROWS
        while r < rows:
            w_at = weights + 4 * r * K
            for c in range(columns):
                dot_row(w_at, x_at + 4 * c * x_stride, x_stride, K, out_at + 4 * (r + c * stride), stride)
            r += 1
    if op[BIAS] != 0:
        bias = f32_at(op[BIAS] + 4 * begin, rows)
        for m in range(M):
            for i in range(rows):
                out[m, first + begin + i] += bias[i]


# As many names as the widest tile of any CPU has; narrower CPUs never reach the last.
_dot_1, _dot_2, _dot_3, _dot_4 = (dot * 2)[:4]


@njit(**SERIAL)
def _blocks(op):
    return (op[ROWS] + BLOCK - 1) // BLOCK


@njit(**SERIAL)
def _pace(op, left, threads, rows):
    """Blocks of the next item when `left` are left: up to ITEM_BYTES of weights, but ever fewer towards the end, so
    that all threads are done at the same time."""
    pace = max(1, min(left // (2 * threads), ITEM_BYTES // block_bytes(op)))
    return max(amx.BLOCKS, pace // amx.BLOCKS * amx.BLOCKS) if AMX and rows >= AMX_FROM else pace


@njit(**SERIAL)
def _op_blocks(op, low, high, x, q, stats, out, first, scratch, config, configured):
    """Blocks `[low, high)` of one op; gives the columns per tile that AMX is configured for, 0 for none."""
    M, step = x.shape[0], 0
    if AMX and M >= AMX_FROM and op[FORMAT] != F32:
        step = _amx_step(op)
    if op[FORMAT] == F32:
        _float_rows(op, x, out, first, BLOCK * low, min(BLOCK * high, op[ROWS]))
    elif step != 0:
        if configured != step:
            configured = step
            _amx_on(config.ctypes.data + (64 if step == 32 else 0))
        for number in range(low, high, amx.BLOCKS):
            target, count = out.ctypes.data + 4 * (first + BLOCK * number), min(amx.BLOCKS, high - number)
            _amx_blocks(op, number, count, q, stats, M, target, out.shape[1], scratch)
    else:
        for number in range(low, high):
            integer_block(op, number, q, stats, M, out.ctypes.data + 4 * (first + BLOCK * number), out.shape[1])
    return configured


@njit(**SERIAL)
def linear(team, threads, ops, x, q, stats, out, scratch, config):
    """All `ops` on the same activations, their results side by side; this thread's part of one phase.

    Args:
        ops: `[n, OP_SIZE]` int64.
        x: `[M, K or more]` float32, C-contiguous, for float32 ops; q, stats: addresses of the same rows, quantized.
        out: `[M, sum of N]` float32, C-contiguous, with room for whole blocks at the end.
        scratch: this thread's, `scratch_bytes` of the widest op; config: of AMX.
    """
    blocks, configured = 0, np.int64(0)  # a literal 0 would be a type, and a compilation, of its own
    for i in range(ops.shape[0]):
        blocks += _blocks(ops[i])
    pace = _pace(ops[0], blocks, threads, x.shape[0])
    begin = take(team, threads, pace)
    while begin < blocks:
        end, start, first = min(blocks, begin + pace), 0, np.int64(0)
        for i in range(ops.shape[0]):
            low, high = max(begin - start, 0), min(end - start, _blocks(ops[i]))
            if low < high:
                configured = _op_blocks(ops[i], low, high, x, q, stats, out, first, scratch, config, configured)
            start += _blocks(ops[i])
            first += ops[i, ROWS]
        pace = _pace(ops[0], blocks - end, threads, x.shape[0])
        begin = take(team, threads, pace)
    if configured != 0:
        _amx_off()


@njit(**SERIAL)
def linear_of_experts(team, threads, op, groups, x, q, stats, out, scratch, config):
    """The same matrix of several experts, each on its own rows of activations; this thread's part of one phase.

    Args:
        op: `[OP_SIZE]`, the first expert's matrix; the others follow it.
        groups: `[n, 3]` int64: expert, first row, end row.
        x, q, stats, out, scratch, config: as for `linear`.
    """
    blocks, configured = _blocks(op), np.int64(0)
    columns, mine = op[COLUMNS], op.copy()
    largest = 0
    for i in range(groups.shape[0]):
        largest = max(largest, groups[i, 2] - groups[i, 1])
    pace = _pace(op, blocks * groups.shape[0], threads, largest)
    per_group = (blocks + pace - 1) // pace
    weight_stride = 4 * op[ROWS] * columns if op[FORMAT] == F32 else blocks * block_bytes(op)
    item = take(team, threads, 1)
    while item < groups.shape[0] * per_group:
        expert, begin, end = groups[item // per_group]
        low = item % per_group * pace
        mine[WEIGHT] = op[WEIGHT] + expert * weight_stride
        if op[FORMAT] != F32:
            mine[SCALE] = op[SCALE] + expert * blocks * scale_bytes(op)
            mine[MINIMUM] = op[MINIMUM] + expert * blocks * scale_bytes(op)
        q_at, stats_at = integers_of(q, stats, columns, begin)
        configured = _op_blocks(
            mine, low, min(blocks, low + pace), x[begin:end], q_at, stats_at, out[begin:end], np.int64(0),
            scratch, config, configured,
        )  # fmt: skip
        item = take(team, threads, 1)
    if configured != 0:
        _amx_off()


def scratch_bytes(columns: int) -> int:
    """Bytes of scratch that a thread needs for ops of up to `columns` columns."""
    return amx.SCRATCH_BYTES + amx.BLOCKS * BLOCK * columns if AMX else 0


def linear_oracle(weights: list[Any], biases: list[Any], x: Any) -> Any:
    """The definition: `weights` are float32 (dequantized) `[N, K]`, `biases` `[N]` or None."""
    parts = [x @ w.T + (0 if b is None else b) for w, b in zip(weights, biases, strict=True)]
    return np.concatenate(parts, axis=1)
