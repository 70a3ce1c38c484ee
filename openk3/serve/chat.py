"""POST /v1/chat/completions: a chat in, the assistant's next message out, whole or as a stream of its pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from openk3.serve.loading import ModelSlot
from openk3.serve.logprobs import chat_logprobs
from openk3.serve.openai_types import ChatRequest
from openk3.serve.openapi import body_of
from openk3.serve.reply import ReplyHead
from openk3.serve.running import RunningChat, ServerCallDelta, start_chat
from openk3.serve.sse import EventStream, while_connected
from openk3.serve.validation import parse_body

if TYPE_CHECKING:
    from openk3.chat.parser import CallDelta
    from openk3.chat.tokenizer import Tokenizer
    from openk3.engine.request import TokenLogprob

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest, streams=True))
async def chat_completions(request: Request) -> Response:
    arrived_at = time.perf_counter()
    slot: ModelSlot = request.app.state.slot
    slot.require()
    body = await parse_body(request, ChatRequest)
    chat = await start_chat(request, body, arrived_at)
    head = ReplyHead("chatcmpl", slot)
    if body.stream:
        return EventStream(_chunks(chat, head, body), on_end=chat.cancel)
    try:
        replies = await while_connected(request.receive, chat.replies())
    finally:
        chat.cancel()
    return JSONResponse(
        head.whole(
            "chat.completion",
            [
                {
                    "index": i,
                    "message": reply.message() | {"refusal": None, "annotations": []} | _ran(chat),
                    "logprobs": _logprobs(chat.generation.tokenizer, choice.logprobs) if body.logprobs else None,
                    "finish_reason": chat.finish_reason(i),
                }
                for i, (reply, choice) in enumerate(zip(replies, chat.generation.choices, strict=True))
            ],
            chat.usage(),
        )
    )


async def _chunks(chat: RunningChat, head: ReplyHead, body: ChatRequest) -> AsyncGenerator[dict[str, Any], None]:
    """The role of every choice, then what it says as it comes, then one chunk with the finish reason for each."""

    def chunk(
        index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return head.chunk("chat.completion.chunk", [choice], body.include_usage)

    for index in range(len(chat.parsers)):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    async for index, said, delta in chat.deltas():
        logprobs = _logprobs(chat.generation.tokenizer, delta.logprobs or ()) if body.logprobs else None
        if isinstance(said, ServerCallDelta):
            yield chunk(index, {"server_tool_calls": [said.ran]})
        if said.reasoning:
            yield chunk(index, {"reasoning_content": said.reasoning})
        if said.content or delta.logprobs:
            yield chunk(index, {"content": said.content}, logprobs)
        for call in said.calls:
            for piece in _call_pieces(call):
                yield chunk(index, {"tool_calls": [piece]})
        if delta.finish_reason is not None:
            yield chunk(index, {}, None, chat.finish_reason(index))
    if body.include_usage:
        yield head.usage_chunk("chat.completion.chunk", chat.usage())


def _ran(chat: RunningChat) -> dict[str, Any]:
    return {"server_tool_calls": chat.server_tool_calls} if chat.server_tool_calls else {}


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
