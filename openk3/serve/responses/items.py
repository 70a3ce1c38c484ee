"""A reply as a Responses object: the events of a stream, and the object that they add up to.

The whole response is what the events wrote, so that a streamed reply and a whole one cannot differ. Each output item is
opened, written and closed before the next, as OpenAI's server does it:

    output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done, output_item.done
"""

from __future__ import annotations

import copy
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from openk3.chat.parser import CallDelta, ReplyDelta
from openk3.engine.request import Delta
from openk3.serve.errors import ApiError
from openk3.serve.responses.types import ResponsesRequest, TextFormat, new_id
from openk3.serve.running import RunningChat

# By the type of an item: the stem of its events, and of the names of its one part of content.
_STEMS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class ResponseWriter:
    """Writes one response. `response` is what it has come to."""

    def __init__(self, chat: RunningChat, body: ResponsesRequest, model: str) -> None:
        self.response = _head(body, model)
        self._chat = chat
        self._sequence_number = 0
        self._open = False  # whether the last item of the output is being written

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events in their order, but for the last one, which is `ended`.

        Raises:
            ApiError: 500, the engine failed; 503, it is shutting down.
        """
        yield self._snapshot("response.created")
        yield self._snapshot("response.in_progress")
        async for _, said, delta in self._chat.deltas():
            for event in self._say(said):
                yield event
            if delta.finish_reason is not None:
                for event in self._end(delta):
                    yield event

    def ended(self) -> dict[str, Any]:
        """The last event: with the whole response."""
        return self._snapshot(f"response.{self.response['status']}")

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event instead, where the reply could not be finished."""
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return self.ended()

    def _say(self, said: ReplyDelta) -> Iterator[dict[str, Any]]:
        if said.reasoning:
            yield from self._enter("reasoning")
            yield self._add(said.reasoning)
        if said.content:
            yield from self._enter("message")
            yield self._add(said.content)
        for call in said.calls:
            yield from self._call(call)

    def _call(self, call: CallDelta) -> Iterator[dict[str, Any]]:
        if call.id is not None:
            yield from self._leave("completed")
            yield from self._enter("function_call", call_id=call.id, name=call.name)
        if call.arguments:
            yield self._add(call.arguments)

    def _enter(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Be in an item of that kind, in the open one if it is of it."""
        if self._open and self._item["type"] == kind and kind != "function_call":
            return
        yield from self._leave("completed")
        item: dict[str, Any] = {"type": kind, "status": "in_progress", **fields}
        if kind == "function_call":
            item |= {"id": new_id("fc"), "arguments": ""}
        elif kind == "reasoning":
            item |= {"id": new_id("rs"), "summary": [], "content": []}
        else:
            item |= {"id": new_id("msg"), "role": "assistant", "content": []}
        self.response["output"].append(item)
        self._open = True
        yield self._of_output("response.output_item.added", item=copy.deepcopy(item))
        if kind != "function_call":
            more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
            item["content"].append({"type": _STEMS[kind].removeprefix("response."), "text": "", **more})
            yield self._of_part("response.content_part.added", part=dict(item["content"][0]))

    def _add(self, text: str) -> dict[str, Any]:
        item = self._item
        name = f"{_STEMS[item['type']]}.delta"
        if item["type"] == "function_call":
            item["arguments"] += text
            return self._of_item(name, delta=text)
        item["content"][0]["text"] += text
        return self._of_part(name, delta=text, **_logprobs(item))

    def _leave(self, status: str) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        item = self._item
        name = f"{_STEMS[item['type']]}.done"
        if item["type"] == "function_call":
            yield self._of_item(name, name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            yield self._of_part(name, text=part["text"], **_logprobs(item))
            yield self._of_part("response.content_part.done", part=dict(part))
        item["status"] = status
        self._open = False
        yield self._of_output("response.output_item.done", item=copy.deepcopy(item))

    def _end(self, delta: Delta) -> Iterator[dict[str, Any]]:
        cut = self._chat.finish_reason(0) == "length"
        status = "incomplete" if cut else "completed"
        yield from self._leave(status)
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }

    @property
    def _item(self) -> dict[str, Any]:
        item: dict[str, Any] = self.response["output"][-1]
        return item

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._of_output(kind, item_id=self._item["id"], **fields)

    def _of_output(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self.response["output"]) - 1, **fields)

    def _snapshot(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response=copy.deepcopy(self.response))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event


def _logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """Events of text have a list of log probabilities, empty where none were asked for."""
    return {"logprobs": []} if item["type"] == "message" else {}


def _head(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """The response before anything was said: what was asked for."""
    form = (body.text and body.text.format) or TextFormat(type="text")
    choice = body.tool_choice or "auto"
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": form.model_dump(exclude_none=True, by_alias=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [
            tool.model_dump(include={"type", "name", "description", "parameters", "strict"})
            for tool in body.tools or ()
        ],
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }
