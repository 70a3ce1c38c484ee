"""Logits have the same bits whoever is in the batch, however prompts are cut, after preemption and from the cache.

And they are the right ones: equal to the model's own, with ordinary attention, to within rounding.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import GREEDY, RUNNERS, add, finish, generate, random_tokens, small_engine, small_model
from numpy.typing import NDArray

from openk3.engine import Engine, SamplingParams

PROMPT = random_tokens(300, seed=1)  # three products of keys, so that their order matters
MODELS = [(), ("window",), ("moe",), ("nope", "moe"), ("gemma", "window"), ("window", "nope", "moe", "gemma")]
ids = ["-".join(kinds) or "dense" for kinds in MODELS]


def mkl_keeps_rows_apart() -> bool:
    """Whether this machine's products have the property on which the promise rests."""
    rows, weight = torch.randn(40, 64), torch.randn(96, 64)
    together = torch.nn.functional.linear(rows, weight)
    return all(torch.equal(torch.nn.functional.linear(rows[:n], weight), together[:n]) for n in (1, 2, 3, 7, 16))


@pytest.fixture(params=RUNNERS, autouse=True)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test of this file holds for both runners."""
    if request.param == "torch" and not mkl_keeps_rows_apart():
        pytest.skip("torch is built without MKL's reproducible mode")
    monkeypatch.setitem(SETTINGS, "runner", request.param)
    return str(request.param)


def record(engine: Engine) -> dict[tuple[str, int], NDArray[np.float32]]:
    """Every logits row the engine's runner returns from now on, by request and position of the last token."""
    rows: dict[tuple[str, int], NDArray[np.float32]] = {}
    run = engine._runner.run

    def recording(chunks: Any) -> NDArray[np.float32]:
        logits = run(chunks)
        sampling = [chunk for chunk in chunks if chunk.samples]
        for chunk, row in zip(sampling, logits, strict=True):
            rows[chunk.request.request_id, len(chunk.request.tokens) - 1] = row
        return logits

    engine._runner.run = recording  # type: ignore[method-assign]
    return rows


SETTINGS: dict[str, Any] = {"page_size": 16, "num_pages": 200}


def engine_of(kinds: tuple[str, ...], **settings: Any) -> Engine:
    return small_engine(small_model(*kinds), **(SETTINGS | settings))


def alone(kinds: tuple[str, ...]) -> dict[int, NDArray[np.float32]]:
    """The prompt and 12 tokens in one piece, without anything around them."""
    engine = engine_of(kinds, max_num_batched_tokens=512, enable_prefix_caching=False)
    rows = record(engine)
    generate(engine, PROMPT, request_id="me")
    return {position: row for (_, position), row in rows.items()}


def same_bits(expected: dict[int, NDArray[np.float32]], rows: dict[tuple[str, int], NDArray[np.float32]]) -> bool:
    mine = {position: row for (name, position), row in rows.items() if name == "me"}
    assert mine.keys() == expected.keys()
    return all(np.array_equal(mine[position], row) for position, row in expected.items())


@pytest.mark.parametrize("kinds", MODELS, ids=ids)
def test_the_same_bits_in_every_circumstance(kinds: tuple[str, ...]) -> None:
    expected = alone(kinds)
    assert len(expected) == GREEDY.max_tokens

    # In a batch of others that come and go, in chunks whose sizes follow from what the others do.
    rng = np.random.default_rng(0)
    engine = engine_of(kinds, max_num_batched_tokens=37)
    rows = record(engine)
    for i in range(5):
        add(engine, random_tokens(int(rng.integers(1, 90)), seed=10 + i), request_id=f"before {i}")
    add(engine, PROMPT, request_id="me")
    for i in range(5):
        add(engine, random_tokens(int(rng.integers(1, 90)), seed=20 + i), request_id=f"after {i}")
    finish(engine)
    assert same_bits(expected, rows)

    # From the prefix cache, which now holds the prompt.
    rows.clear()
    assert generate(engine, PROMPT, request_id="me").cached_tokens == 288
    assert same_bits(expected, rows)

    # Displaced in the middle of its reply by a more important request, then computed again.
    for caching in (False, True):
        crowded = {"num_pages": 48 if "window" in kinds else 64, "max_model_len": 760, "enable_prefix_caching": caching}
        engine = engine_of(kinds, **crowded, max_num_batched_tokens=512, prefill_beside_decode=512)
        rows = record(engine)
        request = add(engine, PROMPT, request_id="me")
        while request.num_generated < 5:
            engine.step()
        add(engine, random_tokens(750, seed=3), SamplingParams(max_tokens=3), priority=1)
        finish(engine)
        assert engine.stats().preemptions == 1
        assert same_bits(expected, rows)


