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
            headings = index.headings(document_ids)
            about = f" The documents have the headings: {'; '.join(headings)}." if headings else ""
            return f"Nothing was found. Try other words, such as a document would use.{about}"
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
                "query": {
                    "type": "string",
                    "maxLength": 200,  # where a grammar keeps to it, no model goes on for ever
                    "description": "A few words to look for; a phrase in quotation marks.",
                },
                "limit": {"type": "integer", "minimum": 1, "maximum": MAX_RESULTS, "description": "How many passages."},
            },
            "required": ["query"],
            "additionalProperties": False,
        },
        function=search,
    )
