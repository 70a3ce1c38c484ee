"""The conversations of the web chat, in one SQLite file.

Everything the page shows lives here, so a reload, a second tab, or a killed server loses at most the last second of a
running answer. The file is in write-ahead-log mode and every change is one transaction; a partial unique index allows
one running reply per conversation, which is what keeps two tabs (or two servers on one file) from interleaving
answers.

Calls are short (a few rows each) and safe from any thread.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from openk3.serve.web.settings import ChatSettings

Role = Literal["user", "assistant"]
Status = Literal["complete", "streaming", "stopped", "interrupted", "failed"]

SCHEMA_VERSION = 1
_BUSY = "An answer is still being written here. Stop it or wait for its end."
_GONE = "This conversation was deleted in the meantime."
TITLE_LENGTH = 60

_SCHEMA = """
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


class StoreError(Exception):
    """The conversation file cannot be read or written; the text is one sentence for the user."""


class ConversationBusyError(StoreError):
    """A reply is already being written in this conversation."""


class ConversationGoneError(StoreError):
    """The conversation or message was deleted or changed meanwhile, for instance in another tab."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A text file on a user message: its name, its text and (where the model was loaded) its length in tokens."""

    name: str
    text: str
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ReplyStats:
    """What one answer cost. Times in seconds, speeds in tokens per second; None where it was not measured."""

    completion_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_s: float | None = None
    tokens_per_second: float | None = None
    finish_reason: str | None = None
    model: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `status` is "complete" for user messages; `stats` belongs to replies."""

    id: int
    conversation_id: str
    role: Role
    content: str
    attachments: tuple[Attachment, ...] = ()
    status: Status = "complete"
    error: str = ""
    stats: ReplyStats | None = None
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of the list; times are Unix seconds."""

    id: str
    title: str
    settings: ChatSettings
    created_at: float
    updated_at: float


