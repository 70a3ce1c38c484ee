"""A reply as Anthropic's content blocks: the events of a stream, and the message that they add up to.

The whole message is what the events wrote, so that a streamed reply and a whole one cannot differ.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pydantic_core

from openk3.chat.parser import CallDelta, ReplyDelta
from openk3.engine.request import Delta
from openk3.serve.running import RunningChat

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Writes one reply. `message` is what it has come to.

    Args:
        chat: the reply under way, with one choice.
        model: the model's name.
        max_tokens: what the client allowed, to tell the end of the context from it.
    """

    def __init__(self, chat: RunningChat, model: str, max_tokens: int) -> None:
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        self._chat = chat
        self._max_tokens = max_tokens
        self._open: str | None = None  # the type of the block that is being written
        self._json = ""  # of the input of the call that is being written

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events in their order. The first comes with the first token, for then its usage is known.

        Raises:
            ApiError: 500, the engine failed; 503, it is shutting down.
        """
        async for _, said, delta in self._chat.deltas():
            if not self.message["usage"]:
                self.message["usage"] = self._usage(delta.completion_tokens)
                yield {"type": "message_start", "message": self.message | {"content": []}}
            for event in self._say(said):
                yield event
            if delta.finish_reason is not None:
                for event in self._end(delta):
                    yield event

    def _say(self, said: ReplyDelta) -> Iterator[dict[str, Any]]:
        if said.reasoning:
            yield from self._enter("thinking", {"thinking": "", "signature": ""})
            self._block["thinking"] += said.reasoning
            yield self._delta({"type": "thinking_delta", "thinking": said.reasoning})
        if said.content:
            yield from self._enter("text", {"text": ""})
            self._block["text"] += said.content
            yield self._delta({"type": "text_delta", "text": said.content})
        for call in said.calls:
            yield from self._call(call)

    def _call(self, call: CallDelta) -> Iterator[dict[str, Any]]:
        if call.id is not None:
            yield from self._leave()
            yield from self._enter("tool_use", {"id": call.id, "name": call.name, "input": {}})
            self._json = ""
        if call.arguments:
            self._json += call.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _enter(self, kind: str, empty: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Be in a block of that kind, in the open one if it is of it."""
        if self._open == kind:
            return
        yield from self._leave()
        self.message["content"].append({"type": kind, **empty})
        self._open = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **empty}}

    def _leave(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        if self._open == "thinking":
            # Only Anthropic can read its own signatures, but clients drop reasoning that has none.
            signature = hashlib.sha256(self._block["thinking"].encode()).hexdigest()
            self._block["signature"] = signature
            yield self._delta({"type": "signature_delta", "signature": signature})
        elif self._open == "tool_use":
            # Where the reply was cut the input is what can be read of it, as clients read a stream.
            self._block["input"] = pydantic_core.from_json(self._json or "{}", allow_partial=True)
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _end(self, delta: Delta) -> Iterator[dict[str, Any]]:
        yield from self._leave()
        self.message |= self._stop(delta) | {"usage": self._usage(delta.completion_tokens)}
        ending = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ending, "usage": self.message["usage"]}
        yield {"type": "message_stop"}

    def _stop(self, delta: Delta) -> dict[str, Any]:
        reason = _REASONS[self._chat.finish_reason(0) or "stop"]
        if reason != "tool_use" and isinstance(delta.stop_match, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_match}
        if reason == "max_tokens" and delta.completion_tokens < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        """Tokens of the prompt count as input unless they were in the cache."""
        usage = self._chat.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        }

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    @property
    def _block(self) -> dict[str, Any]:
        block: dict[str, Any] = self.message["content"][-1]
        return block
