"""A BERT encoder (Devlin et al. 2018, https://arxiv.org/abs/1810.04805) as functions over its checkpoint's tensors.

Shapes: B texts, T tokens, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class BertConfig:
    """The fields of a checkpoint's config.json that bear on the arithmetic."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    layer_norm_eps: float


def encode(weights: Mapping[str, Tensor], config: BertConfig, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The last hidden states, B x T x D, of token ids that are padded where `mask_BT` is False."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        width = (config.hidden_size,)
        return F.layer_norm(x, width, weights[f"{name}.weight"], weights[f"{name}.bias"], config.layer_norm_eps)

    def heads(x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2)

    words, positions, kinds = (
        weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    )
    x_BTD = norm(words[ids_BT] + positions[: ids_BT.shape[1]] + kinds[0], "embeddings.LayerNorm")
    mask_B11T = mask_BT[:, None, None, :]
    for i in range(config.num_hidden_layers):
        layer = f"encoder.layer.{i}"
        q, k, v = (heads(linear(x_BTD, f"{layer}.attention.self.{name}")) for name in ("query", "key", "value"))
        mixed_BTD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B11T).transpose(1, 2).flatten(2)
        attended = linear(mixed_BTD, f"{layer}.attention.output.dense")
        x_BTD = norm(x_BTD + attended, f"{layer}.attention.output.LayerNorm")
        inner = F.gelu(linear(x_BTD, f"{layer}.intermediate.dense"))
        x_BTD = norm(x_BTD + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return x_BTD


def mean_pool(x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Unit vectors, B x D: the mean over each text's tokens, normalized."""
    mask_BT1 = mask_BT[..., None]
    return F.normalize((x_BTD * mask_BT1).sum(1) / mask_BT1.sum(1), dim=-1)


def inference(weights: Mapping[str, Tensor], config: BertConfig, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`encode` and `mean_pool` without gradients."""
    with torch.inference_mode():
        return mean_pool(encode(weights, config, ids_BT, mask_BT), mask_BT)
