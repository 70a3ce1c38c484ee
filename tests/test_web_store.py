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

from openk3.serve.web.settings import ChatSettings
from openk3.serve.web.store import (
    Attachment,
    ConversationBusyError,
    ConversationGoneError,
    ReplyStats,
    Store,
    StoreError,
    title_from,
)


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


def test_regenerate_replaces_only_the_last_reply(store: Store) -> None:
    chat = store.create("c", ChatSettings()).id
    with pytest.raises(ConversationGoneError, match="no question"):
        store.begin_again(chat)
    turn(store, chat, "q1", "a1")
    turn(store, chat, "q2", "a2")
    reply = store.begin_again(chat)
    assert texts(store, chat) == ["q1", "a1", "q2", ""]
    store.save_reply(replace(reply, content="a3", status="stopped"))
    assert texts(store, chat) == ["q1", "a1", "q2", "a3"]


def test_an_edit_drops_what_follows(store: Store) -> None:
    chat = store.create("c", ChatSettings()).id
    reply = store.begin_turn(chat, "q1", [Attachment("f", "t")])
    store.save_reply(replace(reply, content="a1", status="complete"))
    turn(store, chat, "q2", "a2")
    first = store.messages(chat)[0]
    reply = store.begin_edited(first.id, "q1 better")
    assert texts(store, chat) == ["q1 better", ""]
    assert store.messages(chat)[0].attachments == first.attachments
    with pytest.raises(ConversationGoneError, match="message was deleted"):
        store.begin_edited(reply.id, "an answer is not a question")


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


def test_files_that_are_no_conversations_are_refused(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=r"cannot open the chat history .*garbage: .*; move the file away"):
        Store(garbage)
    assert garbage.read_bytes() == b"not a database" * 100
    foreign = tmp_path / "foreign.sqlite3"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE other (x)")
    with pytest.raises(StoreError, match="no chat history of version 1"):
        Store(foreign)
    newer = tmp_path / "newer.sqlite3"
    Store(newer).close()
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="no chat history of version 1"):
        Store(newer)
    with pytest.raises(StoreError, match="cannot open"):
        Store(garbage / "below-a-file")


def test_a_closed_store_says_so(store: Store) -> None:
    store.close()
    with pytest.raises(StoreError, match="could not be read"):
        store.conversations()
    with pytest.raises(StoreError, match="could not be saved"):
        store.create("x", ChatSettings())
