"""Inner loops over floating-point numbers, written as LLVM vector code for Numba functions to call.

The compiler's own vectoriser decides anew for every loop how many partial sums it keeps, so the same dot product gets
other bits in another place. Here every sum has one order, however many rows are worked on at once: a result has the
same bits at any batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from openk3.kernels.code import (
    F32,
    I32,
    I64,
    LANES,
    VEC,
    VEC_F16,
    VEC_I32,
    call,
    constant,
    fma,
    load,
    plus,
    prefetch,
    select_lanes,
    slot,
    splat,
    store,
    sum_lanes,
    times,
)
from openk3.kernels.machine import AVX512, UPDATE_ROWS, UPDATE_VECTORS

# A tile of a product is TILE_ROWS weight rows by up to TILE_COLUMNS activation rows.
TILE_ROWS, TILE_COLUMNS = (4, 4) if AVX512 else (2, 3)
# Weights are asked for this many rows before their turn. Without it the decode of a small model reached 77 % of the
# memory bandwidth of an AVX-512 server core, with it 30 % more; 4 and 16 are nearly as good, 32 is not.
PREFETCH_ROWS = 8


def _make_dot(rows: int, columns: int) -> Any:
    """An intrinsic `dot(weights, x, x_stride, count, out, out_stride)`.

    It writes the `rows x columns` dot products of `rows` consecutive weight rows of `count` elements each and `columns`
    rows of activations, `x_stride` floats apart, to `out[column * out_stride + row]`. `count` is a multiple of 16.
    """

    @intrinsic
    def dot(
        typingctx: Any, weights: Any, x: Any, x_stride: Any, count: Any, out: Any, out_stride: Any
    ) -> tuple[Any, Callable[..., Any]]:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            w, activations, stride, n, target, target_stride = args
            sums = [[slot(builder, VEC) for _ in range(columns)] for _ in range(rows)]
            for row_sums in sums:
                for variable in row_sums:
                    builder.store(constant(0.0), variable)
            row_bytes = times(builder, n, 4)
            row_at = [plus(builder, w, times(builder, row_bytes, r)) for r in range(rows)]
            x_at = [plus(builder, activations, times(builder, stride, 4 * c)) for c in range(columns)]
            with cgutils.for_range(builder, builder.udiv(n, I64(LANES)), intp=I64) as loop:
                offset = times(builder, loop.index, 4 * LANES)
                xs = [load(builder, plus(builder, at, offset), VEC, 4) for at in x_at]
                for r in range(rows):
                    if columns == 1:
                        ahead = times(builder, row_bytes, PREFETCH_ROWS)
                        prefetch(builder, plus(builder, row_at[r], offset, ahead))
                    values = load(builder, plus(builder, row_at[r], offset), VEC, 4)
                    for c in range(columns):
                        builder.store(fma(builder, values, xs[c], builder.load(sums[r][c])), sums[r][c])
            for c in range(columns):
                totals = sum_lanes(builder, [builder.load(row_sums[c]) for row_sums in sums])
                store(builder, totals, plus(builder, target, times(builder, target_stride, 4 * c)), 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


def _make_update(rows: int, vectors: int, half: bool) -> Any:
    """An intrinsic `update(factors, factor_stride, matrix, matrix_stride, count, ahead, out, out_stride)`.

    For each of `rows` rows of factors, `factor_stride` floats apart, it adds to `out[row * out_stride:]` the sum of the
    first `16 * vectors` elements of `count` rows of `matrix`, `matrix_stride` elements apart, each times its factor.
    The matrix is float16 if `half`, else float32. Each element of `out` is one chain of fused multiply-adds. Meanwhile
    the memory at `ahead`, laid out as the matrix is, is asked for.
    """
    kind, size = (VEC_F16, 2) if half else (VEC, 4)

    @intrinsic
    def update(
        typingctx: Any,
        factors: Any,
        f_stride: Any,
        matrix: Any,
        m_stride: Any,
        count: Any,
        ahead: Any,
        out: Any,
        out_stride: Any,
    ) -> tuple[Any, Callable[..., Any]]:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            f, f_step, m, m_step, n, ahead, target, target_step = args
            sums = [[slot(builder, VEC) for _ in range(vectors)] for _ in range(rows)]
            out_at = [plus(builder, target, times(builder, target_step, 4 * r)) for r in range(rows)]
            factor_at = [plus(builder, f, times(builder, f_step, 4 * r)) for r in range(rows)]
            for r in range(rows):
                for v in range(vectors):
                    builder.store(load(builder, plus(builder, out_at[r], 4 * LANES * v), VEC, 4), sums[r][v])
            with cgutils.for_range(builder, n, intp=I64) as loop:
                offset = times(builder, builder.mul(loop.index, m_step), size)
                at = plus(builder, m, offset)
                prefetch(builder, plus(builder, ahead, offset))
                values = [load(builder, plus(builder, at, size * LANES * v), kind, size) for v in range(vectors)]
                if half:
                    values = [builder.fpext(value, VEC) for value in values]
                for r in range(rows):
                    scalar = load(builder, plus(builder, factor_at[r], times(builder, loop.index, 4)), F32, 4)
                    factor = splat(builder, scalar)
                    for v in range(vectors):
                        builder.store(fma(builder, factor, values[v], builder.load(sums[r][v])), sums[r][v])
            for r in range(rows):
                for v in range(vectors):
                    store(builder, builder.load(sums[r][v]), plus(builder, out_at[r], 4 * LANES * v), 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return update


def exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e**x in each lane to about 1 unit in the last place, 0 below -87.3: Cody and Waite's reduction to |r| <= ln(2)/2
    and the minimax polynomial of the Cephes library."""
    too_small = builder.fcmp_ordered("<", x, constant(-87.3))
    x = builder.select(too_small, constant(0.0), x)
    n = call(builder, f"llvm.nearbyint.v{LANES}f32", VEC, builder.fmul(x, constant(1 / math.log(2))))
    r = fma(builder, n, constant(-0.693359375), x)
    r = fma(builder, n, constant(2.12194440e-4), r)
    p = constant(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(builder, p, r, constant(c))
    p = builder.fadd(fma(builder, builder.fmul(r, r), p, r), constant(1.0))
    exponent = builder.shl(builder.fptosi(n, VEC_I32), ir.Constant(VEC_I32, [23] * LANES))
    scaled = builder.bitcast(builder.add(builder.bitcast(p, VEC_I32), exponent), VEC)
    return builder.select(too_small, constant(0.0), scaled)


@intrinsic
def exponentiate(
    typingctx: Any, row: Any, count: Any, begin: Any, end: Any, top: Any, total: Any
) -> tuple[Any, Callable[..., Any]]:
    """`exponentiate(row, count, begin, end, top, total)` turns floats `[begin, end)` of `count` (a multiple of 16) into
    e**(x - their maximum) and the others into 0; the maximum and the sum are stored at addresses `top` and `total`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        row, count, begin, end, top_at, total_at = args
        vectors = builder.udiv(count, I64(LANES))
        low, high = (splat(builder, builder.trunc(bound, I32)) for bound in (begin, end))
        lanes = ir.Constant(VEC_I32, list(range(LANES)))
        best, total = slot(builder, VEC), slot(builder, VEC)
        builder.store(constant(-math.inf), best)
        builder.store(constant(0.0), total)
        with cgutils.for_range(builder, vectors, intp=I64) as loop:
            at = plus(builder, row, times(builder, loop.index, 4 * LANES))
            first = splat(builder, builder.trunc(times(builder, loop.index, LANES), I32))
            index = builder.add(first, lanes)
            seen = builder.and_(builder.icmp_signed(">=", index, low), builder.icmp_signed("<", index, high))
            value = builder.select(seen, load(builder, at, VEC, 4), constant(-math.inf))
            store(builder, value, at, 4)
            before = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), best)
        top = builder.load(best)
        for half in (8, 4, 2, 1):
            other = select_lanes(builder, top, top, [(i + half) % LANES for i in range(LANES)])
            top = builder.select(builder.fcmp_ordered(">", other, top), other, top)
        with cgutils.for_range(builder, vectors, intp=I64) as loop:
            at = plus(builder, row, times(builder, loop.index, 4 * LANES))
            value = exp(builder, builder.fsub(load(builder, at, VEC, 4), top))
            store(builder, value, at, 4)
            builder.store(builder.fadd(builder.load(total), value), total)
        store(builder, builder.extract_element(top, I32(0)), top_at, 4)
        store(builder, builder.extract_element(sum_lanes(builder, [builder.load(total)]), I32(0)), total_at, 4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _make_gate(logit: Callable[[ir.IRBuilder, ir.Value], ir.Value]) -> Any:
    """An intrinsic `gate(gate, up, out, count)`: act(gate) * up of `count` floats (a multiple of 16).

    `act(x)` is `x * sigmoid(logit(x))`, which is SiLU for x itself and GELU's tanh form for a cubic in x.
    """

    @intrinsic
    def gate(typingctx: Any, gate: Any, up: Any, out: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            gate_address, up_address, out_address, n = args
            with cgutils.for_range(builder, builder.udiv(n, I64(LANES)), intp=I64) as loop:
                offset = times(builder, loop.index, 4 * LANES)
                x = load(builder, plus(builder, gate_address, offset), VEC, 4)
                up = load(builder, plus(builder, up_address, offset), VEC, 4)
                # Where e**-x would overflow the quotient is 0 to float32 anyway.
                power = exp(builder, _minimum(builder, builder.fneg(logit(builder, x)), 87.0))
                active = builder.fdiv(x, builder.fadd(power, constant(1.0)))
                store(builder, builder.fmul(active, up), plus(builder, out_address, offset), 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return gate


def _gelu_logit(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """tanh(u) + 1 is 2 sigmoid(2u): twice sqrt(2 / pi) (x + 0.044715 x**3)."""
    factor = 2 * math.sqrt(2 / math.pi)
    cubic = fma(builder, builder.fmul(x, x), constant(0.044715 * factor), constant(factor))
    return builder.fmul(x, cubic)


def _minimum(builder: ir.IRBuilder, x: ir.Value, limit: float) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", x, constant(limit)), x, constant(limit))


dot = [_make_dot(TILE_ROWS, c) for c in range(1, TILE_COLUMNS + 1)]
dot_row = _make_dot(1, 1)
# Tiles of updates by number of rows; a number in between takes the next larger one, with rows that nobody reads.
UPDATE_SIZES = tuple(rows for rows in (1, 3, 4, 6, 8, 12) if rows <= UPDATE_ROWS)
silu_times, gelu_times = _make_gate(lambda builder, x: x), _make_gate(_gelu_logit)


def make_updates(vectors: int, half: bool) -> list[Any]:
    """The update of each of `UPDATE_SIZES`."""
    return [_make_update(rows, vectors, half) for rows in UPDATE_SIZES]


updates = {(v, half): make_updates(v, half) for v in {1, UPDATE_VECTORS} for half in (False, True)}
