"""The sampler against the textbook definitions, and that its randomness has no state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from openk3.engine.request import SamplingParams
from openk3.engine.sampler import adjust, distribution, draw, log_probabilities, sample_token, uniform

logits_of_any_kind = st.lists(
    st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0, -5.0]), min_size=2, max_size=40
).map(lambda values: np.array(values, dtype=np.float32))


def kept_naively(logits: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """Probabilities after truncation, one rule after the other, token by token."""
    weights = {i: np.exp((float(x) - float(logits.max())) / params.temperature) for i, x in enumerate(logits)}
    if params.top_k:
        border = sorted(weights.values(), reverse=True)[: params.top_k][-1]
        weights = {i: w for i, w in weights.items() if w >= border}
    if params.top_p < 1:
        total, mass, nucleus = sum(weights.values()), 0.0, {}
        for i in sorted(weights, key=lambda i: (-weights[i], i)):
            nucleus[i] = weights[i]
            mass += weights[i]
            if mass >= params.top_p * total:
                break
        weights = nucleus
    weights = {i: w for i, w in weights.items() if w >= params.min_p * max(weights.values())}
    return {i: w / sum(weights.values()) for i, w in weights.items() if w > 0}


@settings(max_examples=300, deadline=None)
@given(
    logits_of_any_kind,
    st.floats(0.05, 5),
    st.integers(0, 50),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.05, 0.9, 1.0]),
)
def test_truncation_follows_the_definitions(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = np.round(logits, 6)  # closer ones have the same probability
    expected = kept_naively(logits, params)
    found = distribution(logits, params)
    # Rounding may decide whether the token at the very border is in: accept it, compare the rest.
    difference = set(np.flatnonzero(found)) ^ set(expected)
    assert len(difference) <= 1
    if not difference:
        found = found / found.sum()
        for i, probability in expected.items():
            assert found[i] == pytest.approx(probability, abs=1e-9)


@pytest.mark.parametrize(
    ("setting", "warper"),
    [
        ({"top_k": 5}, TopKLogitsWarper(5)),
        ({"top_p": 0.8}, TopPLogitsWarper(0.8)),
        ({"min_p": 0.1}, MinPLogitsWarper(0.1)),
    ],
)
def test_truncation_agrees_with_transformers(setting: dict[str, Any], warper: Any) -> None:
    import torch

    logits = np.random.default_rng(0).normal(0, 2, 1000).astype(np.float32)
    kept = torch.isfinite(warper(None, torch.from_numpy(logits)[None].double()))[0].numpy()
    assert np.array_equal(distribution(logits, SamplingParams(**setting)) > 0, kept)


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    counts = np.zeros(4)
    for position in range(20000):
        counts[sample_token(logits, SamplingParams(), 7, range(position + 1), 1)] += 1  # type: ignore[arg-type]
    assert np.abs(counts / 20000 - [0.5, 0.3, 0.15, 0.05]).max() < 0.01


def test_randomness_depends_on_seed_and_position_only() -> None:
    assert uniform(1, 5) == uniform(1, 5)
    numbers = {uniform(seed, position) for seed in (0, 1, -1, 2**63, 2**64 - 2) for position in range(200)}
    assert len(numbers) == 1000
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
    assert abs(np.mean([uniform(3, position) for position in range(5000)]) - 0.5) < 0.02


@pytest.mark.parametrize("number", [0.0, 0.3, np.nextafter(1.0, 0)])
def test_a_token_without_weight_is_never_drawn(number: float) -> None:
    for weights in ([0, 1, 0], [0, 0.1, 0, 0.7, 0], [1, 0], [0, 1]):
        array = np.array(weights, dtype=np.float64)
        assert array[draw(array, number)] > 0


def test_draw_at_the_very_end_of_the_interval() -> None:
    assert draw(np.array([0.25, 0.5, 0.0]), 1.0) == 1


def test_temperature_zero_is_the_best_token_and_the_lowest_of_equals() -> None:
    logits = np.array([1, 3, 3, 2], dtype=np.float32)
    assert sample_token(logits, SamplingParams(temperature=0), 0, [0], 1) == 1


def test_tiny_temperatures_do_not_overflow() -> None:
    logits = np.array([1e4, -1e4, 9.9e3], dtype=np.float32)
    assert sample_token(logits, SamplingParams(temperature=1e-9), 0, [0], 1) == 0


def test_penalties_and_bias_by_hand() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5], dtype=np.float32)
    params = SamplingParams(
        repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={3: 10, 2: -100}
    )
    # Prompt: tokens 0, 1. Reply: token 3 twice. Bias first; repetition counts both, the others only the reply.
    found = adjust(logits, params, [0, 1, 3, 3], 2)
    assert found.tolist() == [1.0, -4.0, -99.0, 10.5 / 2 - 2 * 0.5 - 0.25]
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5]


def test_log_probabilities_sum_to_one_and_are_sorted() -> None:
    logits = np.random.default_rng(1).normal(0, 3, 200).astype(np.float32)
    chosen, top = log_probabilities(logits, 7, 200)
    assert sum(np.exp(value) for _, value in top) == pytest.approx(1)
    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
    assert dict(top)[7] == chosen
    assert log_probabilities(logits, 7, 3)[1] == top[:3]
    assert log_probabilities(logits, 7, 0) == (chosen, [])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_an_error(bad: float) -> None:
    logits = np.array([1.0, bad, 0.0], dtype=np.float32)
    with pytest.raises(FloatingPointError, match="weights or the input are broken"):
        sample_token(logits, SamplingParams(temperature=0), 0, [0], 1)
