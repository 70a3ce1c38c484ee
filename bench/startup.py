"""What a process of OpenK3 takes: time until its first token, time to load a checkpoint, memory.

    python bench/startup.py --model smollm2-135m --weights int8 --rounds 5
    python bench/startup.py --model /path/of/a/checkpoint/of/k3/quantize --weights auto

`cold`: from starting `k3 generate` to the first byte it prints, with the files in the disk cache and the kernels
compiled (one run before the first that counts). `load`: `load_weights` and `openk3.load` in a new process. `memory`:
resident memory of a process after a prompt of 4,096 tokens and 64 new ones, against its weights, its keys and values,
and 400 MB. Prints all and keeps it in bench/results/startup-<model>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import require_idle
from results import add_options, keep, result_head, run

_ALLOWANCE = 400_000_000
_CONTEXT = 4096, 64  # prompt and new tokens of the memory part


def cold(model: str, weights: str) -> dict[str, float]:
    """Seconds from the start of the process to its first output, and to its end.

    Raises:
        RuntimeError: it failed.
    """
    command = [str(Path(sys.executable).parent / "k3"), "generate", "--raw", "The capital of France is"]
    command += ["--model", model, "--weights", weights, "--temperature", "0", "--max-tokens", "4"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        first = time.perf_counter() - begin
        process.stdout.read()
        error = process.stderr.read()
    if process.returncode:
        raise RuntimeError(f"k3 generate failed: {error.decode(errors='replace').strip()}")
    return {"first_s": first, "total_s": time.perf_counter() - begin}


def probe(part: str, model: str, weights: str) -> dict[str, float]:
    """Run one of the functions below in a new process."""
    command = [sys.executable, __file__, "--probe", part, "--model", model, "--weights", weights]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # it has said why
    return json.loads(done.stdout)


def probe_load(model: str, weights: str) -> dict[str, float]:
    from openk3.weights import resolve
    from openk3.weights.loaded import load_weights

    directory = resolve(model)
    begin = time.perf_counter()
    load_weights(directory)
    read = time.perf_counter()
    from openk3.engine import EngineConfig
    from openk3.llm import load

    imported = time.perf_counter()
    with load(model, engine=EngineConfig(weights=weights), progress=False):  # type: ignore[arg-type]
        loaded = time.perf_counter()
    return {"load_weights_s": read - begin, "import_s": imported - read, "load_s": loaded - imported}


def probe_memory(model: str, weights: str) -> dict[str, float]:
    from openk3.engine import EngineConfig
    from openk3.llm import load

    with load(model, engine=EngineConfig(weights=weights), progress=False) as llm:  # type: ignore[arg-type]
        prompt_tokens, new_tokens = _CONTEXT
        ids = [1000 + i * 7919 % (llm.config.vocab_size - 2000) for i in range(prompt_tokens)]
        llm.generate(ids, max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return {name: 1024 * int(sizes[name].split()[0]) for name in ("VmRSS", "RssAnon", "RssFile", "VmHWM")}


_PROBES = {"load": probe_load, "memory": probe_memory}


def memory_bar(model: str, weights: str) -> dict[str, float]:
    """Bytes of the weights as held, and of keys and values of the probe's context."""
    from work import held_bytes

    from openk3.model.cost import kv_bytes
    from openk3.weights import load_config, resolve

    directory = resolve(model)
    held = held_bytes(directory, weights)
    cache = kv_bytes(load_config(directory), sum(_CONTEXT), 4 if held.float32 else 2)
    return {"weights": held.size, "keys_and_values": cache, "bar": held.size + cache + _ALLOWANCE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, parts=("cold", "load", "memory"))
    parser.add_argument("--probe", choices=_PROBES, help=argparse.SUPPRESS)
    run(parser, benchmark)


def benchmark(options: argparse.Namespace) -> None:
    from openk3.weights import resolve

    model, weights = options.model, options.weights
    if options.probe:
        print(json.dumps(_PROBES[options.probe](model, weights)))
        return
    resolve(model)
    busy = require_idle(options.allow_busy)
    result: dict[str, Any] = result_head("startup", model, busy) | {"weights": weights}
    if "cold" in options.parts:
        cold(model, weights)
        rounds = [cold(model, weights) for _ in range(options.rounds)]
        first, total = (statistics.median(one[name] for one in rounds) for name in ("first_s", "total_s"))
        result["cold"] = {"rounds": rounds, "first_s": first, "total_s": total, "bar": 3.0}
        print(f"k3 generate: first token after {first:.2f} s (bar: at most 3), all after {total:.2f} s")
    if "load" in options.parts:
        probe("load", model, weights)
        rounds = [probe("load", model, weights) for _ in range(options.rounds)]
        medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        result["load"] = {"rounds": rounds, **medians}
        print(f"load_weights {medians['load_weights_s']:.3f} s, openk3.load {medians['load_s']:.2f} s")
    if "memory" in options.parts:
        found, bar = probe("memory", model, weights), memory_bar(model, weights)
        result["memory"] = found | bar
        print(
            f"resident {found['VmRSS'] / 1e6:.0f} MB ({found['RssAnon'] / 1e6:.0f} own, {found['RssFile'] / 1e6:.0f} "
            f"of files; {found['VmHWM'] / 1e6:.0f} at most), bar {bar['bar'] / 1e6:.0f} MB: weights "
            f"{bar['weights'] / 1e6:.0f}, keys and values {bar['keys_and_values'] / 1e6:.0f}, and 400"
        )
    print(f"written to {keep(result, options.out)}")


if __name__ == "__main__":
    main()
