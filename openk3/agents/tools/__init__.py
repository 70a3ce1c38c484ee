"""The tools that come with OpenK3, by name.

`calculator` and `datetime` need nothing and are here; `search_documents` needs documents and is made with them
(`search_documents.search_tool`).
"""

from __future__ import annotations

from openk3.agents.tools.calculator import CALCULATOR
from openk3.agents.tools.dates import DATETIME
from openk3.agents.tools.tool import Tool

BUILTIN = {tool.name: tool for tool in (CALCULATOR, DATETIME)}


def builtin(name: str) -> Tool:
    """Return a tool by its name, which may begin with ``$``.

    Raises:
        ValueError: there is none of that name.
    """
    try:
        return BUILTIN[name.removeprefix("$")]
    except KeyError:
        raise ValueError(f"there is no built-in tool {name!r}; there are {', '.join(BUILTIN)}") from None
