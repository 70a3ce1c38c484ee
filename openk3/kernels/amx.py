"""Integer products in AMX tiles: 2 blocks of weights by 16 rows of activations at a time.

Eight tile registers of 1 KiB hold the sums of two blocks for both bytes of the activations (0 to 3), the high and low
bytes of 16 rows (4, 5), and both blocks' weights (6, 7). A block is stored just as a tile wants it: 16 quads of 64
bytes. The sums are the same integers that the tiles of `openk3.kernels.integers` find, and become floats the same way.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, "AMX".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from openk3.kernels.code import I8, I32, I64, LANES, VEC, VEC_I32, call, constant, load, plus, store, times
from openk3.kernels.integers import (
    add_group,
    finish,
    float_of_row_sums,
    load_halves,
    nibbles,
    sums_after,
    whole_group_sums,
)

ROWS = 16  # rows of activations of a tile
BLOCKS = 2
TILE_BYTES = 1024
# Room that `products` wants: four tiles of sums and two of floats.
SCRATCH_BYTES = 6 * TILE_BYTES

_PTR, _VOID = I8.as_pointer(), ir.VoidType()
_BYTES = ir.VectorType(I8, 64)


def tile_configs() -> NDArray[np.uint8]:
    """`[2, 64]`: what `ldtilecfg` wants for steps of 64 columns, and for steps of 32."""
    configs = np.zeros((2, 64), np.uint8)
    for config, columns in zip(configs, (64, 32), strict=True):
        config[0] = 1
        widths, heights = config[16:32].view(np.uint16), config[48:56]
        widths[:], heights[:] = 64, 16
        widths[4:6] = columns  # rows of activations
        heights[6:8] = columns // 4  # quads of weights
    return configs


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, _PTR)


@intrinsic
def configure(typingctx: Any, config: Any) -> tuple[Any, Callable[..., Any]]:
    """`configure(address)` makes this thread's tile registers ready."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        call(builder, "llvm.x86.ldtilecfg", _VOID, _pointer(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release(typingctx: Any) -> tuple[Any, Callable[..., Any]]:
    """`release()` gives the tile registers back, so that the system need not save them."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tilerelease", _VOID)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def expand_nibbles(typingctx: Any, source: Any, target: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
    """`expand_nibbles(source, target, count)` writes the two quads of each of `count` times 64 bytes as bytes."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, target, count = args
        with cgutils.for_range(builder, count, intp=I64) as loop:
            raw = load(builder, plus(builder, source, times(builder, loop.index, 64)), _BYTES)
            at = plus(builder, target, times(builder, loop.index, 128))
            for half in range(2):
                store(builder, nibbles(builder, raw, half), plus(builder, at, 64 * half))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


