"""Products of activations with weight matrices in any of the stored formats, on all threads.

A matrix is one row of an int64 table (an *op*): its format, where its weights, scales and bias lie, and its shape. The
rows of every op are divided among the threads; within a thread a block of rows stays in the cache while all
activations pass it. From `UNPACK_FROM` activations on, a block of integer weights is first unpacked to float32, which
costs one pass and changes no bit.

Shapes: M activation rows, K columns (a multiple of 16), N weight rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from openk3.kernels.memory import f32_at, i8_at
from openk3.kernels.vectors import TILE_COLUMNS, TILE_ROWS, dot_f32, dot_f32_row, dot_i8, dot_i8_row

# Columns of an op. BIAS is 0 where there is none.
FORMAT, WEIGHT, SCALE, BIAS, ROWS, COLUMNS = range(6)
OP_SIZE = 6
# Formats. INT8: one float32 scale per row, weights in [-127, 127].
F32, INT8 = 0, 1

BLOCK_ROWS = 8
UNPACK_FROM = 12

SERIAL: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
PARALLEL: dict[str, Any] = SERIAL | {"parallel": True, "cache": True}


def _make_block(tiles: list[Any], single: Any, element_bytes: int) -> Any:
    """The products of `rows` consecutive weight rows with all activations, scales and bias left out."""
    # As many names as the widest tile of any CPU has; narrower CPUs never reach the last.
    tile_1, tile_2, tile_3, tile_4 = (tiles * 2)[:4]

    @njit(**SERIAL)
    def block(weights, x, out, out_stride, rows, K):
        M, x_stride = x.shape
        for m in range(0, M, TILE_COLUMNS):
            columns = min(TILE_COLUMNS, M - m)
            x_at, out_at = x.ctypes.data + 4 * m * x_stride, out + 4 * m * out_stride
            r = 0
            while r + TILE_ROWS <= rows:
                w_at = weights + element_bytes * r * K
                if columns == 4:
                    tile_4(w_at, x_at, x_stride, K, out_at + 4 * r, out_stride)
                elif columns == 3:
                    tile_3(w_at, x_at, x_stride, K, out_at + 4 * r, out_stride)
                elif columns == 2:
                    tile_2(w_at, x_at, x_stride, K, out_at + 4 * r, out_stride)
                else:
                    tile_1(w_at, x_at, x_stride, K, out_at + 4 * r, out_stride)
                r += TILE_ROWS
            while r < rows:
                w_at = weights + element_bytes * r * K
                for c in range(columns):
                    single(w_at, x_at + 4 * c * x_stride, x_stride, K, out_at + 4 * (r + c * out_stride), out_stride)
                r += 1

    return block


_block_f32 = _make_block(dot_f32, dot_f32_row, 4)
_block_i8 = _make_block(dot_i8, dot_i8_row, 1)


@njit(**SERIAL)
def linear_rows(op, x, out, first, begin, end, scratch):
    """Rows `[begin, end)` of one op, written to `out[:, first + begin : first + end]`.

    Args:
        op: `[OP_SIZE]`.
        x: `[M, K or more]` float32, C-contiguous; `out`: `[M, >= first + N]` likewise.
        scratch: room for `BLOCK_ROWS * K` float32.
    """
    M, K = x.shape[0], op[COLUMNS]
    stride = out.shape[1]
    for r in range(begin, end, BLOCK_ROWS):
        rows = min(BLOCK_ROWS, end - r)
        target = out.ctypes.data + 4 * (first + r)
        if op[FORMAT] == F32:
            _block_f32(op[WEIGHT] + 4 * r * K, x, target, stride, rows, K)
            scales = f32_at(op[SCALE], 0)
        else:
            scales = f32_at(op[SCALE] + 4 * r, rows)
            if M < UNPACK_FROM:
                _block_i8(op[WEIGHT] + r * K, x, target, stride, rows, K)
            else:
                packed = i8_at(op[WEIGHT] + r * K, rows * K)
                for i in range(rows * K):
                    scratch[i] = np.float32(packed[i])
                _block_f32(scratch.ctypes.data, x, target, stride, rows, K)
        for i in range(scales.size):
            for m in range(M):
                out[m, first + r + i] *= scales[i]
        if op[BIAS] != 0:
            bias = f32_at(op[BIAS] + 4 * r, rows)
            for m in range(M):
                for i in range(rows):
                    out[m, first + r + i] += bias[i]


@njit(**SERIAL)
def _share(rows, t, threads):
    """The rows `[begin, end)` that thread `t` computes: whole tiles, the last thread also the rest."""
    begin = rows * t // threads // TILE_ROWS * TILE_ROWS
    end = rows if t == threads - 1 else rows * (t + 1) // threads // TILE_ROWS * TILE_ROWS
    return begin, end


@njit(**PARALLEL)
def linear(ops, x, out, scratch):
    """All `ops` on the same activations, their results side by side.

    Args:
        ops: `[n, OP_SIZE]` int64.
        x: `[M, K or more]` float32, C-contiguous.
        out: `[M, sum of rows]` float32, C-contiguous.
        scratch: `[threads, BLOCK_ROWS * K or more]` float32.
    """
    threads = scratch.shape[0]
    for t in prange(threads):
        first = 0
        for i in range(ops.shape[0]):
            begin, end = _share(ops[i, ROWS], t, threads)
            linear_rows(ops[i], x, out, first, begin, end, scratch[t])
            first += ops[i, ROWS]


@njit(**PARALLEL)
def linear_of_experts(op, weight_stride, scale_stride, groups, x, out, scratch):
    """The same matrix of several experts, each on its own rows of activations.

    Args:
        op: `[OP_SIZE]`, the first expert's matrix; the others follow `weight_stride` and `scale_stride` bytes apart.
        groups: `[n, 3]` int64: expert, first row, end row.
        x, out, scratch: as for `linear`.
    """
    threads = scratch.shape[0]
    for t in prange(threads):
        mine = op.copy()
        begin, end = _share(op[ROWS], t, threads)
        for i in range(groups.shape[0]):
            mine[WEIGHT] = op[WEIGHT] + groups[i, 0] * weight_stride
            mine[SCALE] = op[SCALE] + groups[i, 0] * scale_stride
            rows = slice(groups[i, 1], groups[i, 2])
            linear_rows(mine, x[rows], out[rows], 0, begin, end, scratch[t])


def linear_oracle(weights: list[Any], biases: list[Any], x: Any) -> Any:
    """The definition: `weights` are float32 (dequantized) `[N, K]`, `biases` `[N]` or None."""
    parts = [x @ w.T + (0 if b is None else b) for w, b in zip(weights, biases, strict=True)]
    return np.concatenate(parts, axis=1)
