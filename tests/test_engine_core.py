"""The engine step by step: what it refuses, how requests end, what failures touch, and pinned prefixes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_support import EOS, GREEDY, ByteTokenizer, add, finish, generate, random_tokens, small_engine, small_model
from numpy.typing import NDArray

from openk3.engine import Delta, Engine, EngineConfig, SamplingParams, naive

PROMPT = random_tokens(20)


def force(engine: Engine, *reply: int) -> None:
    """Make the model say these tokens, whatever it is asked."""
    run = engine._runner.run

    def forced(chunks: Any) -> NDArray[np.float32]:
        logits = run(chunks)
        sampling = [chunk for chunk in chunks if chunk.samples]
        for chunk, row in zip(sampling, logits, strict=True):
            row.fill(-10)
            row[reply[chunk.request.num_generated]] = 10
        return logits

    engine._runner.run = forced  # type: ignore[method-assign]


# What is refused


@pytest.mark.parametrize(
    ("prompt", "params", "options", "message"),
    [
        ([], {}, {}, "the prompt is empty: it needs at least one token"),
        (
            [1] * 1024,
            {},
            {},
            "the prompt has 1024 tokens but the context holds 1024, of which a reply needs at least one: shorten the "
            "prompt to 1023 tokens",
        ),
        ([1, 256], {}, {}, "the prompt holds 256: token ids are integers from 0 to 255"),
        ([1, -1], {}, {}, "the prompt holds -1: token ids are integers from 0 to 255"),
        ([1, 2.0], {}, {}, "the prompt holds 2.0: token ids are integers from 0 to 255"),
        ([1], {"stop_token_ids": (300,)}, {}, "stop_token_ids names token 300: the vocabulary ends at 255"),
        ([1], {"logit_bias": {256: 1}}, {}, "logit_bias names token 256: the vocabulary ends at 255"),
        ([1], {}, {"priority": "high"}, "priority is 'high': it must be an integer"),
    ],
)
def test_bad_requests(prompt: Any, params: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        small_engine(num_pages=400).make_request(prompt, SamplingParams(**params), **options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 2000}, "max_model_len is 2000: the model has 1024 positions"),
        (
            {"max_model_len": 500, "num_pages": 10},
            "max_model_len is 500: the cache holds 160 tokens, raise kv_cache_bytes (or num_pages)",
        ),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes is 1000: one page of this model takes 8192"),
        (
            {"num_pages": 2, "page_size": 1},
            "the cache has 2 pages: a prompt and a reply need more, raise kv_cache_bytes (or num_pages)",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        Engine(small_model(), ByteTokenizer(), EngineConfig(**settings))
    assert str(error.value) == message


def test_the_size_of_the_cache() -> None:
    assert small_engine(num_pages=20).max_model_len == 60
    assert small_engine(num_pages=20, max_model_len=80).max_model_len == 80
    assert small_engine(num_pages=1000).max_model_len == 1024
    assert small_engine(num_pages=None, kv_cache_bytes=10 * 2048).stats().pages_total == 10
    halved = small_engine(num_pages=None, kv_cache_bytes=10 * 2048, kv_format="float16")
    assert halved.stats().pages_total == 20
    # No more than all seats at full length could use.
    assert small_engine(num_pages=None, max_num_seqs=2).stats().pages_total == 2 * 1024 // 4


def test_two_requests_of_one_name() -> None:
    engine = small_engine()
    add(engine, PROMPT, request_id="twin")
    with pytest.raises(ValueError, match="request_id 'twin' is in use by another request"):
        add(engine, PROMPT, request_id="twin")
    finish(engine)
    add(engine, PROMPT, request_id="twin")


# How requests end


def test_a_reply_ends_with_the_context() -> None:
    engine = small_engine(max_model_len=24)
    for max_tokens in (None, 100):
        reply = generate(engine, PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        assert (reply.finish_reason, reply.completion_tokens) == ("length", 4)
    assert generate(engine, random_tokens(23), SamplingParams(temperature=0)).completion_tokens == 1


def test_end_of_text_and_stop_tokens() -> None:
    engine = small_engine()
    force(engine, 65, 66, EOS, 67, 68)
    ended = generate(engine, PROMPT, SamplingParams(temperature=0))
    assert (ended.text, ended.token_ids, ended.finish_reason, ended.stop_match) == ("AB", (65, 66, EOS), "stop", None)
    went_on = generate(engine, PROMPT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert (went_on.text, went_on.finish_reason) == ("ABC", "length")
    stopped = generate(engine, PROMPT, SamplingParams(temperature=0, stop_token_ids=(66,)))
    assert (stopped.text, stopped.token_ids, stopped.finish_reason, stopped.stop_match) == ("A", (65, 66), "stop", 66)
    named = generate(engine, PROMPT, SamplingParams(temperature=0, stop_token_ids=(EOS,), ignore_eos=True))
    assert (named.text, named.stop_match) == ("AB", EOS)


def test_stop_texts_are_cut_and_held_back() -> None:
    engine = small_engine()
    force(engine, *b"one, two, twelve")
    request = add(engine, PROMPT, SamplingParams(temperature=0, stop=("twe", "three"), max_tokens=16))
    deltas: list[Delta] = []
    while engine.has_requests:
        deltas += engine.step()
    assert request.num_generated == len("one, two, twe")
    assert [delta.text for delta in deltas] == ["o", "n", "e", ",", " ", "", "", "two", ",", " ", "", "", ""]
    assert (deltas[-1].finish_reason, deltas[-1].stop_match) == ("stop", "twe")


def test_held_back_text_comes_out_at_the_end() -> None:
    engine = small_engine()
    force(engine, *b"a tw", *"好".encode()[:2])
    cut_short = generate(engine, PROMPT, SamplingParams(temperature=0, stop=("two",), max_tokens=6))
    assert (cut_short.text, cut_short.finish_reason) == ("a tw\ufffd", "length")


def test_deltas_carry_the_usage_and_the_last_one_the_timings() -> None:
    engine = small_engine()
    add(engine, PROMPT)
    deltas: list[Delta] = []
    while engine.has_requests:
        deltas += engine.step()
    assert [delta.completion_tokens for delta in deltas] == list(range(1, 13))
    assert {delta.prompt_tokens for delta in deltas} == {20}
    assert [delta.timings is None for delta in deltas] == [True] * 11 + [False]
    timings = deltas[-1].timings
    assert timings is not None
    assert 0 <= timings.queue_s <= timings.ttft_s <= timings.total_s
    assert timings.tokens_per_second > 0


def test_seeds() -> None:
    engine = small_engine()
    free = [generate(engine, PROMPT, SamplingParams(max_tokens=8)).token_ids for _ in range(4)]
    assert len(set(free)) > 1
    seeded = [generate(engine, PROMPT, SamplingParams(max_tokens=8, seed=3)).token_ids for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_logprobs_name_their_tokens() -> None:
    engine = small_engine()
    reply = generate(engine, PROMPT, SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    assert reply.logprobs is not None
    assert len(reply.logprobs) == 3
    for token_id, entry in zip(reply.token_ids, reply.logprobs, strict=True):
        assert (entry.token_id, entry.token) == (token_id, ByteTokenizer().decode([token_id]))
        assert len(entry.top) == 2
        assert entry.top[0].logprob == entry.logprob
    assert generate(engine, PROMPT, SamplingParams(max_tokens=1, logprobs=0)).logprobs[0].top == ()  # type: ignore[index]


# Cancelling


def test_cancelling_frees_pages_at_once() -> None:
    engine = small_engine(max_num_seqs=1)
    add(engine, PROMPT, request_id="running")
    add(engine, PROMPT, request_id="waiting")
    deltas = [*engine.step(), *engine.step()]
    for name in ("waiting", "running"):
        delta = engine.cancel(name)
        assert delta is not None
        assert delta.finish_reason == "cancelled"
        engine.check_integrity()
    assert (delta.completion_tokens, len(deltas)) == (2, 2)
    assert engine.stats().pages_used == 0
    assert not engine.has_requests
    assert engine.cancel("running") is None


def test_a_preempted_stream_goes_on_where_it_was() -> None:
    engine = small_engine(num_pages=20, page_size=4, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [random_tokens(30, seed=i) for i in range(2)]
    requests = [add(engine, prompt, params) for prompt in prompts]
    replies = finish(engine)
    assert engine.stats().preemptions > 0
    for prompt, request in zip(prompts, requests, strict=True):
        expected = naive.generate(small_model(), ByteTokenizer(), prompt, params)
        assert replies[request.request_id].token_ids == expected.token_ids
        assert replies[request.request_id].text == expected.text


# Failures


def failing(engine: Engine, when: Callable[[Any], bool]) -> None:
    run = engine._runner.run

    def maybe(chunks: Any) -> NDArray[np.float32]:
        if when(chunks):
            raise RuntimeError("out of luck")
        return run(chunks)

    engine._runner.run = maybe  # type: ignore[method-assign]


def test_a_failed_run_ends_its_requests_and_no_others() -> None:
    engine = small_engine(max_num_seqs=2)
    names = ["one", "bad", "later", "last"]
    failing(engine, lambda chunks: any(chunk.request.request_id == "bad" for chunk in chunks))
    for i, name in enumerate(names):
        add(engine, random_tokens(20, seed=i), request_id=name)
    replies = finish(engine)
    assert [replies[name].finish_reason for name in names] == ["error", "error", "length", "length"]
    assert replies["bad"].error == "RuntimeError: out of luck"
    expected = naive.generate(small_model(), ByteTokenizer(), random_tokens(20, seed=3), GREEDY)
    assert replies["last"].token_ids == expected.token_ids
    assert engine.stats().finished == {"error": 2, "length": 2}
    assert engine.stats().pages_used == 0


def test_broken_logits_end_only_the_request_they_belong_to() -> None:
    engine = small_engine()
    run = engine._runner.run

    def broken(chunks: Any) -> NDArray[np.float32]:
        logits = run(chunks)
        for chunk, row in zip([c for c in chunks if c.samples], logits, strict=True):
            if chunk.request.request_id == "bad" and chunk.request.num_generated == 3:
                row[5] = np.nan
        return logits

    engine._runner.run = broken  # type: ignore[method-assign]
    add(engine, PROMPT, request_id="bad")
    add(engine, random_tokens(20, seed=5), request_id="good")
    replies = finish(engine)
    assert replies["bad"].completion_tokens == 3
    assert replies["bad"].error is not None
    assert "the weights or the input are broken" in replies["bad"].error
    assert replies["good"].finish_reason == "length"


def test_reset_ends_everything_and_leaves_a_working_engine() -> None:
    engine = small_engine(max_num_seqs=1)
    pin = engine.make_pin_request(PROMPT, ttl_s=60)
    engine.add(pin)
    finish(engine)
    running, waiting = add(engine, PROMPT), add(engine, PROMPT)
    engine.step()
    deltas = engine.reset(KeyError("oops"))
    assert {delta.request_id for delta in deltas} == {running.request_id, waiting.request_id}
    assert {delta.error for delta in deltas} == {"KeyError: 'oops'"}
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.pages_free, stats.pages_pinned, stats.running, stats.waiting) == (stats.pages_total, 0, 0, 0)
    expected = naive.generate(small_model(), ByteTokenizer(), PROMPT, GREEDY)
    assert generate(engine, PROMPT).token_ids == expected.token_ids


# Prefixes


def pin(engine: Engine, prompt_ids: list[int], ttl_s: float = 60) -> Any:
    request = engine.make_pin_request(prompt_ids, ttl_s)
    engine.add(request)
    finish(engine)
    if request.failure is not None:
        raise request.failure
    return request.pinned


def test_later_requests_find_earlier_ones() -> None:
    engine = small_engine()
    assert generate(engine, PROMPT).cached_tokens == 0
    # 20 tokens are 5 full pages, but the last token is always computed.
    assert generate(engine, PROMPT).cached_tokens == 16
    assert generate(engine, [*PROMPT, 7, 8]).cached_tokens == 20
    assert generate(engine, [9, *PROMPT]).cached_tokens == 0
    stats = engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (20 + 20 + 22 + 21, 36)


def test_a_conversation_finds_the_replies_too() -> None:
    engine = small_engine()
    reply = generate(engine, PROMPT)
    assert generate(engine, [*PROMPT, *reply.token_ids, 5]).cached_tokens == 28


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = small_engine(enable_prefix_caching=False)
    assert [generate(engine, PROMPT).cached_tokens for _ in range(2)] == [0, 0]
    assert engine.stats().prefix_query_tokens == 0
    with pytest.raises(ValueError, match="cannot be pinned while enable_prefix_caching is off"):
        engine.make_pin_request(PROMPT, 5)


def test_a_pinned_prefix_survives_what_evicts_others() -> None:
    engine = small_engine(num_pages=30, max_model_len=80)
    pinned = pin(engine, PROMPT)
    assert (pinned.num_tokens, pinned.num_cached_tokens, pinned.token_ids) == (20, 20, tuple(PROMPT))
    assert pinned.expires_at == pytest.approx(time.time() + 60, abs=5)
    other = random_tokens(20, seed=1)
    generate(engine, other)
    for i in range(4):
        generate(engine, random_tokens(60, seed=10 + i))
    assert generate(engine, other).cached_tokens == 0
    assert generate(engine, [*PROMPT, 1]).cached_tokens == 20
    stats = engine.stats()
    assert (stats.pages_pinned, stats.pages_used, stats.pinned_prefixes) == (5, 5, 1)
    assert stats.prefix_evictions > 0
    assert engine.unpin(pinned.id)
    assert not engine.unpin(pinned.id)
    assert engine.stats().pages_used == 0
    engine.check_integrity()


def test_a_pin_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine()
    pin(engine, PROMPT, ttl_s=10)
    assert engine.next_expiry == pytest.approx(time.monotonic() + 10, abs=1)
    later = time.monotonic() + 11
    monkeypatch.setattr("openk3.engine.engine.time.monotonic", lambda: later)
    engine.expire_pins()
    assert engine.stats().pinned_prefixes == 0
    assert engine.next_expiry is None


def test_pinning_the_same_prefix_again_costs_no_pages() -> None:
    engine = small_engine()
    first, second = pin(engine, PROMPT), pin(engine, PROMPT)
    assert first.id != second.id
    assert engine.stats().pages_pinned == 5
    engine.check_integrity()


def test_pins_never_take_what_requests_need() -> None:
    engine = small_engine(num_pages=24, max_model_len=80)
    pin(engine, random_tokens(16))
    with pytest.raises(ValueError, match="would leave 19 of 24 for requests, but the longest request needs 20"):
        engine.add(engine.make_pin_request(random_tokens(5, seed=1), 60))
    assert generate(engine, random_tokens(79, seed=2), SamplingParams(temperature=0)).finish_reason == "length"
    engine.check_integrity()


def test_two_pins_under_way_cannot_take_too_much_together() -> None:
    engine = small_engine(num_pages=24, max_model_len=80)
    requests = [engine.make_pin_request(random_tokens(12, seed=i), 60) for i in range(2)]
    for request in requests:
        engine.add(request)
    finish(engine)
    assert requests[0].pinned is not None
    assert isinstance(requests[1].failure, ValueError)
    assert engine.stats().pages_pinned == 3
    engine.check_integrity()


def test_a_prefix_shorter_than_a_page_may_be_pinned() -> None:
    pinned = pin(small_engine(), [1, 2])
    assert (pinned.num_tokens, pinned.num_cached_tokens) == (2, 0)


@pytest.mark.parametrize("ttl", [0, -1, 10**400, float("inf"), float("nan"), "long", True])
def test_bad_lifetimes(ttl: Any) -> None:
    with pytest.raises(ValueError, match="it must be a positive number of seconds"):
        small_engine().make_pin_request(PROMPT, ttl)


def test_counters() -> None:
    engine = small_engine(max_num_batched_tokens=10)
    generate(engine, PROMPT)
    stats = engine.stats()
    # Two chunks of ten, the second of which gives the first token.
    assert (stats.steps, stats.requests, stats.prompt_tokens, stats.generated_tokens) == (13, 1, 20, 12)
    assert stats.finished == {"length": 1}
    assert stats.pages_free + stats.pages_cached + stats.pages_used == stats.pages_total


# Memory of the cache


def test_layers_with_windows_keep_only_their_window() -> None:
    engine = small_engine(small_model("window"), num_pages=100, enable_prefix_caching=False)
    assert engine.stats().pages_total == 200, "one for each group of layers"
    assert engine.max_model_len == 4 * (150 - 19), "3/4 of them, of which the window and a chunk take 19 at most"
    add(engine, random_tokens(500), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    used = []
    finish(engine, lambda _: used.append(engine.stats().pages_used) or ())
    assert max(used) == 130 + 3
    assert engine.stats().preemptions == 0


def test_a_long_conversation_goes_on_though_its_windows_were_given_back() -> None:
    engine = small_engine(small_model("window"))
    prompt = random_tokens(200)
    reply = generate(engine, prompt)
    longer = [*prompt, *reply.token_ids, 5, 6, 7]
    found = generate(engine, longer)
    assert found.cached_tokens == 208
    assert found.token_ids == naive.generate(small_model("window"), ByteTokenizer(), longer, GREEDY).token_ids


def test_what_float16_cannot_hold_becomes_its_largest() -> None:
    model = copy.deepcopy(small_model())
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(1e6)
    reply = generate(small_engine(model, kv_format="float16"), PROMPT)
    assert reply.token_ids == naive.generate(model, ByteTokenizer(), PROMPT, GREEDY, half_cache=True).token_ids
    assert reply.token_ids != naive.generate(model, ByteTokenizer(), PROMPT, GREEDY).token_ids


# The oracle itself


def test_the_naive_loop_gives_the_same_with_and_without_a_cache() -> None:
    for kinds in ((), ("window", "nope", "moe")):
        recomputed, cached = (
            naive.generate(small_model(*kinds), ByteTokenizer(), PROMPT, GREEDY, use_cache=use_cache)
            for use_cache in (False, True)
        )
        assert recomputed == cached
        recomputed, cached = (
            naive.generate(small_model(*kinds), ByteTokenizer(), PROMPT, GREEDY, use_cache=use_cache, half_cache=True)
            for use_cache in (False, True)
        )
        assert recomputed == cached
