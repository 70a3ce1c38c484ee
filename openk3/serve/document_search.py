"""The files of requests, made searchable: each is read and indexed at its first use, under its id.

Files do not change, so what is indexed stays right until the file is deleted. The index is a copy that can be made
again: a file that is gone from the store is not found, whatever the index holds, and its copy is dropped then.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from openk3.agents.tools.search_documents import search_tool
from openk3.agents.tools.tool import Tool
from openk3.documents.search import SearchIndex
from openk3.serve.files.routes import require_file
from openk3.serve.files.store import FileStore
from openk3.serve.files.text import read_file

log = logging.getLogger("openk3.serve")


class DocumentSearch:
    """The index at `path`; opened at the first use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index: SearchIndex | None = None
        self._opening = threading.Lock()

    async def tool(self, files: FileStore, file_ids: Sequence[str], param: str) -> Tool:
        """Return the search tool for these files of the caller, read and indexed.

        Raises:
            ApiError: 404, there is no such file; 400, it cannot be read.
        """
        await asyncio.to_thread(self._prepare, files, file_ids, param)
        assert self._index is not None
        return search_tool(self._index, list(file_ids))

    def forget(self, file_id: str) -> None:
        """Drop what is indexed of a file that was deleted."""
        self._open().remove(file_id)

    def close(self) -> None:
        if self._index is not None:
            self._index.close()

    def _open(self) -> SearchIndex:
        with self._opening:
            if self._index is None:
                try:
                    self._index = SearchIndex(self._path)
                except ValueError as error:  # damaged, or of another version: it is a copy, and made again
                    log.warning("%s; it is made again", error)
                    for name in (self._path.name, f"{self._path.name}-wal", f"{self._path.name}-shm"):
                        self._path.with_name(name).unlink(missing_ok=True)
                    self._index = SearchIndex(self._path)
            return self._index

    def _prepare(self, files: FileStore, file_ids: Sequence[str], param: str) -> None:
        index = self._open()
        for i, file_id in enumerate(file_ids):
            place = f"{param}[{i}]"
            file = require_file(files, file_id, place)
            if file_id not in index:
                index.add(file_id, read_file(files, file, place))
