"""POST /v1/completions: plain text or token ids in, their continuation out, for one prompt or many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from openk3.serve.generation import Generation
from openk3.serve.loading import ModelSlot
from openk3.serve.logprobs import CompletionLogprobs
from openk3.serve.openai_types import CompletionRequest
from openk3.serve.openapi import body_of
from openk3.serve.prompts import text_prompts
from openk3.serve.reply import ReplyHead
from openk3.serve.sse import EventStream, while_connected
from openk3.serve.validation import parse_body

if TYPE_CHECKING:
    from openk3.llm import LLM

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest, streams=True))
async def completions(request: Request) -> Response:
    arrived_at = time.perf_counter()
    slot: ModelSlot = request.app.state.slot
    slot.require()
    body = await parse_body(request, CompletionRequest)
    llm = slot.require(body.model)
    prompts = await text_prompts(llm, body.prompt)
    echoes = await asyncio.to_thread(_texts, llm, body.prompt) if body.echo else [""] * len(prompts)
    generation = Generation(llm, prompts, body, request.app.state.metrics, arrived_at)
    generation.start()
    head = ReplyHead("cmpl", slot)
    if body.stream:
        return EventStream(_chunks(generation, head, body, echoes), on_end=generation.cancel)
    try:
        choices = await while_connected(request.receive, generation.finish())
    finally:
        generation.cancel()
    return JSONResponse(
        head.whole(
            "text_completion",
            [
                {
                    "index": i,
                    "text": echoes[i // body.choices_per_prompt] + choice.text,
                    "logprobs": None
                    if body.logprobs is None
                    else CompletionLogprobs(llm.tokenizer).add(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                }
                for i, choice in enumerate(choices)
            ],
            generation.usage(),
        )
    )


async def _chunks(
    generation: Generation, head: ReplyHead, body: CompletionRequest, echoes: list[str]
) -> AsyncGenerator[dict[str, Any], None]:
    """The echoed prompt of every choice if asked for, then text as it comes; the last chunk of a choice has the
    reason."""

    def chunk(index: int, text: str, logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return head.chunk("text_completion", [choice], body.include_usage)

    if body.echo:
        for index in range(len(generation.choices)):
            yield chunk(index, echoes[index // body.choices_per_prompt])
    makers = [CompletionLogprobs(generation.tokenizer) for _ in generation.choices]
    async for index, delta in generation.deltas():
        logprobs = makers[index].add(delta.logprobs) if delta.logprobs else None
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            yield chunk(index, delta.text, logprobs, delta.finish_reason)
    if body.include_usage:
        yield head.usage_chunk("text_completion", generation.usage())


def _texts(llm: LLM, prompts: list[str] | list[list[int]]) -> list[str]:
    return [p if isinstance(p, str) else llm.tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
