"""Whoever goes away in the middle of a reply leaves nothing running, in every protocol; and slow beginnings are kept
alive."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from chat_support import chat_llm
from numpy.typing import NDArray
from serving import MODEL, idle, live, until
from test_serve_anthropic import events_of

from openk3.serve.app import create_app

CHAT = [{"role": "user", "content": "Tell me a story."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": CHAT},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4000},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False)) as url:
        yield url


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that says "a" for ever, and takes its time."""

    def sample(*_: Any) -> int:
        time.sleep(0.005)
        return ord("a")

    monkeypatch.setattr("openk3.engine.engine.sample_token", sample)


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_goes_away(url: str, endless: None, path: str) -> None:
    body = BODIES[path] | {"model": MODEL, "stream": True}
    with httpx.stream("POST", f"{url}{path}", json=body) as response:
        for line in response.iter_lines():
            if '"a"' in line:
                break
        assert not idle(chat_llm("qwen"))
    until(lambda: idle(chat_llm("qwen")))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}{path}", json=body | {"stream": False}, timeout=0.3)
    until(lambda: idle(chat_llm("qwen")))


def test_what_was_not_finished_is_not_stored(url: str, endless: None) -> None:
    with httpx.stream("POST", f"{url}/v1/responses", json={"model": MODEL, "input": CHAT, "stream": True}) as response:
        lines = response.iter_lines()
        created = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
        next(line for line in lines if '"a"' in line)
    until(lambda: idle(chat_llm("qwen")))
    assert httpx.get(f"{url}/v1/responses/{created['response']['id']}").status_code == 404


def test_pings_while_nothing_comes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openk3.serve.anthropic.messages._PING_EVERY_S", 0.05)

    def slow(logits: NDArray[np.float32], *_: Any) -> int:
        time.sleep(0.3)
        return ord("a")

    monkeypatch.setattr("openk3.engine.engine.sample_token", slow)
    body = BODIES["/v1/messages"] | {"model": MODEL, "max_tokens": 2, "stream": True}
    kinds = [event["type"] for event in events_of(httpx.post(f"{url}/v1/messages", json=body).text)]
    assert kinds[0] == "ping"
    assert kinds.count("ping") > 4
    said = [kind for kind in kinds if kind != "ping"]
    assert said[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert said[-1] == "message_stop"
