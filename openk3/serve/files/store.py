"""Files that clients upload and that batches write: bytes in a folder, one row each in the database.

A file exists when its row does. Its bytes are written and flushed first, under the file's id; its row is added last;
deleting goes the other way. So a process killed at any moment leaves a whole file or bytes that nobody can ask for,
and those are swept when a server starts. Who writes holds a lock on the bytes, which the system lets go when the
process dies: a second server's sweep leaves running uploads alone.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from openk3.serve.state.database import Database
from openk3.weights.store import flush

Order = Literal["asc", "desc"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER
);
CREATE INDEX IF NOT EXISTS files_of_owner ON files(owner, number);
"""
_ID = re.compile(r"file-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file. `owner` is the id of the API key that made it, empty where the server has no keys; times are Unix
    seconds."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The API's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """The files in `folder`, whose rows are in `database`. Calls are safe from any thread."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.folder = folder
        self._database = database
        database.make(_SCHEMA)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def writer(self) -> FileWriter:
        """Begin a new file, to be used in a ``with``: it is there after `FileWriter.commit`, or leaves no trace."""
        return FileWriter(self._database, self.folder)

    def add(self, data: bytes, *, filename: str, purpose: str, owner: str = "") -> StoredFile:
        """Store a file that is in memory."""
        with self.writer() as writer:
            writer.write(data)
            return writer.commit(filename=filename, purpose=purpose, owner=owner)

    def get(self, file_id: str, owner: str = "") -> StoredFile | None:
        """The file; None if there is none of that id, or it is another owner's, or its time is over."""
        row = self._database.row("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner))
        file = None if row is None else _file(row)
        return None if file is None or _expired(file) else file

    def list(
        self,
        owner: str = "",
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int,
        order: Order = "desc",
    ) -> tuple[list[StoredFile], bool]:
        """A page of the owner's files by age, and whether there are more behind it.

        Args:
            after: id of the file that the page begins behind.

        Raises:
            KeyError: `after` is not among the owner's files.
        """
        where, arguments = "owner = ? AND (expires_at IS NULL OR expires_at > ?)", [owner, int(time.time())]
        if purpose is not None:
            where, arguments = f"{where} AND purpose = ?", [*arguments, purpose]
        if after is not None:
            start = self._database.row("SELECT number FROM files WHERE id = ? AND owner = ?", (after, owner))
            if start is None:
                raise KeyError(after)
            where = f"{where} AND number {'>' if order == 'asc' else '<'} ?"
            arguments = [*arguments, start["number"]]
        direction = "ASC" if order == "asc" else "DESC"
        rows = self._database.rows(
            f"SELECT * FROM files WHERE {where} ORDER BY number {direction} LIMIT ?", (*arguments, limit + 1)
        )
        return [_file(row) for row in rows[:limit]], len(rows) > limit

    def path(self, file: StoredFile) -> Path:
        """Where the file's bytes are."""
        return self.folder / file.id

    def delete(self, file_id: str, owner: str = "") -> bool:
        """Forget a file; False if there is none of that id for this owner."""
        if not self._database.change("DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner)):
            return False
        (self.folder / file_id).unlink(missing_ok=True)
        return True

    def sweep(self) -> int:
        """Delete files whose time is over, and bytes without a row that nobody is writing; how many were swept."""
        self._database.change("DELETE FROM files WHERE expires_at <= ?", (int(time.time()),))
        swept = 0
        for path in self.folder.iterdir():
            if _ID.fullmatch(path.name) is None:
                continue
            try:
                with path.open("rb") as bytes_, _locked(bytes_.fileno()):
                    if self._database.row("SELECT 1 FROM files WHERE id = ?", (path.name,)) is None:
                        path.unlink()
                        swept += 1
            except (BlockingIOError, FileNotFoundError):  # being written, or swept by another server
                continue
        return swept


class FileWriter:
    """A file that is being written. `id` and `size` (in bytes) are known from the beginning, and so far."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.id = f"file-{secrets.token_hex(16)}"
        self.size = 0
        self._database = database
        self._path = folder / self.id
        self._committed = False

    def __enter__(self) -> Self:
        while True:
            self._file = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if self._path.exists():
                return self
            self._file.close()  # swept by another server between the two lines above

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)

    def sync(self) -> None:
        """Wait until what was written has reached the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        flush(self._path.parent)

    def commit(self, *, filename: str, purpose: str, owner: str = "", expires_after_s: int | None = None) -> StoredFile:
        """Make the file exist, all of it on the disk."""
        self.sync()
        now = int(time.time())
        expires_at = None if expires_after_s is None else now + expires_after_s
        file = StoredFile(self.id, owner, filename, purpose, self.size, now, expires_at)
        self._database.change(
            "INSERT INTO files (id, owner, filename, purpose, bytes, created_at, expires_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.id, owner, filename, purpose, file.bytes, now, expires_at),
        )
        self._committed = True
        return file

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            self._path.unlink(missing_ok=True)
        try:
            self._file.close()
        except OSError:  # what is left in its buffer does not fit on the disk either
            if self._committed:
                raise


def _file(row: Any) -> StoredFile:
    return StoredFile(*(row[name] for name in StoredFile.__dataclass_fields__))


def _expired(file: StoredFile) -> bool:
    return file.expires_at is not None and file.expires_at <= time.time()


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """
    Raises:
        BlockingIOError: another process, or another part of this one, holds the lock.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield  # closing the file lets go
