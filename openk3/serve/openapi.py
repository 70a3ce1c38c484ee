"""GET /openapi.json: every route described for programs, from the models that its requests are checked by.

There is no page that shows it: those of the framework load scripts from foreign servers. Endpoints read their bodies
themselves (`validation`), so each tells by `body_of` which model it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

router = APIRouter()

_REFERENCE = "#/components/schemas/{model}"
_models: dict[str, type[BaseModel]] = {}

_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
_EVENT = {"type": "object", "required": ["data"], "properties": {"event": _TEXT, "data": _TEXT}}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
        "request_id": {"type": ["string", "null"]},
    },
}


def body_of(model: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """What a route's ``openapi_extra`` says of an endpoint that reads a `model`, and may answer with a stream."""
    _models[model.__name__] = model
    content: dict[str, Any] = {"application/json": {"schema": _OBJECT}}
    if streams:
        content["text/event-stream"] = {"schema": _EVENT}
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "OK", "content": content}},
    }


def form_of(fields: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """The same of an endpoint that reads a form with a file; `fields` are JSON schemas by name."""
    schema = {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def document(title: str, version: str, routes: Sequence[APIRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of the API's routes."""
    paths = get_openapi(title=title, version=version, routes=routes)
    _, definitions = models_json_schema([(model, "validation") for model in _models.values()], ref_template=_REFERENCE)
    schemas = paths.setdefault("components", {}).setdefault("schemas", {})
    schemas |= definitions["$defs"] | {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    for path, operations in paths["paths"].items():
        error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=error)}}}
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)  # the framework's own refusal, which is a 400 here
            responses.setdefault("4XX", {"description": "The request is refused.", "content": content})
            responses.setdefault("5XX", {"description": "The server failed or is not ready.", "content": content})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return paths


@router.get("/openapi.json")
async def openapi_json(request: Request) -> Response:
    return JSONResponse(request.app.state.openapi())
