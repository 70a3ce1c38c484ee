"""The conversation file: what it keeps, what it refuses, and that neither many writers nor a killed server harm it."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from openk3.serve.web import schema
from openk3.serve.web.records import (
    Attachment,
    ConversationBusyError,
    ConversationGoneError,
    ReplyStats,
    Said,
    StoreError,
    Thinking,
    ToolUse,
    title_from,
)
from openk3.serve.web.settings import ChatSettings
from openk3.serve.web.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "deep" / "chat.sqlite3")


def turn(store: Store, conversation_id: str, question: str, answer: str) -> None:
    reply = store.begin_turn(conversation_id, question)
    assert store.save_reply(replace(reply, content=answer, status="complete"))


def texts(store: Store, conversation_id: str) -> list[str]:
    return [message.content for message in store.messages(conversation_id)]


def test_everything_comes_back_from_the_file(store: Store) -> None:
    settings = ChatSettings(temperature=0.1, seed=3, system_prompt="请简短。")
    conversation = store.create("What is\n  this 世界?", settings)
    files = (Attachment("数据.csv", "a,b\n1,2\n", 7), Attachment("b.txt", "x"))
    reply = store.begin_turn(conversation.id, "hello 🌍\0!", files)
    stats = ReplyStats(12, 5, 3, 0.25, 40.0, "stop", "debug")
    assert store.save_reply(replace(reply, content="**hi**", status="complete", stats=stats))
    again = Store(store.path)
    assert again.conversations() == store.conversations()
    assert again.conversation(conversation.id).settings == settings
    user, answer = again.messages(conversation.id)
    assert (user.role, user.content, user.attachments) == ("user", "hello 🌍\0!", files)
    assert (answer.content, answer.status, answer.stats) == ("**hi**", "complete", stats)
    assert oct(store.path.stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("", "New chat"),
        (" \n\n  first   line \nsecond", "first line"),
        ("a" * 100, "a" * 59 + "…"),
        ("word " * 30, "word " * 10 + "word word"[:4] + "…"),
        ("中" * 80, "中" * 59 + "…"),
    ],
)
def test_titles_come_from_the_first_line(text: str, title: str) -> None:
    assert title_from(text) == title


def test_the_most_recent_conversation_comes_first(store: Store) -> None:
    first, second = store.create("first", ChatSettings()), store.create("second", ChatSettings())
    assert [c.title for c in store.conversations()] == ["second", "first"]
    turn(store, first.id, "q", "a")
    assert [c.title for c in store.conversations()] == ["first", "second"]
    store.rename(second.id, "  two\nlines ")
    assert store.conversation(second.id).title == "two"
    with pytest.raises(ValueError, match="title: must not be empty"):
        store.rename(second.id, " \n")


def test_regenerating_adds_a_version_beside_the_old_answer(store: Store) -> None:
    chat = store.create("c", ChatSettings()).id
    with pytest.raises(ConversationGoneError, match="no question"):
        store.begin_again(chat)
    turn(store, chat, "q1", "a1")
    turn(store, chat, "q2", "a2")
    old = store.messages(chat)[-1]
    reply = store.begin_again(chat)
    assert texts(store, chat) == ["q1", "a1", "q2", ""]
    store.save_reply(replace(reply, content="a3", status="stopped"))
    assert texts(store, chat) == ["q1", "a1", "q2", "a3"]
    assert store.messages(chat)[-1].siblings == (old.id, reply.id) == reply.siblings
    first = store.messages(chat)[1]
    again = store.begin_again(chat, first.id)
    assert texts(store, chat) == ["q1", ""] and again.siblings == (first.id, again.id)
    store.save_reply(replace(again, content="b1", status="complete"))
    store.select(first.id)
    assert texts(store, chat) == ["q1", "a1", "q2", "a3"], "a branch is shown down to its newest message"
    store.select(old.id)
    assert texts(store, chat) == ["q1", "a1", "q2", "a2"]
    turn(store, chat, "q3", "a4")
    assert texts(store, chat) == ["q1", "a1", "q2", "a2", "q3", "a4"], "the chat goes on where it is shown"
    assert [m.content for m in store.tree(chat)] == ["q1", "a1", "q2", "a2", "a3", "b1", "q3", "a4"]


def test_an_edit_adds_a_version_beside_the_old_question(store: Store) -> None:
    chat = store.create("c", ChatSettings()).id
    reply = store.begin_turn(chat, "q1", [Attachment("f", "t")])
    store.save_reply(replace(reply, content="a1", status="complete"))
    turn(store, chat, "q2", "a2")
    first = store.messages(chat)[0]
    reply = store.begin_edited(first.id, "q1 better")
    assert texts(store, chat) == ["q1 better", ""]
    better = store.messages(chat)[0]
    assert better.attachments == first.attachments and better.siblings == (first.id, better.id)
    store.select(first.id)
    assert texts(store, chat) == ["q1", "a1", "q2", "a2"]
    with pytest.raises(ConversationGoneError, match="message was deleted"):
        store.begin_edited(reply.id, "an answer is not a question")
    with pytest.raises(ConversationGoneError, match="message was deleted"):
        store.select(99)


def test_a_reply_keeps_its_thinking_and_its_calls(store: Store) -> None:
    chat = store.create("c", ChatSettings()).id
    reply = store.begin_turn(chat, "q")
    work = (
        Thinking("hm, 想", 1.5),
        Said("let me see"),
        ToolUse("id1", "calculator", '{"expression": "1+1"}', 0, "done", "2", 0.01),
        ToolUse("id2", "datetime", "{", 1),
    )
    assert store.save_reply(replace(reply, content="2", work=work))
    assert Store(store.path).messages(chat)[-1].work == work


def test_search_finds_titles_and_messages_of_every_branch(store: Store) -> None:
    rivers, other = store.create("Rivers of Chile", ChatSettings()), store.create("Other", ChatSettings())
    turn(store, rivers.id, "How long is the Loa?", "It is 440 km long. STRASSE 100% a_b")
    turn(store, other.id, "早上好，你好吗？", "我很好")
    regenerated = store.begin_again(rivers.id)
    store.save_reply(replace(regenerated, content="shorter", status="complete"))

    def found(words: str) -> list[tuple[str, bool]]:
        return [(item.conversation.title, item.message_id is not None) for item in store.search(words)]

    assert found("CHILE") == [("Rivers of Chile", False)]
    assert found("440 KM") == [("Rivers of Chile", True)], "the answer is on a branch that is not shown"
    assert found("straße") == [("Rivers of Chile", True)]
    assert found("你好") == [("Other", True)]
    assert found("100%") == [("Rivers of Chile", True)] and found("aXb") == found("1000%") == []
    assert found("loa 440") == [], "all words in one message"
    assert found("  ") == []
    assert store.search("440")[0].text.startswith("It is 440 km")
    assert {title for title, _ in found("o")} == {"Rivers of Chile", "Other"}


def test_pinned_conversations_come_first(store: Store) -> None:
    first, second = store.create("first", ChatSettings()), store.create("second", ChatSettings())
    store.pin(first.id, True)
    turn(store, second.id, "q", "a")
    assert [(c.title, c.pinned) for c in store.conversations()] == [("first", True), ("second", False)]
    store.pin(first.id, False)
    assert [c.title for c in store.conversations()] == ["second", "first"]


def test_a_very_long_conversation_can_be_deleted(store: Store) -> None:
    chat = store.create("c", ChatSettings()).id
    with store._transaction() as db:
        parent = None
        for _ in range(1500):  # more than SQLite cascades through
            parent = store._insert(db, chat, parent, "user", "x", (), "complete").id
    assert len(store.messages(chat)) == 1500
    store.delete(chat)
    assert store.tree(chat) == []


VERSION_1 = """
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
INSERT INTO conversations VALUES ('a', 'One', '{"temperature": 0.5, "seed": 7, "system_prompt": "Be kind."}', 1.5, 2.5);
INSERT INTO conversations VALUES ('b', 'Two', '{}', 1.0, 3.0);
INSERT INTO conversations VALUES ('empty', 'Empty', '{}', 0.5, 0.5);
INSERT INTO messages
VALUES (1, 'a', 'user', 'q1', '[{"name": "f.txt", "text": "t", "tokens": 1}]', 'complete', '', '', 10);
INSERT INTO messages VALUES (2, 'b', 'user', '你好', '[]', 'complete', '', '', 11);
INSERT INTO messages
VALUES (3, 'a', 'assistant', 'a1', '[]', 'stopped', '', '{"completion_tokens": 3, "prompt_tokens": 5}', 12);
INSERT INTO messages VALUES (4, 'b', 'assistant', 'half', '[]', 'streaming', '', '', 13);
INSERT INTO messages VALUES (7, 'a', 'user', 'q2', '[]', 'complete', '', '', 14);
INSERT INTO messages VALUES (9, 'a', 'assistant', '', '[]', 'failed', 'Too long.', '', 15);
PRAGMA user_version = 1;
"""


def version_1(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.executescript(VERSION_1)
    db.close()


def test_a_file_of_version_1_is_upgraded_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite3"
    version_1(path)
    store = Store(path)
    assert [(c.id, c.title, c.created_at, c.updated_at, c.pinned) for c in store.conversations()] == [
        ("b", "Two", 1.0, 3.0, False),
        ("a", "One", 1.5, 2.5, False),
        ("empty", "Empty", 0.5, 0.5, False),
    ]
    one = store.conversation("a")
    assert one is not None
    assert one.settings == ChatSettings(temperature=0.5, seed=7, system_prompt="Be kind.")
    messages = store.messages("a")
    assert [(m.id, m.parent_id, m.role, m.content, m.status, m.error, m.created_at) for m in messages] == [
        (1, None, "user", "q1", "complete", "", 10),
        (3, 1, "assistant", "a1", "stopped", "", 12),
        (7, 3, "user", "q2", "complete", "", 14),
        (9, 7, "assistant", "", "failed", "Too long.", 15),
    ]
    assert messages[0].attachments == (Attachment("f.txt", "t", 1),)
    assert messages[1].stats == ReplyStats(completion_tokens=3, prompt_tokens=5)
    assert store.messages("empty") == []
    assert store.recover() == 1
    assert [(m.content, m.status) for m in store.messages("b")] == [("你好", "complete"), ("half", "interrupted")]
    turn(store, "empty", "q", "a")
    store.save_reply(replace(store.begin_again("a"), content="better", status="complete"))
    assert texts(store, "a") == ["q1", "a1", "q2", "better"]
    fresh = Store(tmp_path / "fresh.sqlite3")
    tables = "SELECT sql FROM sqlite_master ORDER BY name"
    upgraded, new = ([" ".join(str(r[0]).split()) for r in s._rows(tables)] for s in (store, fresh))
    assert upgraded == new


def test_an_upgrade_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.sqlite3"
    version_1(path)
    with sqlite3.connect(path) as db:
        before = list(db.iterdump())
    monkeypatch.setattr(schema, "STEPS", (*schema.STEPS[:-1], schema.STEPS[-1] + "; SELECT no_such_thing"))
    with pytest.raises(StoreError, match="no_such_thing"):
        Store(path)
    with sqlite3.connect(path) as db:
        assert list(db.iterdump()) == before
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    monkeypatch.undo()
    assert texts(Store(path), "a") == ["q1", "a1", "q2", ""]


def test_one_reply_at_a_time(store: Store) -> None:
    chat = store.create("c", ChatSettings()).id
    reply = store.begin_turn(chat, "q")
    question = store.messages(chat)[0]
    for attempt in (
        lambda: store.begin_turn(chat, "me too"),
        lambda: store.begin_again(chat),
        lambda: store.begin_edited(question.id, "changed"),
    ):
        with pytest.raises(ConversationBusyError, match="still being written"):
            attempt()
    assert texts(store, chat) == ["q", ""], "a refused change leaves nothing behind"
    assert store.save_reply(replace(reply, content="half", status="stopped"))
    assert not store.save_reply(replace(reply, content="late", status="complete")), "a settled reply stays as it is"
    assert texts(store, chat) == ["q", "half"]


def test_deleting_takes_the_messages_and_stops_later_writes(store: Store) -> None:
    chat = store.create("c", ChatSettings()).id
    reply = store.begin_turn(chat, "q")
    question = store.messages(chat)[0]
    store.delete(chat)
    store.delete(chat)
    assert store.conversations() == [] and store.messages(chat) == []
    assert not store.save_reply(replace(reply, content="late"))
    with pytest.raises(ConversationGoneError, match="deleted"):
        store.begin_turn(chat, "q")
    with pytest.raises(ConversationGoneError, match="deleted"):
        store.begin_edited(question.id, "q")


def test_many_threads_on_two_connections(store: Store) -> None:
    other = Store(store.path)
    chats = [store.create(str(i), ChatSettings()).id for i in range(4)]
    errors: list[BaseException] = []

    def work(connection: Store, chat: str, name: str) -> None:
        try:
            for i in range(10):
                while True:
                    try:
                        reply = connection.begin_turn(chat, f"{name}-{i}")
                        break
                    except ConversationBusyError:
                        continue
                for end in range(3):
                    assert connection.save_reply(replace(reply, content=f"to {name}-{i}"[: end + 4]))
                assert connection.save_reply(replace(reply, content=f"to {name}-{i}", status="complete"))
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(connection, chat, f"{kind}{chat[:4]}"))
        for chat in chats
        for kind, connection in (("x", store), ("y", other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for chat in chats:
        messages = store.messages(chat)
        assert [m.role for m in messages] == ["user", "assistant"] * 20
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            assert answer.content == f"to {question.content}", "no two conversations or writers got mixed up"


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from openk3.serve.web.settings import ChatSettings
from openk3.serve.web.store import Store

store = Store(Path(sys.argv[1]))
store.recover()
chat = store.create("killed", ChatSettings()).id
print("ready", flush=True)
while True:
    reply = store.begin_turn(chat, "question")
    for words in range(20):
        store.save_reply(replace(reply, content="word " * words))
    store.save_reply(replace(reply, content="word " * 20, status="complete"))
"""


