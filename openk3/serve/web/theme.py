"""What makes the page look and feel as it does: the style sheets, the browser-side scripts, and where they are put.

All files are inlined into the page, so it is styled, and dark where it should be, from its first paint. Icons come
from the Material Symbols font in NiceGUI's wheel; text uses the fonts of the reader's system.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from nicegui import ui

from openk3.serve.web.words import Words, browser_words

ASSETS = Path(__file__).parent / "assets"

PRIMARY = "#2b4fb8"

LOGO = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    f'<rect width="32" height="32" rx="8" fill="{PRIMARY}"/>'
    '<path d="M10 8v16M10 17l9-9M13.5 14l8 10" fill="none" stroke="#fff" stroke-width="3" stroke-linecap="round"/>'
    "</svg>"
)


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def run_at_start(scripts: Iterable[str]) -> None:
    """Run `scripts` when the page that is being built is there. A "<" may be in their strings only."""
    code = "\n".join(scripts).replace("<", "\\u003c")
    ui.add_body_html(f"<script>openk3.start = () => {{ {code} }};</script>")


def apply(words: Words) -> None:
    """Put script and styles into the head of the page that is being built."""
    language = f"document.documentElement.lang = '{words.code}';"
    said = json.dumps(browser_words(words)).replace("<", "\\u003c")
    ui.add_head_html(f"<script>{language}{_asset('chat.js')}openk3.words = {said};</script>")
    ui.add_head_html(f"<script>{_asset('thread.js')}</script>")
    ui.add_head_html(f"<style>{_asset('chat.css')}{_asset('prose.css')}</style>")
    ui.add_head_html('<meta name="referrer" content="no-referrer">')