def _make_products(grouped: bool, has_minimum: bool) -> Any:
    """An intrinsic `products(weights, weights_step, scale, minimum, scale_step, bias, bias_step, q, stats,
    stats_stride, tokens, columns, group, step, out, out_stride, blocks, scratch)`.

    The products of one or two blocks with up to 16 rows of activations, as of `openk3.kernels.integers`' tile.

    Args:
        weights, scale, minimum, bias: of the first block; those of the second follow `..._step` bytes behind (0 if
            there is none). Weights are bytes, nibbles must have been expanded.
        q: of 16 rows, whatever the last ones hold; `tokens` of them are wanted.
        group: columns per scale; `step`: 64 or 32 columns per tile, which divides it and is configured.
        scratch: `SCRATCH_BYTES` bytes.
    """

    @intrinsic
    def products(
        typingctx: Any,
        weights: Any,
        weights_step: Any,
        scale: Any,
        minimum: Any,
        scale_step: Any,
        bias: Any,
        bias_step: Any,
        q: Any,
        stats: Any,
        stats_stride: Any,
        tokens: Any,
        columns: Any,
        group: Any,
        step: Any,
        out: Any,
        out_stride: Any,
        blocks: Any,
        scratch: Any,
    ) -> tuple[Any, Callable[..., Any]]:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            (
                weights,
                weights_step,
                scale,
                minimum,
                scale_step,
                bias,
                bias_step,
                q,
                stats,
                stats_stride,
                tokens,
                columns,
                group,
                step,
                out,
                out_stride,
                blocks,
                scratch,
            ) = args
            line, q_stride = I64(64), times(builder, columns, 2)
            floats = plus(builder, scratch, 4 * TILE_BYTES)
            with cgutils.for_range(builder, I64(BLOCKS * ROWS), intp=I64) as loop:
                store(builder, constant(0.0), plus(builder, floats, times(builder, loop.index, 64)))
            sums_at = sums_after(builder, columns, group)
            with cgutils.for_range(builder, builder.udiv(columns, group), intp=I64) as part:
                for tile in range(4):
                    call(builder, "llvm.x86.tilezero", _VOID, I8(tile))
                first = builder.mul(part.index, group)
                with cgutils.for_range(builder, builder.udiv(group, step), intp=I64) as loop:
                    column = builder.add(first, builder.mul(loop.index, step))
                    quads = plus(builder, weights, times(builder, column, 16))
                    for tile, at, stride in (
                        (4, plus(builder, q, column), q_stride),
                        (5, plus(builder, q, columns, column), q_stride),
                        (6, quads, line),
                        (7, plus(builder, quads, weights_step), line),
                    ):
                        call(builder, "llvm.x86.tileloadd64", _VOID, I8(tile), _pointer(builder, at), stride)
                    for tile in range(4):
                        block, limb = divmod(tile, 2)
                        call(builder, "llvm.x86.tdpbssd", _VOID, I8(tile), I8(4 + limb), I8(6 + block))
                for tile in range(4):
                    at = _pointer(builder, plus(builder, scratch, tile * TILE_BYTES))
                    call(builder, "llvm.x86.tilestored64", _VOID, I8(tile), at, line)
                for block in range(BLOCKS):
                    if grouped:
                        at = plus(builder, times(builder, part.index, 2 * LANES), times(builder, scale_step, block))
                        scales = load_halves(builder, plus(builder, scale, at))
                        minima = load_halves(builder, plus(builder, minimum, at)) if has_minimum else None
                    with cgutils.for_range(builder, tokens, intp=I64) as loop:
                        row = times(builder, loop.index, 64)
                        at = plus(builder, scratch, row, 2 * block * TILE_BYTES)
                        high, low = load(builder, at, VEC_I32), load(builder, plus(builder, at, TILE_BYTES), VEC_I32)
                        total_at = plus(builder, floats, row, block * TILE_BYTES)
                        total = load(builder, total_at, VEC)
                        if grouped:
                            stats_at = plus(builder, stats, builder.mul(loop.index, stats_stride), sums_at)
                            x_sum = load(builder, plus(builder, stats_at, times(builder, part.index, 4)), I32, 4)
                            whole = whole_group_sums(builder, high, low)
                            total = add_group(builder, total, whole, scales, minima, x_sum)
                        else:
                            total = builder.fadd(total, float_of_row_sums(builder, high, low))
                        store(builder, total, total_at)
            with cgutils.for_range(builder, blocks, intp=I64) as block:
                row_scale = None if grouped else plus(builder, scale, builder.mul(block.index, scale_step))
                row_bias = plus(builder, bias, builder.mul(block.index, bias_step))
                out_at = plus(builder, out, times(builder, block.index, 64))
                floats_at = plus(builder, floats, times(builder, block.index, TILE_BYTES))
                with cgutils.for_range(builder, tokens, intp=I64) as loop:
                    total = load(builder, plus(builder, floats_at, times(builder, loop.index, 64)), VEC)
                    stats_at = plus(builder, stats, builder.mul(loop.index, stats_stride))
                    target = plus(builder, out_at, times(builder, builder.mul(loop.index, out_stride), 4))
                    finish(builder, total, stats_at, row_scale, row_bias, target)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 18), codegen

    return products


products_int8 = _make_products(grouped=False, has_minimum=False)
products_int8_groups = _make_products(grouped=True, has_minimum=False)
products_int4_groups = _make_products(grouped=True, has_minimum=True)
