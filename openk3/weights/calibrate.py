"""What a model's matrices multiply when it reads a text: second moments of their inputs, layer after layer.

The model runs once. Where a decoder layer stands, a stand-in first shows it the activations to measure its matrices'
inputs, then lets the caller change its weights, and only then passes the activations on; so every layer is measured
behind layers that are quantized already.

Shapes: B sequences, T tokens each, D hidden size, N tokens of a batch, E experts, K columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.model import K3ForCausalLM
from openk3.model.layers import activation
from openk3.model.moe import Experts, sort_claims
from openk3.parameters import HEAD
from openk3.weights.errors import CheckpointError

_BATCH_TOKENS = 2048


@dataclass
class Moments:
    """Sums of `x x.T` over inputs x.

    Attributes:
        of: by the first parameter that has this input, `[K, K]`, or `[E, K, K]` for experts.
        names: by the same parameter, all parameters that have this input: queries, keys and values, for one.
    """

    of: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, x: Tensor) -> None:
        """Count inputs `[..., K]` of the parameter `name`."""
        rows = x.reshape(-1, x.shape[-1])
        self.names.setdefault(name, [name])
        self.of.setdefault(name, torch.zeros(rows.shape[1], rows.shape[1])).addmm_(rows.T, rows)

    def add_expert(self, name: str, expert: int, experts: int, x: Tensor) -> None:
        """Count inputs `[N, K]` of one expert of the stacked parameter `name`."""
        self.names.setdefault(name, [name])
        moments = self.of.setdefault(name, torch.zeros(experts, x.shape[1], x.shape[1]))
        moments[expert].addmm_(x.T, x)

    def require_finite(self, prefix: str = "") -> None:
        """
        Args:
            prefix: of the parameters' names.

        Raises:
            CheckpointError: some are not.
        """
        for name, moments in self.of.items():
            if not torch.isfinite(moments).all():
                raise CheckpointError(
                    f"what {prefix}{name} multiplies is not finite, or too large for float32: the weights before it "
                    f"are damaged"
                )


@torch.no_grad()
def visit_layers(model: K3ForCausalLM, tokens_BT: Tensor, change: Callable[[int, nn.Module, Moments], None]) -> Tensor:
    """Run `model` over a text; `change` gets each layer with its number and what its matrices multiply.

    The model is of no further use: `change` writes to it.

    Returns:
        The moments `[D, D]` of the head's inputs.

    Raises:
        CheckpointError: the activations are not finite, or their moments too large for float32.
    """
    inner = model.model
    inner.layers = nn.ModuleList(_StandIn(layer, i, change) for i, layer in enumerate(inner.layers))
    last_BTD = inner(input_ids=tokens_BT, use_cache=False).last_hidden_state
    moments = Moments()
    moments.add(HEAD, last_BTD)
    moments.require_finite()
    return moments.of[HEAD]


class _StandIn(nn.Module):
    """A decoder layer that is measured and changed before it passes anything on."""

    def __init__(self, layer: nn.Module, number: int, change: Callable[[int, nn.Module, Moments], None]) -> None:
        super().__init__()
        self.layer, self.number, self.change = layer, number, change

    def forward(self, x_BTD: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        step = max(1, _BATCH_TOKENS // x_BTD.shape[1])

        def run(start: int) -> Tensor:
            part = slice(start, start + step)
            mask = attention_mask if attention_mask is None or len(attention_mask) == 1 else attention_mask[part]
            result: Tensor = self.layer(x_BTD[part], attention_mask=mask, **kwargs)
            return result

        starts = range(0, len(x_BTD), step)
        with _measured(self.layer) as moments:
            for start in starts:
                run(start)
        moments.require_finite(f"model.layers.{self.number}.")
        self.change(self.number, self.layer, moments)
        return torch.cat([run(start) for start in starts])


@contextmanager
def _measured(layer: nn.Module) -> Iterator[Moments]:
    """Count the inputs of every matrix of `layer` while the block runs."""
    moments = Moments()
    last: tuple[Tensor | None, str] = (None, "")

    def linear(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(module: nn.Module, args: tuple[Tensor]) -> None:
            nonlocal last
            (x,) = args
            if x is last[0]:  # measured already, for the parameter called before
                if name not in moments.names[last[1]]:
                    moments.names[last[1]].append(name)
            else:
                last = (x, name)
                moments.add(name, x)

        return hook

    def experts(name: str) -> Callable[[Experts, tuple[Tensor, Tensor, Tensor]], None]:
        def hook(module: Experts, args: tuple[Tensor, Tensor, Tensor]) -> None:
            x_ND, _, chosen_NC = args
            count = len(module.gate_up_proj)
            _, tokens, counts_E = sort_claims(chosen_NC, count)
            for expert, x in enumerate(x_ND[tokens].split(counts_E.tolist())):
                moments.add_expert(f"{name}.gate_up_proj", expert, count, x)
                gate, up = F.linear(x, module.gate_up_proj[expert]).chunk(2, dim=-1)
                moments.add_expert(f"{name}.down_proj", expert, count, activation(module.hidden_act, gate) * up)

        return hook

    handles = []
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(linear(f"{name}.weight")))
        elif isinstance(module, Experts):
            handles.append(module.register_forward_pre_hook(experts(name)))
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()
