"""Tools, thinking and branches of the workspace in a real browser, with replies that a model is made to give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from agents import call_parts, has_model_reply
from chat_support import chat_llm
from web_browser import ask, chromium, expect, needs_browser, settle, watched_page
from web_chat import Chat, served_chat

from openk3.serve.web.settings import ChatSettings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = needs_browser

THINK = ("<think>", "\nI <b>add</b>.\n", "</think>", "\n\n")
SUM = call_parts("calculator", expression="2 + 3")
SETTINGS = ChatSettings(temperature=0, max_tokens=200)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    with served_chat(tmp_path_factory.mktemp("web") / "chat.sqlite3", chat_llm("qwen")) as chat:
        yield chat


@pytest.fixture
def page(browser: Browser, chat: Chat) -> Iterator[Page]:
    with watched_page(browser, chat.url) as page:
        yield page


def test_a_tool_is_switched_on_asked_for_and_shown(page: Page, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_reply(monkeypatch, (*THINK, *SUM), ("It is 5.",), SUM, ("Still 5.",))
    conversation = chat.conversation(settings=SETTINGS)
    page.goto(chat.link(conversation))
    page.click(".tools-chip")
    page.get_by_role("switch", name="Calculator").check()
    expect(page.locator(".tools-chip")).to_have_text("Tools · 1")
    page.keyboard.press("Escape")
    ask(page, "How much?")
    card = page.locator(".tool")
    expect(card).to_have_attribute("data-status", "asking")
    expect(card.locator("pre").first).to_contain_text('"expression": "2 + 3"')
    expect(page.locator("[role=status]").last).to_have_text("A tool is waiting for your approval.")
    card.get_by_role("button", name="Always allow in this chat").click()
    settle(page)
    expect(card).to_have_attribute("data-status", "done")
    expect(card.locator(".tool-state")).to_have_text(re.compile(r"^[\d.]+ s$"))
    expect(card.locator("pre").last).to_have_text("5")
    expect(page.locator(".prose > div").last).to_have_text("It is 5.")
    thinking = page.locator(".thinking")
    expect(thinking.locator("summary")).to_have_text(re.compile(r"^Thought for [\d.]+ s$"))
    expect(thinking.locator(".thinking-text")).not_to_be_visible()
    thinking.locator("summary").click()
    expect(thinking.locator(".thinking-text")).to_have_text("I <b>add</b>.")
    ask(page, "And now?")
    settle(page)
    expect(page.locator(".tool").last).to_have_attribute("data-status", "done")
    page.reload()
    expect(page.locator(".tool")).to_have_count(2)
    expect(page.locator(".prose > div").last).to_have_text("Still 5.")
