"""OpenK3's tools for MCP clients: editors, desktop assistants, other agents. On stdio, or at a path of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from openk3 import __version__
from openk3.agents.calls import run_calls
from openk3.agents.mcp_client import require_mcp
from openk3.agents.tools.tool import Tool
from openk3.chat.reply import ToolCall

if TYPE_CHECKING:
    from mcp.server import Server


def make_server(tools: Sequence[Tool]) -> Server[Any]:
    """Return an MCP server that offers these tools.

    Raises:
        RuntimeError: the package ``mcp`` is not installed.
    """
    require_mcp()
    from mcp import types
    from mcp.server import Server

    box: Mapping[str, Tool] = {tool.name: tool for tool in tools}

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(name=tool.name, description=tool.description, input_schema=dict(tool.parameters))
                for tool in box.values()
            ]
        )

    async def call_tool(context: Any, params: Any) -> types.CallToolResult:
        call = ToolCall("mcp", params.name, json.dumps(params.arguments or {}))
        async for done in run_calls([call], box):
            text = types.TextContent(type="text", text=done.result.text)
            return types.CallToolResult(content=[text], is_error=done.result.is_error)
        raise AssertionError("a call always has a result")

    return Server("openk3", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)


def serve_stdio(tools: Sequence[Tool]) -> None:
    """Offer tools to the client that started this process, on its stdin and stdout, until it goes."""
    server = make_server(tools)
    from mcp.server.stdio import stdio_server

    async def serve() -> None:
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    asyncio.run(serve())
