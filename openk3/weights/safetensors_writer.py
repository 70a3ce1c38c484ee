"""Writing a safetensors file one piece at a time, with its tensors where a memory map can be computed on.

The safetensors package wants all tensors in memory at once, and a dequantized checkpoint is eight times its GGUF. The
format is a length, a JSON header and the raw bytes without gaps, so it can be streamed: the header is known beforehand
from the shapes, and each tensor is written in slices of rows. The data begin at a multiple of 64 bytes.

Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64
_DTYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8"}


def write_float32(path: Path, shapes: dict[str, tuple[int, ...]], pieces: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write float32 tensors.

    Args:
        shapes: every tensor with its shape, in the order in which they come.
        pieces: consecutive runs of rows, each with the name of the tensor it belongs to; a tensor's runs follow each
            other and together have its shape.
    """
    _write(path, {name: (np.dtype(np.float32), shape) for name, shape in shapes.items()}, pieces)


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write float32, float16, int8 and uint8 arrays so that each begins at a multiple of 64 bytes.

    There are no gaps between tensors, so those whose size is a multiple of 64 come first, then those of 32, and so on.
    A packed matrix is always among the first; what follows begins at least at a multiple of its own odd size.
    """
    order = sorted(arrays, key=lambda name: -math.gcd(arrays[name].nbytes, _ALIGNMENT))
    layout = {name: (arrays[name].dtype, arrays[name].shape) for name in order}
    _write(path, layout, ((name, arrays[name]) for name in order))


def _write(
    path: Path, layout: dict[str, tuple[np.dtype[Any], tuple[int, ...]]], pieces: Iterable[tuple[str, np.ndarray]]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _DTYPES[dtype.name], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    written = dict.fromkeys(layout, 0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, values in pieces:
            file.write(np.ascontiguousarray(values, dtype=layout[name][0].newbyteorder("<")).data)
            written[name] += values.size
        assert written == {name: math.prod(shape) for name, (_, shape) in layout.items()}, (
            "pieces do not fill the shapes"
        )
        assert file.tell() == 8 + len(text) + end, "pieces are not in the order of the shapes"