def test_a_killed_server_leaves_a_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite3"
    dice = random.Random(0)
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        threading.Event().wait(0.05 + dice.random() / 5)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    store = Store(path)
    assert store.recover() <= 1
    conversations = store.conversations()
    assert len(conversations) == 2
    for conversation in conversations:
        messages = store.messages(conversation.id)
        assert messages and len(messages) % 2 == 0, "a question and its reply are one transaction"
        assert {m.status for m in messages[:-1]} == {"complete"}
        assert messages[-1].status in ("complete", "interrupted")
        for answer in messages[1:-1:2]:
            assert answer.content == "word " * 20
        store.save_reply(replace(store.begin_again(conversation.id), content="anew", status="complete"))
        assert messages[-1].content in [m.content for m in store.tree(conversation.id)], (
            "the cut answer stays beside it"
        )


def test_files_that_are_no_conversations_are_refused(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=r"cannot open the chat history .*garbage: .*; move the file away"):
        Store(garbage)
    assert garbage.read_bytes() == b"not a database" * 100
    foreign = tmp_path / "foreign.sqlite3"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE other (x)")
    with pytest.raises(StoreError, match="no chat history of version 2 or older"):
        Store(foreign)
    newer = tmp_path / "newer.sqlite3"
    Store(newer).close()
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="no chat history of version 2 or older"):
        Store(newer)
    with pytest.raises(StoreError, match="cannot open"):
        Store(garbage / "below-a-file")


def test_a_closed_store_says_so(store: Store) -> None:
    store.close()
    with pytest.raises(StoreError, match="could not be read"):
        store.conversations()
    with pytest.raises(StoreError, match="could not be saved"):
        store.create("x", ChatSettings())
