"""The forms in which a weight matrix is held: float32, INT8 or INT4, laid out for the CPU kernels.

A block is 16 consecutive output rows, and within it the numbers that 16 vector lanes need together lie together: lane r
works on row r of the block, four columns (INT8) or eight (INT4) at a time. Rows are padded with zeros to whole blocks.
What a quantized model computes is defined as float32 arithmetic on `dequantize(...)`.

Shapes: N rows, K columns, B blocks = ceil(N / 16), G groups of g = K / G columns; "..." is nothing or the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

BLOCK = 16
GROUP_SIZES = (32, 64, 128)
ALIGNMENT = 64
_SLICE_VALUES = 2**20

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


@dataclass(frozen=True, eq=False)
class Int8Matrix:
    """`w = scale * value`, with one scale per row or one per row and group.

    Attributes:
        values: int8 `[..., B, K / 4, 16, 4]`: `values[b, j, r, i]` is row 16 b + r, column 4 j + i.
        scale: float32 `[..., B * 16]`, or float16 `[..., B, G, 16]`.
        rows: N.

    Raises:
        ValueError: dtypes or shapes that contradict each other.
    """

    values: NDArray[np.int8]
    scale: Floats | Halves
    rows: int

    def __post_init__(self) -> None:
        _check_values(self.values, np.int8, self.rows, "INT8")
        if self.scale.ndim == self.values.ndim - 1:
            _check_groups(self.scale, self.values, self.columns, "scale")
        else:
            *experts, blocks = self.values.shape[:-3]
            _check_array(self.scale, np.float32, (*experts, blocks * BLOCK), "scale")

    @property
    def columns(self) -> int:
        return 4 * self.values.shape[-3]

    @property
    def group_size(self) -> int | None:
        """g, or None where a row has one scale."""
        return self.columns // self.scale.shape[-2] if self.scale.ndim == self.values.ndim - 1 else None

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., N, K]`."""
        return (*self.values.shape[:-4], self.rows, self.columns)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes


@dataclass(frozen=True, eq=False)
class Int4Matrix:
    """`w = scale * q + minimum`, with q from 0 to 15 and one scale and minimum per row and group of 32, 64 or 128.

    Attributes:
        values: uint8 `[..., B, K / 8, 16, 4]`: the low half of `values[b, j, r, i]` is row 16 b + r, column 8 j + i,
            the high half column 8 j + 4 + i.
        scale, minimum: float16 `[..., B, G, 16]`.
        rows: N.

    Raises:
        ValueError: dtypes or shapes that contradict each other.
    """

    values: NDArray[np.uint8]
    scale: Halves
    minimum: Halves
    rows: int

    def __post_init__(self) -> None:
        _check_values(self.values, np.uint8, self.rows, "INT4")
        _check_groups(self.scale, self.values, self.columns, "scale")
        _check_groups(self.minimum, self.values, self.columns, "minimum")
        if self.minimum.shape != self.scale.shape:
            raise ValueError(f"scale {list(self.scale.shape)} and minimum {list(self.minimum.shape)} differ in shape")

    @property
    def columns(self) -> int:
        return 8 * self.values.shape[-3]

    @property
    def group_size(self) -> int:
        return self.columns // self.scale.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., N, K]`."""
        return (*self.values.shape[:-4], self.rows, self.columns)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes + self.minimum.nbytes


Matrix = Floats | Int8Matrix | Int4Matrix


def quantize_int8(weight: Floats) -> Int8Matrix:
    """Round to the nearest of 255 numbers; a row's largest magnitude becomes 127.

    Args:
        weight: `[..., N, K]`, K a multiple of 4.

    Raises:
        ValueError: values that are not finite, or another K.
    """
    values = np.empty(weight.shape, np.int8)
    scale = np.empty(weight.shape[:-1], np.float32)
    with np.errstate(invalid="ignore"):
        for rows in _row_slices(weight):
            part = weight[rows]
            scale[rows] = np.abs(part).max(-1) / np.float32(127)
            values[rows] = np.rint(part * reciprocal(scale[rows])[..., None])
    require_finite(scale)
    return pack_int8(values, scale)


