"""Every pair of engine features at once, against the naive loop: most faults are two features meeting.

A feature says what it changes (the model, the engine's settings, the sampling parameters, what happens around the
requests) and how to tell that it took place. Every pair is run; three requests must give exactly the naive loop's
tokens, text, log-probabilities and ending. A new feature of the engine joins by adding an entry to `FEATURES`.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any

import pytest
from engine_support import EOS, RUNNERS, ByteTokenizer, add, finish, random_tokens, small_engine, small_model

from openk3.engine import Delta, Engine, EngineLoop, Handle, SamplingParams, naive
from openk3.engine.engine import EngineStats
from openk3.engine.grammar.spec import Grammar

SHARED = random_tokens(12, seed=100)  # all prompts begin with it: three pages
PROMPTS = [SHARED + random_tokens(length, seed=length) for length in (9, 17, 2)]
INTRUDER = random_tokens(45, seed=200)
CONTEXT = 48
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class Feature:
    """What a feature does to a run.

    Attributes:
        model: kinds of `small_model`.
        engine: settings of the engine.
        params: sampling parameters, or what makes them from the reply without them.
        together: whether the requests are in the engine at the same time, and not one after the other.
        proof: whether it took place, from the replies in order and the final counters.
    """

    model: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] | Callable[[Delta], Mapping[str, Any]] = field(default_factory=dict)
    together: bool = False
    proof: Callable[[list[Delta], EngineStats], bool] = lambda replies, stats: True


def a_stop_text(reply: Delta) -> dict[str, Any]:
    """The latest piece of the reply that can be one, beside a text that never comes."""
    pieces = [reply.text[i : i + 2] for i in range(4, len(reply.text))]
    return {"stop": ("never, never", *[piece for piece in pieces if "\ufffd" not in piece][-1:])}


def a_stop_token(reply: Delta) -> dict[str, Any]:
    """The token of the reply that is new the latest."""
    return {"stop_token_ids": (max(reply.token_ids, key=reply.token_ids.index),)}


FEATURES: dict[str, Feature] = {
    "batching": Feature(together=True),
    "chunked prefill": Feature(
        engine={"max_num_batched_tokens": 5, "max_num_seqs": 4}, proof=lambda replies, stats: stats.steps >= 13
    ),
    "paced prompts": Feature(
        engine={"max_num_batched_tokens": 12, "prefill_beside_decode": 1},
        together=True,
        # All at once: 15 steps, and 9 where a grammar forces tokens, which go together.
        proof=lambda replies, stats: stats.steps >= (10 if any(":--" in r.text for r in replies) else 18),
    ),
    "prefix cache": Feature(
        engine={"enable_prefix_caching": True}, proof=lambda replies, stats: stats.prefix_hit_tokens > 0
    ),
    "pinned prefix": Feature(
        engine={"enable_prefix_caching": True},
        proof=lambda replies, stats: all(reply.cached_tokens >= 12 for reply in replies) and stats.pages_pinned >= 3,
    ),
    "preemption": Feature(engine={"num_pages": 18}, together=True, proof=lambda replies, stats: stats.preemptions > 0),
    "cancelled neighbours": Feature(together=True, proof=lambda replies, stats: stats.finished["cancelled"] == 2),
    "streaming": Feature(),
    "priorities": Feature(together=True),
    "sampling": Feature(params={"temperature": 0.9, "seed": 11}),
    "truncation": Feature(params={"temperature": 1.5, "seed": 7, "top_k": 40, "top_p": 0.9, "min_p": 0.02}),
    "penalties": Feature(params={"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4}),
    "logit bias": Feature(params={"logit_bias": {65: 6.0, 66: 5.5, 10: -100}}),
    "logprobs": Feature(
        params={"logprobs": 3},
        proof=lambda replies, stats: all(len(r.logprobs or ()) == len(r.token_ids) for r in replies),
    ),
    "stop texts": Feature(
        params=a_stop_text, proof=lambda replies, stats: any(r.stop_match is not None for r in replies)
    ),
    "stop tokens": Feature(
        params=a_stop_token, proof=lambda replies, stats: all(r.stop_match is not None for r in replies)
    ),
    "end of context": Feature(params={"max_tokens": None}),
    "end of text": Feature(
        params={"ignore_eos": False, "logit_bias": {EOS: 2.5}},
        proof=lambda replies, stats: any(r.token_ids[-1] == EOS for r in replies),
    ),
    # With forced tokens in runs of several lengths, over the borders of pages, and cut by the end of the reply.
    "grammar": Feature(
        params={"grammar": Grammar.regex("([a-c] forced |[d-f],|[^a-f]:--)+")},
        proof=lambda replies, stats: all(re.match("[a-c]( |$)|[d-f](,|$)|[^a-f](:|$)", r.text) for r in replies),
    ),
    "window layers": Feature(model=("window",)),
    "layers without positions": Feature(model=("nope",)),
    "mixture of experts": Feature(model=("moe",)),
    "sandwich norms": Feature(model=("gemma",)),
    "float16 cache": Feature(engine={"kv_format": "float16"}),
}


@cache
def oracle(model: tuple[str, ...], half: bool, prompt: int, setting: str) -> Delta:
    params = eval(setting, {"SamplingParams": SamplingParams, "Grammar": Grammar})  # noqa: S307 (its own repr, a key for the cache)
    return naive.generate(
        small_model(*model), ByteTokenizer(), PROMPTS[prompt], params, max_model_len=CONTEXT, half_cache=half
    )


def params_of(features: list[Feature], model: tuple[str, ...], half: bool, prompt: int) -> SamplingParams:
    """The features' parameters in turn; those that depend on a reply see the one that the others lead to."""
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
    for feature in sorted(features, key=lambda f: callable(f.params)):
        if callable(feature.params):
            fields |= feature.params(oracle(model, half, prompt, repr(SamplingParams(**fields))))
        else:
            fields |= feature.params
    return SamplingParams(**fields)


