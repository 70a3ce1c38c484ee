"""Calls of tools, run: all of one reply at once, each in a thread with a time limit, after the user's yes where asked.

A thread cannot be ended from outside. One whose time is over is left to itself, and the model is told.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from openk3.agents.tools.tool import Tool, ToolResult, unknown_tool
from openk3.chat.reply import ToolCall

Approve: TypeAlias = Callable[[ToolCall], bool | Awaitable[bool]]

DENIED = ToolResult("The user did not allow this call. Go on without it, or ask.", is_error=True)


@dataclass(frozen=True)
class FinishedCall:
    """A call that was run, or was not allowed to.

    Attributes:
        seconds: how long it ran.
        approved: False if the user denied it.
    """

    call: ToolCall
    result: ToolResult
    seconds: float = 0.0
    approved: bool = True

    def message(self) -> dict[str, str]:
        """The message that tells the model."""
        return {"role": "tool", "tool_call_id": self.call.id, "content": self.result.text}


async def run_calls(
    calls: Sequence[ToolCall], box: Mapping[str, Tool], approve: Approve | None = None
) -> AsyncGenerator[FinishedCall, None]:
    """Run calls at the same time and yield each when it is done. A call never fails: errors are results.

    Args:
        box: the tools by name.
        approve: asked for each call, one after the other, before it runs; True lets it run. None lets all run.
    """
    running: list[asyncio.Task[FinishedCall]] = []
    try:
        for call in calls:
            if approve is not None:
                allowed = approve(call)
                if not (await allowed if inspect.isawaitable(allowed) else allowed):
                    yield FinishedCall(call, DENIED, approved=False)
                    continue
            running.append(asyncio.create_task(_run(call, box)))
        for done in asyncio.as_completed(running):
            yield await done
    finally:
        for task in running:
            task.cancel()


def run_calls_here(
    calls: Sequence[ToolCall], box: Mapping[str, Tool], approve: Callable[[ToolCall], bool] | None = None
) -> list[FinishedCall]:
    """`run_calls` for code that is not asynchronous, wherever it runs; `approve` is asked in this thread."""
    allowed = [call for call in calls if approve is None or approve(call)]
    denied = [FinishedCall(call, DENIED, approved=False) for call in calls if call not in allowed]

    async def run() -> list[FinishedCall]:
        return [done async for done in run_calls(allowed, box)]

    # A thread of its own, because this one may be inside an event loop already, as in a notebook.
    with ThreadPoolExecutor(1, thread_name_prefix="tools") as pool:
        return denied + (pool.submit(asyncio.run, run()).result() if allowed else [])


async def _run(call: ToolCall, box: Mapping[str, Tool]) -> FinishedCall:
    begun = time.monotonic()
    tool = box.get(call.name)
    if tool is None:
        return FinishedCall(call, unknown_tool(call.name, list(box)))
    try:
        result = await asyncio.wait_for(_in_thread(tool, call.arguments), tool.timeout_s)
    except TimeoutError:
        result = ToolResult(f"Error: {tool.name} took longer than {tool.timeout_s:g} seconds", is_error=True)
    return FinishedCall(call, result, time.monotonic() - begun)


def _in_thread(tool: Tool, arguments: str) -> asyncio.Future[ToolResult]:
    """Run a call in a thread that neither the process's end nor a pool waits for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ToolResult] = loop.create_future()

    def hand_over(result: ToolResult) -> None:
        if not future.done():
            future.set_result(result)

    def work() -> None:
        result = tool.call(arguments)
        with suppress(RuntimeError):  # the loop is gone: so is who asked
            loop.call_soon_threadsafe(hand_over, result)

    threading.Thread(target=work, daemon=True, name=f"tool-{tool.name}").start()
    return future
