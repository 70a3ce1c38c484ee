"""A whole model to integers, matrix by matrix, for what a calibration text makes them multiply.

Matrices with the same input (queries, keys and values; gate and up) are quantized as one. Norms, biases and routers
stay float32. An embedding, and experts that no token of the text reached, have no products to be quantized for: all
their columns count alike. A tied embedding is quantized as that and as the head it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from openk3.parameters import EMBEDDING, HEAD, is_matrix
from openk3.weights.calibrate import Moments, visit_layers
from openk3.weights.errors import CheckpointError
from openk3.weights.formats import (
    GROUP_SIZES,
    Int4Matrix,
    Int8Matrix,
    Matrix,
    dequantize,
    pack_int4,
    pack_int8,
    require_finite,
)
from openk3.weights.gptq import INT4, INT8, Quantized, gptq
from openk3.weights.loaded import LoadedModel

# Groups of the default recipe. These matrices, and an embedding that is not the head too, lose least by the bits that
# the coarser groups save; values, an eighth of attention, would lose more than all of them together.
_COARSE_NAMES = (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.o_proj.")
_FINE, _COARSE = 32, 64
# Called with every parameter: its name, what became of it, and the relative error of its products (or of itself).
Done = Callable[[str, Matrix, float], None]


def quantize_calibrated(
    loaded: LoadedModel, format: Literal["int8", "int4"], group_size: int | None, tokens_BT: Tensor, done: Done
) -> None:
    """Quantize every matrix of a model.

    Args:
        group_size: columns with one scale and minimum in INT4; None for the recipe, which is 64 for queries, keys and
            attention's output and for an embedding that is not the head too, and 32 for all others. A matrix whose
            columns they do not fill takes the largest smaller group that fits, else INT8.
        tokens_BT: the calibration text, in sequences that fit the model's context.

    Raises:
        CheckpointError: weights or activations that are not finite, or too large.
    """
    head = HEAD if HEAD in loaded.tensors else EMBEDDING
    quantizer = _Quantizer(format, group_size, head, done)
    for name, tensor in loaded.tensors.items():
        if not is_matrix(name, tensor.shape):
            exact = dequantize(tensor)
            _require_finite(name, exact)
            done(name, exact, 0.0)
    if head != EMBEDDING:
        embedding = torch.from_numpy(dequantize(loaded.tensors[EMBEDDING]))
        quantizer.together(
            [EMBEDDING], [embedding], torch.eye(embedding.shape[1]), quantizer.group(EMBEDDING, embedding)
        )
    moments = visit_layers(loaded.to_torch(), tokens_BT, quantizer.layer)
    if head == EMBEDDING:
        moments += torch.eye(len(moments)) * moments.diagonal().mean()
    weight = torch.from_numpy(dequantize(loaded.tensors[head]))
    quantizer.together([head], [weight], moments, quantizer.group(head, weight))


@dataclass(frozen=True)
class _Quantizer:
    format: Literal["int8", "int4"]
    group_size: int | None
    head: str
    done: Done

    def layer(self, number: int, layer: nn.Module, moments: Moments) -> None:
        """Quantize the matrices of a decoder layer, and let it compute with the result."""
        parameters = dict(layer.named_parameters())
        prefix = f"model.layers.{number}."
        for first, names in moments.names.items():
            if parameters[first].dim() == 3:
                parameters[first].data = self.experts(prefix + first, parameters[first].data, moments.of[first])
                continue
            alike: dict[int | None, list[str]] = {}
            for name in names:
                alike.setdefault(self.group(prefix + name, parameters[name]), []).append(name)
            for group, some in alike.items():
                weights = [parameters[name].data for name in some]
                new = self.together([prefix + name for name in some], weights, moments.of[first], group)
                for name, weight in zip(some, new, strict=True):
                    parameters[name].data = weight

    def together(self, names: list[str], weights: list[Tensor], moments: Tensor, group: int | None) -> list[Tensor]:
        """Quantize matrices `[N, K]` of the same inputs, with `moments` `[K, K]`, in one; gives them dequantized."""
        quantized = _gptq(torch.cat(weights), moments, group)
        counts = [len(weight) for weight in weights]
        parts = zip(*(part.split(counts) for part in (quantized.q, quantized.scale, quantized.minimum)), strict=True)
        new = []
        for name, weight, part in zip(names, weights, parts, strict=True):
            one = Quantized(*part)
            new.append(one.dequantize())
            self.done(name, _packed(name, one, group), _error(weight, new[-1], moments))
        return new

    def experts(self, name: str, weight_ENK: Tensor, moments: Tensor) -> Tensor:
        """Quantize the stacked matrices of all experts, each with its own moments; gives them dequantized."""
        group = self.group(name, weight_ENK)
        each = [_gptq(weight, moments[expert], group) for expert, weight in enumerate(weight_ENK)]
        stacked = Quantized(
            *(torch.stack(parts) for parts in zip(*((e.q, e.scale, e.minimum) for e in each), strict=True))
        )
        new = stacked.dequantize()
        errors = [_error(weight_ENK[e], new[e], moments[e]) for e in range(len(new)) if moments[e].any()]
        self.done(name, _packed(name, stacked, group), sum(errors) / max(1, len(errors)))
        return new

    def group(self, name: str, weight: Tensor) -> int | None:
        """Columns of a group in the matrix or matrices `[..., N, K]` of that name, None for INT8."""
        coarse = any(part in name for part in _COARSE_NAMES) or name == EMBEDDING != self.head
        limit = self.group_size or (_COARSE if coarse else _FINE)
        fitting = [size for size in GROUP_SIZES if size <= limit and weight.shape[-1] % size == 0]
        return max(fitting) if fitting and self.format == "int4" else None


def _gptq(weight: Tensor, moments: Tensor, group: int | None) -> Quantized:
    return gptq(weight, moments, INT4 if group else INT8, group or weight.shape[-1])


def _packed(name: str, quantized: Quantized, group: int | None) -> Int8Matrix | Int4Matrix:
    q, scale, minimum = (part.numpy() for part in (quantized.q, quantized.scale, quantized.minimum))
    _require_finite(name, scale, minimum)
    if group:
        return pack_int4(q.astype(np.uint8), scale.astype(np.float16), minimum.astype(np.float16))
    return pack_int8(q.astype(np.int8), scale[..., 0])


def _require_finite(name: str, *arrays: NDArray[np.float32]) -> None:
    try:
        require_finite(*arrays)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error


def _error(weight: Tensor, new: Tensor, moments: Tensor) -> float:
    """Root mean square of the products' error, as a part of the products' own."""
    difference = new - weight
    wrong, right = ((w @ moments * w).sum() for w in (difference, weight))
    return float((wrong / right.clamp_min(1e-30)).clamp_min(0).sqrt())
