"""Streams and replies that do not end well: clients that leave, engines that fail, servers that stop."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from serving import MODEL, client, debug_app, debug_llm, idle, live, sse, until

from openk3.serve.app import create_app

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
# Never ends by itself: the end token is as good as impossible.
ENDLESS: dict[str, Any] = CHAT | {"max_tokens": 120, "logit_bias": {"255": -100}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(debug_app()) as url:
        yield url


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    until(lambda: idle(debug_llm()))
    engine = debug_llm().loop.engine
    engine.check_integrity()
    assert debug_llm().stats().pages_used == 0


def cancelled() -> int:
    return debug_llm().stats().finished.get("cancelled", 0)


def generated() -> int:
    return debug_llm().stats().generated_tokens


class Steps:
    """Lets the engine take one step at a time while it has requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._allowed = threading.Semaphore(0)
        self._asked = threading.Event()
        engine = debug_llm().loop.engine
        step = engine.step

        def guarded() -> Any:
            if engine.has_requests:
                self._asked.set()
                assert self._allowed.acquire(timeout=30)
            return step()

        monkeypatch.setattr(engine, "step", guarded)

    def take(self) -> None:
        """Wait until the engine stands before a step, let it, and wait until it stands before the next or has none."""
        loop = debug_llm().loop
        assert self._asked.wait(30)
        self._asked.clear()
        self._allowed.release()
        until(lambda: self._asked.is_set() or not (loop.engine.has_requests or loop._inbox))


def test_leaving_a_stream_cancels_within_a_step(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cancelled()
    steps = Steps(monkeypatch)
    with client(url).chat.completions.create(**ENDLESS, stream=True) as stream:
        assert next(iter(stream)).choices[0].delta.role  # comes before anything is computed
        for _ in range(3):
            steps.take()
    until(lambda: debug_llm().loop._inbox)  # the server noticed without having anything to send
    seen = generated()
    steps.take()  # the step the engine stood before when the client left
    until(lambda: cancelled() == before + 1)
    assert generated() == seen + 1


def test_leaving_a_whole_reply_cancels_too(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cancelled()
    steps = Steps(monkeypatch)
    body = json.dumps(ENDLESS | {"n": 3}).encode()
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        while debug_llm().stats().running < 3:
            steps.take()
    until(lambda: len(debug_llm().loop._inbox) == 3)
    steps.take()
    until(lambda: cancelled() == before + 3)


def test_leaving_before_the_body_is_sent(url: str, caplog: pytest.LogCaptureFixture) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
    until(lambda: 'endpoint="/v1/chat/completions",status="499"' in httpx.get(f"{url}/metrics").text)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_stopping_to_read_is_not_leaving(url: str) -> None:
    """A client that reads late gets everything."""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=ENDLESS | {"stream": True}) as response:
        until(lambda: idle(debug_llm()))
        events = sse(response.read().decode())
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


def break_the_model(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    runner = debug_llm().loop.engine._runner
    run, calls = runner.run, []

    def broken(chunks: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            raise MemoryError("no memory for the activations")
        return run(chunks)

    monkeypatch.setattr(runner, "run", broken)


def test_engine_failure_in_a_stream(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_the_model(monkeypatch, after=4)
    response = httpx.post(f"{url}/v1/chat/completions", json=ENDLESS | {"stream": True})
    assert response.status_code == 200
    events = sse(response.text)
    assert events[-1] == {
        "error": {
            "message": "The engine failed: MemoryError: no memory for the activations",
            "type": "server_error",
            "param": None,
            "code": "engine_error",
        }
    }
    assert "[DONE]" not in events
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])


def test_engine_failure_raises_in_the_client(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_the_model(monkeypatch, after=4)
    with pytest.raises(openai.APIError, match="The engine failed: MemoryError"):
        list(client(url).chat.completions.create(**ENDLESS, n=2, stream=True))


def test_engine_failure_in_a_whole_reply(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_the_model(monkeypatch, after=2)
    with pytest.raises(openai.InternalServerError, match="The engine failed: MemoryError") as caught:
        client(url).chat.completions.create(**ENDLESS, n=2)
    assert caught.value.code == "engine_error"
    monkeypatch.undo()
    assert client(url).chat.completions.create(**CHAT, max_tokens=2).choices[0].finish_reason == "length"


def test_a_bug_in_a_stream(url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    prompt = "SECRET"

    def broken(*_: Any) -> Any:
        raise KeyError(prompt)

    monkeypatch.setattr("openk3.serve.chat.chat_logprobs", broken)
    response = httpx.post(f"{url}/v1/chat/completions", json=ENDLESS | {"stream": True, "logprobs": True})
    assert sse(response.text)[-1]["error"]["code"] == "internal_error"
    assert f"{response.headers['x-request-id']} failed: KeyError" in caplog.text
    assert "SECRET" not in caplog.text + response.text


def test_a_closed_engine() -> None:
    """The server says so, in health and in every reply, instead of waiting for ever."""
    from openk3.llm import load

    llm = load(debug_llm().model_dir)
    with live(create_app(lambda: llm, model_name=MODEL, web=False)) as url:
        llm.close()
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert "the engine has stopped" in health.json()["reason"]
        response = httpx.post(f"{url}/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_failed")


def test_closing_the_model_ends_running_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    from openk3.llm import load

    llm = load(debug_llm().model_dir)
    engine = llm.loop.engine
    step = engine.step

    def waiting() -> Any:
        until(lambda: llm.loop.closed or engine.stats().generated_tokens <= 2)  # the reply cannot end before
        return step()

    monkeypatch.setattr(engine, "step", waiting)
    with live(create_app(lambda: llm, model_name=MODEL, web=False)) as url:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=ENDLESS | {"stream": True}) as response:
            until(lambda: llm.stats().generated_tokens > 2)
            llm.close()
            events = sse(response.read().decode())
        assert events[-1]["error"]["code"] == "shutting_down"
        assert events[-1]["error"]["type"] == "server_error"


def test_an_owned_model_is_closed_with_the_server() -> None:
    from openk3.llm import load

    llm = load(debug_llm().model_dir)
    app = create_app(lambda: llm, model_name=MODEL, web=False)
    with live(app):
        assert app.state.llm is llm
    assert llm.loop.closed
    assert app.state.llm is None


def test_running_streams_finish_when_the_server_stops() -> None:
    result: list[str] = []
    started = threading.Event()

    def read(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=ENDLESS | {"stream": True}) as response:
            text = ""
            for piece in response.iter_text():
                started.set()
                text += piece
            result.append(text)

    with live(debug_app()) as url:
        reader = threading.Thread(target=read, args=(url,))
        reader.start()
        assert started.wait(30)
    reader.join(30)
    events = sse(result[0])
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


def test_streams_are_cut_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client can tell, and the engine is free within a step."""
    before = cancelled()
    steps = Steps(monkeypatch)
    with httpx.Client() as session:
        with live(debug_app(), grace_s=0) as url:
            request = session.build_request("POST", f"{url}/v1/chat/completions", json=ENDLESS | {"stream": True})
            response = session.send(request, stream=True)
            steps.take()
        with pytest.raises(httpx.RemoteProtocolError):
            response.read()
    steps.take()
    until(lambda: cancelled() == before + 1)
