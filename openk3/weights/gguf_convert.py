"""GGUF files to Hugging Face directories, once.

A GGUF of the Llama, Qwen2, Qwen3 or Gemma3 architecture becomes an ordinary directory of its own family (config,
float32 safetensors, tokenizer, chat template), which this project and Transformers itself load. What llama.cpp's
converter did to the tensors is undone: Llama's query and key rows were permuted, Gemma's norms had one added.

Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py, read backwards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from openk3.weights import store
from openk3.weights.errors import CheckpointError
from openk3.weights.gguf_config import Json, hf_config, tensor
from openk3.weights.gguf_file import GGUFFile, QuantizedTensor, open_gguf
from openk3.weights.gguf_tokenizer import end_ids, write_tokenizer
from openk3.weights.progress import Progress, bytes_bar
from openk3.weights.safetensors_writer import write_float32

_SLICE_VALUES = 2**24


def converted(path: Path, key: str | None = None, *, progress: bool = False) -> Path:
    """The directory `path` converts to, made at the first call.

    Args:
        key: what names the result in the cache; by default made of the file's path, size and time of change, so that
            a changed file is converted again.

    Raises:
        CheckpointError: the file cannot be read or is not supported, or there is no room for the result.
    """
    final = store.converted_path(path, key)
    if final.is_dir():
        return final
    with store.exclusive(final.name):
        if not final.is_dir():
            file = open_gguf(path)
            needed = 4 * sum(math.prod(tensor.shape) for tensor in file.tensors.values())
            store.require_space(final.parent, needed, f"converting {path.name}")
            with store.new_directory(final) as making, bytes_bar("unpacking", needed, progress) as bar:
                convert(file, making, bar)
    return final


def convert(file: GGUFFile, directory: Path, progress: Progress = lambda at: None) -> None:
    """Write the Hugging Face directory of `file` into `directory`."""
    config = hf_config(file)
    plan = targets(file, config)
    _write_json(directory / "config.json", config)
    write_companions(file, config, directory)
    shapes = {one.name: one.source.shape for one in plan}
    write_float32(directory / "model.safetensors", shapes, _dequantized(plan, progress))


def write_companions(file: GGUFFile, config: Json, directory: Path) -> None:
    """Write what lies beside `config.json` and the weights: the tokenizer, and the ids that end a generation."""
    generation = {name: config[name] for name in ("bos_token_id", "pad_token_id")} | {"eos_token_id": end_ids(file)}
    _write_json(directory / "generation_config.json", {k: v for k, v in generation.items() if v not in (None, [])})
    write_tokenizer(file, directory, config["max_position_embeddings"])


def _write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Target:
    """One tensor of the result: its Hugging Face name, what it is made of, and the number to take away from it."""

    name: str
    source: QuantizedTensor
    minus: float


def targets(file: GGUFFile, config: Json) -> list[Target]:
    """Every tensor of the result, in the order of the model.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the metadata says, or is not known.
    """
    plan, used = [], {"rope_freqs.weight"}
    for theirs, ours, shape in _expected(file, config):
        source = tensor(file, theirs)
        if source.shape != shape:
            raise CheckpointError(
                f"{file.path} has {theirs} of shape {list(source.shape)} where its metadata ask for {list(shape)}: the "
                f"file is damaged, download it again"
            )
        if file.architecture == "llama" and (".attn_q." in theirs or ".attn_k." in theirs):
            source = _unpermuted(source, config["head_dim"])
        plan.append(Target(ours, source, 1.0 if file.architecture == "gemma3" and "norm" in theirs else 0.0))
        used.add(theirs)
    if unknown := file.tensors.keys() - used:
        raise CheckpointError(
            f"{file.path} holds {len(unknown)} tensors that the architecture {file.architecture} does not have, such "
            f"as {min(unknown)}: take the model's safetensors directory"
        )
    return plan


def _expected(file: GGUFFile, config: Json) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The tensors a file of this architecture and configuration has: name there, name here, shape."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    gemma = file.architecture == "gemma3"
    bias = file.architecture == "qwen2" or config.get("attention_bias", False)
    yield "token_embd.weight", "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        there, here = f"blk.{i}", f"model.layers.{i}"
        yield f"{there}.attn_norm.weight", f"{here}.input_layernorm.weight", (hidden,)
        for letter, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{there}.attn_{letter}.weight", f"{here}.self_attn.{letter}_proj.weight", (rows, hidden)
            if bias:
                yield f"{there}.attn_{letter}.bias", f"{here}.self_attn.{letter}_proj.bias", (rows,)
        yield f"{there}.attn_output.weight", f"{here}.self_attn.o_proj.weight", (hidden, queries)
        if bias and file.architecture != "qwen2":
            yield f"{there}.attn_output.bias", f"{here}.self_attn.o_proj.bias", (hidden,)
        if file.architecture in ("qwen3", "gemma3"):
            for letter in "qk":
                yield f"{there}.attn_{letter}_norm.weight", f"{here}.self_attn.{letter}_norm.weight", (head,)
        if gemma:
            yield f"{there}.post_attention_norm.weight", f"{here}.post_attention_layernorm.weight", (hidden,)
            yield f"{there}.post_ffw_norm.weight", f"{here}.post_feedforward_layernorm.weight", (hidden,)
        before_mlp = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        yield f"{there}.ffn_norm.weight", f"{here}.{before_mlp}.weight", (hidden,)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            yield f"{there}.ffn_{name}.weight", f"{here}.mlp.{name}_proj.weight", shape
            if config.get("mlp_bias"):
                yield f"{there}.ffn_{name}.bias", f"{here}.mlp.{name}_proj.bias", shape[:1]
    yield "output_norm.weight", "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight", (config["vocab_size"], hidden)


def _unpermuted(source: QuantizedTensor, head_dim: int) -> QuantizedTensor:
    """Llama's query and key rows back from interleaved pairs (i, i + 1) to halves (i, i + head_dim / 2).

    Quantization blocks run along a row, so rows move without being dequantized. A bias has one value per row.
    """
    order = np.arange(source.shape[0]).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()
    if len(source.shape) == 1:
        values = source.dequantize()[order]
        return QuantizedTensor(source.name, source.shape, gguf.GGMLQuantizationType.F32, values)
    return QuantizedTensor(source.name, source.shape, source.type, source.rows[order])


def _dequantized(plan: list[Target], progress: Progress) -> Iterator[tuple[str, np.ndarray]]:
    """The values of every tensor, in slices of rows that fit a small memory."""
    done = 0
    for one in plan:
        rows = one.source.rows.reshape(-1, one.source.rows.shape[-1])
        step = max(1, _SLICE_VALUES // one.source.shape[-1])
        for start in range(0, len(rows), step):
            values = gguf.dequantize(rows[start : start + step], one.source.type).astype(np.float32, copy=False)
            yield one.name, values - np.float32(one.minus) if one.minus else values
            done += 4 * values.size
            progress(done)
