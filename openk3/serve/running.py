"""A chat request under way: the one path from a checked request to the engine and back, whatever protocol it came by.

Chat completions, Responses and Messages differ in their words alone. Each translates its request into a `ChatRequest`,
starts it here, and tells in its own words what the replies say.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import Request

from openk3.chat.parser import ReplyDelta
from openk3.chat.reply import Reply
from openk3.serve.generation import Generation
from openk3.serve.loading import ModelSlot
from openk3.serve.openai_types import ChatRequest
from openk3.serve.prompts import chat_turn

if TYPE_CHECKING:
    from openk3.chat.turn import Turn
    from openk3.engine.request import Delta


@dataclass(frozen=True)
class ServerCallDelta(ReplyDelta):
    """A call that the server has run, as an entry of ``server_tool_calls``."""

    ran: Mapping[str, Any] | None = None


class RunningChat:
    """The choices of one request, and a reader for the reply of each."""

    def __init__(self, turn: Turn, generation: Generation, body: ChatRequest) -> None:
        self.generation = generation
        self.parsers = [turn.parser(body.stop) for _ in generation.choices]
        self.server_tool_calls: list[dict[str, Any]] = []  # what the server has run, where it runs tools

    async def deltas(self) -> AsyncGenerator[tuple[int, ReplyDelta, Delta], None]:
        """Yield (choice, what it says, the engine's delta) as they come, until every choice has finished.

        Raises:
            ApiError: 500, the engine failed; 503, it is shutting down.
        """
        async for index, delta in self.generation.deltas():
            yield index, self.parsers[index].read(delta), delta

    async def replies(self) -> list[Reply]:
        """Wait for every choice to finish, and return what they say."""
        replies = [Reply() for _ in self.parsers]
        async for index, said, _ in self.deltas():
            replies[index].add(said)
        return replies

    def finish_reason(self, index: int) -> str | None:
        """Why a choice ended, in the words of chat completions; None while it runs."""
        reason = self.generation.choices[index].finish_reason
        return None if reason is None else self.parsers[index].finish_reason(reason)

    def usage(self) -> dict[str, Any]:
        """The usage object of chat completions."""
        return self.generation.usage(sum(parser.reasoning_tokens for parser in self.parsers))

    def cancel(self) -> None:
        """Stop whatever still runs. Idempotent; to be called in every case."""
        self.generation.cancel()


async def start_chat(request: Request, body: ChatRequest, arrived_at: float) -> RunningChat:
    """Begin to generate the replies to a checked request.

    Args:
        arrived_at: when the request arrived, by `time.perf_counter`.

    Raises:
        ApiError: the model is not there, or the chat or a parameter is refused.
    """
    if any(tool["type"] != "function" for tool in body.tools or ()):
        from openk3.serve.tool_rounds import start_tool_chat

        return await start_tool_chat(request, body, arrived_at)
    slot: ModelSlot = request.app.state.slot
    llm = slot.require(body.model)
    turn = await chat_turn(llm, body)
    generation = Generation(llm, [turn.prompt_ids], body, request.app.state.metrics, arrived_at, turn)
    generation.start()
    return RunningChat(turn, generation, body)
