"""Every supported family as a corner of `ModelConfig`, and its tensors as parameters of the one model.

A `config.json` may leave out what is usual in its family and may have old spellings, so each family has its defaults
and one small mapping. They are Transformers' own, read here without Transformers, which takes seconds to import; tests
hold them against its config classes. Tensor names are Hugging Face's on both sides, so parameters map to themselves
except for three things: experts are stored one by one on disk and stacked in the model, Mixtral has its own name for
the layer they are in, and Gemma's norms multiply by `1 + weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from openk3.config import FULL, ROPE_TYPES, SLIDING, ModelConfig
from openk3.weights.errors import CheckpointError, reason
from openk3.weights.quantized_file import check_quantization_config

Json = dict[str, Any]
OWN = "openk3"
# A damaged or hostile config must not make the reader build a million layers before the tensors prove it wrong.
_LIMITS = {
    "num_hidden_layers": (1, 2048),
    "n_shared_experts": (0, 2**16),
    "num_experts": (0, 2**16),
    "num_local_experts": (0, 2**16),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), (1, 2**16)),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), (1, 2**31)),
}


def to_model_config(json: Json, path: Path) -> ModelConfig:
    """
    Args:
        json: the contents of a `config.json`.
        path: where it came from, for messages.

    Raises:
        CheckpointError: another architecture, an option no supported family needs, or values that contradict.
    """
    kind = json.get("model_type")
    if not isinstance(kind, str) or kind not in (*FAMILIES, OWN):
        raise CheckpointError(f"{path} has model_type {kind!r}: supported are {', '.join((*FAMILIES, OWN))}")
    for level in (json, json.get("text_config")):
        if not isinstance(level, dict):
            continue
        for name, (least, most) in _LIMITS.items():
            if isinstance(level.get(name), int) and not least <= level[name] <= most:
                raise CheckpointError(f"{path} has {name} = {level[name]}: it must lie between {least} and {most}")
        if quantization := level.get("quantization_config"):
            check_quantization_config(quantization, path)
    try:
        if kind == OWN:
            own = {field.name for field in fields(ModelConfig)}
            return ModelConfig(**{name: value for name, value in json.items() if name in own})
        defaults, mapping = FAMILIES[kind]
        theirs = json.get("text_config") or {} if kind == "gemma3" else json
        return ModelConfig(**mapping(defaults | theirs, path))
    except CheckpointError:
        raise
    except Exception as error:  # a value of a wrong type may fail anywhere
        raise CheckpointError(f"{path} is not a usable {kind} configuration: {reason(error)}") from error


# What Transformers takes where a config.json says nothing; `head_dim` and so on are derived where they are None.
_COMMON: Json = {
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
    "attention_bias": False,
    "sliding_window": None,
    "layer_types": None,
}
_LLAMA: Json = _COMMON | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mlp_bias": False,
}
_MISTRAL: Json = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_MIXTRAL: Json = _MISTRAL | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
_QWEN2: Json = _COMMON | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3: Json = _QWEN2 | {"head_dim": 128}
_QWEN3_MOE: Json = _QWEN2 | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
_GEMMA3: Json = _COMMON | {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}


def _common(c: Json, path: Path) -> Json:
    """What all families share. `c` is the family's own configuration with its defaults filled in."""
    act = c.get("hidden_activation") or c["hidden_act"]
    _refuse(path, "hidden_act", act, act not in ("silu", "gelu_pytorch_tanh"))
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        _refuse(path, name, c.get(name), bool(c.get(name)))
    fields = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings "
        "rms_norm_eps initializer_range tie_word_embeddings bos_token_id eos_token_id pad_token_id"
    )
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    return {name: c[name] for name in fields.split()} | {
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": c["head_dim"] or c["hidden_size"] // heads,
        "hidden_act": act,
        "rope_parameters": _rope(c, path),
    }


