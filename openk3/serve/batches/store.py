"""Batches and the results of their lines, in the database.

A line's result is one row, written when the line has been answered: after a kill the lines that have a row are not
done again, and no line can be in the output twice. The row and the counts it changes are one transaction. The output
files are made from the rows at the end, together with the batch's last status.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from openk3.serve.state.database import Database

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ACTIVE: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    model TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    status TEXT NOT NULL,
    times TEXT NOT NULL,
    metadata TEXT NOT NULL,
    errors TEXT NOT NULL DEFAULT '[]',
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    output_file_id TEXT,
    error_file_id TEXT
);
CREATE TABLE IF NOT EXISTS batch_lines (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    succeeded INTEGER NOT NULL,
    result TEXT NOT NULL,
    PRIMARY KEY (batch_id, number)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch. `model` is the id of the model that the server had when the batch was made; `times` has the Unix
    seconds at which it got each status; `errors` are what is wrong with all of it."""

    id: str
    owner: str
    model: str
    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: int
    status: Status
    times: Mapping[str, int]
    metadata: Mapping[str, str] | None
    errors: Sequence[Mapping[str, Any]] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The API's batch object."""
        times = {f"{status}_at": self.times.get(status) for status in get_args(Status) if status != "validating"}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.times["validating"],
            "expires_at": self.expires_at,
            **times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


@dataclass(frozen=True, slots=True)
class LineResult:
    """The answer to line `number` of the input, from 0; `result` is its line of the output or of the error file."""

    number: int
    succeeded: bool
    result: dict[str, Any] = field(hash=False)


class BatchStore:
    """The batches in `database`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.make(_SCHEMA)

    def create(
        self,
        *,
        owner: str,
        model: str,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        window_s: int,
        metadata: Mapping[str, str] | None,
    ) -> Batch:
        now = int(time.time())
        batch_id = f"batch_{secrets.token_hex(16)}"
        self._database.change(
            "INSERT INTO batches (id, owner, model, endpoint, input_file_id, completion_window, expires_at, status, "
            "times, metadata) VALUES (?, ?, ?, ?, ?, ?, ?, 'validating', ?, ?)",
            (
                *(batch_id, owner, model, endpoint, input_file_id, completion_window, now + window_s),
                *(json.dumps({"validating": now}), json.dumps(metadata)),
            ),
        )
        return self.require(batch_id)

    def get(self, batch_id: str, owner: str) -> Batch | None:
        row = self._database.row("SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner))
        return None if row is None else _batch(row)

    def require(self, batch_id: str) -> Batch:
        """The batch, which must be there."""
        row = self._database.row("SELECT * FROM batches WHERE id = ?", (batch_id,))
        assert row is not None, batch_id
        return _batch(row)

    def page(self, owner: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """A page of the owner's batches, the newest first, and whether there are more.

        Raises:
            KeyError: `after` is not among them.
        """
        where, arguments = "owner = ?", [owner]
        if after is not None:
            start = self._database.row("SELECT number FROM batches WHERE id = ? AND owner = ?", (after, owner))
            if start is None:
                raise KeyError(after)
            where, arguments = "owner = ? AND number < ?", [owner, start["number"]]
        rows = self._database.rows(
            f"SELECT * FROM batches WHERE {where} ORDER BY number DESC LIMIT ?", (*arguments, limit + 1)
        )
        return [_batch(row) for row in rows[:limit]], len(rows) > limit

    def active(self, model: str) -> list[Batch]:
        """The batches that a server with that model has work to do for, oldest first."""
        marks = ", ".join("?" * len(ACTIVE))
        rows = self._database.rows(
            f"SELECT * FROM batches WHERE model = ? AND status IN ({marks}) ORDER BY number", (model, *ACTIVE)
        )
        return [_batch(row) for row in rows]

    def move(self, batch_id: str, status: Status, *, of: Sequence[Status], **fields: Any) -> bool:
        """Give a batch another status, and more fields with it, if its status is one of `of`; whether it was."""
        with self._database.transaction() as db:
            row = db.execute("SELECT status, times FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if row is None or row["status"] not in of:
                return False
            values = {"status": status, "times": json.dumps(json.loads(row["times"]) | {status: int(time.time())})}
            values |= fields
            assignments = ", ".join(f"{name} = ?" for name in values)
            db.execute(f"UPDATE batches SET {assignments} WHERE id = ?", (*values.values(), batch_id))
            return True

    def add_result(self, batch_id: str, line: LineResult) -> None:
        """Keep the answer to a line; a second answer to the same line is dropped."""
        with self._database.transaction() as db:
            added = db.execute(
                "INSERT OR IGNORE INTO batch_lines VALUES (?, ?, ?, ?)",
                (batch_id, line.number, line.succeeded, json.dumps(line.result, ensure_ascii=False)),
            ).rowcount
            count = "completed" if line.succeeded else "failed"
            db.execute(f"UPDATE batches SET {count} = {count} + ? WHERE id = ?", (added, batch_id))

    def answered(self, batch_id: str) -> set[int]:
        """The numbers of the lines that have a result."""
        return {row[0] for row in self._database.rows("SELECT number FROM batch_lines WHERE batch_id = ?", (batch_id,))}

    def results(self, batch_id: str, *, succeeded: bool, at_a_time: int = 256) -> Iterator[str]:
        """The lines of the output (or of the error file), as JSON, in the order of the input."""
        last = -1
        while rows := self._database.rows(
            "SELECT number, result FROM batch_lines WHERE batch_id = ? AND succeeded = ? AND number > ? "
            "ORDER BY number LIMIT ?",
            (batch_id, succeeded, last, at_a_time),
        ):
            yield from (row["result"] for row in rows)
            last = rows[-1]["number"]

    def forget_lines(self, batch_id: str) -> None:
        """Drop the rows of a batch whose files are written."""
        self._database.change("DELETE FROM batch_lines WHERE batch_id = ?", (batch_id,))


def _batch(row: Any) -> Batch:
    values = {name: row[name] for name in Batch.__dataclass_fields__}
    for name in ("times", "metadata", "errors"):
        values[name] = json.loads(values[name])
    return Batch(**values)
