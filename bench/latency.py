"""The engine under pressure: a long prompt among running replies, and other busy processes beside it.

    python bench/latency.py --model smollm2-135m --weights int8 --rounds 5

`gaps`: while eight replies are generated, a prompt of 4,096 tokens arrives. How long does a reply wait for its next
token at worst, against the median wait before the prompt came (and against the median while it is computed)?

`share`: how fast one reply is generated beside no, one and two processes that never rest, against the share of the
cores that a fair scheduler leaves to as many threads as there are cores.

Prints both and keeps them in bench/results/latency-<model>.json.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from machine import cores, require_idle
from results import add_options, keep, positive, result_head, run

from openk3.engine import EngineConfig, Handle
from openk3.llm import LLM, load

_REPLIES = 8
_LONG_PROMPT = 4096
_BEFORE = 48  # tokens of every reply before the long prompt comes
_GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def prompt(llm: LLM, tokens: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(1000, llm.config.vocab_size - 1000, tokens).tolist()


class _Reply:
    """A running reply, and when each of its tokens came."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for delta in self.handle:
            if delta.token_ids:
                self.times.append(time.perf_counter())

    def stop(self) -> None:
        self.handle.cancel()
        self._thread.join()


def gaps(llm: LLM, rng: np.random.Generator) -> dict[str, float]:
    """One round; seconds.

    Raises:
        RuntimeError: the replies ended before the long prompt had been computed.
    """
    room = llm.max_model_len - 64
    replies = [_Reply(llm.submit(prompt(llm, 64, rng), max_tokens=room, **_GREEDY)) for _ in range(_REPLIES)]
    try:
        while any(len(reply.times) < _BEFORE for reply in replies):
            time.sleep(0.01)
        arrived = time.perf_counter()
        first = llm.submit(prompt(llm, _LONG_PROMPT, rng), max_tokens=1, **_GREEDY).result()
        answered = time.perf_counter()
        time.sleep(0.5)
    finally:
        for reply in replies:
            reply.stop()
    if any(reply.times[-1] < answered for reply in replies):
        raise RuntimeError("a reply ended while the long prompt was being computed")
    before, beside = [], []
    for reply in replies:
        settled = reply.times[_BEFORE // 2 :]  # the first tokens came while the other prompts were computed
        for a, b in pairwise(settled):
            if b < arrived:
                before.append(b - a)
            elif a < answered:
                beside.append(b - a)
    assert first.timings is not None
    return {
        "median_before_s": statistics.median(before),
        "median_beside_s": statistics.median(beside),
        "worst_beside_s": max(beside),
        "long_prompt_ttft_s": first.timings.ttft_s,
    }


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        time.sleep(0.5 * bool(count))
        yield
    time.sleep(5 * bool(count))  # longer than the engine may go on computing with one thread


def decode_speed(llm: LLM, new_tokens: int, rng: np.random.Generator) -> float:
    """Tokens per second of one reply."""
    done = llm.submit(prompt(llm, 64, rng), max_tokens=new_tokens, **_GREEDY).result()
    assert done.timings is not None
    return done.timings.tokens_per_second


def shares(llm: LLM, rng: np.random.Generator, new_tokens: int) -> dict[str, float]:
    """One round: tokens per second beside 0, 1 and 2 busy processes."""
    found = {}
    for count in (0, 1, 2):
        with busy_processes(count):
            found[str(count)] = decode_speed(llm, new_tokens, rng)
    return found


def fair_share(busy: int) -> float:
    """Of the cores, for as many threads as there are cores beside `busy` others."""
    return cores() / (cores() + busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, parts=("gaps", "share"))
    parser.add_argument("--new-tokens", type=positive, default=256, help="of each reply in 'share'")
    run(parser, benchmark)


def benchmark(options: argparse.Namespace) -> None:
    busy = require_idle(options.allow_busy)
    rng = np.random.default_rng()
    result = result_head("latency", options.model, busy) | {"weights": options.weights}
    with load(options.model, engine=EngineConfig(weights=options.weights), progress=False) as llm:
        decode_speed(llm, 16, rng)
        if "gaps" in options.parts:
            gaps(llm, rng)
            rounds = [gaps(llm, rng) for _ in range(options.rounds)]
            ratios = [one["worst_beside_s"] / one["median_before_s"] for one in rounds]
            result["gaps"] = {"rounds": rounds, "worst_over_median": statistics.median(ratios), "bar": 3.0}
            print(f"a prompt of {_LONG_PROMPT:,} tokens among {_REPLIES} replies, medians of {options.rounds} rounds:")
            for name in rounds[0]:
                print(f"  {name:<20} {statistics.median(one[name] for one in rounds) * 1000:9.1f} ms")
            print(f"  worst gap over median gap before: {statistics.median(ratios):.2f} (bar: at most 3)")
            print(f"  in the worst round: {max(ratios):.2f}")
        if "share" in options.parts:
            rounds = [shares(llm, rng, options.new_tokens) for _ in range(options.rounds)]
            medians = {count: statistics.median(one[count] for one in rounds) for count in rounds[0]}
            kept = {count: speed / medians["0"] for count, speed in medians.items()}
            result["share"] = {"rounds": rounds, "tokens_per_second": medians, "of_idle": kept}
            print(f"one reply beside busy processes, medians of {options.rounds} rounds:")
            for count, speed in medians.items():
                bar = f" (bar: at least {fair_share(int(count)) / 2:.0%})" if count != "0" else ""
                print(f"  {count} busy: {speed:7.1f} tokens/s, {kept[count]:.0%} of idle{bar}")
    print(f"written to {keep(result, options.out)}")


if __name__ == "__main__":
    main()
