"""The server's stores together: one database and one folder of files, opened when the server starts."""

from __future__ import annotations

import os
from pathlib import Path

from starlette.datastructures import State

from openk3.serve.batches.store import BatchStore
from openk3.serve.document_search import DocumentSearch
from openk3.serve.files.store import FileStore
from openk3.serve.keys.ledger import Ledger
from openk3.serve.keys.limiter import Limiter
from openk3.serve.keys.store import KeyStore
from openk3.serve.responses.store import ResponseStore
from openk3.serve.state.database import Database
from openk3.weights.store import cache_root


def default_state_folder() -> Path:
    """`$OPENK3_STATE`, or `server` in the cache directory."""
    named = os.environ.get("OPENK3_STATE")
    return Path(named).expanduser().absolute() if named else cache_root() / "server"


def open_database(folder: Path) -> Database:
    """The database of the server whose state is in `folder`.

    Raises:
        StateError: it cannot be opened.
    """
    return Database(folder / "state.sqlite3")


def open_state(state: State, folder: Path) -> None:
    """Open every store for the application's `state`, and remove what a killed server left half done.

    Raises:
        StateError: the database cannot be opened.
    """
    state.database = open_database(folder)
    state.files = FileStore(state.database, folder / "files")
    state.files.sweep()
    state.keys = KeyStore(state.database)
    state.ledger = Ledger(state.database)
    state.limiter = Limiter()
    state.responses = ResponseStore(state.database)
    state.search = DocumentSearch(folder / "search.sqlite3")
    state.batches = BatchStore(state.database)


def close_state(state: State) -> None:
    state.ledger.close()
    state.search.close()
    state.database.close()
