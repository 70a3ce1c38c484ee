"""The overview of the keyboard shortcuts, which the page's script opens with ``?``."""

from __future__ import annotations

from openk3.serve.web.widgets import Text, box, icon_button
from openk3.serve.web.words import Words


def help_dialog(words: Words) -> None:
    """Put the (closed) overview on the page. The keys themselves are in assets/chat.js."""
    rows = (
        (("Enter",), words.key_send),
        (("Shift", "Enter"), words.key_line),
        (("Esc",), words.key_stop),
        (("Ctrl", "Shift", "O"), words.key_new),
        (("Ctrl", "K"), words.key_search),
        (("Alt", "↑ ↓"), words.key_next),
        (("Ctrl", ","), words.key_settings),
        (("?",), words.key_help),
    )
    with box("dialog", "dialog help-dialog", id="help", aria_labelledby="help-title"):
        with box("div", "settings-head"):
            Text("h2", words.shortcuts, "panel-title", id="help-title")
            icon_button(words.close, "close", script="document.getElementById('help').close()")
        with box("dl", "keys"):
            for keys, meaning in rows:
                Text("dt", meaning)
                with box("dd"):
                    for key in keys:
                        Text("kbd", key, "key")
