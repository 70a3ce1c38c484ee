"""Opening a GGUF file: its metadata as plain Python values and its tensors as views into the file.

The `gguf` package does the parsing, but it believes what the file claims: a count of 2^60 makes it loop until memory
is gone. So the header is first walked once with every count and length held against the size of the file; only a
header that survives is handed on.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType

from openk3.weights.errors import CheckpointError, reason

SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
)
# Far beyond any real file (vocabularies reach 3e5 tokens, merges 5e5), far below what would hurt.
_MAX_TENSORS = 100_000
_MAX_KEYS = 10_000
_MAX_ELEMENTS = 6_000_000
_SCALAR_BYTES = {
    GGUFValueType[name]: width
    for width, names in {
        1: ("UINT8", "INT8", "BOOL"),
        2: ("UINT16", "INT16"),
        4: ("UINT32", "INT32", "FLOAT32"),
        8: ("UINT64", "INT64", "FLOAT64"),
    }.items()
    for name in names
}


@dataclass(frozen=True)
class QuantizedTensor:
    """One tensor as it lies in the file.

    `shape` is in PyTorch's order (rows first); `rows` is the raw data, one row of the tensor per row of the array.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    rows: np.ndarray

    def dequantize(self) -> np.ndarray:
        """The values in float32, in `shape`."""
        return gguf.dequantize(self.rows, self.type).astype(np.float32, copy=False).reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file whose header has been checked. `tensors` are views into the memory-mapped file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, QuantizedTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


def open_gguf(path: Path) -> GGUFFile:
    """
    Raises:
        CheckpointError: the file is not GGUF, is truncated or damaged, or holds a tensor type that is not supported.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            _Walk(path, view).check()
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {reason(error)}") from error
    except Exception as error:  # what a damaged header makes the parser raise is not specified
        raise CheckpointError(f"{path} is a damaged GGUF file ({reason(error)}): download it again") from error
    if not isinstance(metadata.get("general.architecture"), str):
        raise CheckpointError(f"{path} has no general.architecture in its metadata: it is not a language model")
    tensors = {
        t.name: QuantizedTensor(t.name, tuple(int(n) for n in reversed(t.shape)), t.tensor_type, t.data)
        for t in reader.tensors
    }
    return GGUFFile(path, metadata, tensors)


class _Walk:
    """One pass over the header that trusts nothing it reads."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path, self.view, self.at, self.elements = path, view, 0, 0

    def check(self) -> None:
        if self.view[:4] != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with the bytes GGUF")
        self.at = 4
        version, tensors, keys = self.unpack("<IQQ")
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path} is GGUF version {version}: little-endian versions 2 and 3 are supported, so convert the "
                f"model again with a current llama.cpp"
            )
        self.limit("tensors", tensors, _MAX_TENSORS)
        self.limit("metadata keys", keys, _MAX_KEYS)
        alignment = 32
        for _ in range(keys):
            key = self.string()
            (kind,) = self.unpack("<I")
            start = self.at
            self.value(kind, key)
            if key == "general.alignment" and kind == GGUFValueType.UINT32:
                (alignment,) = struct.unpack_from("<I", self.view, start)
        if alignment == 0 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path} is damaged: general.alignment is {alignment}; download it again")
        infos = [self.tensor() for _ in range(tensors)]
        data = -(-self.at // alignment) * alignment
        for name, offset, length in infos:
            if data + offset + length > len(self.view):
                raise CheckpointError(
                    f"{self.path} is truncated: tensor {name} ends at byte {data + offset + length} and the file has "
                    f"{len(self.view)}; download it again"
                )

    def tensor(self) -> tuple[str, int, int]:
        """Name, offset within the data and length in bytes."""
        name = self.string()
        (rank,) = self.unpack("<I")
        if not 1 <= rank <= 4:
            raise CheckpointError(f"{self.path} is damaged: tensor {name} has {rank} dimensions; download it again")
        shape = self.unpack(f"<{rank}Q")
        kind, offset = self.unpack("<IQ")
        known = {int(t): t for t in SUPPORTED_TYPES}
        if kind not in known:
            names = {int(t): t.name for t in GGMLQuantizationType}
            raise CheckpointError(
                f"{self.path} stores tensor {name} as {names.get(kind, f'type {kind}')}: supported are "
                f"{', '.join(t.name for t in SUPPORTED_TYPES)}, so take another quantization of the model"
            )
        block, width = GGML_QUANT_SIZES[known[kind]]
        if shape[0] % block or 0 in shape:
            raise CheckpointError(
                f"{self.path} is damaged: tensor {name} has rows of {shape[0]} values in blocks of {block}; download "
                f"it again"
            )
        return name, offset, math.prod(shape) // block * width

    def value(self, kind: int, key: str) -> None:
        if kind == GGUFValueType.STRING:
            self.string()
        elif kind == GGUFValueType.ARRAY:
            item, count = self.unpack("<IQ")
            self.elements += count
            self.limit(f"entries in arrays up to {key}", self.elements, _MAX_ELEMENTS)
            if item == GGUFValueType.STRING:
                for _ in range(count):
                    self.string()
            else:
                self.skip(count * self.width(item, key))
        else:
            self.skip(self.width(kind, key))

    def width(self, kind: int, key: str) -> int:
        for known, width in _SCALAR_BYTES.items():
            if kind == known:
                return width
        raise CheckpointError(f"{self.path} is damaged: {key} has a value of type {kind}; download it again")

    def limit(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise CheckpointError(
                f"{self.path} is damaged: it claims {count} {what} (more than {most}); download it again"
            )

    def string(self) -> str:
        (length,) = self.unpack("<Q")
        start = self.at
        self.skip(length)
        return self.view[start : self.at].decode("utf-8", "replace") if length < 1000 else ""

    def unpack(self, form: str) -> tuple[Any, ...]:
        start = self.at
        self.skip(struct.calcsize(form))
        return struct.unpack_from(form, self.view, start)

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.view):
            raise CheckpointError(
                f"{self.path} is truncated: its header runs past the {len(self.view)} bytes of the file; download it "
                f"again"
            )
