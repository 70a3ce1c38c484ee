"""The sparse mixture of experts: a router, many fine experts stored as 3-D tensors, and a shared expert.

Two ways to run the experts stand side by side. `run_experts_loop` visits each expert that was chosen; a token's result
has the same bits whatever other tokens are in the batch, so it serves inference. `run_experts_grouped` sorts all
claims and runs one grouped product over all experts, with gradients; it serves training. A test holds them together.

Balancing (auxiliary loss, selection bias, capacity) is a training matter: it acts on what `Router.forward` returns and
on `e_score_correction_bias`, and nowhere else.

Shapes: N tokens, D hidden_size, E experts, C chosen experts per token, F moe_intermediate_size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.model.config import K3Config
from openk3.model.layers import MLP, activation


class Router(nn.Module):
    """Scores every expert for every token, in float32, and chooses the best.

    Scores are a softmax over all experts (Mixtral, Qwen3-MoE) or a sigmoid of each (DeepSeek-V3, arXiv:2412.19437).
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        if config.use_expert_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """
        Returns:
            `logits_NE` in float32, the chosen experts' weights `weights_NC` in the dtype of `x_ND`, and their indices
            `chosen_NC`. The selection bias moves the choice, never the weights.
        """
        logits_NE = F.linear(x_ND.float(), self.weight.float())
        scores_NE = logits_NE.softmax(-1) if self.config.scoring_func == "softmax" else logits_NE.sigmoid()
        ranked_NE = scores_NE + self.e_score_correction_bias if self.config.use_expert_bias else scores_NE
        chosen_NC = ranked_NE.topk(self.config.num_experts_per_tok, dim=-1).indices
        weights_NC = scores_NE.gather(-1, chosen_NC)
        if self.config.norm_topk_prob:
            weights_NC = weights_NC / weights_NC.sum(-1, keepdim=True).clamp_min(1e-20)
        return logits_NE, (weights_NC * self.config.routed_scaling_factor).to(x_ND.dtype), chosen_NC


class Experts(nn.Module):
    """The routed experts: `gate_up_proj` `[E, 2F, D]` (gate rows first) and `down_proj` `[E, D, F]`."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        E, D, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.hidden_act = config.hidden_act
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, width))

    def forward(self, x_ND: Tensor, weights_NC: Tensor, chosen_NC: Tensor) -> Tensor:
        run = run_experts_grouped if torch.is_grad_enabled() else run_experts_loop
        return run(x_ND, weights_NC, chosen_NC, self.gate_up_proj, self.down_proj, self.hidden_act)


def run_experts_loop(
    x_ND: Tensor, weights_NC: Tensor, chosen_NC: Tensor, gate_up_proj: Tensor, down_proj: Tensor, hidden_act: str
) -> Tensor:
    """Weighted sum of each token's experts, one product per expert that was chosen.

    A token's contributions are added in the order of the experts' numbers, so the result does not depend on its
    neighbours.
    """
    out_ND = torch.zeros_like(x_ND)
    order, tokens, counts = sort_claims(chosen_NC, gate_up_proj.shape[0])
    weights = weights_NC.flatten()[order, None]
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        claims = slice(start, start + count)
        gate, up = F.linear(x_ND[tokens[claims]], gate_up_proj[expert]).chunk(2, dim=-1)
        result = F.linear(activation(hidden_act, gate) * up, down_proj[expert])
        out_ND.index_add_(0, tokens[claims], result * weights[claims])
        start += count
    return out_ND


def run_experts_grouped(
    x_ND: Tensor, weights_NC: Tensor, chosen_NC: Tensor, gate_up_proj: Tensor, down_proj: Tensor, hidden_act: str
) -> Tensor:
    """The same sum as one grouped matrix product over all experts, differentiable in everything."""
    order, tokens, counts = sort_claims(chosen_NC, gate_up_proj.shape[0])
    ends_E = counts.cumsum(0).to(torch.int32)
    gate_up = F.grouped_mm(x_ND[tokens], gate_up_proj.transpose(1, 2), offs=ends_E)
    gate, up = gate_up.chunk(2, dim=-1)
    result = F.grouped_mm(activation(hidden_act, gate) * up, down_proj.transpose(1, 2), offs=ends_E)
    return torch.zeros_like(x_ND).index_add(0, tokens, result * weights_NC.flatten()[order, None])


def sort_claims(chosen_NC: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """All N x C claims on experts, sorted by expert and within one by token.

    Returns:
        `order`: indices into the flattened claims; `tokens`: the token of each sorted claim; `counts_E`.
    """
    claims = chosen_NC.flatten()
    order = claims.argsort(stable=True)
    return order, order // chosen_NC.shape[1], torch.bincount(claims, minlength=num_experts)


class MoE(nn.Module):
    """A sparse feed-forward layer: the routed experts' weighted sum, plus the shared expert every token passes."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        shared_width = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = MLP(config, shared_width) if shared_width else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        _, weights_NC, chosen_NC = self.gate(x_ND)
        out_BTD = self.experts(x_ND, weights_NC, chosen_NC).view_as(x_BTD)
        return out_BTD if self.shared_experts is None else out_BTD + self.shared_experts(x_BTD)
