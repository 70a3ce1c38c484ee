"""The configuration of MCP servers, in the shape that MCP clients share.

    {"mcpServers": {
        "files": {"command": "npx", "args": ["some-server", "/home/me"], "env": {"KEY": "..."}},
        "shop": {"url": "http://127.0.0.1:9000/mcp", "headers": {"Authorization": "Bearer ..."}}
    }}

A command of it is run with the user's rights. So a configuration is taken from the user's own command line or code, and
never from a request, a model or a working directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_STDIO, _HTTP = {"command", "args", "env", "cwd"}, {"url", "headers"}
# What other clients write into the same file.
_IGNORED = {"type", "transport", "disabled", "timeout", "alwaysAllow", "autoApprove", "description"}


@dataclass(frozen=True)
class McpServer:
    """How one server is reached: a command that is started here, or the URL of one that runs."""

    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def read_config(source: str | Path | Mapping[str, Any]) -> dict[str, McpServer]:
    """Read a configuration from a file, or check one that was read already.

    Raises:
        ValueError: it is none; the text names the place.
        OSError: the file cannot be read.
    """
    where = "the MCP configuration" if isinstance(source, Mapping) else str(source)
    config: Any = source
    if not isinstance(source, Mapping):
        try:
            config = json.loads(Path(source).expanduser().read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{where}: not valid JSON: {error}") from None
    servers = config.get("mcpServers") if isinstance(config, Mapping) else None
    if not isinstance(servers, Mapping):
        raise ValueError(f'{where}: expected an object with "mcpServers", an object from names to servers')
    return {name: _server(name, entry, f"{where}: mcpServers.{name}") for name, entry in servers.items()
            if not (isinstance(entry, Mapping) and entry.get("disabled") is True)}  # fmt: skip


def _server(name: object, entry: object, where: str) -> McpServer:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: a server's name is 1 to 64 letters (a-z, A-Z), digits, underscores and dashes")
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: expected an object with a command or a url")
    given = {field: value for field, value in entry.items() if field not in _IGNORED}
    if ("command" in given) == ("url" in given):
        raise ValueError(f"{where}: give either a command or a url")
    for key in given:
        if key not in (_STDIO if "command" in given else _HTTP):
            raise ValueError(f"{where}.{key}: unknown; there are command, args, env and cwd, or url and headers")
    for key in ("command", "cwd", "url"):
        if key in given and (not isinstance(given[key], str) or not given[key]):
            raise ValueError(f"{where}.{key}: expected text")
    if not given.get("url", "http://").startswith(("http://", "https://")):
        raise ValueError(f"{where}.url: expected a URL that begins with http:// or https://")
    args = given.get("args", [])
    if not isinstance(args, (list, tuple)) or not all(isinstance(arg, str) for arg in args):
        raise ValueError(f"{where}.args: expected a list of texts")
    for key in ("env", "headers"):
        value = given.get(key, {})
        if not isinstance(value, Mapping) or not all(isinstance(item, str) for item in value.values()):
            raise ValueError(f"{where}.{key}: expected an object of texts")
    return McpServer(**{**given, "args": tuple(args)})
