"""The drawer at the right: the sampling settings and the system prompt of the open conversation."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import events, ui

from openk3.serve.web.settings import FIELDS, SYSTEM_PROMPT_LIMIT, ChatSettings, Field
from openk3.serve.web.widgets import Handler, Text, box, button, icon_button, set_attributes
from openk3.serve.web.words import Words

Apply = Callable[[str, str], str | None]


class SettingsPanel:
    """Draws one input per `Field`. `apply(name, text)` keeps a value or returns the sentence that says why not."""

    def __init__(self, words: Words, apply: Apply, reset: Handler) -> None:
        self._words = words
        self._apply = apply
        with box("aside", "settings", id="settings", aria_label=words.settings):
            with box("div", "settings-head"):
                Text("h2", words.settings, "panel-title")
                icon_button(words.close_settings, "close", script="openk3.panel('settings', false)")
            self._form = box("div", "fields")
            with box("div", "settings-foot"):
                button(words.reset, reset, classes="quiet")
                Text("p", words.settings_foot, "help")

    def show(self, settings: ChatSettings) -> None:
        """Fill the inputs with `settings`."""
        self._form.clear()
        with self._form:
            for field in FIELDS:
                self._number(field, getattr(settings, field.name))
            self._system_prompt(settings.system_prompt)

    def _number(self, field: Field, value: float | int | None) -> None:
        shown = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        words = self._words
        label, words_of_help = words.say(field.label), words.say(field.help)
        limits = {"min": f"{field.minimum:g}", "max": str(int(field.maximum)), "step": f"{field.step:g}"}
        key = f"setting-{field.name}"
        with box("div", "field"):
            with box("div", "field-head"):
                Text("label", label, "field-label", for_=key)
                number = box(
                    "input", "input number", type="number", id=key, inputmode="decimal", aria_describedby=f"{key}-help"
                )
                set_attributes(
                    number, **limits, **{"^value": shown}, placeholder=words.random if field.optional else None
                )
            if field.slider:
                slider = box("input", "slider", type="range", data_twin=key, aria_label=label)
                set_attributes(slider, **limits, **{"^value": shown})
            help_text = Text("p", words_of_help, "help", id=f"{key}-help")
        self._follow(number, field.name, help_text, words_of_help)
        if field.slider:
            self._follow(slider, field.name, help_text, words_of_help)

    def _system_prompt(self, value: str) -> None:
        key = "setting-system-prompt"
        words = self._words.help_system_prompt
        with box("div", "field"):
            Text("label", self._words.label_system_prompt, "field-label", for_=key)
            area = Text("textarea", value, "input area")
            set_attributes(
                area,
                id=key,
                rows="5",
                maxlength=str(SYSTEM_PROMPT_LIMIT),
                placeholder=self._words.none,
                aria_describedby=f"{key}-help",
            )
            help_text = Text("p", words, "help", id=f"{key}-help")
        self._follow(area, "system_prompt", help_text, words)

    def _follow(self, element: ui.element, name: str, help_text: Text, words: str) -> None:
        """Apply the element's value once the user has changed it, and show what is wrong with it, if anything."""

        def changed(event: events.GenericEventArguments) -> None:
            error = self._apply(name, str(event.args))
            help_text.set_text(error or words)
            help_text.classes(add="error" if error else None, remove=None if error else "error")
            set_attributes(element, aria_invalid="true" if error else None)

        element.on("change", changed, js_handler="(event) => emit(openk3.wellFormed(event.target.value))")
