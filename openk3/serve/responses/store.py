"""Responses that a client may ask for again or go on from, in an SQLite file.

A response is written once, when it is finished, in one transaction: after a crash it is there whole or not at all. With
it goes what was new in its request; what was before is found by following `previous`. After 30 days a response is
forgotten, as at OpenAI.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.serve.errors import ApiError, shown

_KEPT_S = 30 * 24 * 3600
_VERSION = 1
_SCHEMA = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    created INTEGER NOT NULL,
    previous TEXT,
    input TEXT NOT NULL,
    response TEXT NOT NULL
);
CREATE INDEX responses_created ON responses (created)
"""


@dataclass(frozen=True)
class Stored:
    """A finished response.

    Attributes:
        input: the items of its request, without those of the responses before it.
        response: the API's object, with the output.
    """

    input: list[dict[str, Any]]
    response: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def previous(self) -> str | None:
        previous: str | None = self.response["previous_response_id"]
        return previous


class ResponseStore:
    """The file at `path`, made for this user alone when it is first needed. Safe to use from any thread.

    Every method raises ApiError 500 when the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None

    def save(self, stored: Stored) -> None:
        """Write a response down, and forget those that are too old."""
        row = (stored.id, int(time.time()), stored.previous, _json(stored.input), _json(stored.response))
        with self._using() as db:
            db.execute("DELETE FROM responses WHERE created < ?", (int(time.time()) - _KEPT_S,))
            db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", row)

    def get(self, response_id: str, param: str | None = None) -> Stored:
        """Return a response.

        Raises:
            ApiError: 404, there is none of that id; `param` names where it was asked for.
        """
        with self._using() as db:
            row = db.execute("SELECT input, response FROM responses WHERE id = ?", (response_id,)).fetchone()
        if row is None:
            raise _missing(response_id, param)
        return Stored(json.loads(row[0]), json.loads(row[1]))

    def conversation(self, response_id: str) -> list[Stored]:
        """Return the response that a request goes on from, and all before it, the first first.

        Raises:
            ApiError: 404, one of them is not there (any more).
        """
        chain: list[Stored] = []
        wanted: str | None = response_id
        while wanted is not None:
            chain.append(self.get(wanted, "previous_response_id"))
            wanted = chain[-1].previous
        return chain[::-1]

    def delete(self, response_id: str) -> None:
        """Forget a response, and with it how the conversations that went on from it began.

        Raises:
            ApiError: 404, there is none of that id.
        """
        with self._using() as db:
            deleted = db.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount
        if not deleted:
            raise _missing(response_id, None)

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """The file, in a transaction."""
        try:
            with self._lock:
                if self._db is None:
                    self._db = _opened(self.path)
                with self._db:
                    yield self._db
        except (sqlite3.Error, OSError) as error:
            raise ApiError(
                500, f"The file of stored responses cannot be used: {error}. Send 'store': false.", code="store_failed"
            ) from error


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    db = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA secure_delete=ON")
        with db:
            db.execute("BEGIN IMMEDIATE")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {_VERSION}")
            elif version != _VERSION:
                raise sqlite3.DatabaseError(f"{path} is no file of responses of version {_VERSION}")
    except BaseException:
        db.close()
        raise
    return db


def _missing(response_id: str, param: str | None) -> ApiError:
    return ApiError(
        404,
        f"There is no response {shown(response_id)}; it was not stored, was deleted, or is older than 30 days.",
        param=param,
        code="previous_response_not_found" if param else "response_not_found",
    )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
