"""What a GGUF file's metadata say about the model, as the `config.json` of its own family.

Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py, read backwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from openk3.weights.errors import CheckpointError
from openk3.weights.gguf_file import GGUFFile, QuantizedTensor

Json = dict[str, Any]


def hf_config(file: GGUFFile) -> Json:
    """The `config.json` the file's metadata and tensors describe.

    Raises:
        CheckpointError: another architecture, a missing key, or an option no supported family has.
    """
    families = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "gemma3": _gemma3}
    if file.architecture not in families:
        raise CheckpointError(
            f"{file.path} has the architecture {file.architecture!r}: GGUF files of {', '.join(families)} are supported"
        )
    for key in ("expert_count", "attn_logit_softcapping", "final_logit_softcapping"):
        if _optional(file, key):
            raise CheckpointError(
                f"{file.path} sets {file.architecture}.{key}, which is not supported in a GGUF file: take the model's "
                f"safetensors directory"
            )
    if (pieces := file.metadata.get("split.count")) not in (None, 0, 1):
        raise CheckpointError(f"{file.path} is one of {pieces} pieces: join them with llama-gguf-split --merge")
    if (layers := _count(file, "block_count")) > len(file.tensors):
        raise CheckpointError(
            f"{file.path} claims {layers} layers and holds {len(file.tensors)} tensors: download it again"
        )
    vocab_size = tensor(file, "token_embd.weight").shape[0]
    if (tokens := len(file.metadata.get("tokenizer.ggml.tokens") or ())) > vocab_size:
        raise CheckpointError(f"{file.path} has {tokens} tokens and {vocab_size} embeddings: download it again")
    heads, hidden = _count(file, "attention.head_count"), _count(file, "embedding_length")
    head_dim = _count(file, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _optional(file, key) not in (None, head_dim):
            raise CheckpointError(
                f"{file.path} has {file.architecture}.{key} = {_optional(file, key)} with heads of {head_dim}: heads "
                f"of one size, rotated as a whole, are supported"
            )
    common = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": _count(file, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _count(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _count(file, "context_length"),
        "rms_norm_eps": _shortest(_number(file, "attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        common[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return common | families[file.architecture](file, common)


def _llama(file: GGUFFile, common: Json) -> Json:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_parameters": _rope(file, common),
    }


def _qwen2(file: GGUFFile, common: Json) -> Json:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": _rope(file, common),
    }


def _qwen3(file: GGUFFile, common: Json) -> Json:
    return _qwen2(file, common) | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _gemma3(file: GGUFFile, common: Json) -> Json:
    # llama.cpp writes neither: five sliding layers to a full one, and the 27B model's own score scale.
    layers, heads = common["num_hidden_layers"], common["num_attention_heads"]
    pattern = _count(file, "attention.sliding_window_pattern", 6)
    local = {"rope_type": "default", "rope_theta": _number(file, "rope.freq_base_swa", 10_000.0)}
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": common["hidden_size"] // heads if layers == 62 else common["head_dim"],
        "sliding_window": _count(file, "attention.sliding_window"),
        "layer_types": ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)],
        "rope_parameters": {
            "full_attention": _rope(file, common, theta=1_000_000.0),
            "sliding_attention": local,
        },
    }


def _rope(file: GGUFFile, common: Json, theta: float = 10_000.0) -> Json:
    """Rotary parameters of the layers that see everything."""
    rope: Json = {"rope_type": "default", "rope_theta": _number(file, "rope.freq_base", theta)}
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, rope, common["head_dim"])
    kind = _optional(file, "rope.scaling.type") or "none"
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{file.path} has {file.architecture}.rope.scaling.type = {kind!r}: linear and yarn are supported"
        )
    rope |= {"rope_type": kind, "factor": _number(file, "rope.scaling.factor")}
    if kind == "yarn":
        for key in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier"):
            if _optional(file, f"rope.scaling.{key}") not in (None, 1.0):
                raise CheckpointError(
                    f"{file.path} sets {file.architecture}.rope.scaling.{key}, which is not supported: take the "
                    f"model's safetensors directory"
                )
        rope["original_max_position_embeddings"] = _count(file, "rope.scaling.original_context_length")
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if _optional(file, f"rope.scaling.{theirs}") is not None:
                rope[ours] = _number(file, f"rope.scaling.{theirs}")
    return rope


def _llama3_rope(file: GGUFFile, rope: Json, head_dim: int) -> Json:
    """The parameters behind `rope_freqs.weight`, the table of divisors llama.cpp makes of Llama 3.1's scaling.

    Every release scaled so used the same bounds; the factor is the table's largest entry. The table is computed again
    from them, so that a file scaled otherwise is refused rather than run wrongly.
    """
    table = file.tensors["rope_freqs.weight"].dequantize().astype(np.float64)
    low, high, trained = 1.0, 4.0, 8192
    factor = float(_shortest(table.max()))
    wavelength = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    keep = np.clip((trained / wavelength - low) / (high - low), 0, 1)
    expected = 1 / ((1 - keep) / factor + keep)
    if table.shape != expected.shape or not np.allclose(table, expected, rtol=1e-4):
        raise CheckpointError(
            f"{file.path} scales its rotary frequencies by a table (rope_freqs.weight) that is not Llama 3.1's: take "
            f"the model's safetensors directory"
        )
    return rope | {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }


def _optional(file: GGUFFile, key: str) -> Any:
    return file.metadata.get(f"{file.architecture}.{key}")


def _number(file: GGUFFile, key: str, default: float | None = None) -> float:
    """A positive number; a missing key without a default is an error."""
    value = file.metadata.get(f"{file.architecture}.{key}", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
        raise CheckpointError(
            f"{file.path} has {file.architecture}.{key} = {value!r}: a single positive number is needed there, so the "
            f"file is damaged or of another kind"
        )
    return float(value)


def _count(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A positive whole number."""
    value = _number(file, key, default)
    if value != int(value):
        raise CheckpointError(f"{file.path} has {file.architecture}.{key} = {value}: a whole number is needed there")
    return int(value)


def _shortest(value: float) -> float:
    """The decimal a float32 was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def tensor(file: GGUFFile, name: str) -> QuantizedTensor:
    """
    Raises:
        CheckpointError: the file has no tensor of that name.
    """
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} lacks the tensor {name}: the file is incomplete, download it again")
    return file.tensors[name]
