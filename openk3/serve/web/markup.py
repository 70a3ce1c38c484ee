"""HTML as text, for what the page has hundreds of: messages and rows of the list.

Content that is not `Markup` already is escaped, and so is every attribute, so what users and models write cannot become
an element. Controls in it carry ``data-do``, which the page's script turns into an event for the server.
"""

from __future__ import annotations

from typing import Any

from markupsafe import Markup, escape

__all__ = ["Markup", "action", "element"]


def element(name: str, *content: str, **attributes: Any) -> Markup:
    """One element. ``class_`` stands for ``class``, ``data_do`` for ``data-do``; None leaves out, True has no value."""
    written = []
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is True:
            written.append(Markup(" ") + attribute)
        elif value is not None and value is not False:
            written.append(Markup(' {}="{}"').format(attribute, value))
    inner = Markup("").join(map(escape, content))
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup("").join(written), inner)


def action(label: str, icon: str | None, do: str, *, classes: str = "", **attributes: Any) -> Markup:
    """A button that shows an icon; `label` is its accessible name and its tooltip, `do` what it asks for."""
    return element(
        "button",
        type="button",
        class_=f"icon-button {classes}".strip(),
        aria_label=label,
        title=label,
        data_icon=icon,
        data_do=do,
        **attributes,
    )
