"""The tools that a chat can switch on, and how one call of them is run.

What a tool does is `openk3.agents`' business; here is which tools the page offers, in which order, and that whatever
goes wrong in one becomes a result that the model can read.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openk3.serve.access import log_failure
from openk3.serve.web.records import Attachment

Run = Callable[[Mapping[str, Any], Sequence[Attachment]], Awaitable[str]]


@dataclass(frozen=True)
class Tool:
    """One tool: its name, its definition in OpenAI's form, its icon, and what a call does.

    `run` gets the arguments and the files of the chat and returns the result as text; a ValueError of it is told to the
    model.
    """

    name: str
    definition: Mapping[str, Any]
    icon: str
    run: Run


@dataclass(frozen=True)
class Toolbox:
    """The tools that can be switched on, by name."""

    tools: Mapping[str, Tool]

    def offered(self, names: Iterable[str]) -> list[Tool]:
        """Those of `names` that exist, in the toolbox's order."""
        wanted = set(names)
        return [tool for name, tool in self.tools.items() if name in wanted]


def toolbox(tools: Iterable[Tool]) -> Toolbox:
    return Toolbox({tool.name: tool for tool in tools})


async def run_call(tool: Tool | None, arguments: str, files: Sequence[Attachment]) -> tuple[str, bool]:
    """Run one call; returns the text for the model, and whether it is a result rather than what went wrong."""
    if tool is None:
        return "There is no such tool in this chat.", False
    try:
        values = json.loads(arguments)
        if not isinstance(values, dict):
            raise ValueError("the arguments are not an object")
        return await tool.run(values, files), True
    except ValueError as error:
        return f"Error: {error}", False
    except Exception as error:
        log_failure(f"the tool {tool.name}", error)
        return "Error: the tool failed.", False
