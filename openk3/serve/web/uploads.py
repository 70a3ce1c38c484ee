"""Files dropped on the chat: which are accepted, and the sentence a user reads when one is not.

A file becomes text (`openk3.documents.text`: plain text, Markdown, HTML, Word, PDF). What it is, its bytes decide:
names and media types that browsers send are hints at best.
"""

from __future__ import annotations

import unicodedata

from openk3.documents.text import read_document
from openk3.serve.web.records import Attachment
from openk3.serve.web.words import SpokenError

MAX_FILE_BYTES = 16 << 20
MAX_CHARACTERS = 4_000_000
MAX_FILES = 8
MAX_NAME_LENGTH = 80


class UploadError(SpokenError, ValueError):
    """A file that cannot be attached; the text says why and what would work."""


def clean_name(name: str) -> str:
    """A file name fit for display: no folders, no control or direction characters, at most `MAX_NAME_LENGTH` long."""
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    shown = "".join(c for c in base if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp")).strip()
    if len(shown) > MAX_NAME_LENGTH:
        stem, dot, suffix = shown.rpartition(".")
        keep = MAX_NAME_LENGTH - len(suffix) - 2
        shown = f"{stem[:keep]}….{suffix}" if dot and 0 < len(suffix) <= 10 else shown[: MAX_NAME_LENGTH - 1] + "…"
    return shown or "file.txt"


def readable_size(num_bytes: int) -> str:
    """Bytes as people read them: "340 B", "12 KB", "1.5 MB"."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    if num_bytes < 1024**2:
        return f"{num_bytes / 1024:.0f} KB"
    return f"{num_bytes / 1024**2:.1f} MB"


def read_file(name: str, data: bytes) -> Attachment:
    """The text of an uploaded file; may take a while. Raises `UploadError` if it cannot be had."""
    name = clean_name(name)
    if not data.strip():
        raise UploadError("file_empty", name=name)
    if len(data) > MAX_FILE_BYTES:
        raise too_large(name, len(data))
    try:
        text = read_document(name, data).text
    except ValueError as error:
        raise UploadError("file_unreadable", name=name, reason=str(error).removeprefix(f"{name}: ")) from None
    if len(text) > MAX_CHARACTERS:
        raise UploadError("file_too_long", name=name, limit=MAX_CHARACTERS)
    return Attachment(name, text)


def too_large(name: str, num_bytes: int) -> UploadError:
    """The error for a file over the limit."""
    size, limit = readable_size(num_bytes), readable_size(MAX_FILE_BYTES)
    return UploadError("file_too_large", name=clean_name(name), size=size, limit=limit)
