"""The tables of the conversation file, and how a file of an older version becomes one of today's.

Each step leads from one version to the next (version n has taken n steps), so a new file and an old one end with the
same tables. All steps that a file lacks are one transaction: a killed upgrade leaves the old file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_1 = """
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL,
    settings TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
    content TEXT NOT NULL,
    attachments TEXT NOT NULL DEFAULT '[]',
    status TEXT NOT NULL CHECK (status IN ('complete', 'streaming', 'stopped', 'interrupted', 'failed')),
    error TEXT NOT NULL DEFAULT '',
    stats TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL
);
CREATE INDEX messages_in_order ON messages(conversation_id, id);
CREATE UNIQUE INDEX one_running_reply ON messages(conversation_id) WHERE status = 'streaming';
"""

# Messages become a tree, replies keep their thinking and calls, conversations can be pinned. Parents do not cascade:
# SQLite follows a chain of cascades for a thousand messages only, and all go with their conversation anyway.
_VERSION_2 = """
ALTER TABLE conversations ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
ALTER TABLE conversations ADD COLUMN head_id INTEGER;
ALTER TABLE messages ADD COLUMN parent_id INTEGER REFERENCES messages(id) DEFERRABLE INITIALLY DEFERRED;
ALTER TABLE messages ADD COLUMN work TEXT NOT NULL DEFAULT '[]';
CREATE INDEX messages_by_parent ON messages(parent_id);
UPDATE messages SET parent_id = (
    SELECT max(before.id) FROM messages AS before
    WHERE before.conversation_id = messages.conversation_id AND before.id < messages.id
);
UPDATE conversations SET head_id = (SELECT max(id) FROM messages WHERE conversation_id = conversations.id);
"""

STEPS = (_VERSION_1, _VERSION_2)
VERSION = len(STEPS)


def upgrade(db: sqlite3.Connection) -> None:
    """Bring the open file to `VERSION`.

    Raises:
        sqlite3.DatabaseError: it holds something else, or comes from a later version.
    """
    with _transaction(db):
        _take_steps(db)


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")  # of two servers that start on one file the second waits
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _take_steps(db: sqlite3.Connection) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if not (0 < version <= VERSION or (version == 0 and empty)):
        raise sqlite3.DatabaseError(f"it is no chat history of version {VERSION} or older")
    for step in STEPS[version:]:
        for statement in step.split(";"):  # not executescript(), which would commit first
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {VERSION}")
