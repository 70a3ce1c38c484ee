"""What was used: requests and tokens per API key, day, endpoint and model, in the database.

Days are those of UTC. Rows are written by a thread of their own, in order, so that no reply waits for the disk; whoever
reads through the same `Ledger` sees everything that was recorded before.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from openk3.serve.state.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    owner TEXT NOT NULL,
    day TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    model TEXT NOT NULL,
    requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (owner, day, endpoint, model)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request or of many. `cached_tokens` are those of the prompt that were not computed again."""

    requests: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, name) + getattr(other, name) for name in Usage.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """The use that one key (or nobody: an empty `owner`) made of one model at one endpoint in one day (ISO date)."""

    owner: str
    day: str
    endpoint: str
    model: str
    usage: Usage

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self.usage, name) for name in Usage.__dataclass_fields__}
        return {"day": self.day, "endpoint": self.endpoint, "model": self.model, **fields}


class Ledger:
    """The usage in `database`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.make(_SCHEMA)
        self._writer = ThreadPoolExecutor(1, "openk3-ledger")

    def record(self, owner: str, endpoint: str, model: str, usage: Usage) -> None:
        """Add to today's row; returns at once."""
        self._writer.submit(
            self._database.change,
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
            "cached_tokens = cached_tokens + excluded.cached_tokens, "
            "completion_tokens = completion_tokens + excluded.completion_tokens",
            (
                *(owner, _today().isoformat(), endpoint, model),
                *(usage.requests, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
            ),
        )

    def rows(self, *, days: int, owner: str | None = None) -> list[LedgerRow]:
        """The rows of the last `days` days, today included, oldest first; of one owner or of all."""
        self._flush()
        first = (_today() - timedelta(days=days - 1)).isoformat()
        where, arguments = ("", (first,)) if owner is None else ("AND owner = ?", (first, owner))
        found = self._database.rows(f"SELECT * FROM usage WHERE day >= ? {where} ORDER BY day, owner", arguments)
        return [
            LedgerRow(row["owner"], row["day"], row["endpoint"], row["model"], Usage(*tuple(row)[4:])) for row in found
        ]

    def tokens_today(self, owner: str) -> int:
        """Tokens of prompts and replies that the owner has used since midnight UTC."""
        self._flush()
        row = self._database.row(
            "SELECT TOTAL(prompt_tokens + completion_tokens) FROM usage WHERE owner = ? AND day = ?",
            (owner, _today().isoformat()),
        )
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        """Write what is still to be written."""
        self._writer.shutdown()

    def _flush(self) -> None:
        self._writer.submit(int).result()


def _today() -> Any:
    return datetime.now(UTC).date()
