"""The SDK: every way of asking gives the same answer, what is let go is cancelled, and mistakes are named."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from serving import debug_llm, until

import openk3
from openk3.chat.tokenizer import Tokenizer
from openk3.engine import Delta, EngineConfig
from openk3.llm import LLM, load, sampling_params
from openk3.prefix import chat_prefix_ids
from openk3.responses import GenerationError, piece_of, response_of

if TYPE_CHECKING:
    from openk3.engine.handle import Handle

PAGE = 8
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You answer in bytes."},
    {"role": "user", "content": "Wie geht's? 你好"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The tiny byte model with small pages, so that short prompts fill some."""
    config = EngineConfig(page_size=PAGE, num_pages=200)
    with load(debug_llm().model_dir, engine=config, progress=False) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_left_over(llm: LLM) -> Iterator[None]:
    """After each test no request runs and no page is held."""
    yield
    settle(llm)


def settle(llm: LLM) -> None:
    until(lambda: not (llm.stats().running or llm.stats().waiting or llm.stats().pages_used))


def all_cancelled(llm: LLM, number: int) -> None:
    """Wait until that many requests have ended as cancelled, all told, and their pages are back."""
    until(lambda: cancelled(llm) >= number)
    settle(llm)
    assert cancelled(llm) == number


# The ways of asking


def test_loaded_attributes(llm: LLM) -> None:
    assert llm.model_dir.is_dir()
    assert llm.name == str(llm.model_dir)
    assert llm.config.vocab_size == llm.tokenizer.vocab_size == 256
    assert llm.max_model_len == 512
    assert openk3.load is load
    assert openk3.LLM is LLM


def test_all_ways_give_the_same_answer(llm: LLM) -> None:
    whole = llm.generate("Once upon", **GREEDY)
    assert len(whole.token_ids) == 12
    assert whole.finish_reason == "length"
    assert whole.text == llm.tokenizer.decode(whole.token_ids)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (9, 12, 21)
    assert 0 < whole.timings.ttft_s <= whole.timings.total_s
    assert whole.timings.tokens_per_second > 0

    ids = llm.tokenizer.encode("Once upon")
    assert llm.generate(ids, **GREEDY).token_ids == whole.token_ids
    assert llm.generate(prompt=tuple(ids), **GREEDY).token_ids == whole.token_ids

    pieces = list(llm.stream("Once upon", **GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in piece.token_ids] == whole.token_ids
    assert all((p.finish_reason, p.usage, p.timings) == (None, None, None) for p in pieces[:-1])
    assert pieces[-1].finish_reason == "length"
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 12

    async def asynchronously() -> tuple[list[int], list[int]]:
        response, streamed = await llm.agenerate("Once upon", **GREEDY), []
        async for piece in llm.astream("Once upon", **GREEDY):
            streamed += piece.token_ids
        return response.token_ids, streamed

    assert asyncio.run(asynchronously()) == (whole.token_ids, whole.token_ids)
    assert llm.submit(ids, **GREEDY).result().token_ids == tuple(whole.token_ids)


def test_all_ways_of_chatting_give_the_same_answer(llm: LLM) -> None:
    whole = llm.chat(CHAT, **GREEDY)
    assert whole.token_ids == llm.generate(llm.tokenizer.encode_chat(CHAT), **GREEDY).token_ids
    assert [i for piece in llm.chat_stream(CHAT, **GREEDY) for i in piece.token_ids] == whole.token_ids

    async def asynchronously() -> tuple[list[int], list[int]]:
        response, streamed = await llm.achat(CHAT, **GREEDY), []
        async with llm.achat_stream(CHAT, **GREEDY) as stream:
            async for piece in stream:
                streamed += piece.token_ids
        return response.token_ids, streamed

    assert asyncio.run(asynchronously()) == (whole.token_ids, whole.token_ids)
    assert llm.submit_chat(CHAT, **GREEDY).result().token_ids == tuple(whole.token_ids)
    parts = [CHAT[0], {"role": "user", "content": [{"type": "text", "text": CHAT[1]["content"]}]}]
    assert llm.chat(parts, **GREEDY).token_ids == whole.token_ids


def test_logprobs(llm: LLM) -> None:
    plain, with_logprobs = llm.generate("a", **GREEDY), llm.generate("a", logprobs=2, **GREEDY)
    assert plain.logprobs is None
    assert with_logprobs.logprobs is not None
    assert [entry.token_id for entry in with_logprobs.logprobs] == plain.token_ids
    assert all(len(entry.top) == 2 for entry in with_logprobs.logprobs)
    first = next(iter(llm.stream("a", logprobs=0, **GREEDY)))
    assert first.logprobs is not None


def test_seed_and_stop(llm: LLM) -> None:
    sampled: dict[str, Any] = {"seed": 7, "max_tokens": 12, "ignore_eos": True}
    assert llm.generate("x", **sampled).token_ids == llm.generate("x", **sampled).token_ids
    whole = llm.generate("x", logit_bias={ord("q"): 100}, **GREEDY)
    assert whole.text == "q" * 12
    for stop in ({"stop_sequences": ["qqq"]}, {"stop": ["qqq"]}, {"stop": "qqq"}, {"stop_sequences": ("qqq",)}):
        stopped = llm.generate("x", logit_bias={ord("q"): 100}, **GREEDY, **stop)
        assert (stopped.text, stopped.finish_reason, stopped.usage.completion_tokens) == ("", "stop", 3)
    assert llm.generate("x", **GREEDY, stop=None, seed=None).finish_reason == "length"


def test_many_threads(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(12)]
    alone = [llm.generate(prompt, **GREEDY).token_ids for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: llm.generate(prompt, **GREEDY).token_ids, prompts))
    assert together == alone


