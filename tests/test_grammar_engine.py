"""Grammars in the engine: both runners, beside free requests, with stop texts, log-probabilities and short replies."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import jsonschema
import pytest
from engine_support import EOS, RUNNERS, add, finish, generate, random_tokens, small_engine
from grammars import SCHEMAS, UNSUPPORTED

from openk3.engine import SamplingParams
from openk3.engine.grammar.matcher import Matcher
from openk3.engine.grammar.spec import Grammar

OBJECT = Grammar.json_schema(SCHEMAS["object"])


def params(grammar: Grammar | None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 200, "grammar": grammar} | more)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_random_weights_write_valid_json(runner: str, temperature: float) -> None:
    """A model that has never seen JSON: the grammar does it all."""
    engine = small_engine(runner=runner)
    requests = {
        name: add(engine, random_tokens(9, i), params(Grammar.json_schema(schema), temperature=temperature, seed=i))
        for i, (name, schema) in enumerate(SCHEMAS.items())
    }
    replies = finish(engine)
    for name, request in requests.items():
        reply = replies[request.request_id]
        assert reply.finish_reason == "stop", name
        kind = jsonschema.validators.validator_for(SCHEMAS[name], default=jsonschema.Draft202012Validator)
        kind(SCHEMAS[name]).validate(json.loads(reply.text))


def test_both_runners_give_the_same_tokens() -> None:
    asked = params(OBJECT, temperature=1, seed=5)
    cpu, torch = (generate(small_engine(runner=runner), random_tokens(20), asked) for runner in RUNNERS)
    assert (cpu.token_ids, cpu.text) == (torch.token_ids, torch.text)


@pytest.mark.parametrize("runner", RUNNERS)
def test_free_requests_beside_constrained_ones_are_as_alone(runner: str) -> None:
    free = [params(None, temperature=t, seed=3, max_tokens=30, ignore_eos=True) for t in (0, 1)]
    alone = [generate(small_engine(runner=runner), random_tokens(15, i), asked) for i, asked in enumerate(free)]
    engine = small_engine(runner=runner)
    for i, asked in enumerate(free):
        add(engine, random_tokens(15, i), asked, request_id=f"free {i}")
        add(engine, random_tokens(11, i), params(OBJECT, seed=i), request_id=f"bound {i}")
        add(engine, random_tokens(11, i), params(Grammar.regex("[0-9]{40}"), seed=i), request_id=f"digits {i}")
    together = finish(engine)
    for i, reply in enumerate(alone):
        assert together[f"free {i}"].token_ids == reply.token_ids
        assert together[f"digits {i}"].text.isdigit()


@pytest.mark.parametrize("runner", RUNNERS)
def test_forced_tokens_go_through_the_model_together(runner: str) -> None:
    engine = small_engine(runner=runner)
    asked = params(Grammar.regex("[a-z] is the first[a-z]; [a-z] is the last"))
    reply = generate(engine, random_tokens(9), asked)
    assert reply.finish_reason == "stop"
    assert len(reply.token_ids) == 30
    # The prompt, the first choice with the text after it, and the second with its own.
    assert engine.stats().steps == 3
    assert engine.stats().generated_tokens == 30
    one_by_one = generate(engine, random_tokens(9), params(asked.grammar, logprobs=0))
    assert one_by_one.token_ids == reply.token_ids
    assert engine.stats().steps == 3 + 30


def test_a_long_forced_text_takes_several_steps_and_others_go_on() -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(100))
    engine = small_engine(max_num_batched_tokens=12, max_num_seqs=8)
    free = add(engine, random_tokens(5), params(None, max_tokens=40, ignore_eos=True))
    bound = add(engine, random_tokens(5, 1), params(Grammar.choice([text])))
    steps: dict[str, list[int]] = {free.request_id: [], bound.request_id: []}
    while engine.has_requests:
        for delta in engine.step():
            steps[delta.request_id].append(len(delta.token_ids))
        engine.check_integrity()
    assert steps[free.request_id] == [1] * 40
    assert sum(steps[bound.request_id]) == 100
    assert set(steps[bound.request_id]) == {16, 4}


@pytest.mark.parametrize(("stop", "text"), [("def", "abc"), ("h", "abcdefg"), ("jkx", None)])
def test_stop_texts_in_forced_text(stop: str, text: str | None) -> None:
    whole = "abcdefghijk0123"
    reply = generate(small_engine(), random_tokens(5), params(Grammar.choice([whole]), stop=(stop,)))
    assert reply.text == (whole if text is None else text)
    assert reply.finish_reason == ("stop" if text is None else "length")
    assert len(reply.token_ids) == (len(whole) if text is None else len(text + stop))


@pytest.mark.parametrize("most", [1, 5, 14, 15, 16])
def test_forced_text_ends_with_the_tokens(most: int) -> None:
    reply = generate(small_engine(), random_tokens(5), params(Grammar.choice(["abcdefghijk0123"]), max_tokens=most))
    assert reply.text == "abcdefghijk0123"[:most]
    assert reply.finish_reason == ("stop" if most >= 15 else "length")


@pytest.mark.parametrize("runner", RUNNERS)
def test_masks_are_computed_while_the_model_runs(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, grammar = small_engine(runner=runner), Grammar.regex("[a-z]{12}")
    engine.check_grammar(grammar)
    run, threads = engine._runner.run, []

    def slow_run(chunks: Any) -> Any:
        rows = run(chunks)
        for chunk in chunks:
            while chunk.request.matcher._mask_V is None:  # it comes without our doing anything
                time.sleep(0.001)
        return rows

    compute = Matcher._compute_mask

    def watched(self: Matcher) -> Any:
        threads.append(threading.current_thread().name)
        return compute(self)

    monkeypatch.setattr(engine._runner, "run", slow_run)
    monkeypatch.setattr(Matcher, "_compute_mask", watched)
    reply = generate(engine, random_tokens(5), params(grammar, temperature=1, seed=1))
    assert reply.finish_reason == "stop"
    assert len(threads) == 12 and all(name.startswith("openk3-masks") for name in threads)


def test_the_same_seed_gives_the_same_reply() -> None:
    engine = small_engine()
    asked = params(Grammar.regex("[a-z]{20}"), temperature=1, seed=1)
    first, again = (generate(engine, random_tokens(5), asked).text for _ in range(2))
    other = generate(engine, random_tokens(5), params(Grammar.regex("[a-z]{20}"), temperature=1, seed=2)).text
    assert first == again != other
    assert len(first) == 20


def test_a_reply_ends_where_nothing_can_follow() -> None:
    reply = generate(small_engine(), random_tokens(5), params(Grammar.choice(["yes", "no"]), ignore_eos=True))
    assert reply.text in ("yes", "no")
    assert (reply.finish_reason, reply.stop_match) == ("stop", None)
    assert len(reply.token_ids) == len(reply.text)  # no token is spent on the end


def test_the_model_ends_a_reply_where_it_may() -> None:
    eager = params(Grammar.regex("ab+"), logit_bias={EOS: 100})
    reply = generate(small_engine(), random_tokens(5), eager)
    assert (reply.text, reply.finish_reason, reply.token_ids[-1]) == ("ab", "stop", EOS)


def test_a_reply_that_was_cut_may_be_incomplete() -> None:
    reply = generate(small_engine(), random_tokens(5), params(OBJECT, max_tokens=3))
    assert reply.finish_reason == "length"
    assert reply.text.startswith("{")
    exact = generate(small_engine(), random_tokens(5), params(Grammar.regex("[0-9]{3}"), max_tokens=3))
    assert exact.finish_reason == "stop"


@pytest.mark.parametrize(
    ("pattern", "stop", "text", "reason"),
    [
        ("ab;cd", ";", "ab", "length"),  # cut in the midst
        ("(ab;)*ab;cd", ";c", "ab", "length"),
        ("(ab;?)+", ";", "ab", "stop"),  # what is left has the form
        ("ab;cd", "never", "ab;cd", "stop"),
        ("ab;cd", "d", "ab;c", "length"),
    ],
)
def test_stop_texts(pattern: str, stop: str, text: str, reason: str) -> None:
    push = {"logit_bias": {ord(";"): 100, ord("c"): 50}, "ignore_eos": True, "max_tokens": 20}
    reply = generate(small_engine(), random_tokens(5), params(Grammar.regex(pattern), stop=(stop,), **push))
    assert reply.finish_reason == reason
    assert reply.text.startswith(text)
    assert reply.stop_match == (None if stop == "never" else stop)


@pytest.mark.parametrize(("pattern", "reason"), [("ab;cd", "length"), ("(ab;?)+", "stop")])
def test_stop_tokens(pattern: str, reason: str) -> None:
    asked = params(Grammar.regex(pattern), stop_token_ids=(ord(";"),), logit_bias={ord(";"): 100}, ignore_eos=True)
    reply = generate(small_engine(), random_tokens(5), asked)
    assert (reply.text, reply.finish_reason, reply.stop_match) == ("ab", reason, ord(";"))


def test_logprobs_are_the_models_own() -> None:
    engine = small_engine()
    free = generate(engine, random_tokens(5), params(None, logprobs=2, max_tokens=1))
    bound = generate(engine, random_tokens(5), params(Grammar.choice(["yes", "no"]), logprobs=2))
    assert free.logprobs is not None and bound.logprobs is not None
    assert len(bound.logprobs) == len(bound.token_ids)
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.logprobs[0].logprob < free.logprobs[0].logprob


def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs() -> None:
    engine = small_engine()
    with pytest.raises(ValueError, match="the JSON schema has the keyword uniqueItems, which is not supported"):
        engine.make_request(random_tokens(5), params(Grammar.json_schema(UNSUPPORTED["uniqueItems"])))
    assert not engine.has_requests


def test_a_grammar_that_fails_ends_its_own_request() -> None:
    engine = small_engine()
    request = add(engine, random_tokens(5), params(OBJECT))
    add(engine, random_tokens(5), params(None, max_tokens=5), request_id="free")
    assert request.matcher is not None
    request.matcher.consume(ord("{"))  # out of step with the reply
    request.matcher._forced.append(ord("x"))
    replies = finish(engine)
    assert replies[request.request_id].finish_reason == "error"
    assert "the grammar does not allow token 120" in str(replies[request.request_id].error)
    assert replies["free"].finish_reason == "length"
