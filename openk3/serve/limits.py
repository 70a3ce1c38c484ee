"""Who may talk to the server, and how much they may say at once.

The server runs on people's own machines, beside a browser that runs other people's pages. Two checks keep those pages
out:

- **Host**: a request must name a host we answer to. Without it, DNS rebinding lets any web page make its own name
  point to 127.0.0.1 and read our answers as its own.
- **Origin**: a request that a browser sends on behalf of a page must come from a page of an allowed host. Without it,
  any page could post prompts to us, unread but at our cost, or open a WebSocket. There are no CORS headers, so pages
  of other origins cannot read answers either.

`BodyLimit` refuses bodies over a size while they arrive, whether they announce their length or come in chunks; at no
time is more than the limit in memory. All checks are plain ASGI middleware: nothing here wraps the response, so a
client that goes away is still noticed at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openk3.serve.errors import ApiError, shown

# How long a refused client may go on sending before the connection is cut. Most clients read no answer before they have
# sent everything; cut off at once, they would see a broken pipe in place of the refusal.
_LINGER_S = 5.0


class HostCheck:
    """Refuse requests to hosts, and from pages of hosts, other than the loopback and `allowed_hosts`.

    Args:
        app: what to guard.
        allowed_hosts: more host names or addresses, without port; ``"*"`` allows every host and every origin.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str] = ()) -> None:
        self.app = app
        self.allowed = frozenset(_bare(host) for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            error = self._refusal(Headers(scope=scope))
            if error is not None:
                if scope["type"] == "http":
                    await respond_and_drain(error, scope, receive, send)
                else:
                    await send({"type": "websocket.close", "code": 1008, "reason": "host or origin not allowed"})
                return
        await self.app(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if not self._allows(host):
            return ApiError(
                403,
                f"This server does not answer to the host {shown(host)}. Use localhost, or start it with that host in "
                "its allowed hosts.",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not self._allows(urlsplit_host(origin)):
            return ApiError(
                403,
                f"This server takes no requests from pages of {shown(origin)}. Start it with its host among the "
                "allowed hosts if you trust it.",
                code="origin_not_allowed",
            )
        return None

    def _allows(self, host: str) -> bool:
        name = _bare(host)
        return "*" in self.allowed or name in self.allowed or is_loopback(name)


class BodyLimit:
    """Refuse request bodies of more than `max_bytes` with 413, having read no more than that.

    Args:
        others: limits of paths that have one of their own.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, others: Mapping[str, int] | None = None) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.others = dict(others or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.others.get(scope["path"], self.max_bytes)
        announced = Headers(scope=scope).get("content-length", "")
        # Python refuses to read numbers of thousands of digits; nineteen are more bytes than there are.
        if announced.isdecimal() and int(announced[:19]) > limit:
            await respond_and_drain(_too_large(f"{int(announced[:19]):,} bytes", limit), scope, receive, send)
            return

        received = 0
        started = refused = False

        async def counting_receive() -> Message:
            nonlocal received, refused
            if refused:
                return {"type": "http.disconnect"}
            message = await receive()
            received += len(message.get("body", b""))
            if received <= limit:
                return message
            # For the application the client is gone from here on, whatever it makes of that.
            refused = True
            if not started:
                await respond_and_drain(_too_large("more", limit), scope, receive, send)
            return {"type": "http.disconnect"}

        async def guarded_send(message: Message) -> None:
            nonlocal started
            if not refused:
                started = True
                await send(message)

        try:
            await self.app(scope, counting_receive, guarded_send)
        except Exception:
            if not refused:
                raise


def _too_large(size: str, limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is too large: {size}, where this server takes at most {limit:,} bytes.",
        code="request_too_large",
    )


async def respond_and_drain(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer `error` before the body is read, then throw the rest of the body away as it comes, for a short while."""
    response = error.response(scope)
    response.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    try:
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def is_loopback(host: str) -> bool:
    """True for ``localhost``, names under ``.localhost``, and loopback addresses; `host` is bare, as `_bare` returns
    it."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def urlsplit_host(origin: str) -> str:
    """Return the host of an Origin header; empty for ``null`` and for what is no URL, so that it is never allowed."""
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def _bare(host: str) -> str:
    """Return `host` in lower case, without port and brackets: ``[::1]:8000`` is ``::1``."""
    host = host.strip().lower().removesuffix(".")
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host