def _rope(c: Json, path: Path) -> Json:
    """Rotary parameters, one set or one per layer type, with what older files spell otherwise or keep elsewhere."""
    rope: Json = deepcopy(c.get("rope_scaling") or c["rope_parameters"] or {})
    for one in [rope[kind] for kind in (FULL, SLIDING) if kind in rope] or [rope]:
        if one is None:
            continue
        kind = one.setdefault("rope_type", one.get("type", "default"))
        _refuse(path, "rope_type", kind, kind not in tuple(ROPE_TYPES))
        one.setdefault("rope_theta", c["rope_theta"])
        if kind in ("llama3", "yarn"):
            one.setdefault("original_max_position_embeddings", c["max_position_embeddings"])
        partial = one.get("partial_rotary_factor", c.get("partial_rotary_factor"))
        _refuse(path, "partial_rotary_factor", partial, partial not in (None, 1.0))
    return rope


def _refuse(path: Path, option: str, value: Any, unsupported: bool) -> None:
    if unsupported:
        raise CheckpointError(f"{path} sets {option} to {value!r}, which is not supported: choose another model")


def _windows(c: Json, window: int | None, layer_types: list[str] | None = None) -> Json:
    """Sliding windows: in the layers that `layer_types` says, or in every layer where the family has no such list."""
    if layer_types is None:
        layer_types = [FULL if window is None else SLIDING] * c["num_hidden_layers"]
    return {"layer_types": list(layer_types), "sliding_window": window if SLIDING in layer_types else None}


def _switched_windows(c: Json) -> Json:
    """Qwen's: a switch, and the first layers without a window."""
    window = c["sliding_window"] if c["use_sliding_window"] else None
    first = c["num_hidden_layers"] if window is None else c["max_window_layers"]
    layer_types = [SLIDING if i >= first else FULL for i in range(c["num_hidden_layers"])]
    return _windows(c, window, c["layer_types"] or layer_types)


def _attention_bias(c: Json) -> Json:
    return {"attention_bias": c["attention_bias"], "attention_output_bias": c["attention_bias"]}


def _llama(c: Json, path: Path) -> Json:
    return _common(c, path) | _attention_bias(c) | {"mlp_bias": c["mlp_bias"]}


def _mistral(c: Json, path: Path) -> Json:
    return _common(c, path) | _windows(c, c["sliding_window"])


def _mixtral(c: Json, path: Path) -> Json:
    return _mistral(c, path) | {
        "num_experts": c.get("num_experts", c["num_local_experts"]),
        "num_experts_per_tok": c["num_experts_per_tok"],
        "moe_intermediate_size": c["intermediate_size"],
        "scoring_func": "softmax",
        "norm_topk_prob": True,
    }


def _qwen2(c: Json, path: Path) -> Json:
    return _common(c, path) | _switched_windows(c) | {"attention_bias": True}


def _qwen3(c: Json, path: Path) -> Json:
    return _common(c, path) | _switched_windows(c) | _attention_bias(c) | {"use_qk_norm": True}


def _qwen3_moe(c: Json, path: Path) -> Json:
    experts: int = c["num_local_experts"] if "num_local_experts" in c else c["num_experts"]
    sparse = [
        i not in (c["mlp_only_layers"] or ()) and experts > 0 and (i + 1) % c["decoder_sparse_step"] == 0
        for i in range(c["num_hidden_layers"])
    ]
    return (
        _common(c, path)
        | _windows(c, c["sliding_window"] if c["use_sliding_window"] else None)
        | _attention_bias(c)
        | {
            "use_qk_norm": True,
            "mlp_layer_types": ["sparse" if s else "dense" for s in sparse],
            "num_experts": experts,
            "num_experts_per_tok": c["num_experts_per_tok"],
            "moe_intermediate_size": c["moe_intermediate_size"],
            "scoring_func": "softmax",
            "norm_topk_prob": c["norm_topk_prob"],
        }
    )


