"""Reading safetensors files: the same tensors as the package reads, and the same files refused."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from openk3.weights import CheckpointError
from openk3.weights.safetensors_reader import is_floating, read_arrays, to_float32, type_name

FLOATING = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
OTHER = {
    torch.int8: "I8", torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@pytest.mark.parametrize("dtype", [*FLOATING, *OTHER])
def test_every_type(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randn(3, 5, 2).to(dtype)
    tensors = {"a": tensor, "b": torch.zeros(0, 4).to(dtype), "c": torch.ones(()).to(dtype)}
    save_file(tensors, tmp_path / "f.safetensors")
    found = read_arrays(tmp_path / "f.safetensors")
    assert {name: array.shape for name, array in found.items()} == {"a": (3, 5, 2), "b": (0, 4), "c": ()}
    assert type_name(found["a"]) == (FLOATING | OTHER)[dtype]
    assert found["a"].tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    assert is_floating(found["a"]) == (dtype in FLOATING)
    if dtype in FLOATING:
        assert np.array_equal(to_float32(found["a"]), tensor.float().numpy())
        assert to_float32(found["b"]).shape == (0, 4)


def test_float32_stays_in_the_file_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(64)}, tmp_path / "f.safetensors")
    before = (tmp_path / "f.safetensors").read_bytes()
    array = read_arrays(tmp_path / "f.safetensors")["a"]
    assert np.shares_memory(to_float32(array), array)
    array[0] = 1
    assert (tmp_path / "f.safetensors").read_bytes() == before


def test_a_tensor_at_an_odd_address_is_copied(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"a": entry}).encode()
    text += b" " * (1 - len(text) % 2)  # the data begin at an odd byte
    write(tmp_path / "f.safetensors", text, np.array([1, 2], np.float32).tobytes())
    array = to_float32(read_arrays(tmp_path / "f.safetensors")["a"])
    assert array.flags.aligned
    assert array.tolist() == [1, 2]


def write(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def entry(start: int, end: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]} | changes


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ([], "its header is no JSON object"),
    "no entry": ({"a": 1}, "tensor a has the unknown type None"),
    "unknown type": ({"a": entry(0, 16, dtype="F4")}, "tensor a has the unknown type 'F4'"),
    "no shape": ({"a": entry(0, 16, shape=None)}, "the header is wrong about tensor a"),
    "negative": ({"a": entry(0, 16, shape=[-2, -2])}, "the header is wrong about tensor a"),
    "a truth": ({"a": entry(0, 4, shape=[True])}, "the header is wrong about tensor a"),
    "three offsets": ({"a": entry(0, 16, data_offsets=[0, 8, 16])}, "the header is wrong about tensor a"),
    "another size": ({"a": entry(0, 16, shape=[5])}, r"tensor a of shape \[5\] lies at bytes 0 to 16 of 16"),
    "beyond the end": ({"a": entry(0, 32)}, r"tensor a of shape \[8\] lies at bytes 0 to 32 of 16"),
    "backwards": ({"a": entry(16, 0, shape=[0])}, "tensor a of shape"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 16)}, "its tensors overlap or leave gaps"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 16)}, "its tensors overlap or leave gaps"),
    "rest": ({"a": entry(0, 8)}, "its tensors overlap or leave gaps"),
    "many dimensions": ({"a": entry(0, 16, shape=[1] * 99 + [4])}, "."),
    "absurd": ({"a": entry(0, 16), "b": entry(16, 16, shape=[0, 2**70])}, "."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    header, message = REFUSED[case]
    write(tmp_path / "f.safetensors", json.dumps(header).encode(), bytes(16))
    with pytest.raises(CheckpointError, match=rf"f.safetensors is damaged or truncated \(.*{message}.*\): download"):
        read_arrays(tmp_path / "f.safetensors")


def test_what_the_package_refuses_is_refused(tmp_path: Path) -> None:
    """Whatever byte of a header is damaged: no file is read that the package does not read, nor read otherwise."""
    path = tmp_path / "f.safetensors"
    save_file({"a": torch.arange(6.0), "b": torch.arange(4).half(), "c": torch.ones(2, 2)}, path, {"format": "pt"})
    content = path.read_bytes()
    length = 8 + struct.unpack_from("<Q", content)[0]
    rng = random.Random(0)
    for _ in range(1500):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 2))):
            damaged[rng.randrange(length)] = rng.choice(b'0123456789"{}[]:, FU\x00\xff')
        path.write_bytes(damaged)
        try:
            ours: Any = read_arrays(path)
        except CheckpointError as error:
            assert "\n" not in str(error)
            continue
        with safe_open(path, framework="pt") as theirs:
            assert set(theirs.keys()) == set(ours)
            for name, array in ours.items():
                tensor = theirs.get_tensor(name)
                assert tuple(tensor.shape) == array.shape
                assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == array.tobytes()
