"""Server-sent events, and work that ends when its client goes away.

A stream is ``data: {json}`` events, each ended by a blank line, and ``data: [DONE]`` last. A failure on the way is an
event with the API's error object, and then the stream ends without ``[DONE]``, so that nobody takes half a reply for
a whole one.
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

    Starlette's own streaming response leaves a cancelled generator to the garbage collector, and learns of a lost
    client only when it sends. Here the client is watched while the model computes, and `on_end` runs at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], on_end: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(scope, send))
        except ClientDisconnect:
            pass
        finally:
            self._on_end()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async def send_event(data: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await send_event(to_json(event))
            await send_event("[DONE]")
        except ApiError as error:
            await send_event(to_json(error.body()))
        except Exception as error:
            log_failure(scope.get("state", {}).get("request_id", ""), error)
            await send_event(to_json(server_failure().body()))
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


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
