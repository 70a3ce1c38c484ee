"""Quantized matrices as tensors of a safetensors file, and back.

A quantized parameter P is stored as P (I8 or U8, in blocks as `formats.py` describes) and P.scale, with INT4 also
P.minimum; float32 parameters are stored as they are. `config.json` says with `quantization_config` that a checkpoint is
of this kind. Names are those of `K3ForCausalLM`'s parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openk3.parameters import is_matrix
from openk3.weights.errors import CheckpointError
from openk3.weights.formats import ALIGNMENT, Int4Matrix, Int8Matrix, Matrix, aligned
from openk3.weights.safetensors_writer import write_arrays

METHOD, VERSION = "openk3", 1
SCALE, MINIMUM = ".scale", ".minimum"
FORMATS = ("int4", "int8")


def quantization_config(format: str, group_size: int | None) -> dict[str, Any]:
    """What stands under `quantization_config` in `config.json`.

    Args:
        format: "int4" or "int8": what most matrices are.
        group_size: columns that share a scale, None for whole rows.
    """
    return {"quant_method": METHOD, "version": VERSION, "format": format, "group_size": group_size}


def check_quantization_config(value: Any, path: Path) -> None:
    """
    Args:
        value: `quantization_config` of the `config.json` at `path`.

    Raises:
        CheckpointError: it is not of this project, of a later version, or not whole.
    """
    method = value.get("quant_method") if isinstance(value, dict) else value
    if not isinstance(value, dict) or method != METHOD:
        raise CheckpointError(
            f"{path} describes weights quantized with {method!r} (quantization_config): take the unquantized "
            f"checkpoint or a GGUF file"
        )
    if value.get("version") != VERSION or value.get("format") not in FORMATS:
        raise CheckpointError(
            f"{path} has a quantization_config of version {value.get('version')!r} and format "
            f"{value.get('format')!r}, which this version of OpenK3 does not read: quantize the model again"
        )


def write_matrices(path: Path, matrices: Mapping[str, Matrix]) -> None:
    """Write a safetensors file of parameters by name; those in float32 may have any number of dimensions."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, matrix in matrices.items():
        if isinstance(matrix, Int8Matrix | Int4Matrix):
            arrays[name] = matrix.values
            arrays[name + SCALE] = matrix.scale
            if isinstance(matrix, Int4Matrix):
                arrays[name + MINIMUM] = matrix.minimum
        else:
            arrays[name] = matrix
    write_arrays(path, arrays)


def is_quantized(name: str, arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Whether a file's tensors hold the parameter `name` in the form of a quantized matrix."""
    return name in arrays and arrays[name].dtype in (np.int8, np.uint8)


def tensor_names(name: str, arrays: Mapping[str, NDArray[Any]]) -> list[str]:
    """The tensors that make up the quantized parameter `name`, whether they are all there or not."""
    minimum = [name + MINIMUM] if arrays[name].dtype == np.uint8 else []
    return [name, name + SCALE, *minimum]


def read_matrix(
    name: str, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], path: Path
) -> Int8Matrix | Int4Matrix:
    """One quantized parameter out of a file's tensors, which may be memory-mapped and stay so.

    Args:
        name: of a parameter that `is_quantized`.
        shape: the parameter's natural shape, `[..., N, K]`.
        path: of the file, for messages.

    Raises:
        CheckpointError: it is no matrix that quantizing may change, a tensor is missing, or they contradict each other
            or `shape`.
    """
    if not is_matrix(name, shape):
        raise CheckpointError(
            f"{path} has {name} quantized: norms, biases and routers must be floating-point numbers, quantize the "
            f"model again"
        )
    tensors = tensor_names(name, arrays)
    if missing := [tensor for tensor in tensors if tensor not in arrays]:
        raise CheckpointError(f"{path} lacks {missing[0]}, which belongs to {name}: quantize the model again")
    values, scale, *minimum = (_whole(arrays[tensor]) for tensor in tensors)
    try:
        matrix = Int4Matrix(values, scale, minimum[0], shape[-2]) if minimum else Int8Matrix(values, scale, shape[-2])
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged tensor {name} ({error}): quantize the model again") from error
    if matrix.shape != shape:
        raise CheckpointError(
            f"{path} has {name} of shape {list(matrix.shape)} where config.json asks for {list(shape)}: config.json "
            f"and weights do not belong together"
        )
    return matrix


def _whole(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself where the kernels can run on it, else a copy at an address they can: files of other writers."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy
