"""The text of a Word document: paragraphs, headings as in Markdown, table cells divided by tabs, footnotes at the end.

A docx file is a zip of XML, so two old tricks have to fail: files that unpack to gigabytes (only what is needed is
unpacked, with a limit that counts real bytes), and XML entities that multiply or read other files (defusedxml).
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

MAX_XML_BYTES = 64 << 20
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"


def read_docx(data: bytes) -> bytes:
    """Return the document's text as UTF-8. Runs confined.

    Raises:
        ValueError: it is no Word document, is damaged or hostile, or has no text.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = set(archive.namelist())
            if "word/document.xml" not in names:
                raise ValueError("it is a zip archive, but no Word document")
            left = MAX_XML_BYTES
            trees = {}
            for name in ("word/document.xml", "word/styles.xml", "word/footnotes.xml", "word/endnotes.xml"):
                if name in names:
                    xml = _unpacked(archive, name, left)
                    left -= len(xml)
                    trees[name] = _parsed(xml)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"the Word document is damaged or encrypted ({error})") from None
    levels = _heading_styles(trees.get("word/styles.xml"))
    blocks = list(_blocks(trees["word/document.xml"], levels))
    for name in ("word/footnotes.xml", "word/endnotes.xml"):
        if name in trees:
            blocks += _blocks(trees[name], levels)
    text = "\n\n".join(block for block in blocks if block.strip())
    if not text:
        raise ValueError("the Word document has no text")
    return text.encode("utf-8", "replace")


def _unpacked(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    with archive.open(name) as member:
        xml = member.read(limit + 1)  # what the archive says about its size may be a lie
    if len(xml) > limit:
        raise ValueError(f"the Word document unpacks to more than {MAX_XML_BYTES >> 20} MB of text")
    return xml


def _parsed(xml: bytes) -> Element:
    from xml.etree.ElementTree import ParseError

    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import fromstring

    try:
        return fromstring(xml, forbid_dtd=True)
    except DefusedXmlException:
        raise ValueError("the Word document declares XML entities, which no word processor does: refused") from None
    except ParseError as error:
        raise ValueError(f"the Word document is damaged ({error})") from None


def _heading_styles(styles: Element | None) -> dict[str, int]:
    """The outline level, from 1, of each style that has one: names of styles are in the writer's language."""
    levels = {f"Heading{level}": level for level in range(1, 7)} | {"Title": 1}
    for style in () if styles is None else styles.iter(f"{_W}style"):
        outline = style.find(f"{_W}pPr/{_W}outlineLvl")
        if outline is not None and outline.get(f"{_W}val", "").isdigit():
            levels[style.get(f"{_W}styleId", "")] = int(outline.get(f"{_W}val", "9")) + 1
    return {name: level for name, level in levels.items() if level <= 6}


def _blocks(tree: Element, levels: dict[str, int]) -> Iterator[str]:
    """Paragraphs and tables in order; a table is one block. Not recursive: a file may be nested as it likes."""
    stack = [tree]
    while stack:
        element = stack.pop()
        if element.tag == f"{_W}p":
            yield _paragraph(element, levels)
        elif element.tag == f"{_W}tbl":
            rows = []
            for row in element.iter(f"{_W}tr"):
                cells = [" ".join(map(_runs, cell.iter(f"{_W}p"))).strip() for cell in row.iter(f"{_W}tc")]
                rows.append("\t".join(cells))
            yield "\n".join(rows)
        else:
            stack += reversed(list(element))


def _paragraph(paragraph: Element, levels: dict[str, int]) -> str:
    text = _runs(paragraph)
    style = paragraph.find(f"{_W}pPr/{_W}pStyle")
    level = levels.get(style.get(f"{_W}val", "")) if style is not None else None
    if level and text.strip():
        return "#" * level + " " + " ".join(text.split())
    return "- " + text if text.strip() and paragraph.find(f"{_W}pPr/{_W}numPr") is not None else text


def _runs(paragraph: Element) -> str:
    """Text as it reads now: what tracked changes have deleted is in other elements."""
    parts = []
    for element in paragraph.iter():
        if element.tag == f"{_W}t":
            parts.append(element.text or "")
        elif element.tag == f"{_W}tab":
            parts.append("\t")
        elif element.tag in (f"{_W}br", f"{_W}cr"):
            parts.append("\n")
    return "".join(parts)
