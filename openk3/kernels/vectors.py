"""Inner loops written as LLVM vector code, for Numba functions to call.

The compiler's own vectoriser decides anew for every loop how many partial sums it keeps, so the same dot product gets
other bits in another place. Here every product of a weight row and an activation row keeps one vector of 16 partial
sums over the row in order, however many rows are worked on at once: a result has the same bits at any batch size. LLVM
maps the 16 lanes to one AVX-512 register, two AVX2 registers or four of NEON or SSE.

Addresses are 64-bit integers, so that weights may lie anywhere, in a memory-mapped file for instance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
# Weights are asked for this many rows before their turn. Without it the decode of a small model reached 77 % of the
# memory bandwidth of an AVX-512 server core, with it 30 % more; 4 and 16 are nearly as good, 32 is not.
PREFETCH_ROWS = 8


def _has_avx512() -> bool:
    """Whether compiled code may use AVX-512: Numba's own setting where there is one, else what this CPU has."""
    if config.CPU_FEATURES is not None:
        return "+avx512f" in config.CPU_FEATURES
    return bool(binding.get_host_cpu_features().get("avx512f"))


# A tile of a product is TILE_ROWS weight rows by up to TILE_COLUMNS activation rows, a tile of a mix TILE_COLUMNS rows
# of weights by MIX_VECTORS vectors: as many sums as the registers hold (32 of 16 lanes, or 16 of 8) beside operands.
TILE_ROWS, TILE_COLUMNS, MIX_VECTORS = (4, 4, 4) if _has_avx512() else (2, 3, 2)

_F32 = ir.FloatType()
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VEC = ir.VectorType(_F32, LANES)
_VEC_I32 = ir.VectorType(_I32, LANES)
_BYTES = ir.VectorType(_I8, LANES)


def _load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    vector = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(_VEC_I32, [0] * LANES))


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_VEC, [_F32(value)] * LANES)


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_VEC, [_VEC] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [a, b, c])


