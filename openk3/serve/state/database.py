"""One SQLite file that the server's threads, and `k3 keys` and `k3 usage` beside it, read and write at the same time.

It is in write-ahead-log mode and every change is one transaction, so a process killed at any moment leaves all of a
change or nothing. Each store makes its own tables; their calls are short (a few rows) and safe from any thread.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
# How long a change waits for another process's before it gives up.
_BUSY_S = 10.0


class StateError(ValueError):
    """The server's state cannot be read or written; the text is one sentence for the user."""


class Database:
    """The SQLite file at `path`, made with its folder where it is missing, readable by this user only.

    Raises:
        StateError: it cannot be opened, is no such database, or comes from a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._depth = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                self._db.close()
                raise StateError(f"{path} was written by a newer OpenK3: update this one, or move the file away")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise StateError(
                f"cannot open {path}: {error}; move it away, or set OPENK3_HOME to another place"
            ) from None

    def make(self, schema: str) -> None:
        """Create the tables of `schema`, which says ``IF NOT EXISTS``."""
        with self._lock:
            self._db.executescript(schema)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Several statements that happen together or, after an exception, not at all. One inside of another is a part
        of that."""
        with self._lock:
            if self._depth == 0:
                self._db.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield self._db
                if self._depth == 1:
                    self._db.execute("COMMIT")
            except BaseException:
                if self._depth == 1:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._depth -= 1

    def rows(self, statement: str, arguments: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(statement, arguments).fetchall()

    def row(self, statement: str, arguments: tuple[Any, ...] = ()) -> sqlite3.Row | None:
        with self._lock:
            row: sqlite3.Row | None = self._db.execute(statement, arguments).fetchone()
            return row

    def change(self, statement: str, arguments: tuple[Any, ...] = ()) -> int:
        """Run one statement and return how many rows it changed."""
        with self._lock:
            return self._db.execute(statement, arguments).rowcount

    def close(self) -> None:
        with self._lock:
            self._db.close()
