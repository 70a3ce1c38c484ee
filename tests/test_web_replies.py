"""Replies as the server keeps them, on the real engine: watched, stopped, replaced, edited, deleted, failed, closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from serving import idle, until
from web_chat import LONG, SHORT, endless_llm, happens, nobody

from openk3.serve.web.records import Attachment, ConversationBusyError, Message
from openk3.serve.web.replies import Event, ModelNotReadyError, Replies
from openk3.serve.web.store import Store


@pytest.fixture
async def replies(tmp_path: Path) -> AsyncIterator[Replies]:
    replies = Replies(Store(tmp_path / "chat.sqlite3"), endless_llm, nobody)
    yield replies
    await replies.close()
    replies.store.close()
    await asyncio.to_thread(until, lambda: idle(endless_llm()))


async def finished(replies: Replies, conversation_id: str) -> Message:
    """The last message, once nothing is being written."""
    await happens(replies, lambda: not replies.running(conversation_id))
    return replies.store.messages(conversation_id)[-1]


async def some_text(replies: Replies, conversation_id: str) -> str:
    await happens(replies, lambda: replies.messages(conversation_id)[-1].content)
    return replies.messages(conversation_id)[-1].content


async def test_a_reply_grows_before_all_eyes_and_is_saved_with_its_cost(replies: Replies) -> None:
    chat = replies.store.create("c", LONG.changed("max_tokens", "1500")).id
    seen: list[Event] = []
    unsubscribe = replies.subscribe(seen.append)
    replies.subscribe(lambda event: 1 // 0)  # a page that fails must not harm the others
    replies.send(chat, "hello", [Attachment("f.txt", "text")])
    reply = await finished(replies, chat)
    assert [e.change for e in seen[:2]] == ["thread", "list"] and [e.change for e in seen[-2:]] == ["thread", "list"]
    grown = [e.reply.content for e in seen if e.reply is not None]
    assert grown and all(b.startswith(a) for a, b in zip(grown, [*grown[1:], reply.content], strict=True))
    assert reply.status == "complete" and reply.stats is not None
    assert (reply.stats.completion_tokens, reply.stats.finish_reason) == (1500, "length")
    assert reply.stats.prompt_tokens and reply.stats.ttft_s and reply.stats.tokens_per_second
    same = endless_llm().chat(
        [{"role": "user", "content": "File `f.txt`:\n```\ntext\n```\n\nhello"}],
        **LONG.changed("max_tokens", "1500").sampling(),
    )
    assert reply.content == same.text, "what the page shows is what the model said"
    unsubscribe()
    count = len(seen)
    replies.rename(chat, "other")
    assert len(seen) == count


async def test_stop_keeps_what_is_there_with_its_counts(replies: Replies) -> None:
    chat = replies.store.create("c", LONG).id
    await replies.stop(chat)
    replies.send(chat, "hello")
    await some_text(replies, chat)
    await replies.stop(chat)
    reply = await finished(replies, chat)
    assert reply.status == "stopped" and reply.content and reply.stats is not None
    assert reply.stats.prompt_tokens and 0 < reply.stats.completion_tokens < 8000
    replies.regenerate(chat)
    await replies.stop(chat)  # before the first step
    assert (await finished(replies, chat)).status == "stopped"


async def test_one_reply_per_conversation_many_conversations(replies: Replies) -> None:
    chats = [replies.store.create(str(i), LONG.changed("max_tokens", 100)).id for i in range(4)]
    for chat in chats:
        replies.send(chat, f"hello {chat}")
    with pytest.raises(ConversationBusyError):
        replies.send(chats[0], "me too")
    with pytest.raises(ConversationBusyError):
        replies.regenerate(chats[0])
    for chat in chats:
        assert (await finished(replies, chat)).status == "complete"
        assert len(replies.store.messages(chat)) == 2


async def test_regenerate_and_edit_answer_anew(replies: Replies) -> None:
    chat = replies.store.create("c", SHORT).id
    for question in ("one", "two"):
        replies.send(chat, question)
        await finished(replies, chat)
    first, _, _, last = replies.store.messages(chat)
    replies.regenerate(chat)
    again = await finished(replies, chat)
    assert again.id != last.id and again.content == last.content, "the seed is set"
    replies.edit(first.id, "one, better")
    await finished(replies, chat)
    assert replies.store.messages(chat)[0].content == "one, better"
    assert len(replies.store.messages(chat)) == 2
    replies.select(chat, first.id)
    assert [m.content for m in replies.messages(chat)][::2] == ["one", "two"]


async def test_delete_in_mid_stream(replies: Replies) -> None:
    chat = replies.store.create("c", LONG).id
    replies.send(chat, "hello")
    await some_text(replies, chat)
    await replies.delete(chat)
    assert not replies.running(chat) and replies.store.conversations() == []


async def test_a_reply_deleted_behind_our_back_ends(replies: Replies) -> None:
    chat = replies.store.create("c", LONG).id
    replies.send(chat, "hello")
    await some_text(replies, chat)
    other = Store(replies.store.path)
    other.delete(chat)
    other.close()
    await happens(replies, lambda: not replies.running(chat))


async def test_shutdown_keeps_replies_as_interrupted(replies: Replies) -> None:
    chat = replies.store.create("c", LONG).id
    replies.send(chat, "hello")
    text = await some_text(replies, chat)
    await replies.close()
    reply = replies.store.messages(chat)[-1]
    assert reply.status == "interrupted" and reply.content.startswith(text)


async def test_a_prompt_beyond_the_context_fails_with_a_sentence(replies: Replies) -> None:
    chat = replies.store.create("c", SHORT).id
    replies.send(chat, "hello", [Attachment("long.txt", "word " * 9000)])
    reply = await finished(replies, chat)
    assert reply.status == "failed" and "8,192" in reply.error.replace("8192", "8,192") and reply.stats is None
    replies.edit(replies.store.messages(chat)[0].id, "again")
    assert (await finished(replies, chat)).status == "failed"
    replies.send(replies.store.create("d", SHORT).id, "others go on")


async def test_before_the_model_is_there_nothing_is_stored(replies: Replies) -> None:
    waiting = Replies(replies.store, lambda: None, nobody)
    chat = replies.store.create("c", SHORT).id
    attempts = (lambda: waiting.send(chat, "hello"), lambda: waiting.regenerate(chat), lambda: waiting.edit(1, "x"))
    for attempt in attempts:
        with pytest.raises(ModelNotReadyError, match="still loading"):
            attempt()
    assert replies.store.messages(chat) == []