def _sum_lanes(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """The sums of the lanes of 1, 2 or 4 vectors, as one vector of as many lanes.

    Halves are added to halves, four times; while there is more than one vector, two of them share the additions. The
    order of the sum is the same for every number of vectors.
    """
    width, groups = LANES, 1  # every vector consists of `groups` parts of `width` lanes, each part on its way to a sum
    while width > 1:
        half = width // 2
        halved = []
        for a, b in zip(vectors[::2], vectors[1::2] or vectors, strict=True):
            parts = groups if a is b else 2 * groups
            low = [part * width + i for part in range(parts) for i in range(half)]
            kind = ir.VectorType(_I32, len(low))
            halved.append(
                builder.fadd(
                    builder.shuffle_vector(a, b, ir.Constant(kind, low)),
                    builder.shuffle_vector(a, b, ir.Constant(kind, [i + half for i in low])),
                )
            )
        groups = groups if len(vectors) == 1 else 2 * groups
        vectors, width = halved, half
    return vectors[0]


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line at `address`, which may lie behind the end of anything: a prefetch cannot fault."""
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, _I8.as_pointer()), _I32(0), _I32(3), _I32(1)])


def _weights_f32(builder: ir.IRBuilder, row: ir.Value, column: ir.Value) -> ir.Value:
    return _load(builder, builder.add(row, builder.mul(column, _I64(4))), _VEC, 4)


def _weights_i8(builder: ir.IRBuilder, row: ir.Value, column: ir.Value) -> ir.Value:
    raw = _load(builder, builder.add(row, column), _BYTES, 1)
    return builder.sitofp(builder.sext(raw, _VEC_I32), _VEC)


def _make_dot(load: Callable[..., ir.Value], element_bytes: int, rows: int, columns: int) -> Any:
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
            sums = [[cgutils.alloca_once_value(builder, _constant(0.0)) for _ in range(columns)] for _ in range(rows)]
            for row_sums in sums:  # the slots live in the entry block, the loop may be entered many times
                for slot in row_sums:
                    builder.store(_constant(0.0), slot)
            row_bytes = builder.mul(n, _I64(element_bytes))
            row_at = [builder.add(w, builder.mul(row_bytes, _I64(r))) for r in range(rows)]
            x_at = [builder.add(activations, builder.mul(stride, _I64(4 * c))) for c in range(columns)]
            with cgutils.for_range(builder, builder.udiv(n, _I64(LANES)), intp=_I64) as loop:
                column = builder.mul(loop.index, _I64(LANES))
                offset = builder.mul(column, _I64(4))
                xs = [_load(builder, builder.add(at, offset), _VEC, 4) for at in x_at]
                for r in range(rows):
                    if columns == 1:
                        here = builder.add(row_at[r], builder.mul(column, _I64(element_bytes)))
                        _prefetch(builder, builder.add(here, builder.mul(row_bytes, _I64(PREFETCH_ROWS))))
                    values = load(builder, row_at[r], column)
                    for c in range(columns):
                        builder.store(_fma(builder, values, xs[c], builder.load(sums[r][c])), sums[r][c])
            for c in range(columns):
                totals = _sum_lanes(builder, [builder.load(row_sums[c]) for row_sums in sums])
                at = builder.add(target, builder.mul(target_stride, _I64(4 * c)))
                builder.store(totals, builder.inttoptr(at, totals.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


def _make_mix(columns: int, vectors: int) -> Any:
    """An intrinsic `mix(weights, weights_stride, rows, row_stride, count, out, out_stride)`.

    For each of `columns` rows of weights, `weights_stride` floats apart, it adds to `out[column * out_stride:]` the sum
    of the first `16 * vectors` elements of `count` rows, `row_stride` floats apart, each times its weight.
    """

    @intrinsic
    def mix(
        typingctx: Any, weights: Any, w_stride: Any, rows: Any, row_stride: Any, count: Any, out: Any, out_stride: Any
    ) -> tuple[Any, Callable[..., Any]]:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            w, w_step, row, row_step, n, target, target_step = args

            def out_at(c: int, v: int) -> ir.Value:
                index = builder.add(builder.mul(target_step, _I64(c)), _I64(LANES * v))
                return builder.inttoptr(builder.add(target, builder.mul(index, _I64(4))), _VEC.as_pointer())

            sums = [[cgutils.alloca_once(builder, _VEC) for _ in range(vectors)] for _ in range(columns)]
            for c in range(columns):
                for v in range(vectors):
                    builder.store(builder.load(out_at(c, v), align=4), sums[c][v])
            with cgutils.for_range(builder, n, intp=_I64) as loop:
                at = builder.add(row, builder.mul(builder.mul(loop.index, row_step), _I64(4)))
                values = [_load(builder, builder.add(at, _I64(4 * LANES * v)), _VEC, 4) for v in range(vectors)]
                for c in range(columns):
                    index = builder.add(builder.mul(w_step, _I64(c)), loop.index)
                    scalar = _load(builder, builder.add(w, builder.mul(index, _I64(4))), _F32, 4)
                    weight = _splat(builder, scalar)
                    for v in range(vectors):
                        builder.store(_fma(builder, weight, values[v], builder.load(sums[c][v])), sums[c][v])
            for c in range(columns):
                for v in range(vectors):
                    builder.store(builder.load(sums[c][v]), out_at(c, v), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return mix


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e**x in each lane to about 1 unit in the last place, 0 below -87.3: Cody and Waite's reduction to |r| <= ln(2)/2
    and the minimax polynomial of the Cephes library."""
    too_small = builder.fcmp_ordered("<", x, _constant(-87.3))
    x = builder.select(too_small, _constant(0.0), x)
    kind = ir.FunctionType(_VEC, [_VEC])
    round_even = cgutils.get_or_insert_function(builder.module, kind, f"llvm.nearbyint.v{LANES}f32")
    n = builder.call(round_even, [builder.fmul(x, _constant(1 / math.log(2)))])
    r = _fma(builder, n, _constant(-0.693359375), x)
    r = _fma(builder, n, _constant(2.12194440e-4), r)
    p = _constant(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(builder, p, r, _constant(c))
    p = builder.fadd(_fma(builder, builder.fmul(r, r), p, r), _constant(1.0))
    exponent = builder.shl(builder.fptosi(n, _VEC_I32), ir.Constant(_VEC_I32, [23] * LANES))
    scaled = builder.bitcast(builder.add(builder.bitcast(p, _VEC_I32), exponent), _VEC)
    return builder.select(too_small, _constant(0.0), scaled)


@intrinsic
def exp_and_sum(typingctx: Any, row: Any, count: Any, shift: Any) -> tuple[Any, Callable[..., Any]]:
    """`exp_and_sum(row, count, shift)` turns `count` floats (a multiple of 16) into e**(x - shift); gives their sum."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        address, n, offset = args
        total = cgutils.alloca_once(builder, _VEC)
        builder.store(_constant(0.0), total)
        shift_vector = _splat(builder, offset)
        with cgutils.for_range(builder, builder.udiv(n, _I64(LANES)), intp=_I64) as loop:
            at = builder.add(address, builder.mul(loop.index, _I64(4 * LANES)))
            value = _exp(builder, builder.fsub(_load(builder, at, _VEC, 4), shift_vector))
            builder.store(value, builder.inttoptr(at, _VEC.as_pointer()), align=4)
            builder.store(builder.fadd(builder.load(total), value), total)
        return builder.extract_element(_sum_lanes(builder, [builder.load(total)]), _I32(0))

    return types.float32(types.int64, types.int64, types.float32), codegen


def _make_gate(logit: Callable[[ir.IRBuilder, ir.Value], ir.Value]) -> Any:
    """An intrinsic `gate(gate, up, count)` that replaces `count` floats (a multiple of 16) by act(gate) * up.

    `act(x)` is `x * sigmoid(logit(x))`, which is SiLU for x itself and GELU's tanh form for a cubic in x.
    """

    @intrinsic
    def gate(typingctx: Any, gate: Any, up: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            gate_address, up_address, n = args
            with cgutils.for_range(builder, builder.udiv(n, _I64(LANES)), intp=_I64) as loop:
                offset = builder.mul(loop.index, _I64(4 * LANES))
                at = builder.add(gate_address, offset)
                x = _load(builder, at, _VEC, 4)
                # Where e**-x would overflow the quotient is 0 to float32 anyway.
                power = _exp(builder, _minimum(builder, builder.fneg(logit(builder, x)), 87.0))
                active = builder.fdiv(x, builder.fadd(power, _constant(1.0)))
                result = builder.fmul(active, _load(builder, builder.add(up_address, offset), _VEC, 4))
                builder.store(result, builder.inttoptr(at, _VEC.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return gate


def _gelu_logit(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """tanh(u) + 1 is 2 sigmoid(2u): twice sqrt(2 / pi) (x + 0.044715 x**3)."""
    factor = 2 * math.sqrt(2 / math.pi)
    cubic = _fma(builder, builder.fmul(x, x), _constant(0.044715 * factor), _constant(factor))
    return builder.fmul(x, cubic)


def _minimum(builder: ir.IRBuilder, x: ir.Value, limit: float) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", x, _constant(limit)), x, _constant(limit))


dot_f32 = [_make_dot(_weights_f32, 4, TILE_ROWS, c) for c in range(1, TILE_COLUMNS + 1)]
dot_i8 = [_make_dot(_weights_i8, 1, TILE_ROWS, c) for c in range(1, TILE_COLUMNS + 1)]
dot_f32_row = _make_dot(_weights_f32, 4, 1, 1)
dot_i8_row = _make_dot(_weights_i8, 1, 1, 1)
mix_tile = _make_mix(TILE_COLUMNS, MIX_VECTORS)
mix_tile_narrow = _make_mix(TILE_COLUMNS, 1)
mix_single = _make_mix(1, MIX_VECTORS)
mix_single_narrow = _make_mix(1, 1)
silu_times, gelu_times = _make_gate(lambda builder, x: x), _make_gate(_gelu_logit)