def quantize_int4(weight: Floats, group_size: int) -> Int4Matrix:
    """Round to the nearest of 16 numbers, spread evenly from the smallest to the largest of each group.

    Args:
        weight: `[..., N, K]`, K a multiple of `group_size`.

    Raises:
        ValueError: values that are not finite or too large for float16, or another K.
    """
    check_group_size(group_size, weight.shape[-1])
    groups = weight.reshape(*weight.shape[:-1], -1, group_size)
    values = np.empty(groups.shape, np.uint8)
    scale = np.empty(groups.shape[:-1], np.float16)
    minimum = np.empty(groups.shape[:-1], np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in _row_slices(weight):
            part = groups[rows]
            least = part.min(-1).astype(np.float16)
            step = ((part.max(-1) - least) / np.float32(15)).astype(np.float16)
            values[rows] = nearest_int4(part, step, least)
            scale[rows], minimum[rows] = step, least
    require_finite(scale, minimum)
    return pack_int4(values.reshape(weight.shape), scale, minimum)


def nearest_int4(groups: Floats, scale: Halves, minimum: Halves) -> Floats:
    """The integers, as float32, that come closest to `groups` `[..., g]` with these scales and minima `[...]`."""
    steps = (groups - minimum.astype(np.float32)[..., None]) * reciprocal(scale.astype(np.float32))[..., None]
    rounded: Floats = np.clip(np.rint(steps, out=steps), 0, 15, out=steps)
    return rounded


def reciprocal(scale: Floats) -> Floats:
    """1 / scale, and 0 where the scale is 0: there every integer means the same."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def pack_int8(q: NDArray[np.int8], scale: Floats | Halves) -> Int8Matrix:
    """
    Args:
        q: `[..., N, K]`, K a multiple of 4.
        scale: float32 `[..., N]`, or float16 `[..., N, G]`.

    Raises:
        ValueError: dtypes or shapes that do not fit each other.
    """
    if q.dtype != np.int8 or q.ndim < 2 or q.shape[-1] % 4 or not q.size:
        raise ValueError(f"INT8 needs an int8 matrix whose columns are a multiple of 4, not {q.dtype} {list(q.shape)}")
    values = _to_blocks(np.ascontiguousarray(q).view(np.uint32)).view(np.int8)
    if scale.ndim == q.ndim:
        _check_array(scale, np.float16, (*q.shape[:-1], scale.shape[-1]), "scale")
        packed: Floats | Halves = _to_blocks(scale)
    else:
        _check_array(scale, np.float32, q.shape[:-1], "scale")
        packed = aligned((*q.shape[:-2], -(-q.shape[-2] // BLOCK) * BLOCK), np.float32)
        packed[..., : q.shape[-2]] = scale
        packed[..., q.shape[-2] :] = 0
    return Int8Matrix(values.reshape(*values.shape[:-1], BLOCK, 4), packed, q.shape[-2])


def pack_int4(q: NDArray[np.uint8], scale: Halves, minimum: Halves) -> Int4Matrix:
    """
    Args:
        q: `[..., N, K]` from 0 to 15.
        scale, minimum: float16 `[..., N, G]`.

    Raises:
        ValueError: dtypes or shapes that do not fit each other, or a value above 15.
    """
    if q.dtype != np.uint8 or q.ndim < 2 or not q.size:
        raise ValueError(f"INT4 needs a uint8 matrix, not {q.dtype} {list(q.shape)}")
    groups = scale.shape[-1] if scale.ndim == q.ndim else 0
    check_group_size(q.shape[-1] // groups if groups else 0, q.shape[-1])
    for name, array in (("scale", scale), ("minimum", minimum)):
        _check_array(array, np.float16, (*q.shape[:-1], groups), name)
    if q.max() > 15:
        raise ValueError(f"INT4 holds 0 to 15, not {q.max()}")
    words = np.ascontiguousarray(q).view(np.uint32)  # four columns each, so both halves of a byte meet in one operation
    values = _to_blocks(words[..., 0::2] | words[..., 1::2] << np.uint32(4)).view(np.uint8)
    return Int4Matrix(values.reshape(*values.shape[:-1], BLOCK, 4), _to_blocks(scale), _to_blocks(minimum), q.shape[-2])


@overload
def unpack(matrix: Int8Matrix) -> tuple[NDArray[np.int8], Floats | Halves]: ...
@overload
def unpack(matrix: Int4Matrix) -> tuple[NDArray[np.uint8], Halves, Halves]: ...
def unpack(matrix: Int8Matrix | Int4Matrix) -> tuple[NDArray[Any], ...]:
    """The arrays that `pack_int8` or `pack_int4` was given."""
    words = _from_blocks(_words(matrix.values), matrix.rows)
    if isinstance(matrix, Int8Matrix):
        grouped = matrix.group_size is not None
        scale = _from_blocks(matrix.scale, matrix.rows) if grouped else matrix.scale[..., : matrix.rows]
        return words.view(np.int8), scale
    halves = np.empty((*words.shape, 2), np.uint32)
    np.bitwise_and(words, np.uint32(0x0F0F0F0F), out=halves[..., 0])
    np.bitwise_and(words >> np.uint32(4), np.uint32(0x0F0F0F0F), out=halves[..., 1])
    q = halves.view(np.uint8).reshape(matrix.shape)
    return q, _from_blocks(matrix.scale, matrix.rows), _from_blocks(matrix.minimum, matrix.rows)


def dequantize(matrix: Matrix) -> Floats:
    """The numbers that a matrix stands for, `[..., N, K]`; a float32 matrix is returned itself."""
    return _scaled(*unpack(matrix)) if isinstance(matrix, Int8Matrix | Int4Matrix) else matrix


def _scaled(q: NDArray[Any], scale: NDArray[Any], minimum: Halves | None = None) -> Floats:
    """Natural arrays to float32. With float16 scales every product is exact: 11 and 4, or 11 and 8, bits of 24."""
    if scale.ndim < q.ndim:
        return q * scale[..., None]
    groups = q.reshape(*scale.shape, q.shape[-1] // scale.shape[-1]) * scale.astype(np.float32)[..., None]
    if minimum is not None:
        groups += minimum.astype(np.float32)[..., None]
    result: Floats = groups.reshape(q.shape)
    return result


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An empty array whose memory begins at a multiple of 64 bytes, as the kernels want it."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(count + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + count].view(dtype).reshape(shape)


def check_group_size(group_size: int, columns: int) -> None:
    if group_size not in GROUP_SIZES or columns % group_size:
        raise ValueError(
            f"INT4 groups are {', '.join(map(str, GROUP_SIZES))} columns wide and fill a row: {group_size} does not "
            f"fit {columns} columns"
        )


def require_finite(*arrays: NDArray[Any]) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("the weights are not all finite, or are too large for the scales: they cannot be quantized")


def _row_slices(weight: Floats) -> Iterator[tuple[Any, ...]]:
    """Indices of runs of rows, short enough for what is made of them to stay in the cache."""
    *experts, rows, columns = weight.shape
    step = max(1, _SLICE_VALUES // columns)
    for expert in np.ndindex(*experts):
        for start in range(0, rows, step):
            yield (*expert, slice(start, start + step))


def _to_blocks(units: NDArray[Any]) -> NDArray[Any]:
    """`[..., N, U]` to `[..., B, U, 16]`, padded with zeros."""
    *experts, rows, count = units.shape
    whole, tail = divmod(rows, BLOCK)
    blocks = aligned((*experts, whole + (tail > 0), count, BLOCK), units.dtype)
    full = units[..., : whole * BLOCK, :].reshape(*experts, whole, BLOCK, count)
    blocks[..., :whole, :, :] = full.swapaxes(-1, -2)
    if tail:
        blocks[..., whole, :, :tail] = units[..., whole * BLOCK :, :].swapaxes(-1, -2)
        blocks[..., whole, :, tail:] = 0
    return blocks


def _from_blocks(blocks: NDArray[Any], rows: int) -> NDArray[Any]:
    """`[..., B, U, 16]` to `[..., rows, U]`."""
    *experts, count, units, _ = blocks.shape
    return np.ascontiguousarray(blocks.swapaxes(-1, -2)).reshape(*experts, count * BLOCK, units)[..., :rows, :]


def _words(values: NDArray[Any]) -> NDArray[np.uint32]:
    """`[..., B, U, 16, 4]` bytes as words `[..., B, U, 16]`."""
    return np.ascontiguousarray(values).view(np.uint32)[..., 0]


def _check_values(values: NDArray[Any], dtype: type, rows: int, name: str) -> None:
    if values.dtype != dtype or values.ndim < 4 or values.shape[-2:] != (BLOCK, 4) or not values.size:
        raise ValueError(
            f"{name} values are {np.dtype(dtype)} [..., blocks, columns, {BLOCK}, 4], not {values.dtype} "
            f"{list(values.shape)}"
        )
    blocks = values.shape[-4]
    if not (blocks - 1) * BLOCK < rows <= blocks * BLOCK:
        raise ValueError(f"{name} values hold {blocks} blocks of {BLOCK} rows, which does not fit {rows} rows")


def _check_groups(array: NDArray[Any], values: NDArray[Any], columns: int, name: str) -> None:
    groups = array.shape[-2] if array.ndim >= 2 else 0
    _check_array(array, np.float16, (*values.shape[:-3], groups, BLOCK), name)
    if not groups or columns % groups or columns // groups not in GROUP_SIZES:
        raise ValueError(f"{name} has {groups} groups, which does not fit {columns} columns")


def _check_array(array: NDArray[Any], dtype: type, shape: tuple[int, ...], name: str) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"{name} must be {np.dtype(dtype)} {list(shape)} to fit the values, not {array.dtype} {list(array.shape)}"
        )
