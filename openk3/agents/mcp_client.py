"""Tools of MCP servers, as tools of a model: each server connected once, its tools called from any thread.

    with McpServers("mcp.json") as servers:
        for event in run(model, messages, tools=servers.tools):
            ...

The Model Context Protocol (https://modelcontextprotocol.io) is spoken by its own SDK, the package ``mcp``, which is
asynchronous: it runs in an event loop in a thread of its own. A server that does not answer, or answers with an error,
is a result that the model reads.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from openk3.agents.mcp_config import McpServer, read_config
from openk3.agents.tools.tool import Tool

START_S = 30.0
CALL_S = 120.0
MAX_TOOLS = 1000


class McpServers:
    """The servers of a configuration, connected. Close it, or use it in `with`, to stop those that it started.

    Args:
        config: a file, or what it holds; see `openk3.agents.mcp_config`.

    Attributes:
        by_server: the tools of each server, by name.

    Raises:
        ValueError: the configuration is none, or a server cannot be started or reached; the text names it.
        RuntimeError: the package ``mcp`` is not installed.
    """

    def __init__(self, config: str | Path | Mapping[str, Any]) -> None:
        require_mcp()
        self.by_server: dict[str, dict[str, Tool]] = {}
        servers = read_config(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="mcp")
        self._thread.start()
        self._stops: list[asyncio.Event] = []
        self._tasks: list[Future[None]] = []
        try:
            started = {name: self._start(name, server) for name, server in servers.items()}
            for name, ready in started.items():
                try:
                    self.by_server[name] = ready.result(START_S)
                except FutureTimeoutError:
                    raise ValueError(f"MCP server {name}: it does not answer within {START_S:g} seconds") from None
        except BaseException:
            self.close()
            raise

    @property
    def tools(self) -> list[Tool]:
        """The tools of all servers. A name that two of them have gets the server's name in front."""
        count: dict[str, int] = {}
        for tools in self.by_server.values():
            for name in tools:
                count[name] = count.get(name, 0) + 1
        return [
            tool if count[tool.name] == 1 else _renamed(tool, f"{server}_{tool.name}")
            for server, tools in self.by_server.items()
            for tool in tools.values()
        ]

    def close(self) -> None:
        """Disconnect, and stop the processes that were started. May be called twice."""
        if self._loop.is_closed():
            return
        for stop in self._stops:
            self._loop.call_soon_threadsafe(stop.set)
        for task in self._tasks:
            with suppress(Exception):
                task.result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        if not self._loop.is_running():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, name: str, server: McpServer) -> Future[dict[str, Tool]]:
        ready: Future[dict[str, Tool]] = Future()
        stop = asyncio.Event()
        self._stops.append(stop)
        self._tasks.append(asyncio.run_coroutine_threadsafe(self._serve(name, server, ready, stop), self._loop))
        return ready

    async def _serve(self, name: str, server: McpServer, ready: Future[dict[str, Tool]], stop: asyncio.Event) -> None:
        """Hold a connection, from one task, until it is to stop."""
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(_client(server, stack))
                tools = [self._tool(client, tool) for tool in await _listed(client)]
                ready.set_result({tool.name: tool for tool in tools})
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(ValueError(f"MCP server {name}: {_reason(error)}"))

    def _tool(self, client: Any, described: Any) -> Tool:
        def call(**arguments: Any) -> str:
            running = asyncio.run_coroutine_threadsafe(client.call_tool(described.name, arguments), self._loop)
            try:
                result = running.result(CALL_S)
            except FutureTimeoutError:
                running.cancel()
                raise ValueError(f"the server did not answer within {CALL_S:g} seconds") from None
            except Exception as error:
                raise ValueError(f"the server failed: {_reason(error)}") from None
            text = _result_text(result)
            if result.is_error:
                raise ValueError(text)
            return text

        name = re.sub(r"[^a-zA-Z0-9_-]", "_", described.name)[:64]
        parameters = described.input_schema or {"type": "object", "properties": {}}
        return Tool(name, described.description or described.name, parameters, call, timeout_s=CALL_S + 5)


def require_mcp() -> None:
    """
    Raises:
        RuntimeError: the package ``mcp`` is not installed; the text says how to install it.
    """
    try:
        import mcp  # noqa: F401 (whether it is there)
    except ImportError:
        raise RuntimeError("MCP needs a package that is not installed: pip install 'openk3[mcp]'") from None


def _client(server: McpServer, stack: AsyncExitStack) -> Any:
    from mcp import Client, StdioServerParameters
    from mcp.client.streamable_http import streamable_http_client

    if server.command:
        return Client(
            StdioServerParameters(
                command=server.command, args=list(server.args), env=dict(server.env) or None, cwd=server.cwd
            )
        )
    if not server.headers:
        return Client(server.url)
    import httpx2

    http = httpx2.AsyncClient(headers=dict(server.headers), timeout=CALL_S)
    stack.push_async_callback(http.aclose)
    return Client(streamable_http_client(server.url, http_client=http))


async def _listed(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor or len(tools) > MAX_TOOLS:
            return tools[:MAX_TOOLS]


def _result_text(result: Any) -> str:
    """What a result says. Pictures and sounds are named: the model reads text."""
    parts = [
        part.text if part.type == "text" else getattr(getattr(part, "resource", None), "text", None) or f"[{part.type}]"
        for part in result.content
    ]
    return "\n".join(parts)


def _renamed(tool: Tool, name: str) -> Tool:
    return Tool(name[:64], tool.description, tool.parameters, tool.function, tool.timeout_s)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{error}" or type(error).__name__
