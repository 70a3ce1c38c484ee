"""What a configuration costs: parameters, memory per token, arithmetic per token. The model owns its roofline.

Everything here is arithmetic on the configuration, so a 3-trillion-parameter preset is sized without allocating it.
A test builds every preset on the meta device and holds these figures against it.
"""

from __future__ import annotations

from dataclasses import dataclass

from openk3.config import ModelConfig


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one decoder layer by what they do; `routed` are those of all routed experts together."""

    attention: int
    norms: int
    dense: int
    router: int
    routed: int


def layer_parameters(config: ModelConfig, layer_idx: int) -> LayerParameters:
    """Parameters of layer `layer_idx`. `dense` is the dense feed-forward network or the shared expert."""
    D, head = config.hidden_size, config.head_dim
    query, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    attention = D * query + 2 * D * kv + query * D
    attention += config.attention_bias * (query + 2 * kv) + config.attention_output_bias * D
    norms = D * (4 if config.use_sandwich_norm else 2) + config.use_qk_norm * 2 * head

    def mlp(width: int) -> int:
        return 3 * D * width + config.mlp_bias * (2 * width + D)

    if config.mlp_layer_types[layer_idx] == "dense":
        return LayerParameters(attention, norms, mlp(config.intermediate_size), 0, 0)
    shared = mlp(config.moe_intermediate_size * config.n_shared_experts) if config.n_shared_experts else 0
    routed = config.num_experts * 3 * D * config.moe_intermediate_size
    return LayerParameters(attention, norms, shared, D * config.num_experts, routed)


def embedding_parameters(config: ModelConfig) -> int:
    """The embedding, and the head where it is a matrix of its own."""
    return config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)


def total_parameters(config: ModelConfig) -> int:
    """All trainable parameters."""
    layers = [layer_parameters(config, i) for i in range(config.num_hidden_layers)]
    return (
        sum(p.attention + p.norms + p.dense + p.router + p.routed for p in layers)
        + embedding_parameters(config)
        + config.hidden_size
    )


def active_parameters(config: ModelConfig) -> int:
    """Parameters one token uses: of the routed experts only the chosen; embedding and head count in full."""
    idle = sum(
        p.routed - p.routed * config.num_experts_per_tok // config.num_experts
        for p in (layer_parameters(config, i) for i in range(config.num_hidden_layers))
        if p.routed
    )
    return total_parameters(config) - idle


def kv_bytes_per_token(config: ModelConfig, bytes_per_element: float = 2) -> float:
    """Bytes by which the KV cache grows with each token while every window still has room."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * bytes_per_element


def kv_bytes(config: ModelConfig, context: int, bytes_per_element: float = 2) -> float:
    """Bytes of the KV cache at `context` tokens when sliding layers keep only their window."""
    kept = sum(context if window is None else min(context, window) for window in config.layer_windows)
    return 2 * kept * config.num_key_value_heads * config.head_dim * bytes_per_element


def flops_per_token(config: ModelConfig, context: int) -> int:
    """Floating-point operations of one forward pass for one token that sees `context` positions, itself included.

    Two per weight of every matrix the token passes (the embedding is a lookup and costs nothing, the head counts), and
    two products per head against each visible position. Training costs three times as much.
    """
    matrices = active_parameters(config) - embedding_parameters(config) + config.vocab_size * config.hidden_size
    vectors = config.hidden_size + sum(layer_parameters(config, i).norms for i in range(config.num_hidden_layers))
    visible = sum(context if window is None else min(context, window) for window in config.layer_windows)
    attention = 4 * config.num_attention_heads * config.head_dim * visible
    return 2 * (matrices - vectors) + attention
