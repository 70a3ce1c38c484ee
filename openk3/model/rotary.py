"""Rotary positions in PyTorch, computed on the fly (`openk3.rotary` has the frequencies).

There is no buffer: one that is not part of a checkpoint comes back uninitialised from loaders that build the model on
the meta device.

Shapes: B batch, T positions, H heads, K head_dim, R = K / 2 rotary pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openk3.rotary import inverse_frequencies


def rotations(
    rope: dict[str, Any], head_dim: int, max_position_embeddings: int, position_ids_BT: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, `cos_BTR` and `sin_BTR` in `dtype`."""
    inv_freq_R, factor = inverse_frequencies(rope, head_dim, max_position_embeddings)
    angle_BTR = position_ids_BT[..., None].float() * torch.from_numpy(inv_freq_R).to(position_ids_BT.device)
    return (angle_BTR.cos() * factor).to(dtype), (angle_BTR.sin() * factor).to(dtype)


def rotate(x_BHTK: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Turn each pair (i, i + R) of every head by its angle."""
    first, second = x_BHTK.chunk(2, dim=-1)
    cos, sin = cos_BTR[:, None], sin_BTR[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
