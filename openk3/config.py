"""The configuration of every model OpenK3 runs, the presets, and the one dial between them.

One config class is a superset: a Llama, Qwen2/3, Qwen3-MoE, Mixtral, Mistral or Gemma3 checkpoint is a corner case of
it (`openk3.weights.families` holds the mapping), and OpenK3's own models use the rest. Field names are those of
Hugging Face wherever a name exists there. The class is plain Python, so that generating on a CPU waits for neither
PyTorch nor Transformers; `openk3.model.K3Config` is the same configuration as Transformers knows it.

OpenK3's own models differ in one number, `depth` (the number of layers): `dial(depth)` derives width, heads, experts
and windows from it, so that a laptop-sized model and the 3-trillion-parameter one are the same design at two settings.
"""

# Not `from __future__ import annotations`: values are checked against types, not against their names.
import math
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin

# Each kind of rotary positions with the numbers that it needs beside `rope_theta`.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(kw_only=True)
class ModelConfig:
    """What a model is. A field that is left out, empty or 0 where that means nothing has the default given here.

    Attention:
        head_dim: Default: `hidden_size / num_attention_heads`.
        layer_types: per layer, `"full_attention"` or `"sliding_attention"`. Default: every layer full.
        layer_windows: per layer, the number of positions a token sees (itself included) in a sliding layer, `None` in
            a full layer. Default: `sliding_window` in every sliding layer.
        rope_parameters: per layer type, the rotary parameters (`rope_type` one of default, linear, llama3, yarn;
            `rope_theta`; and what the type needs), or `None` for layers without positions. One flat dictionary stands
            for both types. Default: a theta of 10,000.
        query_pre_attn_scalar: attention scores are divided by its square root. Default: `head_dim`.

    Feed-forward:
        mlp_layer_types: per layer, `"dense"` (SwiGLU of `intermediate_size`) or `"sparse"` (mixture of experts).
            Default: sparse in every layer when `num_experts > 0`.
        scoring_func: how router logits become scores, `"softmax"` over all experts or `"sigmoid"` of each.
        norm_topk_prob: whether the scores of the chosen experts are divided by their sum.
        use_expert_bias: whether a per-expert bias (`e_score_correction_bias`) is added to the scores for the choice
            only, not for the weights (DeepSeek-V3, arXiv:2412.19437).

    Raises:
        ValueError: a value of another type, or a field that contradicts another; the message names both.
    """

    vocab_size: int = 32768
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 0
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0

    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    use_qk_norm: bool = False
    use_sandwich_norm: bool = False
    query_pre_attn_scalar: float | int | None = None
    layer_types: list[str] = field(default_factory=list)
    sliding_window: int | None = None
    layer_windows: list[int | None] = field(default_factory=list)
    rope_parameters: dict[str, Any] = field(default_factory=dict)

    mlp_layer_types: list[str] = field(default_factory=list)
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    n_shared_experts: int = 0
    scoring_func: Literal["softmax", "sigmoid"] = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    use_expert_bias: bool = False

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self) -> None:
        for one in fields(ModelConfig):
            value = getattr(self, one.name)
            _require(_is_a(value, one.type), f"{one.name} is {value!r}: it must be {_words(one.type)}")
            if one.type is float:
                setattr(self, one.name, float(value))
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            _require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: it must be at least 1")
        layers = self.num_hidden_layers
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.layer_types = self.layer_types or [FULL] * layers
        windows = [self.sliding_window if kind == SLIDING else None for kind in self.layer_types]
        self.layer_windows = self.layer_windows or windows
        # Transformers' caches size every sliding layer by this one number, so it is the widest of them.
        self.sliding_window = max((w for w in self.layer_windows if w is not None), default=None)
        self.rope_parameters = _per_layer_type(self.rope_parameters)
        self.mlp_layer_types = self.mlp_layer_types or ["sparse" if self.num_experts else "dense"] * layers
        self._check()

    @property
    def attention_scaling(self) -> float:
        """What query-key products are multiplied by."""
        return float(self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def _check(self) -> None:
        for name in ("rms_norm_eps", "embedding_multiplier", "routed_scaling_factor"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"{name} is {value}: it must be a finite number above 0")
        _require(self.n_shared_experts >= 0, f"n_shared_experts is {self.n_shared_experts}: it must be at least 0")
        kv = self.num_key_value_heads
        _require(
            kv > 0 and self.num_attention_heads % kv == 0,
            f"num_key_value_heads is {kv}: it must divide num_attention_heads ({self.num_attention_heads})",
        )
        _require(self.head_dim > 0 and self.head_dim % 2 == 0, f"head_dim is {self.head_dim}: it must be even")
        for name in ("layer_types", "layer_windows", "mlp_layer_types"):
            found = len(getattr(self, name))
            _require(
                found == self.num_hidden_layers,
                f"{name} has {found} entries: it needs one for each of num_hidden_layers ({self.num_hidden_layers})",
            )
        for i, (kind, window) in enumerate(zip(self.layer_types, self.layer_windows, strict=True)):
            _require(kind in (FULL, SLIDING), f"layer_types[{i}] is {kind!r}: use {FULL!r} or {SLIDING!r}")
            if kind == SLIDING:
                _require(
                    window is not None and window > 0,
                    f"layer_windows[{i}] is {window!r}: a sliding layer needs a window of at least 1 position",
                )
            else:
                _require(window is None, f"layer_windows[{i}] is {window}: a full layer has no window, use null")
        for kind, rope in self.rope_parameters.items():
            if rope is not None:
                _require(
                    rope["rope_type"] in tuple(ROPE_TYPES),
                    f"rope_parameters[{kind!r}].rope_type is {rope['rope_type']!r}: supported are "
                    f"{', '.join(ROPE_TYPES)}",
                )
                for name in ("rope_theta", *ROPE_TYPES[rope["rope_type"]]):
                    value = rope.get(name)
                    _require(
                        _is_a(value, float) and 0 < value < math.inf,
                        f"rope_parameters[{kind!r}].{name} is {value!r}: it must be a number above 0",
                    )
        for i, kind in enumerate(self.mlp_layer_types):
            _require(kind in ("dense", "sparse"), f"mlp_layer_types[{i}] is {kind!r}: use 'dense' or 'sparse'")
        if "sparse" in self.mlp_layer_types:
            _require(
                0 < self.num_experts_per_tok <= self.num_experts,
                f"num_experts_per_tok is {self.num_experts_per_tok}: it must lie between 1 and num_experts "
                f"({self.num_experts})",
            )
            _require(
                self.moe_intermediate_size > 0,
                f"moe_intermediate_size is {self.moe_intermediate_size}: experts need at least 1",
            )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_a(value: object, kind: Any) -> bool:
    """Whether a value has the type of a field. An integer is a float too; a truth value is neither."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        return any(_is_a(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_is_a(one, arguments[0]) for one in value)
    if origin in (int, float):
        return isinstance(value, int if origin is int else int | float) and not isinstance(value, bool)
    return isinstance(value, origin)


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)


def _per_layer_type(rope: dict[str, Any]) -> dict[str, Any]:
    """One entry per layer type, each with an explicit `rope_type`."""
    rope = rope or {"rope_theta": 10000.0}
    if FULL not in rope and SLIDING not in rope:
        rope = {FULL: rope, SLIDING: rope}
    return {
        kind: None if rope.get(kind) is None else {"rope_type": "default", **rope[kind]} for kind in (FULL, SLIDING)
    }


def dial(depth: int, **overrides: Any) -> ModelConfig:
    """OpenK3's own design at `depth` layers; `overrides` replace single fields.

    Width is 96 x depth, experts are many and fine (16 x depth of a sixth of the width each, about one in 50 to 85
    chosen beside a shared one), query heads share key/value heads by eight. Three of four layers see a sliding window
    that shrinks by eight from the first layer to the last (coarse to fine) and carry rotary positions; every fourth
    layer and the last see everything and carry none, which is what lets a trained model grow its context.

    Raises:
        ValueError: `depth` below 2, or overrides that contradict each other.
    """
    _require(depth >= 2, f"depth is {depth}: a model needs at least 2 layers")
    hidden = 96 * depth
    head_dim = 128 if hidden >= 2048 else 64
    kv_heads = max(1, (hidden + 4 * head_dim) // (8 * head_dim))
    context = overrides.get("max_position_embeddings", 8192)
    widest = min(8192, max(256, context // 8))
    full = [(i + 1) % 4 == 0 or i == depth - 1 for i in range(depth)]
    design: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": _multiple_of_64(hidden * 8 / 3),
        "num_hidden_layers": depth,
        "num_attention_heads": 8 * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "use_qk_norm": True,
        "layer_types": [FULL if f else SLIDING for f in full],
        "layer_windows": [None if f else _window(widest, i, depth) for i, f in enumerate(full)],
        "rope_parameters": {FULL: None, SLIDING: {"rope_type": "default", "rope_theta": 10000.0}},
        "mlp_layer_types": ["dense"] + ["sparse"] * (depth - 1),
        "num_experts": 16 * depth,
        "num_experts_per_tok": max(2, depth // 5),
        "moe_intermediate_size": _multiple_of_64(hidden / 6),
        "n_shared_experts": 1,
        "use_expert_bias": True,
    }
    return ModelConfig(**(design | overrides))


def _multiple_of_64(x: float) -> int:
    return max(64, round(x / 64) * 64)


def _window(widest: int, layer: int, depth: int) -> int:
    """Geometric from `widest` down to an eighth of it, in multiples of 32 positions."""
    return max(32, round(widest * 8 ** (-layer / max(1, depth - 1)) / 32) * 32)


PRESETS = ("debug", "nano", "mini", "pro-256k", "pro-1m")


def preset(name: str) -> ModelConfig:
    """The named preset.

    `debug` is for tests, `nano` trains on a laptop, `mini` runs on one, `pro-256k` and `pro-1m` (about 3 trillion
    parameters) need a cluster.

    Raises:
        ValueError: the name is not in `PRESETS`.
    """
    match name:
        case "debug":
            return dial(
                2,
                vocab_size=256,
                hidden_size=64,
                intermediate_size=64,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                moe_intermediate_size=32,
                max_position_embeddings=512,
                layer_types=[SLIDING, FULL],
                layer_windows=[48, None],
                mlp_layer_types=["sparse", "sparse"],
                tie_word_embeddings=True,
            )
        case "nano":
            return dial(6, vocab_size=16384, tie_word_embeddings=True)
        case "mini":
            return dial(16, vocab_size=65536, tie_word_embeddings=True, max_position_embeddings=131072)
        case "pro-256k":
            return dial(60, vocab_size=163840, max_position_embeddings=262144)
        case "pro-1m":
            return dial(80, vocab_size=163840, max_position_embeddings=1048576)
    raise ValueError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
