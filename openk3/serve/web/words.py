"""What the page says: which language a reader gets, and errors that know their phrase.

The phrases are in `phrases` (what there is), `english` and `chinese`. What a reader may see of an error is a
`SpokenError`, which is put into words where the reader's language is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openk3.serve.web.chinese import ZH
from openk3.serve.web.english import EN
from openk3.serve.web.phrases import Phrase, Words

__all__ = ["EN", "ZH", "Phrase", "SpokenError", "Words", "browser_words", "words_for"]

COOKIE = "openk3-language"

# What the browser says without asking the server.
_IN_THE_BROWSER = (
    "new_chat",
    "copy",
    "copied",
    "press_copy",
    "copy_code",
    "edit_label",
    "edit_help",
    "save_and_ask",
    "cancel",
    "pin",
    "unpin",
)


def browser_words(words: Words) -> dict[str, str]:
    """The phrases that the page's script needs."""
    return {name: getattr(words, name) for name in _IN_THE_BROWSER}


def words_for(headers: Mapping[str, str], cookies: Mapping[str, str]) -> Words:
    """The reader's language: the one chosen with the switch, else what the browser asks for first, else English."""
    chosen = cookies.get(COOKIE)
    wanted = [chosen] if chosen else _accepted(headers.get("accept-language", ""))
    for tag in wanted:
        if tag.lower().startswith("zh"):
            return ZH
        if tag.lower().startswith("en"):
            return EN
    return EN


def _accepted(header: str) -> list[str]:
    """The language tags of an Accept-Language header, the most wanted first."""
    ranked: list[tuple[float, str]] = []
    for part in header.split(","):
        tag, _, quality = part.strip().partition(";q=")
        try:
            ranked.append((-float(quality or 1), tag))
        except ValueError:
            continue
    return [tag for _, tag in sorted(ranked, key=lambda pair: pair[0])]


class SpokenError(Exception):
    """An error with a phrase for the user; as a string it is English."""

    def __init__(self, phrase: str, **values: Any) -> None:
        super().__init__(EN.say(phrase, **values))
        self.phrase = phrase
        self.values = values

    def say(self, words: Words) -> str:
        """The phrase in the user's language."""
        return words.say(self.phrase, **self.values)
