"""The tools that a chat can switch on: the built-in ones of `openk3.agents`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from openk3.agents.tools import BUILTIN
from openk3.agents.tools.search_documents import NAME as SEARCH
from openk3.agents.tools.search_documents import search_tool
from openk3.agents.tools.tool import Tool
from openk3.documents.search import SearchIndex
from openk3.documents.text import Document
from openk3.serve.web.records import Attachment

# In the order of the page, with their icons.
TOOLS = {"calculator": "calculate", "datetime": "schedule", SEARCH: "find_in_page"}


def tools_for(names: Collection[str], files: Sequence[Attachment]) -> dict[str, Tool]:
    """The tools of `names`, by name; the search is over `files`, and not there if there are none. May take a while."""
    box = {name: BUILTIN[name] for name in TOOLS if name in names and name in BUILTIN}
    if SEARCH in names and files:
        index = SearchIndex()
        for number, file in enumerate(files):
            index.add(str(number), Document(file.name, "text", file.text))
        box[SEARCH] = search_tool(index)
    return box
