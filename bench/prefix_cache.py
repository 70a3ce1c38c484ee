"""What a pinned prefix saves: time to the first token behind a long system prompt, without and with `prefix_cache`.

Each round takes a new system prompt and asks one question behind it, first on an engine that caches nothing, then on
one that has pinned the prompt. The answers must be the same tokens. Run it on an idle machine:

    python bench/prefix_cache.py --tokens 2000 --rounds 5

Prints the medians and their ratio (the aim is at most 0.1) and writes everything to bench/results/prefix_cache.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import openk3
from openk3.doctor import check_isa
from openk3.engine import EngineConfig
from openk3.llm import DEFAULT_MODEL, LLM, load

RESULTS = Path(__file__).parent / "results" / "prefix_cache.json"
QUESTION = [{"role": "user", "content": "Summarise the rules in one sentence."}]
RULE = "Rule {number} of house {house}: whoever borrows book {number} brings it back before day {day}. "


def system_prompt(llm: LLM, house: int, tokens: int) -> str:
    """Rules that differ from the first line on from house to house, in at least `tokens` tokens."""
    text, number = "", 0
    while len(llm.tokenizer.encode(text)) < tokens:
        number += 1
        text += RULE.format(number=number, house=house, day=(number * 7 + house) % 28 + 1)
    return text


def measure(plain: LLM, caching: LLM, house: int, tokens: int, answer_tokens: int) -> dict[str, Any]:
    """One round.

    Raises:
        RuntimeError: the two answers differ, so that the times mean nothing.
    """
    system = [{"role": "system", "content": system_prompt(plain, house, tokens)}]
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": answer_tokens}
    without = plain.chat([*system, *QUESTION], **sampling)
    begin = time.perf_counter()
    cache = caching.prefix_cache(system)
    pinned = time.perf_counter()
    cached = caching.chat(QUESTION, cache=cache, **sampling)
    cache.release()
    if cached.token_ids != without.token_ids:
        raise RuntimeError("the cached answer differs")
    return {
        "prompt_tokens": without.usage.prompt_tokens,
        "cached_tokens": cached.usage.cached_tokens,
        "pin_s": pinned - begin,
        "ttft_without_s": without.timings.ttft_s,
        "ttft_with_s": cached.timings.ttft_s,
    }


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    return check_isa(cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else "", platform.machine()).found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=2000, help="least length of the system prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answer-tokens", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()

    with load(options.model, engine=EngineConfig(enable_prefix_caching=False)) as plain, load(options.model) as caching:
        for llm in (plain, caching):
            llm.chat(QUESTION, temperature=0, max_tokens=2)  # the first use of every kernel is slower
        tokens, answer_tokens = options.tokens, options.answer_tokens
        rounds = [measure(plain, caching, house, tokens, answer_tokens) for house in range(options.rounds)]

    without = statistics.median(r["ttft_without_s"] for r in rounds)
    with_cache = statistics.median(r["ttft_with_s"] for r in rounds)
    result = {
        "benchmark": "prefix_cache",
        "workload": {
            "model": options.model,
            "system_prompt_tokens": options.tokens,
            "answer_tokens": options.answer_tokens,
            "rounds": options.rounds,
        },
        "median_ttft_without_s": without,
        "median_ttft_with_s": with_cache,
        "ratio": with_cache / without,
        "aim": 0.1,
        "rounds": rounds,
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "processor": processor()},
        "versions": {"openk3": openk3.__version__, "python": platform.python_version(), "torch": version("torch")},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(
        f"time to first token, median of {options.rounds}: {without:.3f} s without, {with_cache:.3f} s with the cache"
    )
    print(f"ratio {with_cache / without:.3f} (aim: at most 0.1), written to {options.out}")


if __name__ == "__main__":
    main()
