"""The web chat with the model people meet first: a question in the browser, a true answer back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from web_browser import ANSWER, ask, chromium, expect, needs_browser, settle, watched_page
from web_chat import SHORT, served_chat

if TYPE_CHECKING:
    from openk3.llm import LLM

pytestmark = needs_browser


def test_the_default_model_answers(smollm2: LLM, tmp_path: Path) -> None:
    with chromium() as browser, served_chat(tmp_path / "chat.sqlite3", smollm2, "smollm2-135m") as chat:
        conversation = chat.store.create("Sky", SHORT.changed("temperature", 0).changed("max_tokens", 40))
        with watched_page(browser, chat.url) as page:
            page.goto(chat.link(conversation))
            ask(page, "What is the capital of France? Answer in one short sentence.")
            settle(page)
            expect(page.locator(ANSWER)).to_contain_text("Paris")
