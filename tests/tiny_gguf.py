"""Writes tiny GGUF files the way llama.cpp's converter does: its tensor names, permutation, norm offset and metadata.

It works forwards from a Transformers model, so that a test of the reader, which works backwards, has an independent
other side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from transformers.convert_slow_tokenizer import bytes_to_unicode

T = transformers
# Rows of 256 values, so that every quantization type has whole blocks.
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def config(architecture: str) -> Any:
    match architecture:
        case "llama":
            return T.LlamaConfig(**TINY, tie_word_embeddings=True)
        case "llama-biased":
            return T.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)
        case "llama-llama3":
            rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
            rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
            return T.LlamaConfig(**TINY, rope_parameters=rope)
        case "llama-linear":
            return T.LlamaConfig(**TINY, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
        case "qwen2":
            return T.Qwen2Config(**TINY, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
        case "qwen2-yarn":
            rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
            return T.Qwen2Config(**TINY, rope_parameters=rope)
        case "qwen3":
            return T.Qwen3Config(**TINY, tie_word_embeddings=True)
        case "gemma3":
            return T.Gemma3TextConfig(
                **TINY | {"num_hidden_layers": 6},
                query_pre_attn_scalar=64,
                sliding_window=8,
                rope_parameters={
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            )
    raise AssertionError(architecture)


ARCHITECTURES = ("llama", "llama-biased", "llama-llama3", "llama-linear", "qwen2", "qwen2-yarn", "qwen3", "gemma3")


def write(
    path: Path,
    model: Any,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
) -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    """Write `model` with its matrices in `kind`.

    Args:
        metadata: keys to add or, where the value is `None`, to leave out.
        tensors: tensors to add or replace.
        drop: tensors to leave out.

    Returns:
        The raw data of every tensor and its type, as written.
    """
    c = model.config
    architecture = {"gemma3_text": "gemma3"}.get(c.model_type, c.model_type)
    writer = GGUFWriter(path, architecture)
    for key, value in (_metadata(c, architecture) | tokenizer_metadata() | (metadata or {})).items():
        _add(writer, key, value)
    written = {}
    for name, values in (_tensors(model, architecture) | (tensors or {})).items():
        if name in drop:
            continue
        raw, raw_kind = quantized(values, kind) if values.ndim == 2 else (values, GGMLQuantizationType.F32)
        writer.add_tensor(name, raw, raw_dtype=raw_kind)
        written[name] = (raw, raw_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def quantized(values: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, GGMLQuantizationType]:
    """The values in that type; for the K types, which the package cannot write, random valid blocks of their shape."""
    if kind.name[-2:] != "_K":
        return gguf.quantize(values, kind), kind
    block, width = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (values.shape[0], values.shape[1] // block, width), dtype=np.uint8)
    scale = np.array([4e-4], np.float16).view(np.uint8)
    for offset in (208,) if kind.name == "Q6_K" else (0, 2):
        blocks[..., offset : offset + 2] = scale
    return blocks.reshape(values.shape[0], -1), kind


def tokenizer_metadata() -> dict[str, Any]:
    """A byte-level vocabulary of 300: the 256 bytes, a few merges, specials, and unused ids at the end."""
    alphabet = sorted(bytes_to_unicode().values())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    tokens = alphabet + [m.replace(" ", "") for m in merges] + ["<|begin|>", "<|end|>", "<think>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    padding = 300 - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(padding)],
        "tokenizer.ggml.token_type": types + [5] * padding,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.chat_template": "{% for m in messages %}<|begin|>{{ m['content'] }}\n{% endfor %}",
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _metadata(c: Any, architecture: str) -> dict[str, Any]:
    rope = c.rope_parameters
    full = rope.get("full_attention", rope)
    keys: dict[str, Any] = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": float(full["rope_theta"]),
        "rope.dimension_count" if architecture == "llama" else "attention.key_length": c.head_dim,
    }
    if full["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": full["factor"]}
    if full["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    if architecture == "gemma3":
        keys["attention.sliding_window"] = c.sliding_window
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    c = model.config
    layer = dict(LAYER)
    if architecture == "gemma3":
        layer |= {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    else:
        layer["post_attention_layernorm"] = "ffn_norm"
    out = {}
    for name, parameter in model.state_dict().items():
        values = parameter.numpy().astype(np.float32)
        stem, leaf = name.rsplit(".", 1)
        if stem in TOP:
            if stem == "lm_head" and c.tie_word_embeddings:
                continue
            new = TOP[stem]
        else:
            _, _, number, rest = stem.split(".", 3)
            new = f"blk.{number}.{layer[rest]}"
            if architecture == "llama" and rest in ("self_attn.q_proj", "self_attn.k_proj"):
                values = _permute(values, values.shape[0] // c.head_dim)
        if architecture == "gemma3" and new.endswith("norm"):
            values = values + 1
        out[f"{new}.{leaf}"] = values
    if c.rope_parameters.get("rope_type") == "llama3":
        out["rope_freqs.weight"] = _llama3_divisors(c)
    return out


def _permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def _llama3_divisors(c: Any) -> np.ndarray:
    """`LlamaModel.generate_extra_tensors` of convert_hf_to_gguf.py."""
    rope = c.rope_parameters
    freqs = 1.0 / (rope["rope_theta"] ** (torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim))
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for freq in freqs:
        wavelength = 2 * np.pi / freq
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(float(1 / ((1 - smooth) / rope["factor"] + smooth)))
    return np.array(factors, np.float32)
