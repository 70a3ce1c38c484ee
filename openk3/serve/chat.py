"""POST /v1/chat/completions: a chat in, the assistant's next message out, whole or as a stream of its pieces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from openk3.serve.errors import ApiError
from openk3.serve.generation import Generation
from openk3.serve.loading import ModelSlot
from openk3.serve.logprobs import chat_logprobs
from openk3.serve.openai_types import ChatRequest, ResponseFormat
from openk3.serve.prompts import chat_prompt
from openk3.serve.reply import ReplyHead
from openk3.serve.sse import EventStream, while_connected
from openk3.serve.validation import parse_body

if TYPE_CHECKING:
    from openk3.llm import LLM

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    arrived_at = time.perf_counter()
    slot: ModelSlot = request.app.state.slot
    slot.require()
    body = await parse_body(request, ChatRequest)
    llm = slot.require(body.model)
    prompt = await chat_prompt(llm, body.messages)
    if body.response_format is not None:
        await _compile(llm, body.response_format)
    generation = Generation(llm, [prompt], body, request.app.state.metrics, arrived_at)
    generation.start()
    head = ReplyHead("chatcmpl", slot)
    if body.stream:
        return EventStream(_chunks(generation, head, body), on_end=generation.cancel)
    try:
        choices = await while_connected(request.receive, generation.finish())
    finally:
        generation.cancel()
    return JSONResponse(
        head.whole(
            "chat.completion",
            [
                {
                    "index": i,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []},
                    "logprobs": chat_logprobs(llm.tokenizer, choice.logprobs) if body.logprobs else None,
                    "finish_reason": choice.finish_reason,
                }
                for i, choice in enumerate(choices)
            ],
            generation.usage(),
        )
    )


async def _compile(llm: LLM, form: ResponseFormat) -> None:
    """Compile a response_format in a thread, so that a large schema does not hold up the streams of others.

    Raises:
        ApiError: 400, it cannot be kept.
    """

    def compile_it() -> None:
        if (grammar := form.grammar()) is not None:
            llm.loop.engine.check_grammar(grammar)

    try:
        await asyncio.to_thread(compile_it)
    except ValueError as error:
        param = "response_format.json_schema.schema" if form.type == "json_schema" else "response_format"
        raise ApiError(400, f"Invalid '{param}': {error}.", param=param, code="invalid_value") from None


async def _chunks(generation: Generation, head: ReplyHead, body: ChatRequest) -> AsyncGenerator[dict[str, Any], None]:
    """The role of every choice, then text as it comes, then one chunk with the finish reason for each choice."""

    def chunk(
        index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return head.chunk("chat.completion.chunk", [choice], body.include_usage)

    for index in range(len(generation.choices)):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    async for index, delta in generation.deltas():
        logprobs = chat_logprobs(generation.tokenizer, delta.logprobs or ()) if body.logprobs else None
        if delta.text or delta.logprobs:
            yield chunk(index, {"content": delta.text}, logprobs)
        if delta.finish_reason is not None:
            yield chunk(index, {}, None, delta.finish_reason)
    if body.include_usage:
        yield head.usage_chunk("chat.completion.chunk", generation.usage())
