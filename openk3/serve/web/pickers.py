"""What the user picks for a conversation beside its settings: how the model thinks, and which tools it may call."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import events, ui

from openk3.serve.web.settings import EFFORTS, ChatSettings
from openk3.serve.web.toolbox import TOOLS
from openk3.serve.web.widgets import Text, box, set_attributes
from openk3.serve.web.words import Words

Apply = Callable[[ChatSettings], None]


class ModelPicker:
    """The chip with the model's name, and what it opens: the model, its context, how long it thinks."""

    def __init__(self, words: Words, apply: Callable[[str], None]) -> None:
        self._words = words
        self._apply = apply
        self._knows_effort = False
        self._settings = ChatSettings()
        chip = box("button", "model-chip", type="button", title=words.the_model, popovertarget="model-menu")
        set_attributes(chip, aria_haspopup="dialog")
        with chip:
            self._name = Text("span", words.loading, "model-name")
            self._context = Text("span", "", "model-context")
        self._menu = box(
            "div", "menu model-menu", id="model-menu", popover="auto", role="dialog", aria_label=words.model
        )

    def show_model(self, name: str, context_tokens: int, knows_effort: bool) -> None:
        """Show which model answers and how many tokens it can look back on."""
        self._name.set_text(name)
        self._context.set_text(self._words.say("context", size=_short(context_tokens)))
        self._knows_effort = knows_effort
        self._menu.clear()
        with self._menu, box("dl", "model-card", aria_label=self._words.model):
            Text("dt", self._words.model)
            Text("dd", name)
            Text("dt", self._words.context_window)
            Text("dd", self._words.say("tokens", count=context_tokens))
        with self._menu:
            self._form = box("div", "effort")
        self.show(self._settings)

    def show(self, settings: ChatSettings) -> None:
        """Show how long the model of the open conversation thinks."""
        self._settings = settings
        if not self._knows_effort:
            return
        words = self._words
        self._form.clear()
        with self._form:
            Text("span", words.effort, "field-label", id="effort-label")
            with box("span", "segments", role="radiogroup", aria_labelledby="effort-label"):
                for effort in EFFORTS:
                    with box("label", "segment"):
                        radio = box("input", "", type="radio", name="effort", value=effort)
                        set_attributes(radio, checked=effort == settings.effort or None)
                        radio.on("change", lambda event: self._apply(str(event.args)), js_handler=_VALUE)
                        Text("span", words.say(f"effort_{effort or 'default'}"))
            Text("p", words.effort_help, "help")


class ToolPicker:
    """The button with the number of tools that are on, and what it opens: a switch for each."""

    def __init__(self, words: Words, switch: Callable[[str, bool], None], permit: Callable[[str, bool], None]) -> None:
        self._words = words
        self._switch = switch
        self._permit = permit
        self._shown: object = None
        chip = box("button", "tools-chip", type="button", popovertarget="tools-menu", aria_haspopup="dialog")
        set_attributes(chip, data_icon="handyman", title=words.tools)
        with chip:
            self._label = Text("span", words.tools)
        self._chip = chip
        self._menu = box(
            "div", "menu tools-menu", id="tools-menu", popover="auto", role="dialog", aria_label=words.tools
        )

    def show(self, settings: ChatSettings) -> None:
        """Show which tools are on in the open conversation, and which of them run without a question."""
        names = [name for name in TOOLS if name in settings.tools]
        self._label.set_text(f"{self._words.tools} · {len(names)}" if names else self._words.tools)
        set_attributes(self._chip, data_on="true" if names else None)
        if (settings.tools, settings.allowed) == self._shown:
            return
        self._shown = settings.tools, settings.allowed
        self._menu.clear()
        with self._menu:
            Text("p", self._words.tools_help, "help")
            for name in TOOLS:
                self._row(name, settings)

    def _row(self, name: str, settings: ChatSettings) -> None:
        words = self._words
        key, on = f"tool-{name}", name in settings.tools
        with box("div", "tool-row"):
            with box("label", "tool-choice", for_=key):
                Text("span", words.say(f"tool_{name}"), "field-label")
                Text("span", words.say(f"tool_{name}_help"), "help")
            self._checkbox(key, on, "switch", lambda event: self._switch(name, bool(event.args)))
            if on:
                with box("label", "tool-always"):
                    allowed = name in settings.allowed
                    self._checkbox(f"{key}-always", allowed, "", lambda event: self._permit(name, bool(event.args)))
                    Text("span", words.always_allowed)

    @staticmethod
    def _checkbox(
        key: str, checked: bool, classes: str, handler: Callable[[events.GenericEventArguments], None]
    ) -> ui.element:
        field = box("input", classes, type="checkbox", id=key, role="switch" if classes else None)
        set_attributes(field, checked=checked or None)
        return field.on("change", handler, js_handler="(event) => emit(event.target.checked)")


_VALUE = "(event) => emit(event.target.value)"


def _short(tokens: int) -> str:
    return (
        f"{tokens / 1_048_576:.0f}M" if tokens >= 1_048_576 else f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)
    )