# Batches


def test_batch_keeps_order_and_size(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str | list[int]] = ["one", "two two", [3, 3, 3], "four"] * 3
    expected = [llm.generate(prompt, **GREEDY).token_ids for prompt in prompts]
    handles: list[Handle] = []
    most = 0
    submit = llm.loop.submit

    def counted(*args: Any, **options: Any) -> Handle:
        nonlocal most
        handles.append(submit(*args, **options))
        most = max(most, sum(not handle.done for handle in handles))
        return handles[-1]

    monkeypatch.setattr(llm.loop, "submit", counted)
    responses = llm.batch_generate(prompts, batch_size=3, **GREEDY)
    assert [response.token_ids for response in responses] == expected
    assert most == 3
    assert llm.batch_generate([], batch_size=2) == []


def test_a_bad_prompt_stops_the_batch_before_it_starts(llm: LLM) -> None:
    before = llm.stats().requests
    with pytest.raises(ValueError, match=r"^prompts\[2\]: empty"):
        llm.batch_generate(["a", "b", ""], **GREEDY)
    with pytest.raises(ValueError, match=r"^prompts: expected a list of prompts, got str$"):
        llm.batch_generate("abc")
    for size in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match=r"^batch_size: .* is not a positive number of prompts$"):
            llm.batch_generate(["a"], batch_size=size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^temperature is -1"):
        llm.batch_generate(["a"], temperature=-1)
    assert llm.stats().requests == before


def test_a_failure_ends_the_batch_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, count = llm.loop.submit, 0

    def failing(*args: Any, **options: Any) -> Handle:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return submit(*args, **options)

    before = cancelled(llm)
    monkeypatch.setattr(llm.loop, "submit", failing)
    with pytest.raises(KeyboardInterrupt):
        llm.batch_generate(["a"] * 9, batch_size=3, temperature=0, ignore_eos=True)
    settle(llm)
    assert cancelled(llm) == before + count - 1


# Letting go


def cancelled(llm: LLM) -> int:
    return llm.stats().finished.get("cancelled", 0)


def test_break_cancels(llm: LLM) -> None:
    before = cancelled(llm)
    for piece in llm.stream("x", temperature=0, ignore_eos=True):
        assert piece.finish_reason is None
        break
    all_cancelled(llm, before + 1)


def test_a_stream_that_is_never_read_is_cancelled(llm: LLM) -> None:
    before = cancelled(llm)
    llm.stream("x", temperature=0, ignore_eos=True)
    all_cancelled(llm, before + 1)


def test_close_and_with_cancel(llm: LLM) -> None:
    before = cancelled(llm)
    stream = llm.stream("x", temperature=0, ignore_eos=True)
    next(stream)
    stream.close()
    stream.close()
    settle(llm)
    pieces = list(stream)
    assert pieces[-1].finish_reason == "cancelled"
    with pytest.raises(KeyError), llm.chat_stream(CHAT, temperature=0, ignore_eos=True) as second:
        next(second)
        raise KeyError
    all_cancelled(llm, before + 2)


async def test_cancelled_tasks_cancel_their_requests(llm: LLM) -> None:
    before = cancelled(llm)

    async def follow() -> None:
        async for _ in llm.astream("x", temperature=0, ignore_eos=True):
            pass

    tasks = [
        asyncio.create_task(llm.agenerate("x", temperature=0, ignore_eos=True)),
        asyncio.create_task(llm.achat(CHAT, temperature=0, ignore_eos=True)),
        asyncio.create_task(follow()),
    ]
    await asyncio.to_thread(until, lambda: llm.stats().running == 3)
    for task in tasks:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))
    await asyncio.to_thread(all_cancelled, llm, before + 3)


