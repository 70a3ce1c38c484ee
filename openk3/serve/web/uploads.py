"""Text files dropped on the chat: what is accepted, and the sentence a user reads when a file is not.

Only UTF-8 text is taken (a byte order mark is removed, line ends become "\\n"). Everything is decided from the bytes:
names and media types that browsers send are hints at best.
"""

from __future__ import annotations

import unicodedata

from openk3.serve.web.records import Attachment
from openk3.serve.web.words import Phrase, SpokenError

MAX_FILE_BYTES = 1_048_576
MAX_FILES = 8
MAX_NAME_LENGTH = 80

_BINARY_SIGNATURES = {
    b"%PDF-": Phrase("a_pdf"),
    b"PK\x03\x04": Phrase("an_office_file"),
    b"\x89PNG": Phrase("an_image"),
    b"\xff\xd8\xff": Phrase("an_image"),
    b"GIF8": Phrase("an_image"),
    b"\x1f\x8b": Phrase("a_compressed_file"),
    b"\x7fELF": Phrase("a_program"),
}


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
    """Decode an uploaded file. Raises `UploadError` for empty, oversized, binary or non-UTF-8 content."""
    name = clean_name(name)
    if not data.strip():
        raise UploadError("file_empty", name=name)
    if len(data) > MAX_FILE_BYTES:
        raise too_large(name, len(data))
    for signature, kind in _BINARY_SIGNATURES.items():
        if data.startswith(signature):
            raise UploadError("file_is", name=name, kind=kind)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UploadError("file_not_utf8", name=name) from None
    if "\0" in text:
        raise UploadError("file_binary", name=name)
    return Attachment(name, text.replace("\r\n", "\n").replace("\r", "\n"))


def too_large(name: str, num_bytes: int) -> UploadError:
    """The error for a file over the limit."""
    size, limit = readable_size(num_bytes), readable_size(MAX_FILE_BYTES)
    return UploadError("file_too_large", name=clean_name(name), size=size, limit=limit)
