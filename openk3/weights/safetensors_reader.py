"""Reading a safetensors file as numpy arrays over its memory map.

The safetensors package copies what it hands to numpy, and knows no bfloat16 there. The format is a length, a JSON
header and the raw bytes without gaps, so a map of the file and a view for each tensor are all it takes; the checks are
those of the package. Pages are read when they are used and are shared between processes, and writing to an array never
changes the file.

Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openk3.weights.errors import CheckpointError, reason

_MAX_HEADER_BYTES = 100_000_000


def _opaque(name: str, size: int) -> np.dtype[Any]:
    """A type that numpy does not compute with, told apart by its name."""
    return np.dtype([(name, f"<u{size}")])


BF16 = _opaque("BF16", 2)
_DTYPES: dict[str, np.dtype[Any]] = {
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{name: _opaque(name, 1) for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")},
    "BF16": BF16,
    "BOOL": np.dtype(np.bool_),
    "C64": np.dtype("<c8"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a file by name, mapped: those in bfloat16 with the opaque type `BF16`, see `to_float32`.

    Raises:
        CheckpointError: the file cannot be read or is not whole.
    """
    try:
        with path.open("rb") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        return _views(*_header(mapped))
    except (OSError, ValueError, RecursionError) as error:  # broken text, broken JSON, numbers that do not fit
        raise CheckpointError(f"{path} is damaged or truncated ({reason(error)}): download it again") from error


def _header(mapped: NDArray[np.uint8]) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    if len(mapped) < 8:
        raise ValueError("it has no header")
    (length,) = struct.unpack("<Q", mapped[:8].tobytes())
    if length > min(_MAX_HEADER_BYTES, len(mapped) - 8):
        raise ValueError(f"its header claims {length} bytes")
    header = json.loads(mapped[8 : 8 + length].tobytes())
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    return header, mapped[8 + length :]


def _views(header: dict[str, Any], data: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    arrays = {}
    spans = []
    for name, entry in header.items():
        dtype, shape, (start, end) = _entry(name, entry)
        if end - start != dtype.itemsize * math.prod(shape) or end > len(data):
            raise ValueError(f"tensor {name} of shape {shape} lies at bytes {start} to {end} of {len(data)}")
        arrays[name] = data[start:end].view(dtype).reshape(shape)
        spans.append((start, end))
    spans.sort()
    if [0, *(end for _, end in spans)] != [*(start for start, _ in spans), len(data)]:
        raise ValueError("its tensors overlap or leave gaps")
    return arrays


def _entry(name: str, entry: Any) -> tuple[np.dtype[Any], list[int], list[int]]:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"tensor {name} has the unknown type {dtype!r}")
    for numbers in (shape, span):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"the header is wrong about tensor {name}")
    assert shape is not None and span is not None
    if len(span) != 2:
        raise ValueError(f"the header is wrong about tensor {name}")
    return _DTYPES[dtype], shape, span


def type_name(array: NDArray[Any]) -> str:
    """What the format calls the type of an array."""
    return _NAMES[array.dtype]


def is_floating(array: NDArray[Any]) -> bool:
    """Whether an array holds numbers of 16 bits or more that `to_float32` takes."""
    return array.dtype == BF16 or array.dtype.kind == "f"


def to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """The numbers as float32: the array itself where they are that already and lie at a multiple of 4 bytes."""
    if array.dtype == BF16:
        return (array.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore"):
        return np.require(array, np.float32, ["ALIGNED", "C_CONTIGUOUS"])
