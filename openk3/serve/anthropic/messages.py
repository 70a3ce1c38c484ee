"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol over the same chats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from openk3.serve.anthropic.blocks import MessageWriter
from openk3.serve.anthropic.translate import translate
from openk3.serve.anthropic.types import CountTokensRequest, MessagesRequest
from openk3.serve.errors import ApiError
from openk3.serve.loading import ModelSlot
from openk3.serve.openapi import body_of
from openk3.serve.prompts import chat_turn
from openk3.serve.running import start_chat
from openk3.serve.sse import EventStream, drained, while_connected
from openk3.serve.validation import parse_body

router = APIRouter()

# A long prompt takes longer to read than some clients and proxies wait for a silent stream.
_PING_EVERY_S = 10.0

# Clients that would rather have the server keep the conversation read this, and send it whole from then on.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


@router.post("/v1/messages", openapi_extra=body_of(MessagesRequest, streams=True))
async def messages(request: Request) -> Response:
    arrived_at = time.perf_counter()
    slot: ModelSlot = request.app.state.slot
    slot.require()
    try:
        body = await parse_body(request, MessagesRequest)
    except ApiError as error:
        if error.param == "thread":
            raise ApiError(error.status, error.message, param=error.param, details=_NO_THREADS) from None
        raise
    translated = translate(body)
    try:
        chat = await start_chat(request, translated.chat, arrived_at)
    except ApiError as error:
        raise translated.named_as_sent(error) from None
    writer = MessageWriter(chat, slot.name, body.max_tokens)
    if body.stream:
        return EventStream(_with_pings(writer.events()), on_end=chat.cancel, named=True)
    try:
        await while_connected(request.receive, drained(writer.events()))
    finally:
        chat.cancel()
    return JSONResponse(writer.message)


@router.post("/v1/messages/count_tokens", openapi_extra=body_of(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    slot: ModelSlot = request.app.state.slot
    slot.require()
    body = await parse_body(request, CountTokensRequest)
    llm = slot.require(body.model)
    translated = translate(body)
    try:
        turn = await chat_turn(llm, translated.chat)
    except ApiError as error:
        raise translated.named_as_sent(error) from None
    return JSONResponse({"input_tokens": len(turn.prompt_ids)})


async def _with_pings(events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    """The events, and a ping after the first and whenever there was none for a while."""
    pinged = False
    coming = asyncio.ensure_future(anext(events))
    try:
        while True:
            await asyncio.wait((coming,), timeout=_PING_EVERY_S)
            if not coming.done():
                yield {"type": "ping"}
                continue
            try:
                yield coming.result()
            except StopAsyncIteration:
                return
            if not pinged:
                pinged = True
                yield {"type": "ping"}
            coming = asyncio.ensure_future(anext(events))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()