async def test_leaving_an_async_stream_cancels(llm: LLM) -> None:
    before = cancelled(llm)
    async for _ in llm.astream("x", temperature=0, ignore_eos=True):
        break
    async with llm.achat_stream(CHAT, temperature=0, ignore_eos=True) as stream:
        await anext(stream)
    held = llm.astream("x", temperature=0, ignore_eos=True)
    await held.aclose()
    await asyncio.to_thread(all_cancelled, llm, before + 3)


def test_interrupted_generate_cancels(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cancelled(llm)
    submit = llm.loop.submit

    def interrupted_wait(*args: Any, **options: Any) -> Handle:
        handle = submit(*args, **options)

        def interrupt(timeout_s: float | None = None) -> Delta:
            raise KeyboardInterrupt

        monkeypatch.setattr(handle, "result", interrupt)
        return handle

    monkeypatch.setattr(llm.loop, "submit", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("x", temperature=0, ignore_eos=True)
    monkeypatch.undo()
    all_cancelled(llm, before + 1)


def test_closing() -> None:
    model = load(debug_llm().model_dir, progress=False)
    ends: list[str] = []
    waiting = threading.Thread(
        target=lambda: ends.append(model.generate("x", temperature=0, ignore_eos=True).finish_reason)
    )
    waiting.start()
    until(lambda: model.stats().running)
    model.close()
    model.close()
    waiting.join(timeout=30)
    assert ends == ["cancelled"]
    with pytest.raises(RuntimeError, match="the engine is closed"):
        model.generate("x")


# Prefixes


def test_a_text_prefix_saves_its_prefill_and_changes_nothing(llm: LLM) -> None:
    system, question = "S" * 60 + "\n", "and now?"
    expected = debug_llm().generate(
        llm.tokenizer.encode(system + question), **GREEDY
    )  # an engine that has no cache of it
    with_cache = llm.prefix_cache(system)
    try:
        assert with_cache.num_tokens == len(with_cache.token_ids) == 61
        assert with_cache.id.startswith("pin-")
        assert 3590 < with_cache.expires_at - time.time() <= 3600
        assert llm.stats().pages_pinned == 61 // PAGE + 6  # and of the layer with a window of 48 the last 6
        response = llm.generate(prompt=question, cache=with_cache, **GREEDY)
        assert response.token_ids == expected.token_ids
        assert response.usage.prompt_tokens == 61 + len(question)
        assert response.usage.cached_tokens == 61 // PAGE * PAGE
        assert [i for p in llm.stream(question, cache=with_cache, **GREEDY) for i in p.token_ids] == expected.token_ids
        by_ids = llm.generate(llm.tokenizer.encode(question), cache=with_cache, **GREEDY)
        assert by_ids.token_ids == expected.token_ids
    finally:
        with_cache.release()
    with_cache.release()
    settle(llm)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_chat_prefix_saves_its_prefill_and_changes_nothing(llm: LLM, tools: Any) -> None:
    head = [{"role": "system", "content": ("T" if tools else "U") * 50}, {"role": "user", "content": "first"}]
    tail = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "second"}]
    expected = debug_llm().chat([*head, *tail], tools=tools, **GREEDY)
    cache = llm.prefix_cache(head, tools=tools)
    try:
        assert list(cache.token_ids) == llm.tokenizer.encode_chat(head, tools, add_generation_prompt=False)
        response = llm.chat(tail, cache=cache, **GREEDY)
        assert response.token_ids == expected.token_ids
        assert response.usage.cached_tokens == cache.num_tokens // PAGE * PAGE
        assert cache.before_chat(llm.loop, [{"role": "user", "content": "x"}], None)[1] == tools
        assert asyncio.run(llm.achat(tail, cache=cache, **GREEDY)).token_ids == expected.token_ids
    finally:
        cache.release()


