"""The packed forms of matrices: what goes in comes out, and the layout is the one the kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from openk3.weights.formats import (
    ALIGNMENT,
    Int4Matrix,
    Int8Matrix,
    dequantize,
    pack_int4,
    pack_int8,
    quantize_int4,
    quantize_int8,
    unpack,
)

RNG = np.random.default_rng(0)
SHAPES = [(16, 128), (33, 256), (1, 128), (3, 20, 128), (2, 2, 17, 128)]


def weights(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


def halves(*shape: int) -> NDArray[np.float16]:
    return RNG.standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_round_trip_and_layout(shape: tuple[int, ...]) -> None:
    *experts, rows, columns = shape
    q = RNG.integers(-128, 128, shape).astype(np.int8)
    scale = weights(*shape[:-1])
    matrix = pack_int8(q, scale)
    assert matrix.shape == shape and matrix.rows == rows and matrix.columns == columns and matrix.group_size is None
    assert matrix.values.shape == (*experts, -(-rows // 16), columns // 4, 16, 4)
    assert matrix.nbytes == matrix.values.nbytes + matrix.scale.nbytes
    for n, k in ((0, 0), (rows - 1, columns - 1), (rows // 2, 17)):
        assert np.array_equal(matrix.values[..., n // 16, k // 4, n % 16, k % 4], q[..., n, k])
    back, scales = unpack(matrix)
    assert np.array_equal(back, q) and np.array_equal(scales, scale)
    assert np.array_equal(dequantize(matrix), q.astype(np.float32) * scale[..., None])


@pytest.mark.parametrize("shape", SHAPES)
def test_grouped_int8_round_trip(shape: tuple[int, ...]) -> None:
    q, scale = RNG.integers(-128, 128, shape).astype(np.int8), halves(*shape[:-1], shape[-1] // 32)
    matrix = pack_int8(q, scale)
    assert matrix.group_size == 32 and matrix.shape == shape
    back, scales = unpack(matrix)
    assert np.array_equal(back, q) and np.array_equal(scales, scale)
    assert np.array_equal(dequantize(matrix), q * np.repeat(scale.astype(np.float32), 32, axis=-1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_round_trip_and_layout(shape: tuple[int, ...], group: int) -> None:
    *experts, rows, columns = shape
    q = RNG.integers(0, 16, shape).astype(np.uint8)
    scale, minimum = halves(*shape[:-1], columns // group), halves(*shape[:-1], columns // group)
    matrix = pack_int4(q, scale, minimum)
    assert matrix.shape == shape and matrix.columns == columns and matrix.group_size == group
    assert matrix.values.shape == (*experts, -(-rows // 16), columns // 8, 16, 4)
    for n, k in ((0, 0), (rows - 1, columns - 1), (rows // 2, 21)):
        byte = matrix.values[..., n // 16, k // 8, n % 16, k % 4]
        assert np.array_equal(byte >> 4 if k % 8 >= 4 else byte & 15, q[..., n, k])
        assert np.array_equal(matrix.scale[..., n // 16, k // group, n % 16], scale[..., n, k // group])
    for found, given in zip(unpack(matrix), (q, scale, minimum), strict=True):
        assert np.array_equal(found, given)
    wide = [np.repeat(a.astype(np.float32), group, axis=-1) for a in (scale, minimum)]
    assert np.array_equal(dequantize(matrix), q * wide[0] + wide[1])


def test_padding_is_zero_and_memory_is_aligned() -> None:
    eight, four = quantize_int8(weights(3, 21, 64)), quantize_int4(weights(3, 21, 64), 32)
    assert not eight.values[:, -1, :, 5:].any() and not eight.scale[:, 21:].any()
    assert not four.values[:, -1, :, 5:].any() and not four.scale[:, -1, :, 5:].any()
    for array in (eight.values, eight.scale, four.values, four.scale, four.minimum):
        assert array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous


@pytest.mark.parametrize("shape", SHAPES)
def test_quantization_rounds_to_nearest(shape: tuple[int, ...]) -> None:
    weight = weights(*shape)
    weight[..., 0, :] = 0
    eight = quantize_int8(weight)
    assert (np.abs(dequantize(eight) - weight) <= eight.scale[..., : shape[-2], None] * 0.5001).all()
    four = quantize_int4(weight, 32)
    step = np.repeat(unpack(four)[1].astype(np.float32), 32, axis=-1)
    assert (np.abs(dequantize(four) - weight) <= step * 0.51 + 2e-3).all()
    assert not dequantize(eight)[..., 0, :].any() and not dequantize(four)[..., 0, :].any()


def test_a_constant_group_is_exact() -> None:
    weight = np.full((2, 64), 0.25, np.float32)
    assert np.array_equal(dequantize(quantize_int4(weight, 32)), weight)


BAD = np.zeros((2, 64), np.uint8)
SCALE = np.zeros((2, 2), np.float16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_int4(weights(2, 48), 32), "32 does not fit 48 columns"),
        (lambda: quantize_int4(weights(2, 64), 16), "16 does not fit 64 columns"),
        (lambda: quantize_int8(np.full((2, 16), np.nan, np.float32)), "cannot be quantized"),
        (lambda: quantize_int4(np.full((2, 32), 1e6, np.float32), 32), "cannot be quantized"),
        (lambda: pack_int8(BAD, SCALE[:, 0]), "INT8 needs an int8 matrix"),
        (lambda: pack_int8(BAD.view(np.int8), SCALE[:, 0]), "scale must be float32"),
        (lambda: pack_int4(BAD + 16, SCALE, SCALE), "INT4 holds 0 to 15, not 16"),
        (lambda: pack_int4(BAD, SCALE[:, :0], SCALE), "0 does not fit 64 columns"),
        (lambda: pack_int4(BAD, SCALE, SCALE[:1]), "minimum must be float16"),
        (lambda: Int4Matrix(np.zeros((1, 8, 4, 16), np.uint8), SCALE, SCALE, 16), "INT4 values are uint8"),
        (lambda: Int8Matrix(np.zeros((1, 8, 16, 4), np.int8), np.zeros(16, np.float32), 17), "not fit 17 rows"),
        (lambda: Int8Matrix(np.zeros((1, 8, 16, 4), np.int8), np.zeros(15, np.float32), 16), "scale must be float32"),
        (
            lambda: Int8Matrix(np.zeros((1, 8, 16, 4), np.int8), np.zeros((1, 3, 16), np.float16), 16),
            "scale has 3 groups, which does not fit 32 columns",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
