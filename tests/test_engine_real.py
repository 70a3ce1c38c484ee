"""The engine on the default model: thirty layers of real weights, batched, cut and displaced, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import add, finish
from numpy.typing import NDArray

from openk3.chat.tokenizer import Tokenizer
from openk3.engine import Delta, Engine, EngineConfig, SamplingParams, naive
from openk3.model import K3ForCausalLM
from openk3.weights import load_model

QUESTIONS = ["What is a page table?", "Write a haiku about the sea 🌊.", "用一句话介绍北京。"]
PARAMS = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def model(smollm2_dir: Path) -> K3ForCausalLM:
    return load_model(smollm2_dir)


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(smollm2_dir)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


def record(engine: Engine) -> dict[tuple[str, int], NDArray[np.float32]]:
    """The logits behind every token from now on, by request and position."""
    rows: dict[tuple[str, int], NDArray[np.float32]] = {}
    run = engine._runner.run

    def recording(chunks: Any) -> NDArray[np.float32]:
        logits = run(chunks)
        for chunk, row in zip([c for c in chunks if c.samples], logits, strict=True):
            rows[chunk.request.request_id, len(chunk.request.tokens)] = row
        return logits

    engine._runner.run = recording  # type: ignore[method-assign]
    return rows


def test_batched_cut_and_displaced_as_alone(
    model: K3ForCausalLM, tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    engine = Engine(model, tokenizer, EngineConfig(max_num_seqs=1, num_pages=64, enable_prefix_caching=False))
    rows_alone = record(engine)
    for i, prompt in enumerate(prompts):
        add(engine, prompt, PARAMS, request_id=str(i))
    alone = finish(engine)
    expected = naive.generate(model, tokenizer, prompts[0], PARAMS, use_cache=True)
    assert (alone["0"].token_ids, alone["0"].text) == (expected.token_ids, expected.text)

    pages = sum(-(-len(prompt) // 4) for prompt in prompts) + 4
    engine = Engine(
        model,
        tokenizer,
        EngineConfig(page_size=4, num_pages=pages, max_num_seqs=4, max_num_batched_tokens=29, max_model_len=4 * pages),
    )
    rows = record(engine)
    for i, prompt in enumerate(prompts):
        add(engine, prompt, PARAMS, request_id=str(i))

    def intrude(step: int) -> list[Delta]:
        if step == 5:
            add(engine, list(range(1000, 1000 + 4 * pages - 4)), SamplingParams(max_tokens=1), priority=1)
        return []

    together = finish(engine, intrude)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0
    for name, reply in alone.items():
        assert (together[name].token_ids, together[name].text) == (reply.token_ids, reply.text)
    if torch.get_num_threads() <= 2:  # with more, threads share rows out unevenly and round differently at the seams
        assert all(np.array_equal(row, rows[key]) for key, row in rows_alone.items())
