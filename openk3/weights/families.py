"""Every supported family as a corner of `K3Config`, and its tensors as parameters of the one model.

A `config.json` is first read by Transformers' own config class of its family, which knows the defaults and the old
spellings; what is left is one small mapping per family. Tensor names are Hugging Face's on both sides, so parameters
map to themselves except for three things: experts are stored one by one on disk and stacked in the model, Mixtral has
its own name for the layer they are in, and Gemma's norms multiply by `1 + weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig

from openk3.config import FULL, ROPE_TYPES, SLIDING, K3Config
from openk3.weights.errors import CheckpointError, reason

Json = dict[str, Any]
# A damaged or hostile config must not make the reader build a million layers before the tensors prove it wrong.
_LIMITS = {
    "num_hidden_layers": (1, 2048),
    "n_shared_experts": (0, 2**16),
    "num_experts": (0, 2**16),
    "num_local_experts": (0, 2**16),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), (1, 2**16)),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), (1, 2**31)),
}


def to_k3_config(json: Json, path: Path) -> K3Config:
    """
    Args:
        json: the contents of a `config.json`.
        path: where it came from, for messages.

    Raises:
        CheckpointError: another architecture, an option no supported family needs, or values that contradict.
    """
    kind = json.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise CheckpointError(f"{path} has model_type {kind!r}: supported are {', '.join(_FAMILIES)}")
    for level in (json, json.get("text_config")):
        if not isinstance(level, dict):
            continue
        for name, (least, most) in _LIMITS.items():
            if isinstance(level.get(name), int) and not least <= level[name] <= most:
                raise CheckpointError(f"{path} has {name} = {level[name]}: it must lie between {least} and {most}")
        if quantization := level.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise CheckpointError(
                f"{path} describes weights quantized with {method!r} (quantization_config): take the unquantized "
                f"checkpoint or a GGUF file"
            )
    try:
        if kind == K3Config.model_type:
            return K3Config.from_dict(json)
        theirs = AutoConfig.for_model(**json)
        return K3Config(**_FAMILIES[kind](theirs, path))
    except CheckpointError:
        raise
    except Exception as error:  # Transformers' validation raises errors of many kinds
        raise CheckpointError(f"{path} is not a usable {kind} configuration: {reason(error)}") from error


def _common(c: PreTrainedConfig, path: Path) -> Json:
    """What all families share. `c` is Transformers' config of the family."""
    act = getattr(c, "hidden_activation", None) or getattr(c, "hidden_act", None)
    _refuse(path, "hidden_act", act, act not in ("silu", "gelu_pytorch_tanh"))
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        value = getattr(c, name, None)
        _refuse(path, name, value, bool(value))
    fields = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "max_position_embeddings rms_norm_eps initializer_range tie_word_embeddings bos_token_id eos_token_id "
        "pad_token_id"
    )
    return {name: getattr(c, name) for name in fields.split()} | {
        "head_dim": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "hidden_act": act,
        "rope_parameters": _rope(c.rope_parameters, path),
    }


def _rope(rope: Json, path: Path) -> Json:
    for flat in [rope] if "rope_type" in rope else rope.values():
        if flat is None:
            continue
        _refuse(path, "rope_type", flat["rope_type"], flat["rope_type"] not in ROPE_TYPES)
        partial = flat.get("partial_rotary_factor")
        _refuse(path, "partial_rotary_factor", partial, partial not in (None, 1.0))
    return rope


def _refuse(path: Path, option: str, value: Any, unsupported: bool) -> None:
    if unsupported:
        raise CheckpointError(f"{path} sets {option} to {value!r}, which is not supported: choose another model")


def _windows(c: PreTrainedConfig, layer_types: list[str] | None = None) -> Json:
    """Sliding windows: in the layers that `layer_types` says, or in every layer where the family has no such list."""
    if layer_types is None:
        layer_types = [FULL if c.sliding_window is None else SLIDING] * c.num_hidden_layers
    return {"layer_types": list(layer_types), "sliding_window": c.sliding_window if SLIDING in layer_types else None}


def _llama(c: PreTrainedConfig, path: Path) -> Json:
    bias = {"attention_bias": c.attention_bias, "attention_output_bias": c.attention_bias, "mlp_bias": c.mlp_bias}
    return _common(c, path) | bias


def _mistral(c: PreTrainedConfig, path: Path) -> Json:
    return _common(c, path) | _windows(c)


def _mixtral(c: PreTrainedConfig, path: Path) -> Json:
    return _mistral(c, path) | {
        "num_experts": c.num_local_experts,
        "num_experts_per_tok": c.num_experts_per_tok,
        "moe_intermediate_size": c.intermediate_size,
        "scoring_func": "softmax",
        "norm_topk_prob": True,
    }


def _qwen2(c: PreTrainedConfig, path: Path) -> Json:
    return _common(c, path) | _windows(c, c.layer_types) | {"attention_bias": True}


def _qwen3(c: PreTrainedConfig, path: Path) -> Json:
    bias = {"attention_bias": c.attention_bias, "attention_output_bias": c.attention_bias}
    return _common(c, path) | _windows(c, c.layer_types) | bias | {"use_qk_norm": True}


def _qwen3_moe(c: PreTrainedConfig, path: Path) -> Json:
    bias = {"attention_bias": c.attention_bias, "attention_output_bias": c.attention_bias}
    sparse = [
        i not in c.mlp_only_layers and c.num_experts > 0 and (i + 1) % c.decoder_sparse_step == 0
        for i in range(c.num_hidden_layers)
    ]
    return (
        _common(c, path)
        | _windows(c)
        | bias
        | {
            "use_qk_norm": True,
            "mlp_layer_types": ["sparse" if s else "dense" for s in sparse],
            "num_experts": c.num_experts,
            "num_experts_per_tok": c.num_experts_per_tok,
            "moe_intermediate_size": c.moe_intermediate_size,
            "scoring_func": "softmax",
            "norm_topk_prob": c.norm_topk_prob,
        }
    )


def _gemma3_text(c: PreTrainedConfig, path: Path) -> Json:
    bias = {"attention_bias": c.attention_bias, "attention_output_bias": c.attention_bias}
    return (
        _common(c, path)
        | _windows(c, c.layer_types)
        | bias
        | {
            "use_qk_norm": True,
            "use_sandwich_norm": True,
            "query_pre_attn_scalar": c.query_pre_attn_scalar,
            "embedding_multiplier": c.hidden_size**0.5,
        }
    )


def _gemma3(c: PreTrainedConfig, path: Path) -> Json:
    """The text half of a multimodal checkpoint."""
    return _gemma3_text(c.get_text_config(), path)


_FAMILIES: dict[str, Callable[[PreTrainedConfig, Path], Json]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3_text,
    "gemma3": _gemma3,
    "openk3": lambda c, path: {},
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
