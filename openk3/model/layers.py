"""The two plain parts of a decoder layer: RMSNorm and the gated feed-forward network.

Shapes: B batch, T positions, D hidden_size, F intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.model.config import K3Config


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (arXiv:1910.07467) in float32, whatever the dtype of the input.

    Gemma's `1 + weight` is folded into the weight when a checkpoint is loaded, so there is one norm.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * (wide.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * wide.to(x.dtype)


def activation(name: str, gate: Tensor) -> Tensor:
    """`hidden_act` by its Hugging Face name."""
    return F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")


class MLP(nn.Module):
    """Gated feed-forward network (SwiGLU or GeGLU, arXiv:2002.05202): `down(act(gate(x)) * up(x))`."""

    def __init__(self, config: K3Config, intermediate_size: int) -> None:
        super().__init__()
        self.hidden_act = config.hidden_act
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(activation(self.hidden_act, self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
