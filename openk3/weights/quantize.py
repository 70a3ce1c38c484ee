"""Integer weights: how a float32 matrix becomes one, and back.

INT8 keeps one scale per row (the largest magnitude maps to 127) and rounds to nearest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def quantize_int8(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """
    Args:
        weight: `[..., N, K]` float32.

    Returns:
        `[..., N, K]` int8 and the scale of each row, `[..., N]` float32, so that `dequantize_int8` gives the rounded
        weights.
    """
    scale = np.abs(weight).max(-1) / np.float32(127)
    scale[scale == 0] = 1
    packed = np.rint(weight / scale[..., None]).astype(np.int8)
    return np.ascontiguousarray(packed), np.ascontiguousarray(scale.astype(np.float32))


def dequantize_int8(packed: NDArray[np.int8], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """The float32 weights that INT8 kernels compute with."""
    return packed.astype(np.float32) * scale[..., None]
