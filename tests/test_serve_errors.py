"""Every refusal has the API's error shape, whoever in the stack it comes from."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from serving import CONTEXT, MODEL, client, debug_app, debug_llm, live, raw_http

from openk3.serve.app import create_app

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(debug_app()) as url:
        yield url


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["type"] == ("invalid_request_error" if response.status_code < 500 else "server_error")
    assert response.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"model": "debug", ', "We could not parse the JSON body of your request"),
        (b"", "The request body is empty"),
        (b'{"model": "\xff\xfe"}', "not valid UTF-8: byte 0xff at position 11"),
        (b'"text"', "expected an object, but got a string"),
    ],
)
def test_broken_body(url: str, path: str, raw: bytes, message: str) -> None:
    response = httpx.post(f"{url}{path}", content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert message in error_of(response)["message"]


def test_bad_parameter(url: str) -> None:
    error = error_of(httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"temperature": -1}))
    assert error == {
        "message": "Invalid 'temperature': expected a value of at least 0, but got -1 instead.",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": "decimal_below_min_value",
    }


def test_the_client_sees_its_own_exceptions(url: str) -> None:
    api = client(url)
    with pytest.raises(openai.BadRequestError, match="'robot' is not one of") as bad:
        api.chat.completions.create(model=MODEL, messages=[{"role": "robot", "content": "x"}])  # type: ignore[typeddict-item]
    assert (bad.value.param, bad.value.code) == ("messages[0].role", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError, match="'functions' is not supported"):
        old: Any = {"name": "f", "parameters": {}}
        api.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], functions=[old])


@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", TEXT)])
def test_unknown_model(url: str, path: str, body: dict[str, Any]) -> None:
    response = httpx.post(f"{url}/v1/{path}", json=body | {"model": "gpt-4o"})
    assert response.status_code == 404
    error = error_of(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error["message"] == "The model \"gpt-4o\" does not exist here; this server has 'debug'."


def test_unknown_route(url: str) -> None:
    for method, path in [("GET", "/v1/nothing"), ("POST", "/v1/nothing/more"), ("GET", "/nothing"), ("DELETE", "/v1")]:
        response = httpx.request(method, f"{url}{path}")
        assert response.status_code == 404
        error = error_of(response)
        assert error["code"] == "unknown_url"
        assert f'Unknown request URL: {method} "{path}"' in error["message"]
        for known in ("/v1/chat/completions", "/v1/responses/{response_id}", "/v1/messages", "/health"):
            assert known in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("OPTIONS", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/debug", "GET"),
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/metrics", "GET"),
        ("PATCH", "/v1/responses/resp_1", "DELETE, GET"),
        ("PATCH", "/v1/responses/input_tokens", "POST"),
        ("QUERY", "/tokenize", "POST"),
    ],
)
def test_wrong_method(url: str, method: str, path: str, allowed: str) -> None:
    response = httpx.request(method, f"{url}{path}")
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    error = error_of(response)
    assert error["code"] == "method_not_allowed"
    assert error["message"] == f'{method} is not allowed for "{path}"; use {allowed}.'


def test_content_type(url: str) -> None:
    response = httpx.post(f"{url}/v1/completions", data={"model": "x"})
    assert response.status_code == 415
    assert "application/x-www-form-urlencoded" in error_of(response)["message"]
    for header in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"):
        raw = json.dumps(TEXT).encode()
        assert httpx.post(f"{url}/v1/completions", content=raw, headers={"Content-Type": header}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_context(url: str, stream: bool) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": "x" * 600}], "stream": stream}
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = error_of(response)
    tokens = len(debug_llm().tokenizer.encode_chat(body["messages"]))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert f"has {tokens} tokens" in error["message"]


def test_prompts_longer_than_the_context(url: str) -> None:
    exact = httpx.post(f"{url}/v1/completions", json=TEXT | {"prompt": "x" * (CONTEXT - 1)})
    assert exact.json()["usage"]["completion_tokens"] == 1
    response = httpx.post(f"{url}/v1/completions", json=TEXT | {"prompt": ["ok", "x" * CONTEXT]})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("prompt[1]", "context_length_exceeded")


def test_hopeless_prompts_are_refused_unread(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: Any) -> Any:
        raise AssertionError("tokenized")

    monkeypatch.setattr(debug_llm().tokenizer, "encode", unwanted)
    characters = 16 * CONTEXT  # what 512 of the longest tokens could stand for
    chat = CHAT | {"messages": [{"role": "user", "content": "x" * (characters // 2)}] * 2}
    text = TEXT | {"prompt": "x" * characters}
    for path, body, param in [("chat/completions", chat, "messages"), ("completions", text, "prompt")]:
        response = httpx.post(f"{url}/v1/{path}", json=body)
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
        assert f"has at least {CONTEXT} tokens" in error["message"]


def test_tokens_beyond_the_vocabulary(url: str) -> None:
    response = httpx.post(f"{url}/v1/completions", json=TEXT | {"prompt": [1, 256]})
    assert response.status_code == 400
    assert error_of(response)["message"] == "Invalid 'prompt': 256 is not a token id; they go from 0 to 255."
    response = httpx.post(f"{url}/v1/completions", json=TEXT | {"logit_bias": {"999": 1}})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "logit_bias"
    assert "999" in error["message"]
    assert debug_llm().stats().running == 0


def test_special_bytes_in_text_are_not_an_error(url: str) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": "\x00\u200d\ufffd👩‍👩‍👧 ‮"}]}
    assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200


def test_not_http(url: str) -> None:
    status, _, _ = raw_http(url, b"BROKEN\r\n\r\n")
    assert status == 400


def test_loading_then_ready() -> None:
    gate = threading.Event()

    def slow() -> Any:
        gate.wait(60)
        return debug_llm()

    with live(create_app(slow, model_name=MODEL, web=False, owns_model=False), wait=False) as url:
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading", "model": MODEL})
        for request in (
            httpx.Request("POST", f"{url}/v1/chat/completions", json=CHAT),
            httpx.Request("POST", f"{url}/v1/completions", json=TEXT),
            httpx.Request("GET", f"{url}/v1/models"),
            httpx.Request("GET", f"{url}/v1/models/{MODEL}"),
        ):
            with httpx.Client() as session:
                response = session.send(request)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "5"
            error = error_of(response)
            assert error["code"] == "model_loading"
            assert error["message"] == "The model 'debug' is still loading; try again in a few seconds."
        assert "openk3_model_ready 0.0" in httpx.get(f"{url}/metrics").text
        gate.set()
        for _ in range(6000):
            if (health := httpx.get(f"{url}/health")).status_code == 200:
                break
        assert health.json() == {"status": "ok", "model": MODEL, "running": 0, "waiting": 0}
        assert httpx.post(f"{url}/v1/completions", json=TEXT).status_code == 200


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ValueError("no model is called 'nothing'"), "no model is called 'nothing'"),
        (OSError("disk full"), "disk full"),
        (ZeroDivisionError("oops"), "ZeroDivisionError: oops"),
    ],
)
def test_failed_to_load(failure: Exception, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise failure

    with live(create_app(broken, model_name=MODEL, web=False), wait=False) as url:
        while (health := httpx.get(f"{url}/health")).json()["status"] == "loading":
            pass
        assert health.status_code == 503
        assert health.json() == {"status": "failed", "model": MODEL, "reason": reason}
        response = httpx.post(f"{url}/v1/completions", json=TEXT)
        assert response.status_code == 503
        error = error_of(response)
        assert (error["code"], error["message"]) == ("model_failed", f"The model is not available: {reason}.")
    assert f"model debug failed to load: {reason}" in caplog.text


def test_a_bug_of_ours(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    prompt = "SECRET"

    def broken(*_: Any) -> Any:
        raise KeyError(prompt)

    with live(debug_app()) as url:
        monkeypatch.setattr("openk3.serve.prompts._checked", broken)
        response = httpx.post(f"{url}/v1/chat/completions", json=CHAT)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert f"{response.headers['x-request-id']} failed: KeyError" in caplog.text
    assert "test_serve_errors.py" in caplog.text  # where it came from
    assert "SECRET" not in caplog.text + response.text
