"""The tensors that make up a model, by name and shape, from its configuration alone.

They are those of `K3ForCausalLM`, under Hugging Face's names; knowing them without building the network is what lets a
checkpoint be read and checked before PyTorch is there, and without it. A test holds them against the network.
"""

from __future__ import annotations

from collections.abc import Iterator

from openk3.config import ModelConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROUTER = "mlp.gate.weight"
SELECTION_BIAS = "e_score_correction_bias"  # the routers' buffer, which is not trained

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shape of every parameter, and of the routers' selection biases, in the order of the network.

    A head that is tied to the embedding is left out. Expert tensors are stacked: `[experts, rows, columns]`.
    """
    D = config.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, D)}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(config, layer)}
    shapes["model.norm.weight"] = (D,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, D)
    return shapes


def is_matrix(name: str, shape: Shape) -> bool:
    """Whether a parameter is one that quantizing makes smaller: not a norm, a bias or a router, which stay exact."""
    return len(shape) >= 2 and not name.endswith(ROUTER)


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    D = config.hidden_size
    yield from _attention(config)
    if config.mlp_layer_types[layer] == "dense":
        yield from _mlp(config, "mlp", config.intermediate_size)
    else:
        experts, width = config.num_experts, config.moe_intermediate_size
        yield ROUTER, (experts, D)
        if config.use_expert_bias:
            yield f"mlp.gate.{SELECTION_BIAS}", (experts,)
        yield "mlp.experts.gate_up_proj", (experts, 2 * width, D)
        yield "mlp.experts.down_proj", (experts, D, width)
        if config.n_shared_experts:
            yield from _mlp(config, "mlp.shared_experts", width * config.n_shared_experts)
    yield "input_layernorm.weight", (D,)
    yield "post_attention_layernorm.weight", (D,)
    if config.use_sandwich_norm:
        yield "pre_feedforward_layernorm.weight", (D,)
        yield "post_feedforward_layernorm.weight", (D,)


def _attention(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    D, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield from _linear(f"self_attn.{name}", rows, D, config.attention_bias)
    yield from _linear("self_attn.o_proj", D, queries, config.attention_output_bias)
    if config.use_qk_norm:
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)


def _mlp(config: ModelConfig, name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{name}.gate_proj", width, config.hidden_size, config.mlp_bias)
    yield from _linear(f"{name}.up_proj", width, config.hidden_size, config.mlp_bias)
    yield from _linear(f"{name}.down_proj", config.hidden_size, width, config.mlp_bias)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)