def title_from(text: str) -> str:
    """Make a title from the first line that says something, cut at a word where possible."""
    line = next((" ".join(line.split()) for line in text.splitlines() if line.strip()), "")
    if len(line) <= TITLE_LENGTH:
        return line or "New chat"
    cut = line[: TITLE_LENGTH - 1]
    head, space, _ = cut.rpartition(" ")
    return (head if space and len(head) > TITLE_LENGTH // 2 else cut).rstrip() + "…"


class Store:
    """Conversations and messages in the SQLite file at `path` (created, with its directory, for this user only).

    Raises `StoreError` when the file cannot be opened, is not a conversation file or comes from another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA foreign_keys=ON")
            self._create_tables()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"cannot open the chat history {path}: {error}; move the file away or free the path"
            ) from error

    def _create_tables(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            # Not executescript(), which would commit first: two servers may start on one new file.
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"it is no chat history of version {SCHEMA_VERSION}")
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the file; later calls raise `StoreError`."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One write transaction; SQLite's errors become sentences for the user."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
            except sqlite3.IntegrityError as error:
                if "messages.conversation_id" in str(error):
                    raise ConversationBusyError(_BUSY) from error
                raise ConversationGoneError(_GONE) from error
            except sqlite3.Error as error:
                raise StoreError(f"The chat history could not be saved: {error}.") from error

    def _rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            try:
                with closing(self._db.execute(sql, values)) as cursor:
                    return cursor.fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"The chat history could not be read: {error}.") from error

    # conversations

    def create(self, title: str, settings: ChatSettings) -> Conversation:
        """Add an empty conversation."""
        now = time.time()
        conversation = Conversation(uuid.uuid4().hex, title_from(title), settings, now, now)
        with self._transaction() as db:
            db.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?)",
                (conversation.id, conversation.title, settings.to_json(), now, now),
            )
        return conversation

    def conversations(self) -> list[Conversation]:
        """All conversations, the most recently used first."""
        return [_conversation(row) for row in self._rows("SELECT * FROM conversations ORDER BY updated_at DESC, id")]

    def conversation(self, conversation_id: str) -> Conversation | None:
        """The conversation, or None if there is none of this id."""
        rows = self._rows("SELECT * FROM conversations WHERE id = ?", conversation_id)
        return _conversation(rows[0]) if rows else None

    def rename(self, conversation_id: str, title: str) -> None:
        """Give a conversation a new title (its first line, shortened). ValueError if it is empty."""
        if not title.strip():
            raise ValueError("title: must not be empty; type a name for the conversation")
        with self._transaction() as db:
            db.execute("UPDATE conversations SET title = ? WHERE id = ?", (title_from(title), conversation_id))

    def delete(self, conversation_id: str) -> None:
        """Delete a conversation with its messages; deleting it twice is no error."""
        with self._transaction() as db:
            db.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

    def save_settings(self, conversation_id: str, settings: ChatSettings) -> None:
        """Keep the sampling settings of a conversation."""
        with self._transaction() as db:
            db.execute("UPDATE conversations SET settings = ? WHERE id = ?", (settings.to_json(), conversation_id))

    # messages

    def messages(self, conversation_id: str) -> list[Message]:
        """The messages of a conversation, oldest first."""
        return [
            _message(row)
            for row in self._rows("SELECT * FROM messages WHERE conversation_id = ? ORDER BY id", conversation_id)
        ]

    def begin_turn(self, conversation_id: str, text: str, attachments: Sequence[Attachment] = ()) -> Message:
        """Add a user message and the empty reply to it (status "streaming"); returns the reply.

        Raises `ConversationBusyError` while another reply is running, `ConversationGoneError` after a deletion.
        """
        with self._transaction() as db:
            self._touch(db, conversation_id)
            self._insert(db, conversation_id, "user", text, attachments, "complete")
            return self._insert(db, conversation_id, "assistant", "", (), "streaming")

    def begin_again(self, conversation_id: str) -> Message:
        """Replace the last reply, if there is one, by a new empty one (status "streaming"), which is returned.

        Raises `ConversationBusyError` while a reply is running, `ConversationGoneError` if there is nothing to answer.
        """
        with self._transaction() as db:
            self._touch(db, conversation_id)
            last = db.execute(
                "SELECT id, role, status FROM messages WHERE conversation_id = ? ORDER BY id DESC LIMIT 1",
                (conversation_id,),
            ).fetchone()
            if last is None:
                raise ConversationGoneError("There is no question to answer here any more.")
            if last["status"] == "streaming":
                raise ConversationBusyError(_BUSY)
            if last["role"] == "assistant":
                db.execute("DELETE FROM messages WHERE id = ?", (last["id"],))
            return self._insert(db, conversation_id, "assistant", "", (), "streaming")

    def begin_edited(self, message_id: int, text: str) -> Message:
        """Change a user message, drop everything after it, and add the empty reply (status "streaming"), returned.

        Raises `ConversationBusyError` while a reply is running, `ConversationGoneError` if the message was deleted.
        """
        with self._transaction() as db:
            row = db.execute("SELECT * FROM messages WHERE id = ? AND role = 'user'", (message_id,)).fetchone()
            if row is None:
                raise ConversationGoneError("This message was deleted in the meantime.")
            conversation_id = row["conversation_id"]
            self._touch(db, conversation_id)
            if db.execute(
                "SELECT 1 FROM messages WHERE conversation_id = ? AND status = 'streaming'", (conversation_id,)
            ).fetchone():
                raise ConversationBusyError(_BUSY)
            db.execute("DELETE FROM messages WHERE conversation_id = ? AND id > ?", (conversation_id, message_id))
            db.execute("UPDATE messages SET content = ? WHERE id = ?", (text, message_id))
            return self._insert(db, conversation_id, "assistant", "", (), "streaming")

    def save_reply(self, reply: Message) -> bool:
        """Write a running reply's text, status, error and stats. False if it no longer runs or was deleted."""
        stats = json.dumps(asdict(reply.stats)) if reply.stats else ""
        with self._transaction() as db:
            cursor = db.execute(
                "UPDATE messages SET content = ?, status = ?, error = ?, stats = ? "
                "WHERE id = ? AND status = 'streaming'",
                (reply.content, reply.status, reply.error, stats, reply.id),
            )
            return cursor.rowcount == 1

    def recover(self) -> int:
        """Mark the replies that a dead server left running as "interrupted"; returns how many."""
        with self._transaction() as db:
            return db.execute("UPDATE messages SET status = 'interrupted' WHERE status = 'streaming'").rowcount

    @staticmethod
    def _touch(db: sqlite3.Connection, conversation_id: str) -> None:
        if not db.execute(
            "UPDATE conversations SET updated_at = ? WHERE id = ?", (time.time(), conversation_id)
        ).rowcount:
            raise ConversationGoneError(_GONE)

    @staticmethod
    def _insert(
        db: sqlite3.Connection,
        conversation_id: str,
        role: Role,
        text: str,
        attachments: Sequence[Attachment],
        status: Status,
    ) -> Message:
        now = time.time()
        cursor = db.execute(
            "INSERT INTO messages (conversation_id, role, content, attachments, status, created_at) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (conversation_id, role, text, json.dumps([asdict(a) for a in attachments]), status, now),
        )
        assert cursor.lastrowid is not None
        return Message(cursor.lastrowid, conversation_id, role, text, tuple(attachments), status, created_at=now)


def _conversation(row: sqlite3.Row) -> Conversation:
    return Conversation(
        row["id"], row["title"], ChatSettings.from_json(row["settings"]), row["created_at"], row["updated_at"]
    )


def _message(row: sqlite3.Row) -> Message:
    return Message(
        id=row["id"],
        conversation_id=row["conversation_id"],
        role=row["role"],
        content=row["content"],
        attachments=tuple(Attachment(**item) for item in json.loads(row["attachments"])),
        status=row["status"],
        error=row["error"],
        stats=ReplyStats(**json.loads(row["stats"])) if row["stats"] else None,
        created_at=row["created_at"],
    )