def run_in_steps(engine: Engine, names: tuple[str, ...], params: list[SamplingParams]) -> list[Delta]:
    """The replies from the bare engine, with everything around them that the features ask for."""
    together = any(FEATURES[name].together for name in names)
    if "pinned prefix" in names:
        engine.add(engine.make_pin_request(SHARED, 600))
        finish(engine)
    if "prefix cache" in names:
        add(engine, PROMPTS[0], SamplingParams(max_tokens=1))
        finish(engine)

    intruders = [INTRUDER] if "preemption" in names else []
    before = engine.stats().generated_tokens

    def disturb(step: int) -> list[Delta]:
        if intruders and engine.stats().generated_tokens > before:  # some replies are under way
            add(engine, intruders.pop(), SamplingParams(max_tokens=2), priority=9)
        cancelled = engine.cancel(f"neighbour {step}") if "cancelled neighbours" in names else None
        return [] if cancelled is None else [cancelled]

    replies: dict[str, Delta] = {}
    for i, prompt in enumerate(PROMPTS):
        if "cancelled neighbours" in names and i < 2:
            add(engine, [*prompt, 9], ENDLESS, request_id=f"neighbour {3 + 3 * i}")  # cancelled after that step
        add(engine, prompt, params[i], priority=priority_of(i, names), request_id=str(i))
        if not together:
            replies |= finish(engine)
    replies |= finish(engine, disturb)
    return [replies[str(i)] for i in range(len(PROMPTS))]


