"""What a pinned prefix saves: time to the first token behind a long system prompt, without and with `prefix_cache`.

Each round takes a new system prompt and asks one question behind it, first on an engine that caches nothing, then on
one that has pinned the prompt. The answers must be the same tokens. Run it on an idle machine:

    python bench/prefix_cache.py --model smollm2-135m --weights int8 --rounds 5

Prints the medians and their ratio (bar: at most 0.05) and keeps everything in bench/results/prefix_cache-<model>.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from machine import require_idle
from results import add_options, keep, positive, result_head, run

from openk3.engine import EngineConfig
from openk3.llm import LLM, load

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--tokens", type=positive, default=4096, help="least length of the system prompt")
    parser.add_argument("--answer-tokens", type=positive, default=8)
    run(parser, benchmark)


def benchmark(options: argparse.Namespace) -> None:
    busy = require_idle(options.allow_busy)
    off, on = (EngineConfig(weights=options.weights, enable_prefix_caching=caching) for caching in (False, True))
    with load(options.model, engine=off) as plain, load(options.model, engine=on) as caching:
        for llm in (plain, caching):
            llm.chat(QUESTION, temperature=0, max_tokens=2)  # the first use of every kernel is slower
        rounds = [
            measure(plain, caching, house, options.tokens, options.answer_tokens) for house in range(options.rounds)
        ]

    without = statistics.median(r["ttft_without_s"] for r in rounds)
    with_cache = statistics.median(r["ttft_with_s"] for r in rounds)
    result = result_head("prefix_cache", options.model, busy) | {
        "weights": options.weights,
        "system_prompt_tokens": options.tokens,
        "answer_tokens": options.answer_tokens,
        "median_ttft_without_s": without,
        "median_ttft_with_s": with_cache,
        "ratio": with_cache / without,
        "bar": 0.05,
        "rounds": rounds,
    }
    print(
        f"time to first token, median of {options.rounds}: {without:.3f} s without, {with_cache:.3f} s with the cache"
    )
    print(f"ratio {with_cache / without:.4f} (bar: at most 0.05), written to {keep(result, options.out)}")


if __name__ == "__main__":
    main()
