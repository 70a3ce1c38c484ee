"""The 4- and 8-bit numbers of a GGUF file as our own matrices, bit for bit.

A file of Q4_0, Q4_1 and Q8_0 tensors needs no quantizing and no dequantizing: a block of 32 values with one float16
scale is a group of ours. Both forms stand for the same float32 numbers.

Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from openk3.weights.errors import CheckpointError
from openk3.weights.formats import Matrix, pack_int4, pack_int8, require_finite
from openk3.weights.gguf_config import Json, hf_config
from openk3.weights.gguf_convert import Target, targets
from openk3.weights.gguf_file import GGUFFile

Bytes = NDArray[np.uint8]
_GROUP_SIZE = 32
_HALF = 2  # bytes of a float16, with which every block begins
_PACKED = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0)
_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


def is_exact(file: GGUFFile) -> bool:
    """Whether every matrix of the file can be taken over as it is, and at least one of them is quantized."""
    kinds = {tensor.type for tensor in file.tensors.values()}
    return kinds <= {*_PACKED, *_PLAIN} and not kinds.isdisjoint(_PACKED)


def exact_matrices(file: GGUFFile) -> tuple[Json, Iterator[tuple[str, Matrix]]]:
    """
    Returns:
        The `config.json` of the model's own family, and every parameter of `K3ForCausalLM` by name: Q4 as INT4, Q8_0
        as INT8, both in groups of 32, the rest as float32.

    Raises:
        CheckpointError: the file does not fit a supported family, or holds matrices of other types.
    """
    config = hf_config(file)
    plan = targets(file, config)  # of whose numbers to take away nothing is: our norms are what Gemma's are with theirs
    for one in plan:
        if one.source.type not in (*_PACKED, *_PLAIN):
            raise CheckpointError(
                f"{file.path} holds {one.source.name} as {one.source.type.name}, which cannot be taken over exactly: "
                f"Q4_0, Q4_1 and Q8_0 can; choose --format int4 or int8"
            )
    return config, ((one.name, _matrix(one)) for one in plan)


def _matrix(one: Target) -> Matrix:
    source = one.source
    if source.type in _PLAIN:
        return source.dequantize().copy()  # the file's map is read-only
    block = gguf.GGML_QUANT_SIZES[source.type][1]
    blocks: Bytes = np.ascontiguousarray(source.rows).reshape(*source.shape[:-1], -1, block)
    scale = _halves(blocks, 0)
    try:
        if source.type == GGMLQuantizationType.Q8_0:
            require_finite(scale)
            return pack_int8(blocks[..., _HALF:].reshape(source.shape).view(np.int8), scale)
        if source.type == GGMLQuantizationType.Q4_1:
            minimum, nibbles = _halves(blocks, _HALF), blocks[..., 2 * _HALF :]
        else:  # Q4_0 counts from -8, and eight times a float16 is one
            minimum, nibbles = scale * np.float16(-8), blocks[..., _HALF:]
        require_finite(scale, minimum)
        q = np.concatenate([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=-1)
        return pack_int4(q.reshape(source.shape), scale, minimum)
    except ValueError as error:
        raise CheckpointError(f"{source.name} of the GGUF file is damaged ({error}): download it again") from error


def _halves(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The float16 that each block has at byte `at`: `[..., N, G]`."""
    return np.ascontiguousarray(blocks[..., at : at + _HALF]).view("<f2")[..., 0].astype(np.float16)
