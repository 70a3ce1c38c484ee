"""Rotary positions (RoFormer, arXiv:2104.09864), computed on the fly from the configuration, for every runner.

There is no table: frequencies are a handful of numbers, positions of a million-token context are not.

Shapes: M positions, K head_dim, R = K / 2 rotary pairs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def inverse_frequencies(rope: dict[str, Any], head_dim: int, max_position_embeddings: int) -> tuple[Floats, float]:
    """Rotation per position of each pair, and the factor on cosine and sine (1 except for YaRN).

    Args:
        rope: one entry of `ModelConfig.rope_parameters`, with `rope_type` one of `openk3.config.ROPE_TYPES`.

    Returns:
        `inv_freq_R` in radians per position, float32; the attention factor.

    Sources: linear (position interpolation, arXiv:2306.15595), llama3 (Llama 3.1 release), yarn (arXiv:2309.00071).
    """
    pairs_R = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq_R = np.float32(1) / np.float32(rope["rope_theta"]) ** pairs_R
    trained = rope.get("original_max_position_embeddings") or max_position_embeddings
    match rope["rope_type"]:
        case "default":
            return inv_freq_R, 1.0
        case "linear":
            return inv_freq_R / np.float32(rope["factor"]), 1.0
        case "llama3":
            return _llama3(inv_freq_R, rope, trained), 1.0
        case "yarn":
            return _yarn(inv_freq_R, rope, trained, head_dim, max_position_embeddings)
    raise ValueError(f"rope_type is {rope['rope_type']!r}: not a supported kind of rotary position")


def turns(inv_freq_R: Floats, factor: float, positions_M: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Cosines and sines of every position, `cos_MR` and `sin_MR`, from what `inverse_frequencies` gives."""
    angle_MR = positions_M[:, None].astype(np.float32) * inv_freq_R
    cos_MR, sin_MR = np.cos(angle_MR), np.sin(angle_MR)
    return (cos_MR, sin_MR) if factor == 1 else (cos_MR * np.float32(factor), sin_MR * np.float32(factor))


def _llama3(inv_freq_R: Floats, rope: dict[str, Any], trained: int) -> Floats:
    """Slow rotations are stretched by `factor`, fast ones kept, those between blended."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength_R = 2 * math.pi / inv_freq_R
    keep_R = ((trained / wavelength_R - low) / (high - low)).clip(0, 1)
    blended_R: Floats = (1 - keep_R) * inv_freq_R / rope["factor"] + keep_R * inv_freq_R
    return blended_R


def _yarn(
    inv_freq_R: Floats, rope: dict[str, Any], trained: int, head_dim: int, max_position_embeddings: int
) -> tuple[Floats, float]:
    """Pairs that turn many times within the trained context are kept, those that never complete a turn interpolated."""
    factor = rope.get("factor") or max_position_embeddings / trained

    def pair_of(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp_R = (np.arange(len(inv_freq_R), dtype=np.float32) - low) / max(high - low, 0.001)
    interpolate_R = ramp_R.clip(0, 1)
    blended_R: Floats = inv_freq_R / factor * interpolate_R + inv_freq_R * (1 - interpolate_R)
    return blended_R, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return temperature(rope["mscale"]) / temperature(rope["mscale_all_dim"])
    return temperature(1.0)
