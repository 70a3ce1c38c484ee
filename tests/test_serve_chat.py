"""/v1/chat/completions against the official client and as raw HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import MODEL, client, debug_app, debug_llm, live, sse

from openk3.engine.request import Request

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a page?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(debug_app()) as url:
        yield url


@pytest.fixture(scope="module")
def openai(url: str) -> OpenAI:
    return client(url)


def test_reply(openai: OpenAI) -> None:
    before = int(time.time())
    reply = openai.chat.completions.create(**GREEDY)
    ChatCompletion.model_validate(reply.model_dump(), strict=True)
    direct = debug_llm().chat(MESSAGES, temperature=0, max_tokens=24)
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert before <= reply.created <= time.time()
    assert reply.model == MODEL
    assert reply.system_fingerprint and reply.system_fingerprint.startswith("fp_")
    (choice,) = reply.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", direct.text)
    assert choice.finish_reason == direct.finish_reason == "length"
    assert choice.logprobs is None
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens == direct.usage.prompt_tokens
    assert reply.usage.completion_tokens == 24
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 24


def test_cached_tokens(openai: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "a prompt of more than sixteen tokens, sent twice"}]
    replies = [openai.chat.completions.create(**GREEDY | {"messages": messages}) for _ in range(2)]
    usages = [reply.usage for reply in replies]
    assert usages[0].prompt_tokens_details.cached_tokens == 0
    assert usages[1].prompt_tokens_details.cached_tokens >= 16
    assert replies[0].choices[0].message == replies[1].choices[0].message
    assert replies[0].id != replies[1].id
    assert replies[0].system_fingerprint == replies[1].system_fingerprint


def test_priorities_reach_the_engine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    priorities = []
    add = debug_llm().loop.engine.add

    def noted(request: Request) -> None:
        priorities.append(request.priority)
        add(request)

    monkeypatch.setattr(debug_llm().loop.engine, "add", noted)
    body = {"model": MODEL, "max_tokens": 1}
    for more in ({"priority": 3, "n": 2}, {}):
        assert httpx.post(f"{url}/v1/chat/completions", json=body | {"messages": MESSAGES} | more).status_code == 200
    for more in ({"priority": -1}, {"priority": None}):
        assert httpx.post(f"{url}/v1/completions", json=body | {"prompt": "Hi"} | more).status_code == 200
    assert priorities == [3, 3, 0, -1, 0]


def test_stream_has_the_text_of_the_whole(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(**GREEDY)
    chunks = list(openai.chat.completions.create(**GREEDY, stream=True))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, MODEL, "chat.completion.chunk")
    }
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 4


def test_stream_as_bytes(url: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json=GREEDY | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    events = sse(response.text)
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    # Usage is not mentioned unless it was asked for.
    assert all("usage" not in event for event in events[:-1])
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert events[-2]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]


def test_stream_usage(url: str) -> None:
    body = GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
    events = sse(httpx.post(f"{url}/v1/chat/completions", json=body).text)
    *chunks, last, done = events
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    whole = httpx.post(f"{url}/v1/chat/completions", json=GREEDY).json()
    same = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][name] for name in same] == [whole["usage"][name] for name in same]
    assert "cached_tokens" in last["usage"]["prompt_tokens_details"]


def test_usage_can_be_declined(url: str) -> None:
    body = GREEDY | {"stream": True, "stream_options": {"include_usage": False}}
    events = sse(httpx.post(f"{url}/v1/chat/completions", json=body).text)
    assert all("usage" not in event and event["choices"] for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_the_seeds_that_follow(openai: OpenAI, stream: bool) -> None:
    body = GREEDY | {"temperature": 1.5, "seed": 40}
    alone = [openai.chat.completions.create(**body | {"seed": 40 + i}).choices[0].message.content for i in range(3)]
    assert len(set(alone)) == 3
    if not stream:
        reply = openai.chat.completions.create(**body, n=3)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert [choice.message.content for choice in reply.choices] == alone
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 3 * 24
        one = openai.chat.completions.create(**body)
        assert one.usage is not None and reply.usage.prompt_tokens == one.usage.prompt_tokens
        return
    texts, roles, reasons = [""] * 3, [0] * 3, [0] * 3
    for chunk in openai.chat.completions.create(**body, n=3, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        reasons[choice.index] += choice.finish_reason is not None
    assert texts == alone
    assert roles == reasons == [1, 1, 1]


def test_choices_share_the_prompt(openai: OpenAI) -> None:
    before = debug_llm().stats()
    text = "a long prompt that nobody has sent before, so that nothing of it is in the cache: " + "0123456789" * 5
    openai.chat.completions.create(**GREEDY | {"messages": [{"role": "user", "content": text}], "n": 4})
    after = debug_llm().stats()
    queried = after.prefix_query_tokens - before.prefix_query_tokens
    found = after.prefix_hit_tokens - before.prefix_hit_tokens
    assert found >= 0.7 * queried * 3 / 4


def test_seed(openai: OpenAI) -> None:
    body = GREEDY | {"temperature": 1.2, "seed": 7}
    first, second = (openai.chat.completions.create(**body).choices[0].message.content for _ in range(2))
    other = openai.chat.completions.create(**body | {"seed": -8}).choices[0].message.content
    assert first == second != other


@pytest.mark.parametrize("many", [False, True])
def test_stop(openai: OpenAI, many: bool) -> None:
    whole = openai.chat.completions.create(**GREEDY).choices[0].message.content or ""
    stop = whole[6:9]
    reply = openai.chat.completions.create(**GREEDY, stop=["\u0001never", stop] if many else stop)
    assert reply.choices[0].message.content == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    chunks = openai.chat.completions.create(**GREEDY, stop=stop, stream=True)
    deltas = [chunk.choices[0] for chunk in chunks]
    assert "".join(delta.delta.content or "" for delta in deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_length_limit(openai: OpenAI, name: str) -> None:
    body = {key: value for key, value in GREEDY.items() if key != "max_tokens"}
    reply = openai.chat.completions.create(**body, **{name: 3})
    assert reply.usage is not None and reply.usage.completion_tokens == 3
    assert reply.choices[0].finish_reason == "length"


def test_the_context_ends_the_reply(openai: OpenAI) -> None:
    body = {key: value for key, value in GREEDY.items() if key != "max_tokens"}
    text = "x" * 440
    reply = openai.chat.completions.create(**body | {"messages": [{"role": "user", "content": text}]})
    assert reply.usage is not None
    if reply.choices[0].finish_reason == "length":
        assert reply.usage.total_tokens == 512
    assert reply.usage.total_tokens <= 512


def test_logit_bias(openai: OpenAI) -> None:
    reply = openai.chat.completions.create(**GREEDY, logit_bias={str(ord("z")): 100})
    assert reply.choices[0].message.content == "z" * 24


def test_penalties_and_filters_reach_the_sampler(openai: OpenAI) -> None:
    base = openai.chat.completions.create(**GREEDY, logit_bias={str(ord("z")): 20, str(ord("y")): 19})
    assert base.choices[0].message.content == "z" * 24
    bias = {"logit_bias": {str(ord("z")): 20, str(ord("y")): 19}}
    penalised = openai.chat.completions.create(**GREEDY, **bias, frequency_penalty=2, presence_penalty=1)
    assert "y" in (penalised.choices[0].message.content or "")
    # With one candidate left, temperature does not matter.
    hot = GREEDY | {"temperature": 2.0}
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        reply = openai.chat.completions.create(**hot, extra_body=extra)
        assert reply.choices[0].message == openai.chat.completions.create(**GREEDY).choices[0].message
    reply = openai.chat.completions.create(**GREEDY, extra_body={"repetition_penalty": 5.0})
    assert len(set(reply.choices[0].message.content or "")) > 5


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(openai: OpenAI, stream: bool) -> None:
    if stream:
        chunks = openai.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3, stream=True)
        found = [chunk.choices[0].logprobs for chunk in chunks]
        content = [entry for logprobs in found if logprobs for entry in logprobs.content or []]
    else:
        reply = openai.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None and logprobs.refusal is None
        content = logprobs.content or []
    assert len(content) == 24
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        # Greedy: what was chosen is the best.
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert entry.bytes is not None and len(entry.bytes) in (1, len(entry.token.encode()))
    text = b"".join(bytes(entry.bytes or ()) for entry in content)
    whole = openai.chat.completions.create(**GREEDY).choices[0].message.content
    specials_gone = text.replace(b"<|end|>", b"").replace(b"<|start|>", b"")
    assert specials_gone.decode(errors="replace") == whole


def test_logprobs_without_alternatives(openai: OpenAI) -> None:
    reply = openai.chat.completions.create(**GREEDY, logprobs=True)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert [entry.top_logprobs for entry in logprobs.content or []] == [[]] * 24


def test_a_conversation_goes_on(openai: OpenAI) -> None:
    """The client's own message object goes back in as it came out."""
    first = openai.chat.completions.create(**GREEDY)
    history = [*MESSAGES, first.choices[0].message.model_dump(), {"role": "user", "content": "And then?"}]
    reply = openai.chat.completions.create(**GREEDY | {"messages": history})
    text = first.choices[0].message.content
    plain = [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    assert reply.choices[0].message.content == debug_llm().chat(plain, temperature=0, max_tokens=24).text


def test_developer_is_system(openai: OpenAI) -> None:
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, MESSAGES[1]]
    reply = openai.chat.completions.create(**GREEDY | {"messages": messages})
    assert reply.choices[0].message == openai.chat.completions.create(**GREEDY).choices[0].message
