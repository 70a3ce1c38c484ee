"""Answers of the web chat that call tools, on the real engine with replies that a model is made to give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agents import call_parts, has_model_reply
from chat_support import chat_llm, tokenizer
from serving import idle, until
from web_chat import happens, nobody

from openk3.chat.turn import prepare_turn
from openk3.serve.web.records import Attachment, ConversationGoneError, Message, Said, Thinking, ToolStatus, ToolUse
from openk3.serve.web.replies import Replies
from openk3.serve.web.settings import ChatSettings
from openk3.serve.web.store import Store

TOOLS = ("calculator", "datetime", "search_documents")
SETTINGS = ChatSettings(temperature=0, max_tokens=200, tools=TOOLS)
THINK = ("<think>", "\nI add.\n", "</think>", "\n\n")
SUM = call_parts("calculator", expression="2 + 3")


@pytest.fixture
async def replies(tmp_path: Path) -> AsyncIterator[Replies]:
    replies = Replies(Store(tmp_path / "chat.sqlite3"), lambda: chat_llm("qwen"), nobody)
    yield replies
    await replies.close()
    replies.store.close()
    await asyncio.to_thread(until, lambda: idle(chat_llm("qwen")))


def calls(message: Message) -> list[ToolUse]:
    return [part for part in message.work if isinstance(part, ToolUse)]


async def until_call(replies: Replies, chat: str, status: ToolStatus) -> ToolUse:
    """The first call that has this status, once one has."""

    def those() -> list[ToolUse]:
        return [call for call in calls(replies.messages(chat)[-1]) if call.status == status]

    await happens(replies, those)
    return those()[0]


async def finished(replies: Replies, chat: str) -> Message:
    await happens(replies, lambda: not replies.running(chat))
    return replies.store.messages(chat)[-1]


async def test_a_call_runs_once_it_is_allowed(replies: Replies, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = has_model_reply(monkeypatch, (*THINK, "I compute.\n", *SUM), ("It is 5.",), ("You asked for a sum.",))
    chat = replies.store.create("c", SETTINGS).id
    replies.send(chat, "How much?")
    call = await until_call(replies, chat, "asking")
    assert (call.name, call.arguments) == ("calculator", '{"expression": "2 + 3"}')
    assert calls(replies.store.messages(chat)[-1]) == [call], "the question is saved: it is there after a crash"
    with pytest.raises(ConversationGoneError, match="not waiting"):
        replies.decide(chat, "other", "allow")
    replies.decide(chat, call.id, "allow")
    reply = await finished(replies, chat)
    assert (reply.status, reply.content) == ("complete", "It is 5.")
    thinking, said, done = reply.work
    assert isinstance(thinking, Thinking) and thinking.text == "I add." and thinking.seconds is not None
    assert said == Said("I compute.")
    assert isinstance(done, ToolUse) and (done.status, done.result) == ("done", "5") and done.seconds is not None
    assert reply.stats is not None and reply.stats.context_tokens is not None and reply.stats.prompt_tokens is not None
    assert reply.stats.completion_tokens > reply.stats.context_tokens - reply.stats.prompt_tokens, "of both rounds"
    assert all(mark not in reply.content for mark in ("<think>", "<tool_call>"))
    replies.send(chat, "What did I ask?")
    await finished(replies, chat)
    assert '"expression": "2 + 3"' in prompts[2] and "5\n" in prompts[2], "later turns know the call and its result"


async def test_a_denied_call_is_told_and_never_runs(replies: Replies, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = has_model_reply(monkeypatch, SUM, ("As you wish.",))
    chat = replies.store.create("c", SETTINGS).id
    replies.send(chat, "How much?")
    replies.decide(chat, (await until_call(replies, chat, "asking")).id, "deny")
    reply = await finished(replies, chat)
    (call,) = calls(reply)
    assert (call.status, call.seconds, reply.content) == ("denied", None, "As you wish.")
    assert "did not allow this call" in prompts[1]


async def test_always_is_kept_with_the_conversation(replies: Replies, monkeypatch: pytest.MonkeyPatch) -> None:
    other = call_parts("calculator", expression="4 * 5")
    has_model_reply(monkeypatch, SUM, ("Five.",), other, ("Twenty.",))
    chat = replies.store.create("c", SETTINGS).id
    replies.send(chat, "How much?")
    replies.decide(chat, (await until_call(replies, chat, "asking")).id, "always")
    await finished(replies, chat)
    conversation = replies.store.conversation(chat)
    assert conversation is not None and conversation.settings.allowed == ("calculator",)
    replies.send(chat, "And 4 * 5?")
    reply = await finished(replies, chat)
    assert reply.content == "Twenty." and [c.result for c in calls(reply)] == ["20"]


async def test_stopping_at_the_question_skips_the_call(replies: Replies, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_reply(monkeypatch, SUM)
    chat = replies.store.create("c", SETTINGS).id
    replies.send(chat, "How much?")
    await until_call(replies, chat, "asking")
    await replies.stop(chat)
    reply = await finished(replies, chat)
    assert reply.status == "stopped" and [call.status for call in calls(reply)] == ["skipped"]


async def test_files_of_the_chat_can_be_searched(replies: Replies, monkeypatch: pytest.MonkeyPatch) -> None:
    search = call_parts("search_documents", query="landlord")
    has_model_reply(monkeypatch, search, ("Ms. Brook.",))
    text = "Nothing here.\n\n" * 600 + "The landlord is Ms. Brook.\n"
    settings = SETTINGS.permitted("search_documents", True)
    chat = replies.store.create("c", settings).id
    replies.send(chat, "Who is the landlord?", [Attachment("lease.md", text)])
    (call,) = calls(await finished(replies, chat))
    assert "lease.md" in call.result and "Ms. Brook" in call.result


async def test_tools_that_are_off_are_not_offered(replies: Replies, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = has_model_reply(monkeypatch, ("Hello.",))
    chat = replies.store.create("c", ChatSettings(temperature=0, max_tokens=50)).id
    replies.send(chat, "Hi")
    assert (await finished(replies, chat)).content == "Hello."
    assert "calculator" not in prompts[0]


@pytest.mark.parametrize("effort", ["", "none"])
async def test_effort_is_asked_for_as_it_is_picked(
    replies: Replies, monkeypatch: pytest.MonkeyPatch, effort: str
) -> None:
    prompts = has_model_reply(monkeypatch, ("Hello.",))
    chat = replies.store.create("c", ChatSettings(temperature=0, max_tokens=50).changed("effort", effort)).id
    replies.send(chat, "Hi")
    await finished(replies, chat)
    given = {"messages": [{"role": "user", "content": "Hi"}]}
    asked = prepare_turn(tokenizer("qwen"), **given, reasoning_effort=effort or None).prompt_ids
    assert prompts == [tokenizer("qwen").decode(asked, skip_special_tokens=False)]
    assert ("</think>" in prompts[0]) == (effort == "none")
