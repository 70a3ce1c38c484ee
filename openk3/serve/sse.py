"""Server-sent events, and work that ends when its client goes away.

A stream is ``data: {json}`` events, each ended by a blank line, and ``data: [DONE]`` last. A failure on the way is an
event with the API's error object, and then the stream ends without ``[DONE]``, so that nobody takes half a reply for
a whole one. In the newer protocols events have names, of which the last one tells that it was the last.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from openk3.serve.access import log_failure
from openk3.serve.errors import ApiError, server_failure

log = logging.getLogger("openk3.serve")

_T = TypeVar("_T")


class EventStream(Response):
    """A streamed response of JSON `events`; `on_end` is called in every case, when the last was sent or the client
    has gone.

    With `named`, an event's ``type`` is its name, and there is no ``[DONE]``. `failure` makes the event that tells of
    an error; by default it is the body of an error response.

    Starlette's own streaming response leaves a cancelled generator to the garbage collector, and learns of a lost
    client only when it sends. Here the client is watched while the model computes, and `on_end` runs at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        on_end: Callable[[], None],
        *,
        named: bool = False,
        failure: Callable[[ApiError], dict[str, Any]] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._on_end = on_end
        self._named = named
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(scope, send))
        except ClientDisconnect:
            pass
        finally:
            self._on_end()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async def send_text(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        async def send_event(event: dict[str, Any]) -> None:
            name = f"event: {event['type']}\n" if self._named else ""
            await send_text(f"{name}data: {to_json(event)}\n\n")

        async def send_failure(error: ApiError) -> None:
            await send_event(error.body(scope) if self._failure is None else self._failure(error))

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await send_event(event)
            if not self._named:
                await send_text("data: [DONE]\n\n")
        except ApiError as error:
            await send_failure(error)
        except Exception as error:
            log_failure(scope.get("state", {}).get("request_id", ""), error)
            await send_failure(server_failure())
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`, whose request has been read; cancel it if the client goes away first.

    Raises:
        ClientDisconnect: the client is gone.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def drained(events: AsyncGenerator[dict[str, Any], None]) -> None:
    """Have all events made, for what making them leaves behind."""
    async for _ in events:
        pass


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
