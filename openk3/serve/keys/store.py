"""API keys, at rest as salted hashes.

A key is ``k3-<id>-<secret>`` with a secret of 256 random bits. That many cannot be guessed, so one round of SHA-256
over a salt and the secret is as good as a slow password hash and costs a request nothing. The whole key is shown once,
when it is made; the database holds its id, salt and hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass
from typing import Any

from openk3.serve.state.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    salt BLOB NOT NULL,
    hash BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    revoked_at INTEGER,
    requests_per_minute INTEGER,
    tokens_per_minute INTEGER,
    tokens_per_day INTEGER
);
"""
_KEY = re.compile(r"k3-([0-9a-f]{8})-([A-Za-z0-9_-]{43})")
MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, without its secret. A limit of None is no limit; times are Unix seconds."""

    id: str
    name: str
    created_at: int
    revoked_at: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class KeyStore:
    """The keys in `database`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.make(_SCHEMA)

    def create(
        self,
        name: str,
        *,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        tokens_per_day: int | None = None,
    ) -> tuple[ApiKey, str]:
        """Make a key; returns it and its text, which cannot be had again.

        Raises:
            ValueError: a bad name, or a limit that is not a positive number.
        """
        if not name.strip() or len(name) > MAX_NAME or not name.isprintable():
            raise ValueError(f"name: {name[:MAX_NAME]!r} is not 1 to {MAX_NAME} printable characters")
        limits = {
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "tokens_per_day": tokens_per_day,
        }
        for field, limit in limits.items():
            if limit is not None and not 1 <= limit < 2**53:
                raise ValueError(f"{field}: {limit} is not a positive number; leave it out for no limit")
        key_id, secret, salt = secrets.token_hex(4), secrets.token_urlsafe(32), secrets.token_bytes(16)
        key = ApiKey(key_id, name.strip(), int(time.time()), None, *limits.values())
        self._database.change(
            "INSERT INTO keys (id, name, salt, hash, created_at, requests_per_minute, tokens_per_minute, "
            "tokens_per_day) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (key.id, key.name, salt, _hash(salt, secret), key.created_at, *limits.values()),
        )
        return key, f"k3-{key_id}-{secret}"

    def list(self) -> list[ApiKey]:
        """Every key that was ever made, the revoked ones too, in order."""
        return [_key(row) for row in self._database.rows("SELECT * FROM keys ORDER BY number")]

    def get(self, key_id: str) -> ApiKey | None:
        row = self._database.row("SELECT * FROM keys WHERE id = ?", (key_id,))
        return None if row is None else _key(row)

    def revoke(self, key_id: str) -> bool:
        """Make a key worthless from now on; False if there is none of that id that still works."""
        statement = "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"
        return self._database.change(statement, (int(time.time()), key_id)) > 0

    def any(self) -> bool:
        """Whether a key was ever made: from then on the server asks for one, also when the last was revoked."""
        return self._database.row("SELECT 1 FROM keys LIMIT 1") is not None

    def check(self, text: str) -> ApiKey | None:
        """The key that `text` is, if it is one and not revoked. Takes as long for a wrong secret as for a right one."""
        match = _KEY.fullmatch(text)
        row = self._database.row("SELECT * FROM keys WHERE id = ?", (match[1],)) if match else None
        salt, expected = (row["salt"], row["hash"]) if row is not None else (b"", b"")
        right = hmac.compare_digest(_hash(salt, match[2] if match else ""), expected)
        return _key(row) if row is not None and right and row["revoked_at"] is None else None


def _hash(salt: bytes, secret: str) -> bytes:
    return hashlib.sha256(salt + secret.encode()).digest()


def _key(row: Any) -> ApiKey:
    return ApiKey(*(row[name] for name in ApiKey.__dataclass_fields__))
