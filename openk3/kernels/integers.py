"""Products of quantized activations with integer weights, exact in every order and on every instruction set.

Activations of a row become 16-bit integers `q = round(x / s)`, |q| <= 32512, with one scale per row: 15 bits lose
nothing that shows beside weights of 4 or 8 bits. Sums of integer products are exact, so all tiles and all batch sizes
give the same bits, and one VNNI instruction multiplies 64 weights where a float32 one multiplies 16. VNNI and AMX
multiply bytes: there q is two signed bytes, `q = 256 * high + low`.

Weights come in blocks of 16 rows (`openk3.weights.formats`): 64 bytes hold four columns of 16 rows, a *quad*, so that
the 16 sums of a block lie in the lanes of one register and nothing is ever added across lanes. For INT4 the low nibbles
of 64 bytes are one quad and the high nibbles the next.

The activations of a row, as `quantize_row` leaves them:

    q       2 K bytes: `[2, K]` int8 (high bytes, low bytes) for VNNI and AMX, else `[K]` int16
    stats   int32: bits of the float32 scale, -128 * sum(high), -128 * sum(low), 0,
            then the sums of q over every 32, every 64 and every 128 columns
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from openk3.kernels.code import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VEC,
    VEC_F16,
    VEC_I8,
    VEC_I16,
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
    times,
)
from openk3.kernels.machine import AVX2, AVX512, VNNI

LARGEST = 32512  # 127 * 256, so that the high byte stays within [-127, 127]
QUAD_BYTES = 64
STATS_HEADER = 4
# A single row of activations is multiplied as fast as weights come: they are asked for so many bytes before their turn.
PREFETCH_BYTES = 4096
# Weights with one scale per row: columns whose products are added up before they become float32. Pairs of 16-bit
# products would overflow behind 1,036 columns, bytes behind 65,789, which is more than any row has.
MOST_COLUMNS = 65536
ROW_SEGMENT = MOST_COLUMNS if VNNI else 1024
# Formats of weights that are made of integers.
INT8, INT8_GROUPS, INT4_GROUPS = range(1, 4)

_BYTES = ir.VectorType(I8, QUAD_BYTES)
_PAIRS = 32 if AVX512 else 16  # 16-bit factors per register
_PARTS = 1 if VNNI else QUAD_BYTES // _PAIRS  # registers of sums per token, for each of the limbs
_LIMBS = 2 if VNNI else 1
_SUMS = VEC_I32 if VNNI else ir.VectorType(I32, _PAIRS // 2)


def stats_size(columns: int) -> int:
    """int32 of statistics per row of activations."""
    return STATS_HEADER + columns // 32 + columns // 64 + columns // 128


@intrinsic
def quantize_row(typingctx: Any, x: Any, count: Any, q: Any, stats: Any) -> tuple[Any, Callable[..., Any]]:
    """`quantize_row(x, count, q, stats)` quantizes `count` floats (a multiple of 16). A row that is not finite gets the
    scale NaN, so that its results are NaN too."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, count, q, stats = args
        vectors = builder.udiv(count, I64(LANES))
        largest = slot(builder, VEC)
        builder.store(constant(0.0), largest)
        finite = slot(builder, VEC)
        builder.store(constant(0.0), finite)  # becomes NaN in a lane that meets NaN or infinity
        with cgutils.for_range(builder, vectors, intp=I64) as loop:
            value = load(builder, plus(builder, x, times(builder, loop.index, 4 * LANES)), VEC, 4)
            size = call(builder, "llvm.fabs.v16f32", VEC, value)
            best = builder.load(largest)
            builder.store(builder.select(builder.fcmp_ordered(">", size, best), size, best), largest)
            builder.store(fma(builder, value, constant(0.0), builder.load(finite)), finite)
        top = builder.load(largest)
        for half in (8, 4, 2, 1):
            other = select_lanes(builder, top, top, [(i + half) % LANES for i in range(LANES)])
            top = builder.select(builder.fcmp_ordered(">", other, top), other, top)
        broken = builder.load(finite)
        for half in (8, 4, 2, 1):
            broken = builder.fadd(
                broken, select_lanes(builder, broken, broken, [(i + half) % LANES for i in range(16)])
            )
        top = builder.extract_element(top, I32(0))
        broken = builder.extract_element(broken, I32(0))  # 0 or NaN
        usable = builder.and_(builder.fcmp_ordered("==", broken, F32(0.0)), builder.fcmp_ordered(">", top, F32(1e-30)))
        scale = builder.fadd(builder.fmul(top, F32(1 / LARGEST)), broken)
        inverse = splat(builder, builder.select(usable, builder.fdiv(F32(LARGEST), top), F32(0.0)))
        store(builder, builder.bitcast(scale, I32), stats, 4)
        sums32 = plus(builder, stats, 4 * STATS_HEADER)
        high_sum, low_sum = slot(builder, VEC_I32), slot(builder, VEC_I32)
        zero = ir.Constant(VEC_I32, [0] * LANES)
        builder.store(zero, high_sum)
        builder.store(zero, low_sum)
        usable_lanes = splat(builder, usable)
        groups = builder.udiv(count, I64(32))
        with cgutils.for_range(builder, vectors, intp=I64) as loop:
            column = times(builder, loop.index, LANES)
            value = builder.fmul(load(builder, plus(builder, x, times(builder, column, 4)), VEC, 4), inverse)
            value = builder.select(usable_lanes, value, constant(0.0))
            rounded = builder.fptosi(call(builder, "llvm.nearbyint.v16f32", VEC, value), VEC_I32)
            if VNNI:
                bits = ir.Constant(VEC_I32, [8] * LANES)
                high = builder.ashr(builder.add(rounded, ir.Constant(VEC_I32, [128] * LANES)), bits)
                low = builder.sub(rounded, builder.shl(high, bits))
                store(builder, builder.trunc(high, VEC_I8), plus(builder, q, column))
                store(builder, builder.trunc(low, VEC_I8), plus(builder, q, column, count))
                builder.store(builder.add(builder.load(high_sum), high), high_sum)
                builder.store(builder.add(builder.load(low_sum), low), low_sum)
            else:
                store(builder, builder.trunc(rounded, VEC_I16), plus(builder, q, times(builder, column, 2)))
            # The sum of every second vector begins a group of 32; a last half group has no place and no reader.
            total = call(builder, "llvm.vector.reduce.add.v16i32", I32, rounded)
            group = builder.udiv(loop.index, I64(2))
            with builder.if_then(builder.icmp_unsigned("<", group, groups)):
                at = plus(builder, sums32, times(builder, group, 4))
                first = builder.icmp_unsigned("==", builder.and_(loop.index, I64(1)), I64(0))
                before = builder.select(first, I32(0), load(builder, at, I32, 4))
                store(builder, builder.add(before, total), at, 4)
        for offset, variable in ((4, high_sum), (8, low_sum)):
            total = call(builder, "llvm.vector.reduce.add.v16i32", I32, builder.load(variable))
            store(builder, builder.mul(total, I32(-128)), plus(builder, stats, offset), 4)
        source = sums32
        for size in (64, 128):
            target = plus(builder, source, times(builder, builder.udiv(count, I64(size // 2)), 4))
            with cgutils.for_range(builder, builder.udiv(count, I64(size)), intp=I64) as loop:
                pair = plus(builder, source, times(builder, loop.index, 8))
                both = builder.add(load(builder, pair, I32, 4), load(builder, plus(builder, pair, 4), I32, 4))
                store(builder, both, plus(builder, target, times(builder, loop.index, 4)), 4)
            source = target
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _add_products(builder: ir.IRBuilder, sums: Any, quad: ir.Value, x: list[ir.Value], signed: bool) -> None:
    """Add the products of a quad of weights (64 bytes) and four columns of one token to its sums.

    `x` are the addresses of the token's columns: one per limb.
    """
    if VNNI:
        if signed:
            quad = builder.xor(quad, ir.Constant(_BYTES, [-128] * QUAD_BYTES))  # w + 128, as an unsigned byte
        for limb in range(2):
            factor = builder.bitcast(splat(builder, load(builder, x[limb], I32)), _BYTES)
            variable = sums[limb][0]
            total = call(builder, "llvm.x86.avx512.vpdpbusd.512", VEC_I32, builder.load(variable), quad, factor)
            builder.store(total, variable)
        return
    kind = ir.VectorType(I16, _PAIRS)
    factor = builder.bitcast(splat(builder, load(builder, x[0], I64), _PAIRS // 4), kind)
    for part in range(_PARTS):
        lanes = list(range(part * _PAIRS, (part + 1) * _PAIRS))
        weights = builder.sext(select_lanes(builder, quad, quad, lanes), kind)
        variable = sums[0][part]
        builder.store(builder.add(builder.load(variable), _pair_products(builder, weights, factor)), variable)


def _pair_products(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The sums of neighbouring 16-bit products."""
    if AVX512:
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", _SUMS, a, b)
    if AVX2:
        return call(builder, "llvm.x86.avx2.pmadd.wd", _SUMS, a, b)
    wide = ir.VectorType(I32, _PAIRS)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = ([lane + i for lane in range(0, _PAIRS, 2)] for i in (0, 1))
    return builder.add(select_lanes(builder, products, products, even), select_lanes(builder, products, products, odd))


def _pairs_of_lanes(builder: ir.IRBuilder, parts: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """The first and the second sum of each of the 16 rows, as two vectors."""
    while len(parts) > 1:
        width = 2 * parts[0].type.count
        parts = [select_lanes(builder, a, b, list(range(width))) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    even, odd = ([lane + i for lane in range(0, 2 * LANES, 2)] for i in (0, 1))
    return select_lanes(builder, parts[0], parts[0], even), select_lanes(builder, parts[0], parts[0], odd)


def float_of_row_sums(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    """The 16 sums of a segment of rows with one scale, as floats: from limbs, or from the two sums of each row."""
    first, second = builder.sitofp(first, VEC), builder.sitofp(second, VEC)
    return fma(builder, first, constant(256.0), second) if VNNI else builder.fadd(first, second)


def whole_group_sums(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    """The 16 sums of a group, as integers."""
    if VNNI:
        first = builder.shl(first, ir.Constant(VEC_I32, [8] * LANES))
    return builder.add(first, second)


def add_group(
    builder: ir.IRBuilder, total: ir.Value, group: ir.Value, scale: ir.Value, minimum: ir.Value | None, x_sum: ir.Value
) -> ir.Value:
    """`total + scale * group + minimum * x_sum`: what a group of columns adds to the 16 results."""
    total = fma(builder, scale, builder.sitofp(group, VEC), total)
    if minimum is None:
        return total
    return fma(builder, minimum, splat(builder, builder.sitofp(x_sum, F32)), total)


def load_halves(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """16 float16 as float32."""
    return builder.fpext(load(builder, address, VEC_F16, 2), VEC)


def sums_after(builder: ir.IRBuilder, columns: ir.Value, group: ir.Value) -> ir.Value:
    """Where in `stats` the sums of groups begin, in bytes."""
    by_32, by_64 = builder.udiv(columns, I64(32)), builder.udiv(columns, I64(64))
    is_32 = builder.icmp_unsigned("==", group, I64(32))
    is_64 = builder.icmp_unsigned("==", group, I64(64))
    before = builder.select(is_32, I64(0), builder.select(is_64, by_32, builder.add(by_32, by_64)))
    return times(builder, builder.add(before, I64(STATS_HEADER)), 4)


def _make_tile(kind: int, tokens: int) -> Any:
    """An intrinsic `tile(weights, scale, minimum, bias, q, stats, stats_stride, columns, group, out, out_stride)`.

    The products of one block with `tokens` rows of activations, written to 16 floats at `out + 4 * t * out_stride`.

    Args:
        weights, scale, minimum: addresses of the block's; `scale` is float32 `[16]` for INT8, else float16
            `[columns / group, 16]`. `bias`: address of 16 floats or 0.
        q, stats: addresses of the first token's, `2 * columns` bytes and `stats_stride` bytes apart.
        columns: a multiple of 16 (INT8) or of `group`.
    """
    grouped = kind != INT8
    unroll = {1: 4, 2: 2}.get(tokens, 1) if kind == INT8 else 1

    @intrinsic
    def tile(
        typingctx: Any,
        weights: Any,
        scale: Any,
        minimum: Any,
        bias: Any,
        q: Any,
        stats: Any,
        stats_stride: Any,
        columns: Any,
        group: Any,
        out: Any,
        out_stride: Any,
    ) -> tuple[Any, Callable[..., Any]]:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            weights, scale, minimum, bias, q, stats, stats_stride, columns, group, out, out_stride = args
            totals = [slot(builder, VEC) for _ in range(tokens)]
            sums = [
                [[[slot(builder, _SUMS) for _ in range(_PARTS)] for _ in range(_LIMBS)] for _ in range(unroll)]
                for _ in range(tokens)
            ]
            q_at = [plus(builder, q, times(builder, columns, 2 * t)) for t in range(tokens)]
            stats_at = [plus(builder, stats, times(builder, stats_stride, t)) for t in range(tokens)]
            for variable in totals:
                builder.store(constant(0.0), variable)
            size = group if grouped else I64(ROW_SEGMENT)
            sums_at = sums_after(builder, columns, group) if grouped else None
            number = builder.udiv(plus(builder, columns, builder.sub(size, I64(1))), size)
            with cgutils.for_range(builder, number, intp=I64) as part:
                first = builder.mul(part.index, size)
                rest = builder.sub(columns, first)
                length = builder.select(builder.icmp_unsigned("<", rest, size), rest, size)
                for t in range(tokens):
                    for u in range(unroll):
                        for limb in range(_LIMBS):
                            start = ir.Constant(_SUMS, [0] * _SUMS.count)
                            if VNNI and kind == INT8 and u == 0:  # weights will be w + 128
                                start = splat(builder, load(builder, plus(builder, stats_at[t], 4 + 4 * limb), I32, 4))
                            for variable in sums[t][u][limb]:
                                builder.store(start, variable)
                quads = 2 if kind == INT4_GROUPS else 1
                with cgutils.for_range(builder, builder.udiv(length, I64(4 * quads * unroll)), intp=I64) as loop:
                    for u in range(unroll):
                        index = plus(builder, times(builder, loop.index, unroll), u)
                        column = plus(builder, first, times(builder, index, 4 * quads))
                        at = plus(builder, weights, times(builder, column, QUAD_BYTES // (4 * quads)))
                        if tokens == 1:
                            prefetch(builder, plus(builder, at, PREFETCH_BYTES))
                        raw = load(builder, at, _BYTES)
                        for half in range(quads):
                            quad = nibbles(builder, raw, half) if kind == INT4_GROUPS else raw
                            for t in range(tokens):
                                x = _limb_addresses(builder, q_at[t], column, columns, 4 * half)
                                _add_products(builder, sums[t][u], quad, x, kind != INT4_GROUPS)
                if grouped:
                    at = times(builder, part.index, 2 * LANES)
                    scales = load_halves(builder, plus(builder, scale, at))
                    minima = load_halves(builder, plus(builder, minimum, at)) if kind == INT4_GROUPS else None
                for t in range(tokens):
                    a, b = _two_sums(builder, sums[t])
                    if not grouped:
                        floats = float_of_row_sums(builder, a, b)
                        builder.store(builder.fadd(builder.load(totals[t]), floats), totals[t])
                        continue
                    x_sum = load(builder, plus(builder, stats_at[t], sums_at, times(builder, part.index, 4)), I32, 4)
                    whole = whole_group_sums(builder, a, b)
                    if VNNI and kind == INT8_GROUPS:  # weights were w + 128
                        whole = builder.sub(whole, splat(builder, builder.shl(x_sum, I32(7))))
                    total = add_group(builder, builder.load(totals[t]), whole, scales, minima, x_sum)
                    builder.store(total, totals[t])
            for t in range(tokens):
                total = builder.load(totals[t])
                at = plus(builder, out, times(builder, out_stride, 4 * t))
                finish(builder, total, stats_at[t], scale if kind == INT8 else None, bias, at)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), codegen

    return tile


def nibbles(builder: ir.IRBuilder, raw: ir.Value, half: int) -> ir.Value:
    if half:
        wide = ir.VectorType(I16, QUAD_BYTES // 2)
        shifted = builder.lshr(builder.bitcast(raw, wide), ir.Constant(wide, [4] * wide.count))
        raw = builder.bitcast(shifted, _BYTES)
    return builder.and_(raw, ir.Constant(_BYTES, [15] * QUAD_BYTES))


def _limb_addresses(
    builder: ir.IRBuilder, q: ir.Value, column: ir.Value, columns: ir.Value, offset: int
) -> list[ir.Value]:
    if VNNI:
        return [plus(builder, q, column, offset), plus(builder, q, columns, column, offset)]
    return [plus(builder, q, times(builder, column, 2), 2 * offset)]


def _two_sums(builder: ir.IRBuilder, unrolled: Any) -> tuple[ir.Value, ir.Value]:
    """The two vectors of 16 sums that a token's registers add up to."""
    added = []
    for limb in range(_LIMBS):
        for part in range(_PARTS):
            total = builder.load(unrolled[0][limb][part])
            for other in unrolled[1:]:
                total = builder.add(total, builder.load(other[limb][part]))
            added.append(total)
    return (added[0], added[1]) if VNNI else _pairs_of_lanes(builder, added)


def finish(
    builder: ir.IRBuilder, total: ir.Value, stats: ir.Value, scale: ir.Value | None, bias: ir.Value, out: ir.Value
) -> None:
    """Multiply 16 results by the scales of their activations and rows, add the bias, and store them."""
    x_scale = builder.bitcast(load(builder, stats, I32, 4), F32)
    total = builder.fmul(total, splat(builder, x_scale))
    if scale is not None:
        total = builder.fmul(total, load(builder, scale, VEC, 4))
    result = slot(builder, VEC)
    builder.store(total, result)
    with builder.if_then(builder.icmp_unsigned("!=", bias, I64(0))):
        builder.store(builder.fadd(total, load(builder, bias, VEC, 4)), result)
    store(builder, builder.load(result), out, 4)
