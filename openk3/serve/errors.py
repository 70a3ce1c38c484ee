"""The shape in which the API says no: OpenAI's ``{"error": {"message", "type", "param", "code"}}``, or Anthropic's.

Clients read their exceptions out of this shape, so every 4xx and 5xx has it: wrong parameters, unknown routes, wrong
methods, bodies that are too large, a model that is not ready, and our own failures. `ApiError` is what the rest of the
server raises; `install` teaches the application to answer it and the framework's own errors in that shape. Who asked
decides between the two: ``/v1/messages``, and whoever sends Anthropic's version header, is answered with
``{"type": "error", "error": {"type", "message"}, "request_id"}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

# What Anthropic calls a status. Its servers are never unavailable, only overloaded, which is a status of its own.
_OVERLOADED = 529
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    _OVERLOADED: "overloaded_error",
}


class ApiError(Exception):
    """A refusal or failure, with everything the client is told.

    Attributes:
        status: HTTP status, 400-599.
        message: one or two sentences for a person: the field, the value, and what to do.
        param: the request field at fault as the client wrote it (``messages[0].role``), or None.
        code: a stable word for programs (``context_length_exceeded``), or None.
        type: ``invalid_request_error`` for the client's mistakes, ``server_error`` for ours.
        headers: more response headers, such as ``Retry-After``.
        details: what clients of Anthropic's read to get along without what they asked for; None for most errors.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        # Both may quote the request, which may be megabytes long.
        self.message = cut(message, 1000)
        self.param = None if param is None else cut(param, 200)
        self.code = code
        self.type = "invalid_request_error" if status < 500 else "server_error"
        self.headers = dict(headers or {})
        self.details = details

    def body(self, scope: Scope) -> dict[str, Any]:
        """Return the JSON object of the response to the request with that ASGI scope."""
        if not is_anthropic(scope):
            return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        kind = _ANTHROPIC_TYPES.get(self._status(scope), "api_error" if self.status >= 500 else "invalid_request_error")
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.details is not None:
            error["details"] = self.details
        return {"type": "error", "error": error, "request_id": scope.get("state", {}).get("request_id")}

    def response(self, scope: Scope) -> Response:
        return JSONResponse(self.body(scope), self._status(scope), headers=self.headers)

    def renamed(self, param: str) -> ApiError:
        """The same error about a field that the client knows by another name."""
        message = self.message if self.param is None else self.message.replace(f"'{self.param}'", f"'{param}'", 1)
        return ApiError(self.status, message, param=param, code=self.code, headers=self.headers)

    def _status(self, scope: Scope) -> int:
        return _OVERLOADED if self.status == 503 and is_anthropic(scope) else self.status


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's protocol."""
    path = scope["path"]
    return path == "/v1/messages" or path.startswith("/v1/messages/") or "anthropic-version" in Headers(scope=scope)


def server_failure() -> ApiError:
    """The answer to a bug of ours. It says nothing about the cause: that is in the log, under the request's id."""
    return ApiError(
        500,
        "The server had an error while processing your request; its log has it under this request id.",
        code="internal_error",
    )


def install(app: FastAPI) -> None:
    """Answer `ApiError` and the framework's own errors in the API's shape."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(request.scope)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return unknown_route(request).response(request.scope)
        if error.status_code == 405:
            return wrong_method(request).response(request.scope)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response(request.scope)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return ApiError(
            400, f"Invalid {param or 'request'}: {first['msg']}.", param=param, code="invalid_value"
        ).response(request.scope)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)


def unknown_route(request: Request) -> ApiError:
    paths = ", ".join(dict.fromkeys(route.path_format for route in request.app.state.api_routes))
    return ApiError(
        404,
        f"Unknown request URL: {request.method} {shown(request.url.path)}. This server has {paths}.",
        code="unknown_url",
    )


def wrong_method(request: Request) -> ApiError:
    """405 for a known path."""
    allowed = ", ".join(allowed_methods(request))
    return ApiError(
        405,
        f"{request.method} is not allowed for {shown(request.url.path)}; use {allowed or 'another method'}.",
        code="method_not_allowed",
        headers={"Allow": allowed} if allowed else None,
    )


def allowed_methods(request: Request) -> list[str]:
    """What the API's routes allow for a path; nothing for an unknown one."""
    routes: list[APIRoute] = request.app.state.api_routes
    known = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    # A path of its own comes before one that is an example of another's: input_tokens is the id of no response.
    own = [route for route in known if route.path_format == request.url.path]
    return sorted(set().union(*(route.methods or () for route in own or known)))


def shown(value: object, limit: int = 80) -> str:
    """Return `value` as JSON for an error message, cut to `limit` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return cut(text, limit)


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
