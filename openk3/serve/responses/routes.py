"""/v1/responses: OpenAI's newer protocol over the same chats, and the responses that were stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from openk3.serve.caller import caller
from openk3.serve.errors import ApiError, shown
from openk3.serve.files.routes import page
from openk3.serve.loading import ModelSlot
from openk3.serve.openapi import body_of
from openk3.serve.prompts import chat_turn
from openk3.serve.responses.items import ResponseWriter
from openk3.serve.responses.store import ResponseStore, Stored
from openk3.serve.responses.translate import Translated, resolved, translate
from openk3.serve.responses.types import InputTokensRequest, Item, ResponsesRequest
from openk3.serve.running import start_chat
from openk3.serve.sse import EventStream, drained, while_connected
from openk3.serve.validation import parse_body

if TYPE_CHECKING:
    from openk3.llm import LLM

router = APIRouter()

# The part of the context that is left for the reply where a conversation is cut.
_ROOM = 8


@router.post("/v1/responses", openapi_extra=body_of(ResponsesRequest, streams=True))
async def create_response(request: Request) -> Response:
    arrived_at = time.perf_counter()
    slot: ModelSlot = request.app.state.slot
    slot.require()
    body = await parse_body(request, ResponsesRequest)
    llm = slot.require(body.model)
    items, translated = await _read(request, llm, body)
    try:
        chat = await start_chat(request, translated.chat, arrived_at)
    except ApiError as error:
        raise translated.named_as_sent(error) from None
    writer = ResponseWriter(chat, body, slot.name)

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        async for event in writer.events():
            yield event
        if body.store is not False:
            stored = Stored([item.stored() for item in items], writer.response)
            await asyncio.to_thread(_store(request).save, stored, caller().owner)
        yield writer.ended()

    if body.stream:
        return EventStream(events(), on_end=chat.cancel, named=True, failure=writer.failed)
    try:
        await while_connected(request.receive, drained(events()))
    finally:
        chat.cancel()
    return JSONResponse(writer.response)


@router.post("/v1/responses/input_tokens", openapi_extra=body_of(InputTokensRequest))
async def count_input_tokens(request: Request) -> Response:
    slot: ModelSlot = request.app.state.slot
    slot.require()
    body = await parse_body(request, InputTokensRequest)
    llm = slot.require(body.model)
    _, translated = await _read(request, llm, body)
    try:
        turn = await chat_turn(llm, translated.chat)
    except ApiError as error:
        raise translated.named_as_sent(error) from None
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(turn.prompt_ids)})


@router.get("/v1/responses/{response_id}")
async def get_response(
    request: Request, response_id: str, stream: Annotated[Literal["false"] | None, Query()] = None
) -> Response:
    """`stream` must not be asked for: what was streamed once is not streamed again."""
    return JSONResponse((await asyncio.to_thread(_store(request).get, response_id, caller().owner)).response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    await asyncio.to_thread(_store(request).delete, response_id, caller().owner)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    after: Annotated[str | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
) -> Response:
    """The items of a response's request, a page of them from the one `after` which it begins."""
    items = (await asyncio.to_thread(_store(request).get, response_id, caller().owner)).input
    if order == "desc":
        items = items[::-1]
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise ApiError(
                400, f"Invalid 'after': there is no item {shown(after)} here.", param="after", code="invalid_value"
            )
        items = items[place + 1 :]
    return JSONResponse(page(items[:limit], len(items) > limit))


async def _read(request: Request, llm: LLM, body: InputTokensRequest) -> tuple[list[Item], Translated]:
    """What is new in a request, and the chat request for all of it; cut to the context where that is wanted.

    Raises:
        ApiError: 404, a response or an item that it names is not there; 400, as `translate`.
    """
    store, owner = _store(request), caller().owner
    items = await asyncio.to_thread(resolved, body.input or (), store, owner)
    before: list[Stored] = []
    if body.previous_response_id is not None:
        before = await asyncio.to_thread(store.conversation, body.previous_response_id, owner)
    translated = await asyncio.to_thread(translate, body, before, items)
    return items, await _cut_to_context(llm, translated) if body.truncation == "auto" else translated


async def _cut_to_context(llm: LLM, translated: Translated) -> Translated:
    """As much of the end of a conversation as the context holds; one that is cut leaves room for the reply."""

    async def fits(candidate: Translated, room: int) -> bool:
        try:
            turn = await chat_turn(llm, candidate.chat)
        except ApiError as error:
            return error.code != "context_length_exceeded"  # another mistake is found when the reply is begun
        return len(turn.prompt_ids) + room <= llm.max_model_len

    beginnings = translated.beginnings()
    if not beginnings or await fits(translated, 0):
        return translated
    low, high = 0, len(beginnings) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(translated.from_message(beginnings[middle]), llm.max_model_len // _ROOM):
            high = middle
        else:
            low = middle + 1
    return translated.from_message(beginnings[low])


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store
