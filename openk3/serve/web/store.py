"""The conversations of the web chat, in one SQLite file.

Everything the page shows lives here, so a reload, a second tab, or a killed server loses at most the last second of a
running answer. The file is in write-ahead-log mode and every change is one transaction; a partial unique index allows
one running reply per conversation, which is what keeps two tabs (or two servers on one file) from interleaving
answers.

Nothing that was written is overwritten: a message that is edited and an answer that is regenerated stay beside the new
one as its siblings, and a conversation's head says which branch is shown. Ids grow, so a parent's is always less than
its child's, and the greatest of a branch is its end.

Calls are short (a few rows each) and safe from any thread.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openk3.serve.web import schema
from openk3.serve.web.records import (
    Attachment,
    Conversation,
    ConversationBusyError,
    ConversationGoneError,
    Found,
    Message,
    ReplyStats,
    Role,
    Status,
    StoreError,
    title_from,
    work_from_json,
    work_to_json,
)
from openk3.serve.web.settings import ChatSettings

SEARCH_LIMIT = 50

_PATH = """
WITH RECURSIVE path(id, parent_id) AS (
    SELECT messages.id, messages.parent_id FROM messages JOIN conversations ON messages.id = head_id
    WHERE conversations.id = ?
    UNION ALL
    SELECT messages.id, messages.parent_id FROM messages JOIN path ON messages.id = path.parent_id
)
SELECT messages.* FROM messages JOIN path USING (id) ORDER BY id
"""
_END_OF_BRANCH = """
WITH RECURSIVE branch(id) AS (
    SELECT ?
    UNION ALL
    SELECT messages.id FROM messages JOIN branch ON messages.parent_id = branch.id
)
SELECT max(id) FROM branch
"""


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
            self._db.create_function("folded", 1, _folded, deterministic=True)
            schema.upgrade(self._db)
        except (sqlite3.Error, OSError) as error:
            raise StoreError("store_cannot_open", path=path, error=error) from error

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
                    raise ConversationBusyError("busy") from error
                raise ConversationGoneError("gone") from error
            except sqlite3.Error as error:
                raise StoreError("store_cannot_write", error=error) from error

    def _rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            try:
                with closing(self._db.execute(sql, values)) as cursor:
                    return cursor.fetchall()
            except sqlite3.Error as error:
                raise StoreError("store_cannot_read", error=error) from error

    # conversations

    def create(self, title: str, settings: ChatSettings) -> Conversation:
        """Add an empty conversation."""
        now = time.time()
        conversation = Conversation(uuid.uuid4().hex, title_from(title), settings, now, now)
        with self._transaction() as db:
            db.execute(
                "INSERT INTO conversations (id, title, settings, created_at, updated_at) VALUES (?, ?, ?, ?, ?)",
                (conversation.id, conversation.title, settings.to_json(), now, now),
            )
        return conversation

    def conversations(self) -> list[Conversation]:
        """All conversations, the pinned ones and then the most recently used first."""
        rows = self._rows("SELECT * FROM conversations ORDER BY pinned DESC, updated_at DESC, id")
        return [_conversation(row) for row in rows]

    def search(self, words: str) -> list[Found]:
        """The conversations whose title, or one of whose messages on any branch, holds all `words`, whatever the case.

        In the order of `conversations`, at most `SEARCH_LIMIT`.
        """
        terms = words.casefold().split()
        if not terms:
            return []
        holds = " AND ".join(["instr(folded({0}), ?) > 0"] * len(terms))
        rows = self._rows(
            "SELECT conversations.*, found.message_id, found.content FROM conversations LEFT JOIN ("
            "  SELECT conversation_id, max(id) AS message_id, content FROM messages"
            f"  WHERE {holds.format('content')} GROUP BY conversation_id"
            f") AS found ON found.conversation_id = conversations.id WHERE message_id OR ({holds.format('title')}) "
            "ORDER BY pinned DESC, updated_at DESC, id LIMIT ?",
            *terms,
            *terms,
            SEARCH_LIMIT,
        )
        return [Found(_conversation(row), row["message_id"], row["content"] or "") for row in rows]

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

    def pin(self, conversation_id: str, pinned: bool) -> None:
        """Keep a conversation at the top of the list, or no longer."""
        with self._transaction() as db:
            db.execute("UPDATE conversations SET pinned = ? WHERE id = ?", (int(pinned), conversation_id))

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
        """The messages of the branch that is shown, oldest first."""
        with self._lock:
            return self._with_siblings(conversation_id, self._rows(_PATH, conversation_id))

    def tree(self, conversation_id: str) -> list[Message]:
        """All messages of all branches, oldest first."""
        with self._lock:
            rows = self._rows("SELECT * FROM messages WHERE conversation_id = ? ORDER BY id", conversation_id)
            return self._with_siblings(conversation_id, rows)

    def _with_siblings(self, conversation_id: str, rows: Sequence[sqlite3.Row]) -> list[Message]:
        children: defaultdict[int | None, list[int]] = defaultdict(list)
        everything = "SELECT id, parent_id FROM messages WHERE conversation_id = ? ORDER BY id"
        for message_id, parent_id in self._rows(everything, conversation_id):
            children[parent_id].append(message_id)
        return [_message(row, tuple(children[row["parent_id"]])) for row in rows]

    def recent_stats(self, limit: int) -> list[ReplyStats]:
        """What the latest answers of all conversations cost, the latest first."""
        rows = self._rows("SELECT stats FROM messages WHERE stats != '' ORDER BY id DESC LIMIT ?", limit)
        return [ReplyStats(**json.loads(row["stats"])) for row in rows]

    def begin_turn(self, conversation_id: str, text: str, attachments: Sequence[Attachment] = ()) -> Message:
        """Add a user message to the branch that is shown, and the empty reply to it (status "streaming"), returned.

        Raises `ConversationBusyError` while another reply is running, `ConversationGoneError` after a deletion.
        """
        with self._transaction() as db:
            head_id = self._touch(db, conversation_id)
            question = self._insert(db, conversation_id, head_id, "user", text, attachments, "complete")
            return self._insert(db, conversation_id, question.id, "assistant", "", (), "streaming")

    def begin_again(self, conversation_id: str, reply_id: int | None = None) -> Message:
        """Add an empty reply (status "streaming"), returned, beside `reply_id`, or beside the last reply shown.

        Raises `ConversationBusyError` while a reply is running, `ConversationGoneError` if there is nothing to answer.
        """
        with self._transaction() as db:
            head_id = self._touch(db, conversation_id)
            row = db.execute(
                "SELECT id, parent_id, role FROM messages WHERE id = ? AND conversation_id = ?",
                (head_id if reply_id is None else reply_id, conversation_id),
            ).fetchone()
            if row is None:
                raise ConversationGoneError("nothing_to_answer")
            question_id = row["parent_id"] if row["role"] == "assistant" else row["id"]
            return self._insert(db, conversation_id, question_id, "assistant", "", (), "streaming")

    def begin_edited(self, message_id: int, text: str) -> Message:
        """Add another version of a user message, with its files, and the empty reply (status "streaming"), returned.

        Raises `ConversationBusyError` while a reply is running, `ConversationGoneError` if the message was deleted.
        """
        with self._transaction() as db:
            row = db.execute("SELECT * FROM messages WHERE id = ? AND role = 'user'", (message_id,)).fetchone()
            if row is None:
                raise ConversationGoneError("message_gone")
            conversation_id = row["conversation_id"]
            self._touch(db, conversation_id)
            files = _message(row).attachments
            question = self._insert(db, conversation_id, row["parent_id"], "user", text, files, "complete")
            return self._insert(db, conversation_id, question.id, "assistant", "", (), "streaming")

    def select(self, message_id: int) -> None:
        """Show the branch that `message_id` is on, down to its newest message.

        Raises `ConversationGoneError` if the message was deleted.
        """
        with self._transaction() as db:
            end = db.execute(_END_OF_BRANCH, (message_id,)).fetchone()[0]
            changed = db.execute(
                "UPDATE conversations SET head_id = ? WHERE id = (SELECT conversation_id FROM messages WHERE id = ?)",
                (end, message_id),
            )
            if not changed.rowcount:
                raise ConversationGoneError("message_gone")

    def save_reply(self, reply: Message) -> bool:
        """Write a running reply's text, work, status, error and stats. False if it no longer runs or was deleted."""
        stats = json.dumps(asdict(reply.stats)) if reply.stats else ""
        with self._transaction() as db:
            cursor = db.execute(
                "UPDATE messages SET content = ?, work = ?, status = ?, error = ?, stats = ? "
                "WHERE id = ? AND status = 'streaming'",
                (reply.content, work_to_json(reply.work), reply.status, reply.error, stats, reply.id),
            )
            return cursor.rowcount == 1

    def recover(self) -> int:
        """Mark the replies that a dead server left running as "interrupted"; returns how many."""
        with self._transaction() as db:
            return db.execute("UPDATE messages SET status = 'interrupted' WHERE status = 'streaming'").rowcount

    @staticmethod
    def _touch(db: sqlite3.Connection, conversation_id: str) -> int | None:
        """Note that the conversation is used now; return its head."""
        row = db.execute(
            "UPDATE conversations SET updated_at = ? WHERE id = ? RETURNING head_id", (time.time(), conversation_id)
        ).fetchone()
        if row is None:
            raise ConversationGoneError("gone")
        head_id: int | None = row["head_id"]
        return head_id

    @staticmethod
    def _insert(
        db: sqlite3.Connection,
        conversation_id: str,
        parent_id: int | None,
        role: Role,
        text: str,
        attachments: Sequence[Attachment],
        status: Status,
    ) -> Message:
        """Add a message below `parent_id` and show its branch."""
        now = time.time()
        cursor = db.execute(
            "INSERT INTO messages (conversation_id, parent_id, role, content, attachments, status, created_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (conversation_id, parent_id, role, text, json.dumps([asdict(a) for a in attachments]), status, now),
        )
        message_id = cursor.lastrowid
        assert message_id is not None
        db.execute("UPDATE conversations SET head_id = ? WHERE id = ?", (message_id, conversation_id))
        siblings = db.execute(
            "SELECT id FROM messages WHERE conversation_id = ? AND parent_id IS ? ORDER BY id",
            (conversation_id, parent_id),
        )
        return Message(
            message_id,
            conversation_id,
            role,
            text,
            tuple(attachments),
            status,
            created_at=now,
            parent_id=parent_id,
            siblings=tuple(row["id"] for row in siblings),
        )


def _folded(text: Any) -> str:
    return str(text).casefold()


def _conversation(row: sqlite3.Row) -> Conversation:
    return Conversation(
        row["id"],
        row["title"],
        ChatSettings.from_json(row["settings"]),
        row["created_at"],
        row["updated_at"],
        bool(row["pinned"]),
        row["head_id"],
    )


def _message(row: sqlite3.Row, siblings: tuple[int, ...] = ()) -> Message:
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
        parent_id=row["parent_id"],
        work=work_from_json(row["work"]),
        siblings=siblings,
    )
