"""Calls without marks: where, in an answer, an object begins that may be one.

Small models told to write ``<tool_call>`` write the bare object instead, or ```` ```json ```` and the object, and
Llama's models are told to. Only the beginning of an answer is taken for that, and what directly follows a call.
"""

from __future__ import annotations

from dataclasses import dataclass

_FENCE = "```"
_LONGEST_OPENING = 24  # "```json" and its kin
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Lead:
    """What stands at the beginning of a text.

    Attributes:
        length: characters before the object, if there is one, else before the text that is to be shown.
        is_object: whether an object begins there. None: more text is needed to tell.
        text: what is to be shown of those characters if the object turns out to be no call.
        fenced: whether the object stands in a fence.
        skipped: what is not to be shown in any case: the end of the fence of the call before.
    """

    length: int
    is_object: bool | None
    text: str = ""
    fenced: bool = False
    skipped: str = ""


def find_lead(text: str, before: Lead | None) -> Lead:
    """Look for an object at the beginning of `text`. `before`: what led to the call before it, if that had no mark."""
    start = 0
    separators = _SPACE if before is None else _SPACE + ",]"
    at = _skip(text, 0, separators)
    if before is not None and before.fenced:
        if _may_go_on(text, at):
            return Lead(at, None)
        if text.startswith(_FENCE, at):
            start = at + len(_FENCE)
            at = _skip(text, start, _SPACE)
    fenced = before is not None and before.fenced and start == 0
    if _may_go_on(text, at):
        return Lead(start, None)
    if not fenced and text.startswith(_FENCE, at):
        line_end = text.find("\n", at)
        if line_end < 0 and len(text) - at <= _LONGEST_OPENING:
            return Lead(start, None)
        if not 0 <= line_end - at <= _LONGEST_OPENING:
            return Lead(start, False)
        fenced = True
        at = _skip(text, line_end, _SPACE)
    if text.startswith("[", at):
        at = _skip(text, at + 1, _SPACE)
    if at == len(text):
        return Lead(start, None)
    return Lead(at, True, text[start:at], fenced, text[:start]) if text[at] == "{" else Lead(start, False)


def _may_go_on(text: str, at: int) -> bool:
    """Whether what is left of the text may be the beginning of a fence."""
    return len(text) - at < len(_FENCE) and _FENCE.startswith(text[at:])


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at
