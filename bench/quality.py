"""Perplexity of every way to hold the weights, on a fixed text of 20,480 tokens, beside llama.cpp's 4-bit formats.

What a quantized model computes is defined as float32 arithmetic on its dequantized matrices, and so it is measured
here. That holds for llama.cpp's formats too: its own quantizer makes the files out of the same float32 weights, and
their numbers are read back. Windows of 1,024 tokens, each by itself.

    python bench/quality.py --model smollm2-135m

The text is half novel and half dictionary, both in the public domain: the beginning of Jane Austen's "Persuasion"
(1817), from the Debian package r-cran-janeaustenr 1.0.0, and the entries "blue box" to "bug" of the Jargon File 4.4.7
(2003), from the Debian package dict-jargon 4.4.7-3.1, with the lines of each paragraph joined. Nothing of it is in the
calibration text. Quantized checkpoints are made once and kept in OpenK3's cache directory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_files import cache_directory, gguf_files
from machine import busy_share
from results import DEFAULT_MODEL, RESULTS, positive, result_file, result_head, run, write_json
from rich.console import Console
from rich.table import Table

from openk3.chat.tokenizer import Tokenizer
from openk3.config import ModelConfig
from openk3.model import K3ForCausalLM
from openk3.weights import LoadedModel, load_weights, resolve
from openk3.weights.gguf_exact import exact_matrices
from openk3.weights.gguf_file import open_gguf
from openk3.weights.quantize import Format, quantize

TEXT = Path(__file__).parent / "data" / "quality.txt"
SHA256 = "2bed7fb195fbd85c08919e45ae2ae6501ebf6348b1524e88f5ddf383ea539ef9"
WINDOW, WINDOWS = 1024, 20
# Ours: format and group size, None for the recipe.
CALIBRATED: dict[str, tuple[Format, int | None]] = {
    "int8, calibrated": ("int8", None),
    "int4, calibrated": ("int4", None),
    "int4 in groups of 64, calibrated": ("int4", 64),
    "int4 in groups of 32, calibrated": ("int4", 32),
}
LLAMA_CPP = ("Q8_0", "Q4_1", "Q4_0", "Q4_0-pure")


def tokens(directory: Path) -> np.ndarray:
    """The text as `[WINDOWS, WINDOW]` tokens of the model.

    Raises:
        ValueError: the text is not the one that belongs to the figures.
    """
    data = TEXT.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ValueError(f"{TEXT} is not the text of SHA-256 {SHA256}: take it from the repository again")
    ids = Tokenizer.from_directory(directory).encode(data.decode())[: WINDOWS * WINDOW]
    return np.array(ids, np.int64).reshape(WINDOWS, WINDOW)


@torch.inference_mode()
def perplexity(model: K3ForCausalLM, ids: np.ndarray) -> float:
    """Of every token but the first of each window."""
    total = 0.0
    for window in torch.from_numpy(ids):
        hidden = model.model(input_ids=window[None], use_cache=False).last_hidden_state[0, :-1]
        for part, wanted in zip(hidden.split(256), window[1:].split(256), strict=True):
            total += float(torch.nn.functional.cross_entropy(model.lm_head(part), wanted, reduction="sum"))
    return math.exp(total / (ids.shape[0] * (ids.shape[1] - 1)))


def variants(name: str, directory: Path) -> dict[str, Callable[[], LoadedModel]]:
    """Every way to hold the weights, by name, to be loaded when its turn comes."""
    plain = load_weights(directory)
    return {
        "float32": lambda: plain,
        **{f"{format}, rounded when loaded": partial(plain.quantized, format) for format in ("int8", "int4")},
        **{title: partial(_made, name, directory, format, group) for title, (format, group) in CALIBRATED.items()},
        **{f"llama.cpp {kind}": partial(_of_llama_cpp, plain.config, directory, kind) for kind in LLAMA_CPP},
    }


def _made(name: str, directory: Path, format: Format, group: int | None) -> LoadedModel:
    made = cache_directory(directory) / f"{format}-{group or 'recipe'}"
    if not made.exists():
        quantize(name, format=format, group_size=group, output=made)
    return load_weights(made)


def _of_llama_cpp(config: ModelConfig, directory: Path, kind: str) -> LoadedModel:
    return LoadedModel(config, dict(exact_matrices(open_gguf(gguf_files(directory)[kind]))[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure those whose name begins so; others stay")
    parser.add_argument("--threads", type=positive, help="CPU threads; one per core by default")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    run(parser, benchmark)


def benchmark(options: argparse.Namespace) -> None:
    if options.threads:
        torch.set_num_threads(options.threads)

    directory = resolve(options.model)
    ids = tokens(directory)
    result = result_head("quality", options.model, busy_share())
    result |= {"text_sha256": SHA256, "tokens": int(ids.size), "window": WINDOW}
    path = options.out or RESULTS / result_file("quality", options.model)
    rows = measured(path, result)
    ways = variants(options.model, directory)
    for start in options.only or ():
        if not any(title.startswith(start) for title in ways):
            raise ValueError(f"--only {start!r}: no way is called so; they are {'; '.join(ways)}")
    for title, load in ways.items():
        needed = title == "float32" and title not in rows
        if options.only and not needed and not title.startswith(tuple(options.only)):
            continue
        loaded = load()
        count = sum(math.prod(tensor.shape) for tensor in loaded.tensors.values())
        nbytes = sum(tensor.nbytes for tensor in loaded.tensors.values())
        rows[title] = {
            "perplexity": perplexity(loaded.to_torch(), ids),
            "bytes": nbytes,
            "bits_per_parameter": 8 * nbytes / count,
            "times_smaller_than_float32": 4 * count / nbytes,
            "times_smaller_than_bfloat16": 2 * count / nbytes,
        }
        rows[title]["against_float32"] = rows[title]["perplexity"] / rows["float32"]["perplexity"] - 1
        print(f"{title}: {rows[title]['perplexity']:.4f} ({rows[title]['against_float32']:+.2%})", flush=True)
        write_json(path, result | {"perplexities": rows})

    table = Table(
        "weights", "perplexity", "against float32", "size", "of float32", title=f"{options.model}, {ids.size} tokens"
    )
    for title, row in rows.items():
        size = f"{row['bytes'] / 1e6:.1f} MB"
        times = f"1 / {row['times_smaller_than_float32']:.2f}"
        table.add_row(title, f"{row['perplexity']:.3f}", f"{row['against_float32']:+.2%}", size, times)
    Console(width=110).print(table)
    print(f"written to {path}")


def measured(path: Path, result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What an earlier run on the same text has found."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    same = all(old.get(key) == result[key] for key in ("text_sha256", "tokens", "window"))
    return old["perplexities"] if same else {}


if __name__ == "__main__":
    main()
