"""Models that use tools.

`tools` holds the tools that come with OpenK3, `loop` the conversation of a model with any, `mcp_client` those of MCP
servers, `mcp_server` ours for MCP clients.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "run": "openk3.agents.loop",
    "arun": "openk3.agents.loop",
    "McpServers": "openk3.agents.mcp_client",
    "CallStarted": "openk3.agents.loop",
    "CallFinished": "openk3.agents.loop",
    "Finished": "openk3.agents.loop",
    "TextPiece": "openk3.agents.loop",
    "Tool": "openk3.agents.tools.tool",
    "builtin": "openk3.agents.tools",
    "search_tool": "openk3.agents.tools.search_documents",
}

__all__ = [
    "CallFinished",
    "CallStarted",
    "Finished",
    "McpServers",
    "TextPiece",
    "Tool",
    "arun",
    "builtin",
    "run",
    "search_tool",
]

if TYPE_CHECKING:
    from openk3.agents.loop import CallFinished, CallStarted, Finished, TextPiece, arun, run
    from openk3.agents.mcp_client import McpServers
    from openk3.agents.tools import builtin
    from openk3.agents.tools.search_documents import search_tool
    from openk3.agents.tools.tool import Tool


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'openk3.agents' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
