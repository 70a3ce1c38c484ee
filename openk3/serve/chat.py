"""POST /v1/chat/completions: a chat in, the assistant's next message out, whole or as a stream of its pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from openk3.chat.reply import Reply
from openk3.serve.generation import Generation
from openk3.serve.loading import ModelSlot
from openk3.serve.logprobs import chat_logprobs
from openk3.serve.openai_types import ChatRequest
from openk3.serve.prompts import chat_turn
from openk3.serve.reply import ReplyHead
from openk3.serve.sse import EventStream, while_connected
from openk3.serve.validation import parse_body

if TYPE_CHECKING:
    from openk3.chat.parser import CallDelta, ReplyParser
    from openk3.chat.tokenizer import Tokenizer
    from openk3.engine.request import TokenLogprob

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    arrived_at = time.perf_counter()
    slot: ModelSlot = request.app.state.slot
    slot.require()
    body = await parse_body(request, ChatRequest)
    llm = slot.require(body.model)
    turn = await chat_turn(llm, body)
    generation = Generation(llm, [turn.prompt_ids], body, request.app.state.metrics, arrived_at, turn)
    generation.start()
    parsers = [turn.parser(body.stop) for _ in generation.choices]
    head = ReplyHead("chatcmpl", slot)
    if body.stream:
        return EventStream(_chunks(generation, parsers, head, body), on_end=generation.cancel)
    try:
        replies = await while_connected(request.receive, _whole(generation, parsers))
    finally:
        generation.cancel()
    return JSONResponse(
        head.whole(
            "chat.completion",
            [
                {
                    "index": i,
                    "message": reply.message() | {"refusal": None, "annotations": []},
                    "logprobs": _logprobs(llm.tokenizer, choice.logprobs) if body.logprobs else None,
                    "finish_reason": choice.finish_reason and parser.finish_reason(choice.finish_reason),
                }
                for i, (reply, parser, choice) in enumerate(zip(replies, parsers, generation.choices, strict=True))
            ],
            generation.usage(),
        )
    )


async def _whole(generation: Generation, parsers: Sequence[ReplyParser]) -> list[Reply]:
    replies = [Reply() for _ in parsers]
    async for index, delta in generation.deltas():
        replies[index].add(parsers[index].read(delta))
    return replies


async def _chunks(
    generation: Generation, parsers: Sequence[ReplyParser], head: ReplyHead, body: ChatRequest
) -> AsyncGenerator[dict[str, Any], None]:
    """The role of every choice, then what it says as it comes, then one chunk with the finish reason for each."""

    def chunk(
        index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return head.chunk("chat.completion.chunk", [choice], body.include_usage)

    for index in range(len(generation.choices)):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    async for index, delta in generation.deltas():
        said = parsers[index].read(delta)
        logprobs = _logprobs(generation.tokenizer, delta.logprobs or ()) if body.logprobs else None
        if said.reasoning:
            yield chunk(index, {"reasoning_content": said.reasoning})
        if said.content or delta.logprobs:
            yield chunk(index, {"content": said.content}, logprobs)
        for call in said.calls:
            for piece in _call_pieces(call):
                yield chunk(index, {"tool_calls": [piece]})
        if delta.finish_reason is not None:
            yield chunk(index, {}, None, parsers[index].finish_reason(delta.finish_reason))
    if body.include_usage:
        yield head.usage_chunk("chat.completion.chunk", generation.usage())


def _call_pieces(call: CallDelta) -> Iterator[dict[str, Any]]:
    """A piece of a call for the stream. A call's first chunk says which it is, the others hold its arguments."""
    if call.id is not None:
        function = {"name": call.name, "arguments": ""}
        yield {"index": call.index, "id": call.id, "type": "function", "function": function}
    if call.arguments:
        yield {"index": call.index, "function": {"arguments": call.arguments}}


def _logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities of what can be seen: the marks that divide a reply are no part of it."""
    dialect = tokenizer.dialect
    marks = {dialect.control.ids.get(text) for text in (*dialect.marks.meaning, *dialect.marks.shown)}
    return chat_logprobs(tokenizer, [entry for entry in entries if entry.token_id not in marks])
