"""Who may ask, and how much: hosts, origins, and bodies that are refused while they arrive."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import debug_app, live, raw_http
from starlette.types import Message, Receive, Scope, Send

from openk3.serve.limits import BodyLimit

MIB = 1 << 20


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(debug_app(allowed_hosts=["k3.example"])) as url:
        yield url


LOOPBACK = ["localhost:8000", "LOCALHOST", "127.0.0.1", "127.8.9.1:1", "[::1]:8000"]
FOREIGN = ["evil.example", "localhost.evil.example", "192.168.1.5:8000", "127.0.0.1.evil.example", ""]


@pytest.mark.parametrize("host", [*LOOPBACK, "k3.example:443"])
def test_allowed_hosts(url: str, host: str) -> None:
    assert httpx.get(f"{url}/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_other_hosts_are_refused(url: str, host: str) -> None:
    response = httpx.get(f"{url}/health", headers={"Host": host})
    assert response.status_code == 403
    error = response.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert f"does not answer to the host {json.dumps(host)}" in error["message"]


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1:8000", "https://k3.example", "http://[::1]:1"]
)
def test_allowed_origins(url: str, origin: str) -> None:
    response = httpx.get(f"{url}/health", headers={"Origin": origin})
    assert response.status_code == 200
    # Allowed to send, not to read: there is no CORS.
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", "http://[broken"])
def test_other_origins_are_refused(url: str, origin: str) -> None:
    response = httpx.post(f"{url}/v1/completions", json={"model": "debug", "prompt": "x"}, headers={"Origin": origin})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"


def test_foreign_web_sockets_are_refused(url: str) -> None:
    request = (
        "GET /socket HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nOrigin: https://evil.example\r\n\r\n"
    )
    status, _, _ = raw_http(url, request.encode())
    assert status == 403


def test_a_star_allows_every_host() -> None:
    with live(debug_app(allowed_hosts=["*"])) as url:
        headers = {"Host": "any.example", "Origin": "https://other.example"}
        assert httpx.get(f"{url}/health", headers=headers).status_code == 200


def hundred_megabytes() -> Iterator[bytes]:
    yield b'{"model": "debug", "prompt": "'
    for _ in range(100):
        yield b"a" * MIB
    yield b'"}'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/nowhere"])
@pytest.mark.parametrize("announced", [True, False], ids=["content-length", "chunked"])
def test_100_mb_body(url: str, path: str, announced: bool) -> None:
    size = sum(map(len, hundred_megabytes()))
    headers = {"Content-Type": "application/json"} | ({"Content-Length": str(size)} if announced else {})
    response = httpx.post(f"{url}{path}", content=hundred_megabytes(), headers=headers, timeout=60)
    if path == "/nowhere" and not announced:
        assert response.status_code == 404  # nobody read it
        return
    assert response.status_code == 413
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "request_too_large", None)
    said = f"{size:,} bytes" if announced else "more"
    assert error["message"].startswith(f"The request body is too large: {said}, ")
    assert error["message"].endswith("where this server takes at most 33,554,432 bytes.")
    assert response.headers["connection"] == "close"
    assert response.headers["x-request-id"]


def test_refused_before_the_body_is_sent(url: str) -> None:
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(100 * MIB))
    connection.putheader("Expect", "100-continue")
    connection.endheaders()
    response = connection.getresponse()  # no byte of the body was sent
    assert response.status == 413
    connection.close()


def test_a_small_limit_holds_to_the_byte() -> None:
    body = json.dumps({"model": "debug", "prompt": "abc", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    with live(debug_app(max_body_bytes=len(body))) as url:
        assert httpx.post(f"{url}/v1/completions", content=body, headers=headers).status_code == 200
        assert httpx.post(f"{url}/v1/completions", content=body + b" ", headers=headers).status_code == 413
        assert httpx.post(f"{url}/v1/completions", content=iter([body, b" "]), headers=headers).status_code == 413


async def test_no_more_than_the_limit_is_read() -> None:
    """The app behind the limit sees at most `max_bytes`, then a client that is gone."""
    given: list[int] = []
    sent: list[Message] = []
    state = {"left": 1000}

    async def receive() -> Message:
        state["left"] -= 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": state["left"] > 0}

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            given.append(len(message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("what an app may do when its client is gone")

    scope: dict[str, Any] = {"type": "http", "path": "/", "headers": [(b"transfer-encoding", b"chunked")]}
    await BodyLimit(app, max_bytes=50_500)(scope, receive, send)
    assert sum(given) == 50_000
    assert sent[0]["status"] == 413
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert sent[-1]["more_body"] is False
    assert state["left"] == 0  # the rest was thrown away, so that the client gets to read the answer
