"""Responses that a client may ask for again or go on from, in the server's database.

A response is written once, when it is finished, in one transaction: after a crash it is there whole or not at all. With
it goes what was new in its request; what was before is found by following `previous`. After 30 days a response is
forgotten, as at OpenAI.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from openk3.serve.errors import ApiError, shown
from openk3.serve.state.database import Database

_KEPT_S = 30 * 24 * 3600
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    created INTEGER NOT NULL,
    owner TEXT NOT NULL,
    input TEXT NOT NULL,
    response TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_created ON responses (created);
CREATE TABLE IF NOT EXISTS response_items (
    item TEXT NOT NULL,
    holder TEXT NOT NULL,
    PRIMARY KEY (item, holder)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS response_items_holder ON response_items (holder);
CREATE TRIGGER IF NOT EXISTS response_deleted AFTER DELETE ON responses BEGIN
    DELETE FROM response_items WHERE holder = old.id;
END;
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
    def items(self) -> list[dict[str, Any]]:
        """All of its items, those of its request first."""
        return [*self.input, *self.response["output"]]

    @property
    def previous(self) -> str | None:
        previous: str | None = self.response["previous_response_id"]
        return previous


class ResponseStore:
    """The responses in `database`. Each belongs to an owner, the API key that asked for it; to others it is not there.
    For any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.make(_SCHEMA)

    def save(self, stored: Stored, owner: str) -> None:
        """Write a response down, and forget those that are too old."""
        now = int(time.time())
        with self._database.transaction() as db:
            db.execute("DELETE FROM responses WHERE created < ?", (now - _KEPT_S,))
            row = (stored.id, now, owner, _json(stored.input), _json(stored.response))
            db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", row)
            ids = {item["id"] for item in stored.items}
            db.executemany("INSERT INTO response_items VALUES (?, ?)", [(item, stored.id) for item in ids])

    def get(self, response_id: str, owner: str, param: str | None = None) -> Stored:
        """Return a response.

        Raises:
            ApiError: 404, there is none of that id; `param` names where it was asked for.
        """
        statement = "SELECT input, response FROM responses WHERE id = ? AND owner = ?"
        row = self._database.row(statement, (response_id, owner))
        if row is None:
            raise _missing(response_id, param)
        return Stored(json.loads(row["input"]), json.loads(row["response"]))

    def item(self, item_id: str, owner: str) -> dict[str, Any] | None:
        """Return an item of any response, if it is there."""
        statement = (
            "SELECT input, response FROM responses JOIN response_items ON id = holder "
            "WHERE item = ? AND owner = ? LIMIT 1"
        )
        row = self._database.row(statement, (item_id, owner))
        if row is None:
            return None
        items = Stored(json.loads(row["input"]), json.loads(row["response"])).items
        return next(item for item in items if item["id"] == item_id)

    def conversation(self, response_id: str, owner: str) -> list[Stored]:
        """Return the response that a request goes on from, and all before it, the first first.

        Raises:
            ApiError: 404, one of them is not there (any more).
        """
        chain: list[Stored] = []
        wanted: str | None = response_id
        while wanted is not None:
            chain.append(self.get(wanted, owner, "previous_response_id"))
            wanted = chain[-1].previous
        return chain[::-1]

    def delete(self, response_id: str, owner: str) -> None:
        """Forget a response, and with it how the conversations that went on from it began.

        Raises:
            ApiError: 404, there is none of that id.
        """
        if not self._database.change("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)):
            raise _missing(response_id, None)


def _missing(response_id: str, param: str | None) -> ApiError:
    return ApiError(
        404,
        f"There is no response {shown(response_id)}; it was not stored, was deleted, or is older than 30 days.",
        param=param,
        code="previous_response_not_found" if param else "response_not_found",
    )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