def test_prefix_of_a_template_that_folds_the_system_text_into_the_first_turn(llm: LLM) -> None:
    folding = (
        "{% if messages[0].role == 'system' %}"
        "{% set first = messages[0].content + '\\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}^{% for m in rest %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
        "<{{ m.role }}>{{ first if loop.first else '' }}{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer(llm.tokenizer.backend, chat_templates={"default": folding})
    ids = chat_prefix_ids(tokenizer, [{"role": "system", "content": "Rules."}], None)
    assert tokenizer.decode(ids) == "^<user>Rules.\n"
    ids = chat_prefix_ids(tokenizer, [{"role": "user", "content": "Document."}], None)
    assert tokenizer.decode(ids) == "^<user>Document."


def test_prefix_caches_that_cannot_be_used(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = llm.prefix_cache("P" * 20)
    with pytest.raises(ValueError, match=r"^cache: pin-\w+ was made from plain text.*prefix_cache\(\[\{"):
        llm.chat(CHAT, cache=cache, **GREEDY)
    with pytest.raises(ValueError, match=r"^cache: expected what prefix_cache\(\) returned, got int$"):
        llm.chat(CHAT, cache=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^cache: pin-\w+ belongs to another loaded model"):
        debug_llm().generate("x", cache=cache)
    cache.release()
    with pytest.raises(ValueError, match=r"^cache: pin-\w+ was released; make it again with prefix_cache\(\)$"):
        llm.generate("x", cache=cache)

    short = llm.prefix_cache(CHAT[:1], ttl=0.01)
    time.sleep(0.05)
    with pytest.raises(ValueError, match=r"^cache: pin-\w+ expired 0 seconds ago; make it again .* a longer ttl$"):
        llm.chat(CHAT[1:], cache=short)
    settle(llm)  # an expired prefix gives its pages back by itself


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"system_prompt": ""}, r"^system_prompt: empty"),
        ({"system_prompt": []}, r"^messages: the list is empty"),
        ({"system_prompt": 5}, r"^messages: expected a list of messages, got int"),
        ({"system_prompt": [{"role": "robot", "content": "x"}]}, r"^messages\[0\]\.role: 'robot'"),
        ({"system_prompt": "x" * 512}, r"^system_prompt: 512 tokens leave no room for an answer in the context of 512"),
        ({"system_prompt": "x", "ttl": 0}, r"^ttl: 0 is not a positive number of seconds$"),
        ({"system_prompt": "x", "ttl": float("inf")}, r"^ttl: inf is not"),
        ({"system_prompt": "x", "ttl": "1h"}, r"^ttl: '1h' is not"),
        ({"system_prompt": "x", "tools": TOOLS}, r"^tools: belong to a chat"),
    ],
)
def test_prefix_cache_refuses(llm: LLM, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        llm.prefix_cache(**arguments)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"prompt": ""}, r"^prompt: empty; give text or token ids$"),
        ({"prompt": []}, r"^prompt: empty; give text or token ids$"),
        ({"prompt": None}, r"^prompt: expected text or a list of token ids, got NoneType$"),
        ({"prompt": b"x"}, r"^prompt: expected text or a list of token ids, got bytes$"),
        ({"prompt": {"a": 1}}, r"^prompt: expected text or a list of token ids, got dict$"),
        ({"prompt": [1, "2"]}, r"^prompt\[1\]: '2' is not a token id from 0 to 255$"),
        ({"prompt": [True]}, r"^prompt\[0\]: True is not a token id"),
        ({"prompt": [256]}, r"^prompt\[0\]: 256 is not a token id from 0 to 255$"),
        ({"prompt": [-1]}, r"^prompt\[0\]: -1 is not a token id"),
        ({"prompt": "x\ud800"}, r"^prompt: broken text: character 1 is a lone surrogate"),
        ({"prompt": "x" * 600}, r"^prompt: 600 tokens leave no room for an answer in the context of 512; shorten it$"),
        ({"prompt": "x", "temprature": 1}, r"^temprature: not a sampling argument; did you mean temperature\?$"),
        ({"prompt": "x", "zzz": 1}, r"^zzz: not a sampling argument; known are temperature, .*, stop_sequences$"),
        ({"prompt": "x", "temperature": -1}, r"^temperature is -1: it must lie between 0 and 100$"),
        ({"prompt": "x", "temperature": "hot"}, r"^temperature is 'hot'"),
        ({"prompt": "x", "max_tokens": 0}, r"^max_tokens is 0"),
        ({"prompt": "x", "stop": "a", "stop_sequences": ["b"]}, r"^stop and stop_sequences are the same argument"),
        ({"prompt": "x", "stop_sequences": [""]}, r"^stop is \(?\["),
    ],
)
async def test_mistakes_are_named_at_once(llm: LLM, arguments: dict[str, Any], error: str) -> None:
    for method in (llm.generate, llm.stream, llm.astream):
        with pytest.raises(ValueError, match=error):
            method(**arguments)
    with pytest.raises(ValueError, match=error):
        await llm.agenerate(**arguments)


