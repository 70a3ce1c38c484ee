"""The search_documents tool: a full-text search over certain documents of an index."""

from __future__ import annotations

from collections.abc import Sequence

from openk3.agents.tools.tool import Tool
from openk3.documents.search import SearchIndex

NAME = "search_documents"
MAX_RESULTS = 10


def search_tool(index: SearchIndex, document_ids: Sequence[str] | None = None) -> Tool:
    """Return the tool that searches some documents of an index; None for all that it holds when it is called."""

    def search(query: str, limit: int = 5) -> str:
        hits = index.search(query, document_ids=document_ids, limit=limit)
        if not hits:
            return "Nothing was found. Try other words: the search looks for words, not for meaning."
        return "\n\n".join(f"[{number}] {hit.place}:\n{hit.text}" for number, hit in enumerate(hits, 1))

    return Tool(
        name=NAME,
        description=(
            "Searches the user's documents (contracts, reports, manuals, notes) for words, and returns the passages "
            "with the facts, each with its file and page. Use it for every question about what a document says, and "
            "name the passage that the answer is from."
        ),
        parameters={
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "Words to look for; a phrase in quotation marks."},
                "limit": {"type": "integer", "minimum": 1, "maximum": MAX_RESULTS, "description": "How many passages."},
            },
            "required": ["query"],
            "additionalProperties": False,
        },
        function=search,
    )
