"""Grouped-query attention (arXiv:2305.13245) with optional biases, query/key norms, windows and positions.

How scores are computed is not decided here: the function is looked up in Transformers' attention registry under
`config._attn_implementation`. `eager`, `sdpa` and `flash_attention_2` come from there; the engine registers its paged
attention and vLLM its own under the same interface.

Shapes: B batch, T positions, D hidden_size, H query heads, G key/value heads, K head_dim, R = K / 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from openk3.model.config import K3Config
from openk3.model.layers import RMSNorm
from openk3.model.rotary import rotate


def eager_attention(
    module: nn.Module,
    query_BHTK: Tensor,
    key_BGSK: Tensor,
    value_BGSK: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The definition of attention, and the oracle of every faster one.

    Args:
        attention_mask: added to the scores, broadcastable to `[B, H, T, S]`; `None` attends to everything.

    Returns:
        `out_BTHK` and the weights `[B, H, T, S]`.
    """
    group = query_BHTK.shape[1] // key_BGSK.shape[1]
    key_BHSK, value_BHSK = key_BGSK.repeat_interleave(group, 1), value_BGSK.repeat_interleave(group, 1)
    scores_BHTS = query_BHTK @ key_BHSK.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores_BHTS = scores_BHTS + attention_mask
    weights_BHTS = scores_BHTS.softmax(-1, dtype=torch.float32).to(query_BHTK.dtype)
    weights_BHTS = nn.functional.dropout(weights_BHTS, dropout, module.training)
    return (weights_BHTS @ value_BHSK).transpose(1, 2).contiguous(), weights_BHTS


class Attention(nn.Module):
    """One layer's attention; `layer_windows[layer_idx]` and the rotations passed in make it what the layer is."""

    is_causal = True

    def __init__(self, config: K3Config, layer_idx: int) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = heads // kv_heads
        self.scaling = config.attention_scaling
        self.sliding_window = config.layer_windows[layer_idx]
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=config.attention_output_bias)
        if config.use_qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x_BTD: Tensor,
        rotations: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """
        Args:
            rotations: `cos_BTR` and `sin_BTR`; `None` in a layer without positions.
            attention_mask: whatever the registered attention function takes.
            kwargs: handed to the attention function.

        Returns:
            `out_BTD`.
        """
        B, T, _ = x_BTD.shape
        query_BTHK = self.q_proj(x_BTD).view(B, T, -1, self.head_dim)
        key_BTGK = self.k_proj(x_BTD).view(B, T, -1, self.head_dim)
        if self.config.use_qk_norm:
            query_BTHK, key_BTGK = self.q_norm(query_BTHK), self.k_norm(key_BTGK)
        query, key = query_BTHK.transpose(1, 2), key_BTGK.transpose(1, 2)
        value = self.v_proj(x_BTD).view(B, T, -1, self.head_dim).transpose(1, 2)
        if rotations is not None:
            query, key = rotate(query, *rotations), rotate(key, *rotations)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out_BTHK, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(out_BTHK.reshape(B, T, -1))