@pytest.mark.parametrize("chunk", [1, 2, 63, 128, 129, 256])
def test_the_same_bits_at_every_chunk_size(chunk: int) -> None:
    kinds = ("window", "nope", "moe")
    engine = engine_of(kinds, max_num_seqs=1, max_num_batched_tokens=chunk)
    rows = record(engine)
    generate(engine, PROMPT, request_id="me")
    assert same_bits(alone(kinds), rows)


def test_the_same_bits_from_a_float16_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "kv_format", "float16")
    expected = alone(("window",))
    for chunk in (1, 63, 256):
        engine = engine_of(("window",), max_num_seqs=1, max_num_batched_tokens=chunk)
        rows = record(engine)
        generate(engine, PROMPT, request_id="me")
        assert same_bits(expected, rows)


@pytest.mark.parametrize("page_size", [1, 2, 32, 128])
def test_the_same_bits_at_every_page_size(page_size: int) -> None:
    engine = engine_of(("window",), page_size=page_size, num_pages=1024 // page_size)
    rows = record(engine)
    generate(engine, PROMPT, request_id="me")
    assert same_bits(alone(("window",)), rows)


def test_the_same_bits_whatever_the_pages_held_before() -> None:
    engine = engine_of(())
    torch.as_tensor(engine._runner._keys).fill_(float("nan"))  # type: ignore[attr-defined]
    torch.as_tensor(engine._runner._values).fill_(float("inf"))  # type: ignore[attr-defined]
    rows = record(engine)
    generate(engine, PROMPT, request_id="me")
    assert same_bits(alone(()), rows)


def test_tiles_change_no_bits(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Very long contexts are computed in tiles of few queries, to bound the memory for scores."""
    if runner != "torch":
        pytest.skip("the kernels' memory for scores does not grow with the context")
    expected = alone(("window",))
    monkeypatch.setattr("openk3.engine.runner_torch.MAX_SCORES", 10_000)
    engine = engine_of(("window",), max_num_batched_tokens=512)
    rows = record(engine)
    generate(engine, PROMPT, request_id="me")
    assert same_bits(expected, rows)


@pytest.mark.parametrize("kinds", MODELS, ids=ids)
@torch.no_grad()
def test_the_models_own_logits(kinds: tuple[str, ...]) -> None:
    engine = engine_of(kinds, max_num_batched_tokens=64)
    rows = record(engine)
    reply = generate(engine, PROMPT, request_id="me").token_ids
    model = small_model(*kinds)
    expected = model(torch.tensor([[*PROMPT, *reply]])).logits[0]
    for (_, position), row in rows.items():
        assert np.abs(row - expected[position].numpy()).max() < 1e-4
    assert model.config._attn_implementation == "sdpa", "the caller's model is not changed"


def test_bfloat16_runs_and_stays_close() -> None:
    model = copy.deepcopy(small_model()).to(torch.bfloat16)
    engine = small_engine(model)
    rows = record(engine)
    generate(engine, PROMPT[:50], request_id="me")
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT[:50]])).logits[0, -1].float()
    assert np.abs(rows["me", 49] - expected.numpy()).max() < 0.2 * expected.abs().max()
