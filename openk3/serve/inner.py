"""A request that the server makes to itself, through the same endpoints, checks and errors as everybody's."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from openk3.serve.caller import Caller
from openk3.serve.keys.check import CALLER_SCOPE


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the status, the JSON body, and the headers."""

    status: int
    body: Any
    headers: Headers


async def ask(app: ASGIApp, endpoint: str, body: bytes, who: Caller) -> Answer:
    """POST a JSON `body` on behalf of a caller who has been checked already. Cancelling the task ends the request."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": endpoint,
        "raw_path": endpoint.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
        CALLER_SCOPE: who,
    }
    unread = [body]
    status, headers, data = 0, Headers(), bytearray()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # this client never goes away; its task may be cancelled
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], Headers(raw=message["headers"])
        elif message["type"] == "http.response.body":
            data.extend(message.get("body", b""))

    await app(scope, receive, send)
    return Answer(status, json.loads(bytes(data)), headers)
