"""A real browser for the web chat's tests, watched: whatever goes wrong in a page fails the test it happens in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = sync_api.expect
expect.set_options(timeout=20_000)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; install the package 'chromium'"),
]

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

BOX = "#composer-text"
ANSWER = ".message-assistant .prose"
BLOCK = f"{ANSWER} > div:not(.waiting)"


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def watched_page(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """A page in a fresh profile. A console error, a failed script or a request to another host than `url`'s fails."""
    problems: list[str] = []
    host = urlsplit(url).netloc

    def check(address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("data", "blob", "about") and parts.netloc != host:
            problems.append(f"request to {address}")

    def watch(page: Page) -> None:
        page.on("console", lambda m: m.type in ("error", "warning") and problems.append(f"console: {m.text}"))
        page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
        page.on("websocket", lambda socket: check(socket.url))

    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    try:
        context.set_default_timeout(20_000)
        context.on("request", lambda request: check(request.url))
        context.on("page", watch)
        yield context.new_page()
        assert not problems, problems
    finally:
        context.close()


def ask(page: Page, text: str) -> None:
    """Send a message and wait until the page shows it."""
    page.fill(BOX, text)
    page.press(BOX, "Enter")
    expect(page.locator(BOX)).to_have_value("")


def settle(page: Page) -> None:
    """Wait until the last answer is complete."""
    expect(page.locator(".message-assistant").last.locator(".stats")).not_to_be_empty()
    expect(page.locator(".composer")).not_to_have_attribute("data-busy", "true")
