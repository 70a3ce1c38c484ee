"""The door between the server and the pages: who may come in, which paths exist, and what a page may load.

- **Same origin only.** A browser that connects on behalf of another site's page (an `Origin` header whose host and
  port are not those it connects to) is turned away, WebSockets included, which the browser's own same-origin policy
  does not cover. A reverse proxy in front must pass the `Host` header on.
- **Known paths only.** Everything else is the application's ordinary 404, in the application's own shape.
- **Content security policy.** Whatever slips into a page, the browser loads nothing for it from anywhere else and
  sends nothing anywhere else. (NiceGUI needs inline scripts and `eval`.)
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SCOPE_KEY = "openk3.web"

_PREFIXES = ("/_nicegui/", "/_nicegui_ws/", "/c/")
_PATHS = ("/", "/favicon.ico", "/usage")

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; connect-src 'self'; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Gate:
    """Guards `app` (NiceGUI) and hands `context` to its pages in the request's scope under `SCOPE_KEY`."""

    def __init__(self, app: ASGIApp, context: Any) -> None:
        self.app = app
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        if not same_origin(Headers(scope=scope)):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": "cross-origin connection"})
                return
            raise HTTPException(403, "This page takes no requests from other sites.")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in _PATHS and not path.startswith(_PREFIXES):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": "unknown path"})
                return
            raise HTTPException(404)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app({**scope, SCOPE_KEY: self.context}, receive, send_with_headers)


def same_origin(headers: Headers) -> bool:
    """Whether a request comes from a page of the host and port it is sent to, or from no page at all."""
    origin = headers.get("origin")
    if origin is None:
        return True
    try:
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
    except ValueError:
        return False
