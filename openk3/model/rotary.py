"""Rotary positions (RoFormer, arXiv:2104.09864), computed on the fly from the configuration.

There is no table and no buffer: frequencies are a handful of numbers, positions of a million-token context are not, and
a buffer that is not part of a checkpoint comes back uninitialised from loaders that build the model on the meta device.

Shapes: B batch, T positions, H heads, K head_dim, R = K / 2 rotary pairs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(rope: dict[str, Any], head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """Rotation per position of each pair, and the factor on cosine and sine (1 except for YaRN).

    Args:
        rope: one entry of `K3Config.rope_parameters`, with `rope_type` one of `openk3.config.ROPE_TYPES`.

    Returns:
        `inv_freq_R` in radians per position, float32; the attention factor.

    Sources: linear (position interpolation, arXiv:2306.15595), llama3 (Llama 3.1 release), yarn (arXiv:2309.00071).
    """
    pairs_R = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq_R = 1.0 / (rope["rope_theta"] ** pairs_R)
    trained = rope.get("original_max_position_embeddings") or max_position_embeddings
    match rope["rope_type"]:
        case "default":
            return inv_freq_R, 1.0
        case "linear":
            return inv_freq_R / rope["factor"], 1.0
        case "llama3":
            return _llama3(inv_freq_R, rope, trained), 1.0
        case "yarn":
            return _yarn(inv_freq_R, rope, trained, head_dim, max_position_embeddings)
    raise ValueError(f"rope_type is {rope['rope_type']!r}: not a supported kind of rotary position")


def _llama3(inv_freq_R: Tensor, rope: dict[str, Any], trained: int) -> Tensor:
    """Slow rotations are stretched by `factor`, fast ones kept, those between blended."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength_R = 2 * math.pi / inv_freq_R
    keep_R = ((trained / wavelength_R - low) / (high - low)).clamp(0, 1)
    return (1 - keep_R) * inv_freq_R / rope["factor"] + keep_R * inv_freq_R


def _yarn(
    inv_freq_R: Tensor, rope: dict[str, Any], trained: int, head_dim: int, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """Pairs that turn many times within the trained context are kept, those that never complete a turn interpolated."""
    factor = rope.get("factor") or max_position_embeddings / trained

    def pair_of(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp_R = (torch.arange(len(inv_freq_R), dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolate_R = ramp_R.clamp(0, 1)
    blended_R = inv_freq_R / factor * interpolate_R + inv_freq_R * (1 - interpolate_R)
    return blended_R, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return temperature(rope["mscale"]) / temperature(rope["mscale_all_dim"])
    return temperature(1.0)


def rotations(
    rope: dict[str, Any], head_dim: int, max_position_embeddings: int, position_ids_BT: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, `cos_BTR` and `sin_BTR` in `dtype`."""
    inv_freq_R, factor = inverse_frequencies(rope, head_dim, max_position_embeddings)
    angle_BTR = position_ids_BT[..., None].float() * inv_freq_R.to(position_ids_BT.device)
    return (angle_BTR.cos() * factor).to(dtype), (angle_BTR.sin() * factor).to(dtype)


def rotate(x_BHTK: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Turn each pair (i, i + R) of every head by its angle."""
    first, second = x_BHTK.chunk(2, dim=-1)
    cos, sin = cos_BTR[:, None], sin_BTR[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
