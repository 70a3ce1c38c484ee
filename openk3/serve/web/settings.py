"""The settings of one conversation: their ranges, and how they reach the model.

One `Field` describes one input; the panel is drawn from `FIELDS` and the same ranges validate what comes back, so the
page and the check cannot disagree.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from openk3.serve.web.words import Phrase, SpokenError

SYSTEM_PROMPT_LIMIT = 20_000

EFFORTS = ("", "none", "low", "medium", "high")


class SettingError(SpokenError, ValueError):
    """A value that a setting cannot have."""


@dataclass(frozen=True, slots=True)
class Field:
    """One numeric setting: attribute name and the closed range of its values."""

    name: str
    minimum: float
    maximum: float
    step: float
    integer: bool = False
    optional: bool = False
    slider: bool = False

    @property
    def label(self) -> Phrase:
        return Phrase(f"label_{self.name}")

    @property
    def help(self) -> Phrase:
        return Phrase(f"help_{self.name}")

    def parse(self, raw: Any) -> float | int | None:
        """Turn what an input holds into a value. SettingError if it is no such number."""
        text = "" if raw is None else str(raw).strip()
        if not text and self.optional:
            return None
        try:
            number = float(text)
        except ValueError:
            phrase = "setting_number_or_empty" if self.optional else "setting_number"
            raise SettingError(phrase, label=self.label) from None
        if not math.isfinite(number) or not self.minimum <= number <= self.maximum:
            limits = {"minimum": f"{self.minimum:g}", "maximum": _plain(self.maximum)}
            raise SettingError("setting_range", label=self.label, **limits)
        if self.integer:
            if number != int(number):
                raise SettingError("setting_whole", label=self.label)
            return int(number)
        return number


def _plain(number: float) -> str:
    return f"{int(number)}" if number == int(number) else f"{number:g}"


FIELDS: tuple[Field, ...] = (
    Field("temperature", 0, 2, 0.05, slider=True),
    Field("top_p", 0.01, 1, 0.01, slider=True),
    Field("top_k", 0, 1000, 1, integer=True),
    Field("max_tokens", 1, 1_048_576, 1, integer=True),
    Field("seed", 0, 2**31 - 1, 1, integer=True, optional=True),
)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Sampling settings and system prompt of a conversation. SettingError names the field that is out of range.

    `effort` is how long the model thinks ("" is the model's own way), `tools` what it may call, and `allowed` those of
    the tools whose calls run without a question.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 40
    max_tokens: int = 1024
    seed: int | None = None
    system_prompt: str = ""
    effort: str = ""
    tools: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in FIELDS:
            field.parse(getattr(self, field.name))
        if len(self.system_prompt) > SYSTEM_PROMPT_LIMIT:
            label = Phrase("label_system_prompt")
            raise SettingError("setting_too_long", label=label, limit=SYSTEM_PROMPT_LIMIT)
        if self.effort not in EFFORTS:
            raise SettingError("setting_choice", label=Phrase("effort"), choices=", ".join(EFFORTS[1:]))

    def sampling(self) -> dict[str, Any]:
        """The keyword arguments of `LLM.achat_stream`."""
        return {field.name: getattr(self, field.name) for field in FIELDS}

    def changed(self, name: str, raw: Any) -> ChatSettings:
        """These settings with one field set from an input's text. SettingError if it cannot have that value."""
        if name == "system_prompt":
            return replace(self, system_prompt=str(raw or "").strip())
        if name == "effort":
            return replace(self, effort=str(raw or ""))
        for field in FIELDS:
            if field.name == name:
                changes: dict[str, Any] = {name: field.parse(raw)}
                return replace(self, **changes)
        raise SettingError("setting_unknown", name=name)

    def switched(self, tool: str, on: bool) -> ChatSettings:
        """These settings with a tool offered to the model, or no longer; a tool that goes loses its permission too."""
        tools = tuple(name for name in self.tools if name != tool) + ((tool,) if on else ())
        return replace(self, tools=tools, allowed=tuple(name for name in self.allowed if name in tools))

    def permitted(self, tool: str, always: bool) -> ChatSettings:
        """These settings with a tool whose calls always run, or always ask."""
        allowed = tuple(name for name in self.allowed if name != tool) + ((tool,) if always else ())
        return replace(self, allowed=allowed)

    def to_json(self) -> str:
        """One line of JSON for the conversation file."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> ChatSettings:
        """Read `to_json`'s line; a field that is missing or no longer valid takes its default."""
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in json.loads(text).items() if name in known}
        for name in ("tools", "allowed"):
            values[name] = tuple(str(item) for item in values.get(name) or ())
        try:
            return cls(**values)
        except (TypeError, ValueError):
            settings = cls(tools=values.pop("tools"), allowed=values.pop("allowed"))
        for name, value in values.items():
            with suppress(ValueError):
                settings = settings.changed(name, value)
        return settings
