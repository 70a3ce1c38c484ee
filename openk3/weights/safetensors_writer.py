"""Writing a safetensors file one piece at a time.

The safetensors package wants all tensors in memory at once, and a dequantized checkpoint is eight times its GGUF. The
format is a length, a JSON header and the raw bytes, so it can be streamed: the header is known beforehand from the
shapes, and each tensor is written in slices of rows.

Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def write_float32(path: Path, shapes: dict[str, tuple[int, ...]], pieces: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write float32 tensors.

    Args:
        shapes: every tensor with its shape, in the order in which they come.
        pieces: consecutive runs of rows, each with the name of the tensor it belongs to; a tensor's runs follow each
            other and together have its shape.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    written = dict.fromkeys(shapes, 0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, values in pieces:
            file.write(np.ascontiguousarray(values, dtype="<f4").data)
            written[name] += values.size
        assert written == {name: math.prod(shape) for name, shape in shapes.items()}, "pieces do not fill the shapes"
        assert file.tell() == 8 + len(text) + end, "pieces are not in the order of the shapes"
