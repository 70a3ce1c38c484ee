"""A text cut into passages: the pieces that a search finds, each with its place.

A passage is some paragraphs under one heading and on one page, together up to `TARGET` characters; a paragraph that is
longer is cut where a sentence ends, and a heading is alone only where a page or the document ends with it. Its text is
exactly ``document.text[start:end]``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from openk3.documents.text import Document

TARGET = 800
LONGEST = 1200

_LINE = re.compile(r"[^\n\f]+")
_HEADING = re.compile(r"#{1,6} +(\S[^\n]{0,200})")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s|(?<=[。！？；])|\n")


@dataclass(frozen=True)
class Passage:
    """A piece of a text: where it is, the page (from 1) if there are pages, and the heading that it stands under."""

    start: int
    end: int
    page: int | None
    heading: str


def passages(document: Document) -> Iterator[Passage]:
    """Cut a document into passages, in order."""
    text = document.text
    starts = document.page_starts
    heading, bare = "", True  # whether the open passage has nothing but headings so far
    open_: Passage | None = None  # the one that may still grow
    for begin, end in _blocks(text):
        page = bisect_right(starts, begin) if document.format == "pdf" else None
        title = _HEADING.match(text, begin, end)
        if title is not None:
            heading = title.group(1).strip()
        if open_ is not None:
            if open_.page == page and end - open_.start <= TARGET and (title is None or bare):
                open_, bare = Passage(open_.start, end, page, heading), bare and title is not None
                continue
            yield open_
        open_, bare = Passage(begin, end, page, heading), title is not None
    if open_ is not None:
        yield open_


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Headings, paragraphs, and the pieces of those that are too long."""
    begin, end = -1, 0  # the paragraph that the lines so far make up, and where the last of them ended
    for line in _LINE.finditer(text):
        if not (shown := line.group().strip()):
            continue
        start = line.start() + line.group().index(shown)
        heading = _HEADING.match(shown) is not None
        between = text[end:start]
        if begin >= 0 and (heading or "\f" in between or between.count("\n") > 1):
            yield from _pieces(text, begin, end)
            begin = -1
        begin, end = begin if begin >= 0 else start, start + len(shown)
        if heading:
            yield begin, end
            begin = -1
    if begin >= 0:
        yield from _pieces(text, begin, end)


def _pieces(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    while end - begin > LONGEST:
        first, last = begin + TARGET // 2, begin + LONGEST
        ends = [match.end() for match in _SENTENCE_END.finditer(text, first, last)]
        cut = ends[-1] if ends else text.rfind(" ", first, last) + 1 or last
        yield begin, begin + len(text[begin:cut].rstrip())
        while cut < end and text[cut].isspace():
            cut += 1
        begin = cut
    if begin < end:
        yield begin, end