def _gemma3(c: Json, path: Path) -> Json:
    """The text model; of a multimodal checkpoint, its text half."""
    layers, pattern = range(c["num_hidden_layers"]), c["sliding_window_pattern"]
    layer_types = c["layer_types"] or [SLIDING if (i + 1) % pattern else FULL for i in layers]
    rope, scaling = c["rope_parameters"] or {}, c.get("rope_scaling") or {}  # which is for the full layers only
    _refuse(path, "rope_parameters", rope, not rope.keys() <= {FULL, SLIDING})
    rope = {
        FULL: {"rope_theta": c["rope_theta"]} | (rope.get(FULL) or {}) | scaling,
        SLIDING: {"rope_theta": c["rope_local_base_freq"]} | (rope.get(SLIDING) or {}),
    }
    return (
        _common(c | {"rope_parameters": rope, "rope_scaling": None}, path)
        | _windows(c, c["sliding_window"], layer_types)
        | _attention_bias(c)
        | {
            "use_qk_norm": True,
            "use_sandwich_norm": True,
            "query_pre_attn_scalar": c["query_pre_attn_scalar"],
            "embedding_multiplier": c["hidden_size"] ** 0.5,
        }
    )


FAMILIES: dict[str, tuple[Json, Callable[[Json, Path], Json]]] = {
    "llama": (_LLAMA, _llama),
    "mistral": (_MISTRAL, _mistral),
    "mixtral": (_MIXTRAL, _mixtral),
    "qwen2": (_QWEN2, _qwen2),
    "qwen3": (_QWEN3, _qwen3),
    "qwen3_moe": (_QWEN3_MOE, _qwen3_moe),
    "gemma3_text": (_GEMMA3, _gemma3),
    "gemma3": (_GEMMA3, _gemma3),
}


@dataclass(frozen=True)
class Source:
    """Where a parameter of the model comes from.

    `experts` lists, per expert, the tensors to put under each other; one expert of one tensor that is not `stacked` is
    the tensor itself. `plus_one` adds one to it.
    """

    experts: list[list[str]]
    stacked: bool = False
    plus_one: bool = False

    def names(self) -> list[str]:
        return [name for tensors in self.experts for name in tensors]


def source_of(parameter: str, available: Collection[str], model_type: str, num_experts: int) -> Source:
    """The tensors of a checkpoint that make up `parameter`, whether they are all there or not.

    Args:
        parameter: a name in `K3ForCausalLM`'s state dict.
        available: the names in the checkpoint.
    """
    gemma = model_type in ("gemma3", "gemma3_text")
    plus_one = gemma and parameter.endswith("norm.weight")
    if parameter in available:
        return Source([[parameter]], plus_one=plus_one)
    if ".mlp.experts." in parameter:
        layer, which = parameter.split(".mlp.experts.")
        for block, gate_up, down in (
            ("mlp", ["gate_proj", "up_proj"], ["down_proj"]),
            ("block_sparse_moe", ["w1", "w3"], ["w2"]),
        ):
            parts = gate_up if which == "gate_up_proj" else down
            experts = [[f"{layer}.{block}.experts.{e}.{p}.weight" for p in parts] for e in range(num_experts)]
            if experts[0][0] in available:
                break
        return Source(experts, stacked=True)
    other = [parameter]
    if gemma and parameter.startswith("model."):
        rest = parameter.removeprefix("model.")
        other += [f"model.language_model.{rest}", f"language_model.model.{rest}"]
    elif gemma:
        other += [f"language_model.{parameter}"]
    other += [parameter.replace(".mlp.gate.", ".block_sparse_moe.gate.")]
    return Source([[next((name for name in other if name in available), parameter)]], plus_one=plus_one)


def ignorable(tensor: str) -> bool:
    """Whether a tensor may stand in a checkpoint without being loaded: rotary tables, and the vision half of Gemma3."""
    return tensor.endswith("rotary_emb.inv_freq") or any(
        tensor.removeprefix("model.").startswith(part) for part in ("vision_tower.", "multi_modal_projector.")
    )
