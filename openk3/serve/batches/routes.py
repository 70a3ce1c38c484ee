"""/v1/batches: make, look at, list and cancel batches. And several chats in one request, answered together.

POST /v1/chat/completions/batch takes ``{"requests": [...]}``, each a body of /v1/chat/completions, and answers when all
of them are done: ``{"object": "chat.completion.batch", "data": [{"index", "status_code", "body"}, ...], "usage"}``, in
the order of the requests. ``body`` is what the endpoint itself would have answered: a completion, or an error, which is
nobody's but that item's.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from openk3.serve.batches.runner import BatchRunner
from openk3.serve.batches.store import Batch, BatchStore
from openk3.serve.caller import caller
from openk3.serve.errors import ApiError, shown
from openk3.serve.files.routes import page, require_file
from openk3.serve.inner import Answer, ask
from openk3.serve.loading import ModelSlot
from openk3.serve.openapi import body_of
from openk3.serve.sse import while_connected
from openk3.serve.validation import parse_body

router = APIRouter()

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_CHATS = 128
_CHATS_AT_A_TIME = 16
_LONGEST_WINDOW_S = 7 * 86400
_UNITS_S = {"h": 3600, "d": 86400}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class BatchRequest(_Body):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = Field(default=None, max_length=16)


class ChatsRequest(_Body):
    """The body of POST /v1/chat/completions/batch."""

    requests: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_CHATS)


@router.post("/v1/batches", openapi_extra=body_of(BatchRequest))
async def create_batch(request: Request) -> Response:
    body = await parse_body(request, BatchRequest)
    state = request.app.state
    slot: ModelSlot = state.slot
    if body.endpoint not in ENDPOINTS:
        raise ApiError(
            400,
            f"Invalid 'endpoint': {shown(body.endpoint)} is none of {', '.join(ENDPOINTS)}.",
            param="endpoint",
            code="invalid_value",
        )
    window_s = _window_s(body.completion_window)
    file = await asyncio.to_thread(require_file, state.files, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise ApiError(
            400,
            f"Invalid 'input_file_id': the file was uploaded for {shown(file.purpose)}; its purpose must be \"batch\".",
            param="input_file_id",
            code="invalid_value",
        )
    store: BatchStore = state.batches
    batch = await asyncio.to_thread(
        store.create,
        owner=caller().owner,
        model=slot.name,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        window_s=window_s,
        metadata=body.metadata,
    )
    _runner(request).wake()
    return JSONResponse(batch.to_json())


@router.get("/v1/batches")
def list_batches(
    request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> dict[str, Any]:
    try:
        batches, more = request.app.state.batches.page(caller().owner, after=after, limit=limit)
    except KeyError:
        raise ApiError(
            400, f"Invalid 'after': there is no batch {shown(after)}.", param="after", code="invalid_value"
        ) from None
    return page([batch.to_json() for batch in batches], more)


@router.get("/v1/batches/{batch_id}")
def get_batch(request: Request, batch_id: str) -> dict[str, Any]:
    return _require(request, batch_id).to_json()


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    batch = await asyncio.to_thread(_require, request, batch_id)
    store: BatchStore = request.app.state.batches
    if not await asyncio.to_thread(store.move, batch.id, "cancelling", of=("validating", "in_progress")):
        now = await asyncio.to_thread(store.require, batch.id)
        if now.status not in ("cancelling", "cancelled"):
            raise ApiError(
                409, f"The batch is {now.status} and cannot be cancelled any more.", code="batch_not_cancellable"
            )
    _runner(request).wake()
    return JSONResponse((await asyncio.to_thread(store.require, batch.id)).to_json())


@router.post("/v1/chat/completions/batch", openapi_extra=body_of(ChatsRequest))
async def chat_batch(request: Request) -> Response:
    slot: ModelSlot = request.app.state.slot
    slot.require()
    body = await parse_body(request, ChatsRequest)
    for i, chat in enumerate(body.requests):
        if chat.get("stream"):
            raise ApiError(
                400,
                f"Invalid 'requests[{i}].stream': replies that come together cannot be streamed; leave it out.",
                param=f"requests[{i}].stream",
                code="invalid_parameter_combination",
            )
    places = asyncio.Semaphore(_CHATS_AT_A_TIME)
    who = caller()

    async def answer(chat: dict[str, Any]) -> Answer:
        async with places:
            return await ask(request.app, "/v1/chat/completions", json.dumps(chat).encode(), who)

    async def answer_all() -> list[Answer]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(chat)) for chat in body.requests]
        return [task.result() for task in tasks]

    answers = await while_connected(request.receive, answer_all())
    usages = [answer.body["usage"] for answer in answers if answer.status < 400]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    return JSONResponse(
        {
            "id": f"chatbatch-{uuid.uuid4().hex}",
            "object": "chat.completion.batch",
            "created": int(time.time()),
            "model": slot.name,
            "data": [
                {"index": i, "status_code": answer.status, "body": answer.body} for i, answer in enumerate(answers)
            ],
            "usage": {name: sum(usage[name] for usage in usages) for name in counts},
        }
    )


def _require(request: Request, batch_id: str) -> Batch:
    store: BatchStore = request.app.state.batches
    batch = store.get(batch_id, caller().owner)
    if batch is None:
        raise ApiError(404, f"There is no batch {shown(batch_id)}.", param="batch_id", code="batch_not_found")
    return batch


def _runner(request: Request) -> BatchRunner:
    runner: BatchRunner = request.app.state.batch_runner
    return runner


def _window_s(window: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,2})([hd])", window)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise ApiError(
            400,
            f'Invalid \'completion_window\': {shown(window)} is not a time such as "24h" or "7d", a week at most.',
            param="completion_window",
            code="invalid_value",
        )
    return seconds
