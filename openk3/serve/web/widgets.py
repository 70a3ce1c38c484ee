"""The few native HTML elements the page is made of, each with its accessible name.

Plain `<button>`, `<a>` and `<textarea>` bring keyboard and screen-reader behaviour along and leave the look to our
own style sheet. Text and attributes are always set as data, never through NiceGUI's `props()` mini-language: titles
and file names come from users. Icons are drawn by the style sheet (``data-icon`` names a glyph of the Material
Symbols font inside NiceGUI's wheel), which spares an element, a third of a millisecond of the server's time, for each
of hundreds of buttons.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

Handler = Callable[[], Awaitable[None] | None]


class Text(TextElement):
    """An element that begins with plain text: `Text("h1", "OpenK3")`."""

    def __init__(self, tag: str, text: str = "", classes: str = "", **attributes: Any) -> None:
        super().__init__(tag=tag, text=text)
        self.classes(classes)
        set_attributes(self, **attributes)


def box(tag: str, classes: str = "", **attributes: Any) -> ui.element:
    """A container element; `attributes` are as for `set_attributes`."""
    element = ui.element(tag).classes(classes)
    set_attributes(element, **attributes)
    return element


def set_attributes(element: ui.element, **attributes: Any) -> None:
    """Set attributes as data; None removes one. ``aria_label`` stands for ``aria-label``, ``for_`` for ``for``."""
    for name, value in attributes.items():
        key = name.rstrip("_").replace("_", "-")
        if element.props.get(key) != value:
            element.props.set_optional(key, value)


def button(label: str, on_click: Handler | None = None, *, classes: str = "", icon: str | None = None) -> Text:
    """A button with visible text."""
    element = Text("button", label, f"button {classes}", type="button", data_icon=icon)
    if on_click is not None:
        element.on("click", on_click, args=[])
    return element


def icon_button(
    label: str, icon: str | None, on_click: Handler | None = None, *, classes: str = "", script: str = ""
) -> ui.element:
    """A button that shows an icon (None: the style sheet draws one); `label` is its accessible name and its tooltip.

    `script` runs in the browser in place of a call to the server.
    """
    element = box("button", f"icon-button {classes}", type="button", aria_label=label, title=label, data_icon=icon)
    if script:
        element.on("click", js_handler=f"() => {script}")
    elif on_click is not None:
        element.on("click", on_click, args=[])
    return element


def value_of(element_id: int) -> str:
    """Script that sends the current text of an input along with its event, without halves of characters."""
    return f"() => emit(openk3.wellFormed(document.getElementById('c{element_id}').value))"
