"""A chat with tools that the server runs: its rounds, followed as if they were one reply.

What the model says is handed on as it comes. Its calls are parted: the client's are handed on, ours are run, all of a
reply at once, and told to the model, which goes on. A reply that has calls of both kinds ends the request: ours are
run first and come back as ``server_tool_calls``, and the client answers its own, with the message sent back as it is.
Usage is the sum of all rounds, and `max_tokens` holds for all of them together.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request

from openk3.agents.calls import run_calls
from openk3.agents.rounds import ANSWER, Rounds
from openk3.agents.tools import BUILTIN
from openk3.agents.tools.search_documents import NAME as SEARCH
from openk3.agents.tools.tool import Tool
from openk3.chat.messages import validate_messages, validate_tools
from openk3.chat.parser import ReplyDelta
from openk3.chat.reply import Reply
from openk3.engine.grammar.spec import Grammar
from openk3.serve.errors import ApiError
from openk3.serve.openai_types import ChatRequest, ResponseFormat
from openk3.serve.running import RunningChat, ServerCallDelta, start_chat
from openk3.serve.server_tools import report

if TYPE_CHECKING:
    from openk3.engine.request import Delta


class _Answer(ResponseFormat):
    """The form of a reply that has to be an answer in words."""

    def grammar(self) -> Grammar:
        return ANSWER


class ToolChat(RunningChat):
    """A `RunningChat` of one choice that goes through rounds.

    Args:
        body: the request, with the definitions of all tools.
        box: those that the server runs.
        first: its first round, under way.
        begin: starts another round for a changed body.
    """

    def __init__(
        self,
        body: ChatRequest,
        box: Mapping[str, Tool],
        first: RunningChat,
        begin: Callable[[ChatRequest, float], Awaitable[RunningChat]],
    ) -> None:
        self._body = body
        given = body.response_format
        self._form = None if given is None or given.type == "text" else given
        self._box = box
        self._begin = begin
        others = [name for tool in body.tools or () if (name := tool["function"]["name"]) not in box]
        self._rounds = Rounds(others=others)
        self._follow(first)
        self._usage: dict[str, Any] = {}
        self._ended: str | None = None
        self.server_tool_calls = []

    def _follow(self, chat: RunningChat) -> None:
        self._round = chat
        self.generation = chat.generation
        self.parsers = chat.parsers

    async def deltas(self) -> AsyncGenerator[tuple[int, ReplyDelta, Delta], None]:
        while True:
            reply, shown = Reply(), dict[int, int]()
            async for _, said, delta in self._round.deltas():
                reply.add(said)
                last = delta
                yield 0, self._clients(said, shown), replace(delta, finish_reason=None)
            silent = replace(last, text="", token_ids=(), logprobs=None)
            reason = self._round.finish_reason(0)
            finished = []
            calls = self._rounds.add_reply(reply, reason or "")
            async for done in run_calls(calls, self._box):
                finished.append(done)
                entry = report(done, len(self.server_tool_calls), self._rounds.rounds - 1)
                self.server_tool_calls.append(entry)
                yield 0, ServerCallDelta(ran=entry), replace(silent, finish_reason=None)
            if not self._rounds.goes_on:
                break
            self._rounds.add_results(finished)
            if not await self._next_round():
                reason = "length"
                break
        self._ended = reason
        yield 0, ReplyDelta(), silent

    async def replies(self) -> list[Reply]:
        reply = Reply()
        async for _, said, _delta in self.deltas():
            reply.add(said)
        return [reply]

    def finish_reason(self, index: int) -> str | None:
        return self._ended

    def usage(self) -> dict[str, Any]:
        return _sum(self._usage, self._round.usage())

    def cancel(self) -> None:
        self._round.cancel()

    def _clients(self, said: ReplyDelta, shown: dict[int, int]) -> ReplyDelta:
        """What of a piece the client is told: all but calls of ours. `shown`: its calls of this round, renumbered."""
        for call in said.calls:
            if call.name is not None and call.name not in self._box:
                shown[call.index] = len(shown)
        return replace(
            said, calls=tuple(replace(call, index=shown[call.index]) for call in said.calls if call.index in shown)
        )

    async def _next_round(self) -> bool:
        """Start the next round; False if there is no room for one."""
        usage, choice = self.usage(), self.generation.choices[0]
        more = validate_messages([*self._rounds.messages, *self._rounds.reminder])
        changes: dict[str, Any] = {"messages": [*self._body.messages, *more]}
        choice_of_tools = self._body.tool_choice
        if self._rounds.must_answer:
            changes["tool_choice"] = "none"
            changes["response_format"] = self._form or _Answer(type="text")
        elif isinstance(choice_of_tools, Mapping) and choice_of_tools.get("type") == "allowed_tools":
            allowed = {**choice_of_tools["allowed_tools"], "mode": "auto"}
            changes["tool_choice"] = {**choice_of_tools, "allowed_tools": allowed}
        else:
            changes["tool_choice"] = "auto"
        for field in ("max_tokens", "max_completion_tokens"):
            if (most := getattr(self._body, field)) is not None:
                changes[field] = most - usage["completion_tokens"]
                if changes[field] < 1:
                    return False
        self._round.cancel()
        try:
            following = await self._begin(self._body.model_copy(update=changes), time.perf_counter())
        except ApiError as error:
            if error.status == 400:  # what was right before the results came is too long now
                return False
            raise
        following.generation.choices[0].logprobs[:0] = choice.logprobs
        self._usage, self._round = usage, following
        return True


def _sum(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _sum(a.get(name, {}), value) if isinstance(value, Mapping) else a.get(name, 0) + value
        for name, value in b.items()
    }


async def start_tool_chat(request: Request, body: ChatRequest, arrived_at: float) -> ToolChat:
    """`start_chat` for a request that switches on tools of the server.

    Raises:
        ApiError: as `start_chat`; 400, a tool that is not there, more than one choice, or a partial message; 404, a
            file that is not there.
    """
    request.app.state.slot.require(body.model)
    if body.choices_per_prompt > 1:
        raise _refused("n", "tools that the server runs are for one choice; leave it out")
    if body.messages[-1].get("partial"):
        raise _refused(f"messages[{len(body.messages) - 1}].partial", "not possible beside tools that the server runs")
    box, definitions = await _switched_on(request, body)
    try:
        validate_tools(definitions)
    except ValueError as error:
        path, _, reason = str(error).partition(": ")
        raise _refused(path, reason) from None
    body = body.model_copy(update={"tools": definitions})
    first = await start_chat(request, body, arrived_at)
    return ToolChat(body, box, first, partial(start_chat, request))


async def _switched_on(request: Request, body: ChatRequest) -> tuple[dict[str, Tool], list[dict[str, Any]]]:
    """The tools that the server is to run, by name, and the definitions of all."""
    box: dict[str, Tool] = {}
    definitions: list[dict[str, Any]] = []
    for i, entry in enumerate(body.tools or ()):
        kind, where = entry["type"], f"tools[{i}]"
        if kind == "function":
            definitions.append(entry)
            continue
        if kind == SEARCH:
            state = request.app.state
            tools = [await state.search.tool(state.files, entry["file_ids"], f"{where}.{SEARCH}.file_ids")]
        elif kind == "mcp":
            tools = _of_mcp_server(request.app.state.mcp_tools, entry, where)
        else:
            tools = [BUILTIN[kind]]
        for tool in tools:
            box[tool.name] = tool
            definitions.append(tool.definition)
    return box, definitions


def _of_mcp_server(servers: Mapping[str, Mapping[str, Tool]], entry: Mapping[str, Any], where: str) -> list[Tool]:
    label, allowed = entry["server_label"], entry["allowed_tools"]
    if label not in servers:
        known = f"there are {', '.join(servers)}" if servers else "this server was started without any (k3 serve --mcp)"
        raise _refused(f"{where}.server_label", f"there is no MCP server {label!r}; {known}")
    tools = servers[label]
    for name in allowed or ():
        if name not in tools:
            raise _refused(f"{where}.allowed_tools", f"{label} has no tool {name!r}; it has {', '.join(tools)}")
    return [tool for name, tool in tools.items() if allowed is None or name in allowed]


def _refused(param: str, reason: str) -> ApiError:
    return ApiError(400, f"Invalid '{param}': {reason}.", param=param, code="invalid_value")
