"""What makes the page look and feel as it does: the style sheet, the browser-side script, and where they are put.

Both files are inlined into the page, so it is styled, and dark where it should be, from its first paint. Icons come
from the Material Symbols font in NiceGUI's wheel; text uses the fonts of the reader's system.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from nicegui import ui

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


def apply() -> None:
    """Put script and styles into the head of the page that is being built."""
    ui.add_head_html(f"<script>{_asset('chat.js')}</script>")
    ui.add_head_html(f"<style>{_asset('chat.css')}{_asset('prose.css')}</style>")
    ui.add_head_html('<meta name="referrer" content="no-referrer">')
