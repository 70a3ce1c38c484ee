"""A real conversation of the capable model in the workspace, with a tool and a Chinese question; pictures of it.

`OPENK3_SCREENSHOTS=docs/images pytest -m slow tests/test_web_screenshots.py` writes the pictures of the documentation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from web_browser import ANSWER, ask, chromium, expect, needs_browser, settle, watched_page
from web_chat import Chat, served_chat

from openk3 import EngineConfig
from openk3.serve.web.settings import ChatSettings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [*needs_browser, pytest.mark.slow]

PATIENCE_MS = 300_000

MODEL = "qwen2.5-coder-0.5b"
SETTINGS = ChatSettings(
    temperature=0,
    max_tokens=160,
    tools=("datetime",),
    system_prompt="Use the tools for every calculation, then answer in one sentence from their result.",
)
OTHERS = ("Merge two sorted lists", "租房合同要注意什么？", "Names for a small bakery", "SQL: find duplicate rows")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    from openk3.llm import load

    engine = EngineConfig(weights="int8")
    with (
        load(MODEL, engine=engine) as llm,
        served_chat(tmp_path_factory.mktemp("web") / "chat.sqlite3", llm, MODEL) as chat,
    ):
        yield chat


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("OPENK3_SCREENSHOTS") or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def shot(browser: Browser, chat: Chat, address: str, path: Path, *, opened: bool, **options: Any) -> None:
    """A picture of the end of the conversation, or of its beginning with the tool's card `opened`."""
    with watched_page(browser, chat.url, **options) as page:
        page.goto(address)
        expect(page.locator(".message").last.locator(".stats")).not_to_be_empty()
        page.evaluate("document.fonts.ready")
        if opened:
            page.locator(".tool summary").first.click()
            page.evaluate("document.querySelector('.scroller').scrollTop = 0")
        page.locator("h1").hover()
        page.screenshot(path=path, animations="disabled")
    assert path.stat().st_size > 10_000


def settled(page: Page) -> None:
    """Wait, as long as a busy machine needs, until the last answer is complete."""
    expect(page.locator(".composer")).not_to_have_attribute("data-busy", "true", timeout=PATIENCE_MS)
    settle(page)


def talk(page: Page, chat: Chat) -> None:
    ask(page, "What day of the week is it today in Shanghai?")
    allow = page.locator(".tool-ask").get_by_role("button", name="Always allow in this chat")
    allow.click(timeout=PATIENCE_MS)
    settled(page)
    ask(page, "Write a Python function that tells whether a year is a leap year.")
    settled(page)


def test_a_real_conversation_with_a_tool(chat: Chat, pictures: Path) -> None:
    for title in OTHERS:
        other = chat.conversation(title, "…")
    chat.store.pin(other.id, True)
    conversation = chat.store.create("Today in Shanghai", SETTINGS)
    with chromium() as browser:
        with watched_page(browser, chat.url) as page:
            page.goto(chat.link(conversation))
            talk(page, chat)
            expect(page.locator(".tool").first).to_have_attribute("data-status", "done")
            expect(page.locator(f"{ANSWER} > div").first).to_contain_text("day")
            expect(page.locator(ANSWER).last.locator(".code").first).to_be_visible()
        address = chat.link(conversation)
        desk = {"viewport": {"width": 1280, "height": 800}}
        phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
        shot(browser, chat, address, pictures / "web-light.png", opened=True, **desk)
        shot(browser, chat, address, pictures / "web-dark.png", opened=False, color_scheme="dark", **desk)
        shot(browser, chat, address, pictures / "web-phone.png", opened=True, **phone)
