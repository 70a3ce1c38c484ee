"""The text of an uploaded file, whatever it is: plain text and Markdown, HTML, Word documents, PDF.

What a file is, its bytes tell; its name only where they leave it open, for Markdown, HTML and source code are all plain
text. Formats that need a parser are read in a process of their own with limits (`openk3.confined`): files come from
anywhere. Errors are ValueErrors that begin with the file's name and say what would help.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, TypeAlias

from openk3.confined import ConfinedError, run_confined
from openk3.documents.encoding import decode

Format: TypeAlias = Literal["text", "markdown", "html", "docx", "pdf"]

MAX_BYTES = 64 << 20
MAX_CHARACTERS = 20_000_000
SECONDS = 60.0
MEGABYTES = 1024
PAGE_BREAK = "\f"

_PARSERS = {
    "html": "openk3.documents.html:read_html",
    "docx": "openk3.documents.docx:read_docx",
    "pdf": "openk3.documents.pdf:read_pdf",
}
_OTHERS = {
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
    b"\x1f\x8b": "a compressed file",
    b"\x7fELF": "a program",
    b"MZ": "a program",
    b"\xd0\xcf\x11\xe0": "an old Office file (save it as .docx or PDF)",
    b"{\\rtf": "rich text (save it as .docx or PDF)",
}
_HTML = re.compile(rb"\s*(<!--.{0,1000}?-->\s*)*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Document:
    """The text of a file.

    Attributes:
        name: the file's name.
        format: what it was.
        text: what it says, lines ended by ``\\n``. Headings of HTML and Word are as in Markdown; pages of a PDF are
            divided by a form feed.
    """

    name: str
    format: Format
    text: str

    @property
    def page_starts(self) -> list[int]:
        """Where each page begins in the text; one page, at 0, unless it is a PDF."""
        if self.format != "pdf":
            return [0]
        return [0, *(match.end() for match in re.finditer(PAGE_BREAK, self.text))]

    def page_at(self, offset: int) -> int | None:
        """The number, from 1, of the page that a place in the text is on; None where there are no pages."""
        return bisect_right(self.page_starts, offset) if self.format == "pdf" else None


def read_document(name: str, data: bytes, *, seconds: float = SECONDS) -> Document:
    """Return the text of a file.

    Args:
        name: its name, for messages and, where the bytes leave it open, for its format.
        data: its bytes, which may be hostile.
        seconds: how long a parser may take.

    Raises:
        ValueError: it is empty, too large, of a kind that cannot be read, damaged, without text, or took too long.
    """
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has {len(data) >> 20} MB; at most {MAX_BYTES >> 20} MB are read")
        if not data.strip():
            raise ValueError("it is empty")
        form = file_format(name, data)
        text = _parse(form, data, seconds) if form in _PARSERS else decode(data).replace(PAGE_BREAK, "\n")
        if not text.strip():
            raise ValueError("it has no text")
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it has {len(text):,} characters of text; at most {MAX_CHARACTERS:,} are read: split it")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return Document(name, form, text)


def file_format(name: str, data: bytes) -> Format:
    """What a file is.

    Raises:
        ValueError: of a kind that has no text to be read; the text names it.
    """
    if b"%PDF-" in data[:1024]:
        return "pdf"
    if data.startswith(b"PK\x03\x04"):
        return "docx"
    for signature, kind in _OTHERS.items():
        if data.startswith(signature):
            raise ValueError(f"it is {kind}; what can be read is plain text, Markdown, HTML, .docx and PDF")
    suffix = name.lower().rpartition(".")[2]
    if suffix in ("html", "htm", "xhtml") or _HTML.match(data[:4096]):
        return "html"
    return "markdown" if suffix in ("md", "markdown") else "text"


def _parse(form: Format, data: bytes, seconds: float) -> str:
    try:
        return run_confined(_PARSERS[form], data, seconds=seconds, megabytes=MEGABYTES).decode("utf-8")
    except ConfinedError as error:
        raise ValueError(f"it cannot be read: {error}; it may be damaged or made to harm") from None
