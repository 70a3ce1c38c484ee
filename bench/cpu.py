"""Speed on this CPU: OpenK3's kernels and its PyTorch runner beside Transformers (and llama.cpp where it is installed).

All contenders run the same weights and the same token ids, one after the other in every round, in one process. Run it
on an idle machine:

    python bench/cpu.py --rounds 5

Prints medians, ratios, and the share of the memory bandwidth that decoding reaches, and writes everything to
bench/results/cpu.json. llama.cpp takes part if `llama-cpp-python` is installed and `--gguf` names a file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from prefix_cache import processor
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

import openk3
from openk3.engine import EngineConfig
from openk3.llm import DEFAULT_MODEL, LLM, load
from openk3.model.cost import active_parameters, kv_bytes
from openk3.weights import resolve

RESULTS = Path(__file__).parent / "results" / "cpu.json"
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
# A contender: (prompts, new tokens) -> seconds of prefill (until the first token of the last prompt), of everything.
Contender = Callable[[list[list[int]], int], tuple[float, float]]


def of_openk3(llm: LLM) -> Contender:
    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        begin = time.perf_counter()
        handles = [llm.submit(prompt, max_tokens=new_tokens, **GREEDY) for prompt in prompts]
        first = max(handle.result().timings.ttft_s for handle in handles)  # type: ignore[union-attr]
        return first, time.perf_counter() - begin

    return run


def of_transformers(directory: Path) -> Contender:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        begin = time.perf_counter()
        output = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        first = time.perf_counter() - begin
        for _ in range(new_tokens - 1):
            output = model(token, cache=output.cache, use_cache=True)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
        return first, time.perf_counter() - begin

    return run


def of_llama_cpp(gguf: Path, context: int) -> Contender:
    import llama_cpp

    model = llama_cpp.Llama(str(gguf), n_ctx=context, n_batch=512, n_threads=os.cpu_count(), verbose=False)

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """One prompt at a time: its Python interface has no batch."""
        begin, first = time.perf_counter(), 0.0
        for prompt in prompts:
            model.reset()
            model.eval(prompt)
            first = time.perf_counter() - begin
            for _ in range(new_tokens - 1):
                model.eval([int(np.argmax(model.scores[model.n_tokens - 1]))])
        return first, time.perf_counter() - begin

    return run


@njit(parallel=True, fastmath=True)
def _read(x: Any, threads: int) -> Any:
    sums = np.zeros(threads, np.float32)
    part = x.size // threads
    for t in prange(threads):
        total = np.float32(0)
        for i in range(t * part, (t + 1) * part):
            total += x[i]
        sums[t] = total
    return sums


def read_bandwidth() -> float:
    """Bytes per second that all cores read from 1 GiB, the best of ten."""
    x, threads = np.ones(2**28, np.float32), os.cpu_count() or 1
    _read(x, threads)
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        _read(x, threads)
        times.append(time.perf_counter() - begin)
    return x.nbytes / min(times)


def measure(contenders: dict[str, Contender], rounds: int, vocab_size: int) -> dict[str, dict[str, list[float]]]:
    """Tokens per second of each workload and contender, one figure per round."""
    rng = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[int(t) for t in rng.integers(1000, vocab_size - 1000, length)] for _ in range(count)]

    speeds: dict[str, dict[str, list[float]]] = {}

    def note(workload: str, name: str, speed: float) -> None:
        speeds.setdefault(workload, {}).setdefault(name, []).append(speed)

    for _ in range(rounds + 1):  # the first round warms up and is thrown away
        short, long, many = prompts(1, 64), prompts(1, 512), prompts(16, 64)
        for name, run in contenders.items():
            first, total = run(short, 128)
            note("decode, batch 1, after 64 tokens", name, 127 / (total - first))
            note("prefill, 512 tokens", name, 512 / run(long, 1)[0])
            first, total = run(many, 32)
            note("16 sequences of 64 + 32 tokens, all generated tokens", name, 16 * 32 / total)
    return {workload: {name: s[1:] for name, s in by_name.items()} for workload, by_name in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gguf", type=Path, help="a file of the same model, for llama.cpp")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()

    directory = resolve(options.model)
    engines = {
        "openk3 float32": EngineConfig(enable_prefix_caching=False, kv_cache_bytes=2**29),
        "openk3 int8": EngineConfig(enable_prefix_caching=False, kv_cache_bytes=2**29, weights="int8"),
        "openk3 torch": EngineConfig(enable_prefix_caching=False, kv_cache_bytes=2**29, runner="torch"),
    }
    models = {name: load(str(directory), engine=config) for name, config in engines.items()}
    contenders: dict[str, Contender] = {name: of_openk3(llm) for name, llm in models.items()}
    contenders["transformers float32"] = of_transformers(directory)
    if options.gguf:
        contenders[f"llama.cpp {options.gguf.stem}"] = of_llama_cpp(options.gguf, 1024)
    config = models["openk3 int8"].config
    speeds = measure(contenders, options.rounds, config.vocab_size)
    bandwidth = read_bandwidth()
    for llm in models.values():
        llm.close()

    medians = {work: {name: statistics.median(s) for name, s in by.items()} for work, by in speeds.items()}
    table = Table("tokens per second", *contenders, title=f"{options.model}, medians of {options.rounds} rounds")
    for work, by_name in medians.items():
        base = by_name["transformers float32"]
        table.add_row(work, *[f"{speed:.1f} ({speed / base:.2f}x)" for speed in by_name.values()])
    Console(width=160).print(table)
    moved = active_parameters(config) + kv_bytes(config, 128, 4)
    decode = medians["decode, batch 1, after 64 tokens"]["openk3 int8"]
    share = moved * decode / bandwidth
    print(f"INT8 decode moves {moved * decode / 1e9:.1f} GB/s, {share:.0%} of the {bandwidth / 1e9:.1f} GB/s read here")
    result = {
        "benchmark": "cpu",
        "workload": {"model": options.model, "rounds": options.rounds},
        "median_tokens_per_second": medians,
        "tokens_per_second": speeds,
        "read_bandwidth_bytes_per_second": bandwidth,
        "int8_decode_bandwidth_share": share,
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "processor": processor()},
        "versions": {
            "openk3": openk3.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numba", "transformers")},
        },
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
