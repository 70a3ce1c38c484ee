"""GGUF files of a float32 Llama or Qwen2 checkpoint, so that llama.cpp runs the very weights that OpenK3 runs.

The float32 file is written here, the others are quantized from it by llama.cpp itself. They hold no vocabulary, since
every contender is given token ids. Files are made once and kept in OpenK3's cache directory.

Source of names, permutation and metadata: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

from openk3.weights.store import cache_root

Json = dict[str, object]
# llama.cpp's usual mixtures keep embedding or head in Q8_0 here; "pure" quantizes every matrix alike.
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q4_0-pure")
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def cache_directory(model: Path) -> Path:
    """Where the files of that checkpoint are kept; a changed checkpoint has another place."""
    stat = (model / "model.safetensors").stat()
    key = hashlib.sha256(f"{model.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    directory = cache_root() / "bench" / f"{model.name}-{key}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def gguf_files(model: Path) -> dict[str, Path]:
    """The file of each of `FORMATS`, and the float32 one under "F32". Takes a minute or two the first time.

    Raises:
        ValueError: a checkpoint of another family, or not in float32.
        RuntimeError: llama.cpp failed to quantize.
    """
    directory = cache_directory(model)
    files = {kind: directory / f"{kind}.gguf" for kind in ("F32", *FORMATS)}
    for kind, path in files.items():
        if not path.exists():
            print(f"writing {path}", flush=True)
            making = path.with_suffix(".making")
            if kind == "F32":
                _write_float32(model, making)
            else:
                _quantize(files["F32"], making, kind)
            making.replace(path)
    return files


def _write_float32(model: Path, path: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    family = config["model_type"]
    if family not in ("llama", "qwen2"):
        raise ValueError(f"{model} is of the family {family}: llama and qwen2 can be written as GGUF here")
    writer = gguf.GGUFWriter(path, family)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, values in _tensors(model):
        if values.dtype != np.float32:
            raise ValueError(f"{model} holds {name} as {values.dtype}: a float32 checkpoint is needed")
        if family == "llama" and (".attn_q." in name or ".attn_k." in name):
            values = _permuted(values, heads if ".attn_q." in name else kv_heads)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under llama.cpp's name."""
    with safe_open(model / "model.safetensors", "numpy") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            stem, _, end = name.rpartition(".")
            if stem in _TOP:
                yield f"{_TOP[stem]}.{end}", file.get_tensor(name)
            else:
                _, _, layer, part = stem.split(".", 3)  # model.layers.7.mlp.up_proj
                yield f"blk.{layer}.{_LAYER[part]}.{end}", file.get_tensor(name)


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves (i, i + head_dim / 2) to the interleaved pairs that llama.cpp rotates."""
    return np.ascontiguousarray(values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape))


def _quantize(source: Path, target: Path, kind: str) -> None:
    import llama_cpp as ll

    ll.llama_log_set(quiet := ll.llama_log_callback(lambda *message: None), None)
    quant, _, pure = kind.partition("-")
    params = ll.llama_model_quantize_default_params()
    params.ftype = {"Q8_0": ll.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": ll.LLAMA_FTYPE_MOSTLY_Q4_0}.get(
        quant, ll.LLAMA_FTYPE_MOSTLY_Q4_1
    )
    params.pure = bool(pure)
    if ll.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot quantize {source} to {kind}")
    del quiet  # it had to live until here
