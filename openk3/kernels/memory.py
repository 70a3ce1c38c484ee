"""Views of memory at an address, for compiled code."""

from __future__ import annotations

from typing import Any

from numba import carray, njit, types
from numba.extending import intrinsic


def _make_pointer(element: Any) -> Any:
    """An intrinsic that turns an address into a pointer to `element`, a Numba type."""

    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return pointer


_pointer_f32, _pointer_i8 = _make_pointer(types.float32), _make_pointer(types.int8)


@njit(inline="always")
def f32_at(address, size):
    """`size` float32 at `address` as a one-dimensional array."""
    return carray(_pointer_f32(address), (size,))


@njit(inline="always")
def i8_at(address, size):
    """`size` int8 at `address` as a one-dimensional array."""
    return carray(_pointer_i8(address), (size,))
