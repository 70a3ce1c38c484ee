"""/mcp: the built-in tools for MCP clients, over streamable HTTP, beside the API and behind the same door.

Stateless: a call needs no session, so a restart loses nothing. Host and Origin are checked as for every request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from openk3.agents.mcp_server import make_server
from openk3.agents.tools import BUILTIN


class McpEndpoint:
    """The endpoint; `route` is to be added to an application whose lifespan is inside of `running`.

    Raises:
        RuntimeError: the package ``mcp`` is not installed.
    """

    def __init__(self) -> None:
        self._server = make_server(list(BUILTIN.values()))
        self.route = Route("/mcp", endpoint=self, methods=["GET", "POST", "DELETE"])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        # Which hosts may ask is decided before a request comes here (limits.HostCheck).
        self._sessions = StreamableHTTPSessionManager(self._server, json_response=True, stateless=True)
        async with self._sessions.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._sessions.handle_request(scope, receive, send)
