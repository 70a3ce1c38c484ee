"""Views of memory at an address, for compiled code."""

from __future__ import annotations

from typing import Any

from numba import carray, njit, types
from numba.extending import intrinsic

from openk3.kernels.code import F16, F32, load


def _make_pointer(element: Any) -> Any:
    """An intrinsic that turns an address into a pointer to `element`, a Numba type."""

    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return pointer


_pointer_f32, _pointer_i64, _pointer_u8 = map(_make_pointer, (types.float32, types.int64, types.uint8))


@intrinsic
def half_at(typingctx: Any, address: Any) -> Any:
    """The float16 at an address, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(load(builder, args[0], F16, 2), F32)

    return types.float32(types.int64), codegen


@njit(inline="always")
def u8_at(address, size):
    """`size` bytes at `address`."""
    return carray(_pointer_u8(address), (size,))


@njit(inline="always")
def f32_at(address, size):
    """`size` float32 at `address` as a one-dimensional array."""
    return carray(_pointer_f32(address), (size,))


@njit(inline="always")
def f32_rows_at(address, rows, size):
    """`[rows, size]` float32 at `address`."""
    return carray(_pointer_f32(address), (rows, size))


@njit(inline="always")
def i64_rows_at(address, rows, size):
    """`[rows, size]` int64 at `address`."""
    return carray(_pointer_i64(address), (rows, size))


@njit(inline="always")
def f32_cube_at(address, a, b, c):
    """`[a, b, c]` float32 at `address`."""
    return carray(_pointer_f32(address), (a, b, c))
