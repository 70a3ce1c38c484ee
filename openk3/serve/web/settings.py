"""The sampling settings of one conversation: their ranges, their words on the page, and how they reach the model.

One `Field` describes one input; the panel is drawn from `FIELDS` and the same ranges validate what comes back, so the
page and the check cannot disagree.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

SYSTEM_PROMPT_LIMIT = 20_000


@dataclass(frozen=True, slots=True)
class Field:
    """One numeric setting: attribute name, label, one line of help, and the closed range of its values."""

    name: str
    label: str
    help: str
    minimum: float
    maximum: float
    step: float
    integer: bool = False
    optional: bool = False
    slider: bool = False

    def parse(self, raw: Any) -> float | int | None:
        """Turn what an input holds into a value. ValueError with a sentence for the user if it is no such number."""
        text = "" if raw is None else str(raw).strip()
        if not text and self.optional:
            return None
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"{self.label}: enter a number{' or leave it empty' if self.optional else ''}.") from None
        if not math.isfinite(number) or not self.minimum <= number <= self.maximum:
            raise ValueError(f"{self.label}: enter a number from {self.minimum:g} to {_plain(self.maximum)}.")
        if self.integer:
            if number != int(number):
                raise ValueError(f"{self.label}: enter a whole number.")
            return int(number)
        return number


def _plain(number: float) -> str:
    return f"{int(number)}" if number == int(number) else f"{number:g}"


FIELDS: tuple[Field, ...] = (
    Field(
        "temperature",
        "Temperature",
        "0 always takes the likeliest word; higher is more varied.",
        0,
        2,
        0.05,
        slider=True,
    ),
    Field("top_p", "Top p", "Draw from the likeliest words that together hold this share.", 0.01, 1, 0.01, slider=True),
    Field("top_k", "Top k", "Draw from this many of the likeliest words; 0 is no limit.", 0, 1000, 1, integer=True),
    Field("max_tokens", "Max tokens", "The longest answer, in tokens.", 1, 1_048_576, 1, integer=True),
    Field(
        "seed",
        "Seed",
        "The same seed repeats an answer; empty is random.",
        0,
        2**31 - 1,
        1,
        integer=True,
        optional=True,
    ),
)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Sampling settings and system prompt of a conversation. ValueError names the field that is out of range."""

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 40
    max_tokens: int = 1024
    seed: int | None = None
    system_prompt: str = ""

    def __post_init__(self) -> None:
        for field in FIELDS:
            field.parse(getattr(self, field.name))
        if len(self.system_prompt) > SYSTEM_PROMPT_LIMIT:
            raise ValueError(f"System prompt: keep it below {SYSTEM_PROMPT_LIMIT:,} characters.")

    def sampling(self) -> dict[str, Any]:
        """The keyword arguments of `LLM.achat_stream`."""
        return {field.name: getattr(self, field.name) for field in FIELDS}

    def changed(self, name: str, raw: Any) -> ChatSettings:
        """These settings with one field set from an input's text. ValueError with a sentence for the user."""
        if name == "system_prompt":
            return replace(self, system_prompt=str(raw or "").strip())
        for field in FIELDS:
            if field.name == name:
                changes: dict[str, Any] = {name: field.parse(raw)}
                return replace(self, **changes)
        raise ValueError(f"{name}: there is no such setting.")

    def to_json(self) -> str:
        """One line of JSON for the conversation file."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> ChatSettings:
        """Read `to_json`'s line; a field that is missing or no longer valid takes its default."""
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in json.loads(text).items() if name in known}
        try:
            return cls(**values)
        except (TypeError, ValueError):
            settings = cls()
        for name, value in values.items():
            with suppress(ValueError):
                settings = settings.changed(name, value)
        return settings
