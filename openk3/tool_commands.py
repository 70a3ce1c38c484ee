"""`k3 search` and `k3 mcp`: search in documents, and OpenK3's tools for MCP clients; and the tools of `k3 chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from openk3.terminal import AsJson, harmless, print_json, spinner

if TYPE_CHECKING:
    from openk3.agents.tools.tool import Tool
    from openk3.documents.search import SearchIndex

Documents = Annotated[list[str], typer.Argument(help="Text, Markdown, HTML, .docx or PDF files, or folders of them.")]

McpConfig = Annotated[
    Path | None,
    typer.Option("--mcp", help='File with "mcpServers" whose tools the model may call. Its commands are run.'),
]

_SUFFIXES = (".txt", ".md", ".markdown", ".html", ".htm", ".docx", ".pdf")


def search(
    files: Documents,
    query: Annotated[str, typer.Option("--query", "-q", help="Words to look for; a phrase in quotation marks.")],
    limit: Annotated[int, typer.Option("--limit", "-l", min=1, max=100, help="How many passages.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Find passages in documents: by words, in all their forms, best first.

    Nothing is kept: the files are read anew each time. The exit code is 1 if
    nothing was found.

      [cyan]k3 search contract.pdf -q "notice period"[/cyan]
      [cyan]k3 search docs/ README.md -q 'rent "due date"' --json[/cyan]
      [cyan]k3 search 合同.docx -q 押金[/cyan]
    """
    hits = indexed(files).search(query, limit=limit)
    if as_json:
        places = ("name", "page", "heading", "start", "end", "score", "text")
        print_json({"query": query, "hits": [{name: getattr(hit, name) for name in places} for hit in hits]})
    else:
        typer.echo("\n\n".join(f"{harmless(hit.place)}\n  {harmless(hit.snippet)}" for hit in hits) or "nothing found")
    if not hits:
        raise typer.Exit(1)


def mcp(
    files: Annotated[list[str] | None, typer.Argument(help="Documents that the client may search.")] = None,
) -> None:
    """Offer OpenK3's tools to an MCP client, on stdin and stdout.

    To be started by the client, such as an editor, which has in its
    configuration: {"mcpServers": {"openk3": {"command": "k3", "args": ["mcp"]}}}
    The tools are calculator and datetime, and search_documents if files are
    given.

      [cyan]k3 mcp[/cyan]
      [cyan]k3 mcp ~/contracts[/cyan]
    """
    from openk3.agents.mcp_server import serve_stdio

    with open_tools(["calculator", "datetime"], files or (), None) as tools:
        serve_stdio(tools)


@contextmanager
def open_tools(names: Sequence[str], files: Sequence[str], mcp_config: Path | None) -> Iterator[list[Tool]]:
    """Built-in tools by name, the search tool if there are files, and those of MCP servers, which run meanwhile.

    Raises:
        ValueError: an unknown name, a file that cannot be read, or a server that cannot be started.
        RuntimeError: the package ``mcp`` is needed and not installed.
    """
    from openk3.agents.tools import builtin
    from openk3.agents.tools.search_documents import search_tool

    tools = [builtin(name) for name in names] + ([search_tool(indexed(files))] if files else [])
    if mcp_config is None:
        yield tools
        return
    from openk3.agents.mcp_client import McpServers

    with spinner("starting MCP servers"):
        servers = McpServers(mcp_config)
    with servers:
        yield tools + servers.tools


def indexed(files: Sequence[str]) -> SearchIndex:
    """An index of files, and of what can be read in folders, in memory."""
    from openk3.documents.search import SearchIndex
    from openk3.documents.text import read_document

    paths: list[Path] = []
    for name in files:
        path = Path(name).expanduser()
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        paths += found if path.is_dir() else [path]
        if path.is_dir() and not found:
            raise ValueError(f"{name}: no documents in this folder; what can be read is {', '.join(_SUFFIXES)}")
    index = SearchIndex()
    with spinner(f"reading {len(paths)} files"):
        for path in paths:
            try:
                index.add(str(path), read_document(str(path), path.read_bytes()))
            except ValueError as error:
                if len(paths) == 1:
                    raise
                print(f"k3: left out: {error}", file=sys.stderr)
    return index
