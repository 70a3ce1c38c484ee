"""Quantized matrices in a safetensors file: they come back as they were, aligned, and damage is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from openk3.weights import CheckpointError
from openk3.weights.formats import Int4Matrix, Matrix, dequantize, pack_int8, quantize_int4, quantize_int8
from openk3.weights.quantized_file import (
    check_quantization_config,
    is_quantized,
    quantization_config,
    read_matrix,
    write_matrices,
)

RNG = np.random.default_rng(0)
SHAPES = {"eight": (20, 64), "grouped": (7, 64), "four": (33, 96), "experts": (3, 40, 64), "norm": (64,), "odd": (5,)}


def weights(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture
def matrices() -> dict[str, Matrix]:
    grouped = pack_int8(RNG.integers(-128, 128, SHAPES["grouped"]).astype(np.int8), weights(7, 2).astype(np.float16))
    return {
        "odd": weights(5),
        "norm": weights(64),
        "four": quantize_int4(weights(*SHAPES["four"]), 32),
        "grouped": grouped,
        "experts": quantize_int4(weights(*SHAPES["experts"]), 64),
        "eight": quantize_int8(weights(*SHAPES["eight"])),
    }


def test_round_trip(matrices: dict[str, Matrix], tmp_path: Path) -> None:
    write_matrices(path := tmp_path / "model.safetensors", matrices)
    arrays = load_file(path)
    assert set(arrays) == {"odd", "norm", "four", "four.scale", "four.minimum", "grouped", "grouped.scale"} | {
        "experts", "experts.scale", "experts.minimum", "eight", "eight.scale",
    }  # fmt: skip
    for name, matrix in matrices.items():
        if is_quantized(name, arrays):
            back: Matrix = read_matrix(name, arrays, SHAPES[name], path)
            assert type(back) is type(matrix) and np.array_equal(dequantize(back), dequantize(matrix))
        else:
            assert np.array_equal(arrays[name], matrix)
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("four").shape == (3, 12, 16, 4)


def test_tensors_begin_where_kernels_can_read_them(matrices: dict[str, Matrix], tmp_path: Path) -> None:
    write_matrices(path := tmp_path / "model.safetensors", matrices)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % 64 == 0
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}
    assert all(start % 64 == 0 for name, start in starts.items() if header[name]["dtype"] in ("I8", "U8"))
    assert all(start % 32 == 0 for name, start in starts.items() if name != "odd")
    mapped = np.memmap(path, np.uint8, "r")
    at, (_, end) = starts["four"], header["four"]["data_offsets"]
    values = mapped[at : 8 + length + end].reshape(header["four"]["shape"])
    arrays = {"four": values, **{name: array for name, array in load_file(path).items() if name != "four"}}
    matrix = read_matrix("four", arrays, SHAPES["four"], path)
    assert isinstance(matrix, Int4Matrix) and np.shares_memory(matrix.values, mapped)


def test_misaligned_arrays_are_copied(matrices: dict[str, Matrix], tmp_path: Path) -> None:
    write_matrices(path := tmp_path / "model.safetensors", matrices)
    arrays = load_file(path)
    memory = np.empty(arrays["eight"].nbytes + 1, np.int8)
    shifted = memory[1:].reshape(arrays["eight"].shape)
    shifted[...] = arrays["eight"]
    matrix = read_matrix("eight", arrays | {"eight": shifted}, SHAPES["eight"], path)
    assert matrix.values.ctypes.data % 64 == 0 and np.array_equal(matrix.values, shifted)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("four", {"four.scale": None}, "lacks four.scale, which belongs to four"),
        ("four", {"four.minimum": None}, "lacks four.minimum"),
        ("four", {"four.scale": np.zeros((3, 3, 16), np.float32)}, "damaged tensor four .scale must be float16"),
        ("four", {"four.minimum": np.zeros((3, 6, 16), np.float16)}, "damaged tensor four .minimum has 6 groups"),
        ("four", {"four": np.zeros((3, 12, 64), np.uint8)}, "damaged tensor four .INT4 values are uint8"),
        ("four", {"four": np.zeros((2, 12, 16, 4), np.uint8)}, "damaged tensor four .INT4 values hold 2 blocks"),
        ("eight", {"eight": np.zeros((2, 8, 16, 4), np.int8)}, r"of shape \[20, 32\] where config.json asks"),
        ("eight", {"eight.scale": np.zeros(20, np.float32)}, "damaged tensor eight .scale must be float32"),
    ],
)
def test_damage_is_named(
    name: str, change: dict[str, Any], message: str, matrices: dict[str, Matrix], tmp_path: Path
) -> None:
    write_matrices(path := tmp_path / "model.safetensors", matrices)
    arrays = {key: value for key, value in (load_file(path) | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=message) as caught:
        read_matrix(name, arrays, SHAPES[name], path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.gate.weight", (16, 64)),
        ("model.layers.0.mlp.gate.e_score_correction_bias", (16,)),
        ("model.norm.weight", (64,)),
    ],
)
@pytest.mark.parametrize("quantize", [quantize_int8, lambda weight: quantize_int4(weight, 32)])
def test_what_must_stay_exact_is_refused(name: str, shape: tuple[int, ...], quantize: Any, tmp_path: Path) -> None:
    """Nothing computes with a quantized router or norm: the runners would take its integers for something else."""
    write_matrices(path := tmp_path / "model.safetensors", {name: quantize(weights(16, 64))})
    with pytest.raises(CheckpointError, match=f"{path} has {name} quantized: norms, biases and routers"):
        read_matrix(name, load_file(path), shape, path)


def test_quantization_config(tmp_path: Path) -> None:
    check_quantization_config(quantization_config("int4", 64), tmp_path)
    for value, message in (
        ({"quant_method": "gptq"}, "quantized with 'gptq'"),
        ("awq", "quantized with 'awq'"),
        ("openk3", "quantized with 'openk3'"),
        (quantization_config("int4", 64) | {"version": 2}, "version 2"),
        (quantization_config("int3", 64), "format 'int3'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_quantization_config(value, tmp_path)
