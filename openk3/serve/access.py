"""The outermost layer around every request: its id, its line in the log, its place in the metrics, and the last resort.

Nothing that a user wrote reaches the log: neither bodies nor query strings nor unknown paths. For an unexpected
exception that means its type and where it was raised, but not its text, which often quotes the input. The id in the
``x-request-id`` header of the response stands in the log line, so that the two can be brought together.
"""

from __future__ import annotations

import logging
import re
import time
import traceback
import uuid
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openk3.serve.caller import Caller
from openk3.serve.errors import is_anthropic, server_failure
from openk3.serve.metrics import Metrics

log = logging.getLogger("openk3.serve")

# Status of a request whose client went away before the answer, as nginx counts it. Nobody receives it.
CLIENT_CLOSED_REQUEST = 499


class Access:
    """ASGI middleware; see the file's head. A client's own ``X-Request-Id`` is kept if it is a plain word.

    `endpoints` are the paths of the API's routes, by which requests are counted.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, endpoints: Collection[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if re.fullmatch(r"[A-Za-z0-9._-]{1,128}", asked) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        begin = time.perf_counter()
        status = 0

        async def tagged_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic(scope):
                    headers["request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, tagged_send)
        except Exception as error:
            log_failure(request_id, error)
            if status == 0:
                await server_failure().response(scope)(scope, receive, tagged_send)
            # Otherwise the response stays unfinished, and the HTTP server cuts the connection: the client must not
            # take it for whole.
        finally:
            endpoint, status = _endpoint(scope, self.endpoints), status or CLIENT_CLOSED_REQUEST
            self.metrics.requests.labels(endpoint, str(status)).inc()
            level = logging.DEBUG if endpoint in ("web", "/health", "/metrics") else logging.INFO
            milliseconds = (time.perf_counter() - begin) * 1000
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "endpoint": endpoint,
                "status": status,
                "ms": round(milliseconds, 1),
                **_use(scope["state"].get("caller")),
            }
            words = (request_id, scope["method"], endpoint, status, milliseconds)
            log.log(level, "%s %s %s %d %.0f ms", *words, extra={"fields": fields})


def log_failure(request_id: str, error: BaseException) -> None:
    """Log where an unexpected exception came from, without its text."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s failed: %s\n%s", request_id, type(error).__name__, frames)


def _use(who: Caller | None) -> dict[str, Any]:
    """Whose request it was, and the tokens that it used."""
    fields: dict[str, Any] = {} if who is None or who.key is None else {"key": who.key.id}
    if who is not None and who.account is not None and (used := who.account.used).requests:
        fields |= {name: getattr(used, name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
    return fields


def _endpoint(scope: Scope, endpoints: Collection[str]) -> str:
    """A label with few values, whatever paths clients come up with: the path of the route, or of what has none."""
    path = str(getattr(scope.get("route"), "path_format", scope["path"]))
    if path in endpoints:
        return path
    return "/v1" if path.startswith("/v1/") else "web"
