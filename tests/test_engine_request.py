"""What the engine refuses before it starts: the message names the field, the value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from openk3.engine import EngineConfig, SamplingParams
from openk3.engine.request import Request


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature is -0.1: it must lie between 0 and 100"),
        ("temperature", 1e9, "temperature is 1000000000.0: it must lie between 0 and 100"),
        ("temperature", float("nan"), "temperature is nan: it must be a number from 0 to 100"),
        ("temperature", 10**400, f"temperature is {10**400}: it must lie between 0 and 100"),
        ("temperature", "hot", "temperature is 'hot': it must be a number from 0 to 100"),
        ("temperature", True, "temperature is True: it must be a number from 0 to 100"),
        ("top_p", 1.5, "top_p is 1.5: it must lie between 0 and 1"),
        ("top_k", -1, "top_k is -1: it must be an integer of at least 0"),
        ("top_k", 2.0, "top_k is 2.0: it must be an integer of at least 0"),
        ("min_p", -1, "min_p is -1: it must lie between 0 and 1"),
        ("repetition_penalty", 0, "repetition_penalty is 0: it must be above 0, 1 switches it off"),
        ("repetition_penalty", 11, "repetition_penalty is 11: it must lie between 0 and 10"),
        ("frequency_penalty", 3, "frequency_penalty is 3: it must lie between -2 and 2"),
        ("presence_penalty", float("inf"), "presence_penalty is inf: it must be a number from -2 to 2"),
        ("seed", 2**64, f"seed is {2**64}: it must be an integer from {-(2**63)} to {2**64 - 1}"),
        ("seed", 1.5, f"seed is 1.5: it must be an integer from {-(2**63)} to {2**64 - 1}"),
        ("max_tokens", 0, "max_tokens is 0: it must be an integer of at least 1"),
        ("max_tokens", -5, "max_tokens is -5: it must be an integer of at least 1"),
        ("stop", ("a", ""), "stop is ('a', ''): it must be a list of texts, none of them empty"),
        ("stop", 5, "stop is 5: it must be a list of texts, none of them empty"),
        ("stop_token_ids", [1, -2], "an entry of stop_token_ids is -2: it must be an integer of at least 0"),
        ("stop_token_ids", 7, "stop_token_ids is 7: it must be a list of token ids"),
        ("logprobs", 21, "logprobs is 21: it must be an integer from 0 to 20"),
        ("logit_bias", [1], "logit_bias is [1]: it must map token ids to numbers"),
        ("logit_bias", {"5": 1.0}, "a token id in logit_bias is '5': it must be an integer of at least 0"),
        ("logit_bias", {5: 101}, "logit_bias[5] is 101: it must lie between -100 and 100"),
        ("ignore_eos", 1, "ignore_eos is 1: it must be true or false"),
        ("grammar", {}, "grammar is a dict: it must be a Grammar, for instance Grammar.json_schema({...})"),
    ],
)
def test_bad_sampling_parameters(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    assert str(error.value) == message


def test_sampling_parameters_are_normalised_and_frozen() -> None:
    bias = {3: 1.0}
    params = SamplingParams(stop="end", stop_token_ids=[1, 2], logit_bias=bias)  # type: ignore[arg-type]
    bias[4] = 2.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("end",), (1, 2), {3: 1.0})
    with pytest.raises(AttributeError):
        params.top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_size": 0}, "page_size is 0: it must be an integer of at least 1"),
        ({"page_size": 24}, "page_size is 24: it must be a power of two up to 128, for instance 16"),
        ({"page_size": 256}, "page_size is 256: it must be a power of two up to 128, for instance 16"),
        ({"num_pages": -1}, "num_pages is -1: it must be an integer of at least 1"),
        ({"num_pages": 2.5}, "num_pages is 2.5: it must be an integer of at least 1"),
        ({"prefill_beside_decode": 0}, "prefill_beside_decode is 0: it must be 'auto' or an integer of at least 1"),
        ({"prefill_beside_decode": "x"}, "prefill_beside_decode is 'x': it must be 'auto' or an integer of at least 1"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes is 0: it must be an integer of at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs is True: it must be an integer of at least 1"),
        ({"max_model_len": 1}, "max_model_len is 1: a prompt and a reply need at least 2 tokens"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 4},
            "max_num_batched_tokens is 4: every one of max_num_seqs (8) requests needs a token per step, raise the "
            "first or lower the second",
        ),
    ],
)
def test_bad_engine_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineConfig(**fields)
    assert str(error.value) == message


def test_timings_of_a_request() -> None:
    request = Request("r", (1, 2), SamplingParams(), 0, 0, 5, text=None, arrived_at=10.0)  # type: ignore[arg-type]
    idle = request.timings(now=13.0)
    assert (idle.queue_s, idle.ttft_s, idle.total_s, idle.tokens_per_second) == (3, 3, 3, 0)
    request.scheduled_at, request.first_token_at, request.last_token_at = 11.0, 12.0, 14.0
    request.tokens += [5, 6, 7, 8, 9]
    ended = request.timings(now=14.0)
    assert (ended.queue_s, ended.ttft_s, ended.total_s, ended.tokens_per_second) == (1, 2, 4, 2)
