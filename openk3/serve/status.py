"""What the server says about itself: its model, whether it is ready, its metrics, and what is not there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute

from openk3.serve.errors import allowed_methods, is_anthropic, unknown_route, wrong_method
from openk3.serve.loading import ModelSlot
from openk3.serve.metrics import Metrics

router = APIRouter()

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    slot: ModelSlot = request.app.state.slot
    if is_anthropic(request.scope):
        return {"data": [_anthropic_card(slot)], "has_more": False, "first_id": slot.name, "last_id": slot.name}
    return {"object": "list", "data": [_card(slot)]}


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    slot: ModelSlot = request.app.state.slot
    slot.require(model)
    return _anthropic_card(slot) if is_anthropic(request.scope) else _card(slot)


@router.head("/health", include_in_schema=False)
@router.get("/health", responses={503: {"description": "Not ready (yet)."}})
async def health(request: Request) -> Response:
    """200 when requests can be served; 503 with the status before, and with the reason if they never will be."""
    slot: ModelSlot = request.app.state.slot
    body: dict[str, Any] = {"status": "ok" if slot.status == "ready" else slot.status, "model": slot.name}
    if slot.reason:
        body["reason"] = slot.reason
    if slot.llm is not None:
        stats = slot.llm.stats()
        body |= {"running": stats.running, "waiting": stats.waiting}
    return JSONResponse(body, 200 if slot.status == "ready" else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def prometheus_metrics(request: Request) -> Response:
    metrics: Metrics = request.app.state.metrics
    return Response(metrics.exposition(), media_type=metrics.content_type)


def fallback_router(routes: Sequence[APIRoute]) -> APIRouter:
    """Answers what the API's `routes` do not, under the API's paths: before a web page mounted at ``/`` can."""
    router = APIRouter()

    async def fallback(request: Request) -> Response:
        raise wrong_method(request) if allowed_methods(request) else unknown_route(request)

    paths = {route.path for route in routes if not route.path.startswith("/v1/")}
    for path in ("/v1/{rest:path}", *sorted(paths)):
        router.add_api_route(path, fallback, methods=_METHODS)
    return router


def _card(slot: ModelSlot) -> dict[str, Any]:
    llm = slot.require()
    return {
        "id": slot.name,
        "object": "model",
        "created": slot.created,
        "owned_by": "openk3",
        "max_model_len": llm.max_model_len,
    }


def _anthropic_card(slot: ModelSlot) -> dict[str, Any]:
    llm = slot.require()
    return {
        "type": "model",
        "id": slot.name,
        "display_name": slot.name,
        "created_at": datetime.fromtimestamp(slot.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": llm.max_model_len,
        "max_tokens": llm.max_model_len,
    }