class Gate:
    """Stands before the model's steps: requests that come in while it is shut come together, and none ends unseen."""

    def __init__(self, engine: Engine) -> None:
        self._turn = threading.Condition()
        self._taken, self._until = 0, math.inf
        self._run = engine._runner.run
        engine._runner.run = self._step  # type: ignore[method-assign]

    def allow(self, steps: float) -> None:
        """Let so many steps pass from now on."""
        with self._turn:
            self._until = self._taken + steps
            self._turn.notify()

    def _step(self, chunks: Any) -> Any:
        with self._turn:
            assert self._turn.wait_for(lambda: self._taken < self._until, 60)
            self._taken += 1
        return self._run(chunks)


async def run_as_stream(engine: Engine, names: tuple[str, ...], params: list[SamplingParams]) -> list[Delta]:
    """The same through the engine's thread, read piece by piece; what was shown is never taken back."""
    together = any(FEATURES[name].together for name in names)
    gate = Gate(engine)

    async def read(handle: Handle) -> Delta:
        shown = [delta.text async for delta in handle]
        reply = await handle.aresult()
        assert "".join(shown) == reply.text
        return reply

    with EngineLoop(engine) as loop:
        if "pinned prefix" in names:
            await asyncio.to_thread(loop.pin, SHARED, 600)
        if "prefix cache" in names:
            await loop.submit(PROMPTS[0], SamplingParams(max_tokens=1)).aresult()
        neighbours = []
        if "cancelled neighbours" in names:
            gate.allow(0)
            neighbours = [loop.submit([*prompt, 9], ENDLESS) for prompt in PROMPTS[:2]]
            begun = [asyncio.ensure_future(anext(aiter(neighbour))) for neighbour in neighbours]
            while not all(first.done() for first in begun):
                gate.allow(1)
                await asyncio.sleep(0.001)
        replies = []
        if together:
            gate.allow(0)
        for i, prompt in enumerate(PROMPTS):
            replies.append(asyncio.ensure_future(read(loop.submit(prompt, params[i], priority=priority_of(i, names)))))
            if not together:
                await replies[-1]
        if "preemption" in names:
            loop.submit(INTRUDER, SamplingParams(max_tokens=2), priority=9)
        for neighbour in neighbours:
            neighbour.cancel()
        gate.allow(math.inf)
        return await asyncio.gather(*replies)


def priority_of(i: int, names: tuple[str, ...]) -> int:
    return (0, 2, 1)[i] if "priorities" in names else 0


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("names", combinations(FEATURES, 2), ids=" x ".join)
async def test_pair(names: tuple[str, str], runner: str) -> None:
    features = [FEATURES[name] for name in names]
    model = tuple(sorted(kind for feature in features for kind in feature.model))
    settings: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": CONTEXT, "num_pages": 100}
    for feature in features:
        settings |= feature.engine
    half = settings.get("kv_format") == "float16"
    engine = small_engine(small_model(*model), runner=runner, **settings)
    params = [params_of(features, model, half, i) for i in range(len(PROMPTS))]

    if "streaming" in names:
        replies = await run_as_stream(engine, names, params)
    else:
        replies = run_in_steps(engine, names, params)

    for i, reply in enumerate(replies):
        expected = oracle(model, half, i, repr(params[i]))
        assert reply.token_ids == expected.token_ids
        assert (reply.text, reply.finish_reason, reply.stop_match) == (
            expected.text,
            expected.finish_reason,
            expected.stop_match,
        )
        assert_same_logprobs(reply, expected, tolerance=1e-3 if half else 1e-4)
    for name in names:
        assert FEATURES[name].proof(replies, engine.stats()), f"{name} did not take place"
    engine.check_integrity()


def assert_same_logprobs(reply: Delta, expected: Delta, tolerance: float) -> None:
    assert (reply.logprobs is None) == (expected.logprobs is None)
    for found, wanted in zip(reply.logprobs or (), expected.logprobs or (), strict=True):
        assert (found.token_id, found.token) == (wanted.token_id, wanted.token)
        assert found.logprob == pytest.approx(wanted.logprob, abs=tolerance)
        assert [entry.token_id for entry in found.top] == [entry.token_id for entry in wanted.top]
