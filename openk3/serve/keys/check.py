"""The check at the door: which key a request shows, and whether that key may ask for more now.

A server on which no key was ever made asks for none. From the first key on, every request to ``/v1``, ``/mcp`` and
``/metrics`` needs one, as ``Authorization: Bearer`` (OpenAI's clients) or ``x-api-key`` (Anthropic's). The web
workspace of a server that only this machine can reach stays open to whoever sits at it; elsewhere the browser asks for
a name, which is ignored, and a password, which is a key. ``/health`` is open, for it says little that a closed port
does not.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
import time
from typing import cast

from starlette.datastructures import Headers, MutableHeaders, State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openk3.serve.caller import Caller, set_caller
from openk3.serve.errors import ApiError
from openk3.serve.keys.account import Account
from openk3.serve.keys.ledger import Ledger
from openk3.serve.keys.limiter import Limiter
from openk3.serve.keys.store import ApiKey, KeyStore
from openk3.serve.limits import respond_and_drain

# A caller that the server itself sets for a request of its own, as for the lines of a batch. No client can.
CALLER_SCOPE = "openk3.caller"


class KeyCheck:
    """ASGI middleware; see the file's head.

    Args:
        state: the application's state, with its stores once it has started.
        open_web: the web workspace needs no key.
        always: a key is needed even where none was ever made.
    """

    def __init__(self, app: ASGIApp, state: State, *, open_web: bool, always: bool) -> None:
        self.app = app
        self.state = state
        self.open_web = open_web
        self.always = always

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        try:
            if (caller := cast("Caller | None", scope.get(CALLER_SCOPE))) is None:
                caller = await asyncio.to_thread(self._caller, scope)
            if caller.key is not None and not caller.in_background and scope.get("method") == "POST":
                await asyncio.to_thread(self._admit, caller.key)
                headers = self._limiter.headers(caller.key)
        except ApiError as error:
            if scope["type"] == "http":
                await respond_and_drain(error, scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008, "reason": "an API key is needed"})
            return
        set_caller(caller)
        scope.setdefault("state", {})["caller"] = caller

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            await send(message)

        await self.app(scope, receive, send_with_headers if headers else send)

    @property
    def _limiter(self) -> Limiter:
        limiter: Limiter = self.state.limiter
        return limiter

    def _caller(self, scope: Scope) -> Caller:
        """
        Raises:
            ApiError: 401, a key is needed and none that works was shown.
        """
        keys: KeyStore = self.state.keys
        path = scope["path"]
        api = path in ("/v1", "/metrics", "/mcp", "/tokenize", "/detokenize") or path.startswith("/v1/")
        key = None
        if (api or not self.open_web) and path != "/health" and (self.always or keys.any()):
            shown = _shown_key(Headers(scope=scope), basic=not api)
            key = None if shown is None else keys.check(shown)
            if key is None:
                raise _unauthorized(shown, api)
        ledger: Ledger = self.state.ledger
        return Caller(key, Account(key, path, self._limiter, ledger, self.state.queue))

    def _admit(self, key: ApiKey) -> None:
        """Count a request that makes work.

        Raises:
            ApiError: 429, one of the key's limits is reached.
        """
        requests, tokens = self._limiter.bucket(key, "requests"), self._limiter.bucket(key, "tokens")
        if requests is not None and (wait := requests.seconds_to(1)):
            raise self._too_many(key, "requests per minute", requests.per_minute, wait)
        if tokens is not None and (wait := tokens.seconds_to(1)):
            raise self._too_many(key, "tokens per minute", tokens.per_minute, wait)
        ledger: Ledger = self.state.ledger
        if key.tokens_per_day is not None and ledger.tokens_today(key.id) >= key.tokens_per_day:
            raise self._too_many(key, "tokens per day (UTC)", key.tokens_per_day, 86400 - time.time() % 86400)
        if requests is not None:
            requests.level -= 1

    def _too_many(self, key: ApiKey, what: str, limit: int, wait_s: float) -> ApiError:
        seconds = math.ceil(wait_s)
        return ApiError(
            429,
            f"This API key's limit of {limit:,} {what} is reached; try again in {seconds:,} seconds.",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(seconds)} | self._limiter.headers(key),
        )


def _shown_key(headers: Headers, *, basic: bool) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    if basic and scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode("utf-8", "replace").partition(":")[2]
        except binascii.Error:
            return None
    return headers.get("x-api-key")


def _unauthorized(shown: str | None, api: bool) -> ApiError:
    if shown is None:
        why = "This server needs an API key; send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    else:
        why = "Incorrect API key: it is unknown here, or was revoked"
    return ApiError(
        401,
        f"{why}. Whoever runs the server makes keys with 'k3 keys create'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer" if api else 'Basic realm="OpenK3: any name, an API key as password"'},
    )
