"""/v1/completions against the official client and as raw HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types import Completion
from serving import MODEL, client, debug_app, debug_llm, live, sse

GREEDY: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(debug_app()) as url:
        yield url


@pytest.fixture(scope="module")
def openai(url: str) -> OpenAI:
    return client(url)


def direct(prompt: str | list[int], **sampling: Any) -> str:
    return debug_llm().generate(prompt, **{"temperature": 0, "max_tokens": 20} | sampling).text


def test_reply(openai: OpenAI) -> None:
    reply = openai.completions.create(**GREEDY)
    Completion.model_validate(reply.model_dump(), strict=True)
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    (choice,) = reply.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, direct("Once upon a time"), "length")
    assert choice.logprobs is None
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (16, 20, 36)


def test_sixteen_tokens_unless_asked_otherwise(openai: OpenAI) -> None:
    reply = openai.completions.create(model=MODEL, prompt="Once", temperature=0)
    assert reply.usage is not None and reply.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abc"]),
        (["abc", "the second"], ["abc", "the second"]),
        (list(b"abc"), ["abc"]),
        ([list(b"abc"), list(b"the second")], ["abc", "the second"]),
    ],
    ids=["text", "texts", "tokens", "lists of tokens"],
)
def test_prompt_forms(openai: OpenAI, prompt: Any, texts: list[str]) -> None:
    reply = openai.completions.create(**GREEDY | {"prompt": prompt})
    assert [choice.index for choice in reply.choices] == list(range(len(texts)))
    assert [choice.text for choice in reply.choices] == [direct(text) for text in texts]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(map(len, texts))


@pytest.mark.parametrize("prompt", ["Hé, 世界!", list("Hé, 世界!".encode())])
def test_echo(openai: OpenAI, prompt: Any) -> None:
    reply = openai.completions.create(**GREEDY | {"prompt": prompt}, echo=True)
    assert reply.choices[0].text == "Hé, 世界!" + direct("Hé, 世界!")
    chunks = list(openai.completions.create(**GREEDY | {"prompt": prompt}, echo=True, stream=True))
    assert chunks[0].choices[0].text == "Hé, 世界!"
    assert "".join(chunk.choices[0].text for chunk in chunks) == reply.choices[0].text


def test_stream(openai: OpenAI, url: str) -> None:
    chunks = list(openai.completions.create(**GREEDY, stream=True))
    for chunk in chunks:
        assert chunk.object == "text_completion"
        assert chunk.id == chunks[0].id
    assert "".join(chunk.choices[0].text for chunk in chunks) == direct("Once upon a time")
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    events = sse(httpx.post(f"{url}/v1/completions", json=GREEDY | {"stream": True}).text)
    assert events[-1] == "[DONE]"
    assert all("usage" not in event for event in events[:-1])


def test_stream_usage(url: str) -> None:
    body = GREEDY | {"prompt": ["a", "bc"], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = sse(httpx.post(f"{url}/v1/completions", json=body).text)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 4 * 20)


def test_choices_of_several_prompts(openai: OpenAI) -> None:
    """Each prompt's choices have the seeds they would have alone."""
    body = GREEDY | {"temperature": 1.3, "seed": 5}
    both = openai.completions.create(**body | {"prompt": ["abc", "xyz"]}, n=2)
    alone = [openai.completions.create(**body | {"prompt": prompt}, n=2) for prompt in ("abc", "xyz")]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == [c.text for reply in alone for c in reply.choices]
    assert both.choices[1].text == direct("abc", temperature=1.3, seed=6)
    assert len({choice.text for choice in both.choices}) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(openai: OpenAI, stream: bool) -> None:
    # Only ASCII letters, so that tokens are their own text.
    body = GREEDY | {"logit_bias": {str(i): 50 for i in range(97, 123)}}
    reply = openai.completions.create(**body, logprobs=2)
    logprobs = reply.choices[0].logprobs
    if stream:
        found = [chunk.choices[0].logprobs for chunk in openai.completions.create(**body, logprobs=2, stream=True)]
        pieces = [piece for piece in found if piece is not None]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            whole = getattr(logprobs, name)
            assert [item for piece in pieces for item in getattr(piece, name)] == whole
        return
    assert logprobs is not None
    assert logprobs.tokens == list(reply.choices[0].text)
    assert logprobs.text_offset == list(range(20))
    assert len(logprobs.token_logprobs or ()) == len(logprobs.top_logprobs or ()) == 20
    rows = zip(logprobs.tokens, logprobs.token_logprobs or (), logprobs.top_logprobs or (), strict=True)
    for token, value, top in rows:
        # The model's own probabilities: the bias made another choice, which is listed beside the best two.
        assert top[token] == value
        assert 2 <= len(top) <= 3


def test_offsets_count_characters(openai: OpenAI) -> None:
    """A character of three tokens has one place in the text."""
    body = GREEDY | {"max_tokens": 1, "temperature": 0}
    sequence = list("é世".encode())
    offsets, tokens = [], []
    prompt = list(b"x")
    for byte in sequence:
        reply = openai.completions.create(**body | {"prompt": prompt, "logit_bias": {str(byte): 100}}, logprobs=0)
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        tokens += logprobs.tokens or []
        offsets += logprobs.text_offset or []
        prompt.append(byte)
    assert tokens == [f"bytes:\\x{byte:02x}" for byte in sequence]
    assert offsets == [0] * len(sequence)


def test_stop_and_special_tokens(openai: OpenAI) -> None:
    text = direct("Once upon a time")
    reply = openai.completions.create(**GREEDY, stop=text[4:6])
    assert reply.choices[0].text == text[: text.index(text[4:6])]
    assert reply.choices[0].finish_reason == "stop"
    ended = openai.completions.create(**GREEDY, logit_bias={"255": 100})
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
