"""Small pieces of LLVM code that the kernels are written with: vectors, loads, broadcasts, sums over lanes.

A vector of 16 floats is one AVX-512 register, two AVX2 registers or four of NEON or SSE; LLVM maps them. Addresses are
64-bit integers, so that weights may lie anywhere, in a memory-mapped file for instance.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16
F16, F32 = ir.HalfType(), ir.FloatType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
VEC, VEC_F16 = ir.VectorType(F32, LANES), ir.VectorType(F16, LANES)
VEC_I8, VEC_I16, VEC_I32 = (ir.VectorType(kind, LANES) for kind in (I8, I16, I32))


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 1) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def plus(builder: ir.IRBuilder, address: ir.Value, *offsets: ir.Value | int) -> ir.Value:
    """`address` and the offsets added up; plain integers are constants."""
    for offset in offsets:
        address = builder.add(address, I64(offset) if isinstance(offset, int) else offset)
    return address


def times(builder: ir.IRBuilder, value: ir.Value, factor: int) -> ir.Value:
    return builder.mul(value, I64(factor))


def splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
    vector = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def constant(value: float) -> ir.Constant:
    return ir.Constant(VEC, [F32(value)] * LANES)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """A call of an LLVM intrinsic."""
    kind = ir.FunctionType(result, [value.type for value in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call(builder, f"llvm.fma.v{LANES}f32", VEC, a, b, c)


def select_lanes(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    """The vector of the given lanes of `a` followed by `b`."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def sum_lanes(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
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
            halved.append(
                builder.fadd(select_lanes(builder, a, b, low), select_lanes(builder, a, b, [i + half for i in low]))
            )
        groups = groups if len(vectors) == 1 else 2 * groups
        vectors, width = halved, half
    return vectors[0]


def slot(builder: ir.IRBuilder, kind: ir.Type) -> Any:
    """A variable of the function's entry block, which LLVM keeps in a register."""
    return cgutils.alloca_once(builder, kind)


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line at `address`, which may lie behind the end of anything: a prefetch cannot fault."""
    at = builder.inttoptr(address, I8.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), at, I32(0), I32(3), I32(1))