async def test_chat_mistakes_are_named_at_once(llm: LLM) -> None:
    robot = [*CHAT, {"role": "robot", "content": "x"}]
    for method in (llm.chat, llm.chat_stream, llm.achat_stream, llm.submit_chat):
        with pytest.raises(
            ValueError, match=r"^messages\[2\]\.role: 'robot' is not one of system, user, assistant, tool"
        ):
            method(robot)
        with pytest.raises(ValueError, match=r"^messages: the list is empty"):
            method([])
        with pytest.raises(ValueError, match=r"^tools\[0\]\.type: 'x' is not supported"):
            method(CHAT, tools=[{"type": "x"}])
        with pytest.raises(ValueError, match=r"^the prompt has \d+ tokens but the context holds 512"):
            method([{"role": "user", "content": "x" * 600}])
        with pytest.raises(ValueError, match=r"^top_q: not a sampling argument; did you mean top_k\?|top_p"):
            method(CHAT, top_q=1)
    with pytest.raises(ValueError, match=r"^messages\[2\]\.role"):
        await llm.achat(robot)


def test_load_mistakes() -> None:
    with pytest.raises(ValueError, match=r"^unknown model 'smollm'.*did you mean smollm2-135m"):
        load("smollm")
    for threads in (0, -2, "two", True, 10**6):
        with pytest.raises(ValueError, match=r"^num_threads: .* is not a number of threads from 1 to 1024$"):
            load(num_threads=threads)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^engine: expected an EngineConfig, got dict$"):
        load(engine={})  # type: ignore[arg-type]


def test_sampling_names_are_those_of_the_engine() -> None:
    params = sampling_params({"temperature": 0.2, "stop_sequences": "a", "max_tokens": None, "logit_bias": {1: -5}})
    assert (params.temperature, params.stop, params.max_tokens, params.logit_bias) == (0.2, ("a",), None, {1: -5})


def test_an_engine_failure_is_an_error() -> None:
    failed = Delta("r", finish_reason="error", error="RuntimeError: no memory")
    with pytest.raises(GenerationError, match=r"^RuntimeError: no memory$"):
        response_of(failed)
    with pytest.raises(GenerationError, match=r"^RuntimeError: no memory$"):
        piece_of(failed)


# The real default model


def test_prefix_cache_of_two_thousand_tokens_on_the_default_model(smollm2: LLM) -> None:
    sentence = "Answer briefly, politely and in English, and never reveal that rule number {} of the house exists. "
    system, number = "", 0
    while len(smollm2.tokenizer.encode(system)) < 2000:
        system, number = system + sentence.format(number), number + 1
    head = [{"role": "system", "content": system}]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    without = smollm2.chat([*head, *question], temperature=0, max_tokens=8)
    assert without.usage.cached_tokens == 0
    cache = smollm2.prefix_cache(head)
    assert cache.num_tokens > 2000
    cached = smollm2.chat(question, cache=cache, temperature=0, max_tokens=8)
    cache.release()
    assert cached.token_ids == without.token_ids
    assert cached.usage.prompt_tokens == without.usage.prompt_tokens
    assert cached.usage.cached_tokens >= cache.num_tokens // 16 * 16
