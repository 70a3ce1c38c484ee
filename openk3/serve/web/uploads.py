"""Text files dropped on the chat: what is accepted, and the sentence a user reads when a file is not.

Only UTF-8 text is taken (a byte order mark is removed, line ends become "\\n"). Everything is decided from the bytes:
names and media types that browsers send are hints at best.
"""

from __future__ import annotations

import unicodedata

from openk3.serve.web.store import Attachment

MAX_FILE_BYTES = 1_048_576
MAX_FILES = 8
MAX_NAME_LENGTH = 80

_BINARY_SIGNATURES = {
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a zip archive or office document",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
    b"\x1f\x8b": "a compressed file",
    b"\x7fELF": "a program",
}


class UploadError(ValueError):
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


def read_text_file(name: str, data: bytes) -> Attachment:
    """Decode an uploaded file. Raises `UploadError` for empty, oversized, binary or non-UTF-8 content."""
    name = clean_name(name)
    if not data.strip():
        raise UploadError(f"“{name}” is empty.")
    if len(data) > MAX_FILE_BYTES:
        raise UploadError(too_large(name, len(data)))
    for signature, kind in _BINARY_SIGNATURES.items():
        if data.startswith(signature):
            raise UploadError(f"“{name}” is {kind}. Attach plain text instead, such as .txt, .md, .csv or source code.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UploadError(f"“{name}” is not UTF-8 text. Save it as UTF-8 and attach it again.") from None
    if "\0" in text:
        raise UploadError(
            f"“{name}” is a binary file. Attach plain text instead, such as .txt, .md, .csv or source code."
        )
    return Attachment(name, text.replace("\r\n", "\n").replace("\r", "\n"))


def too_large(name: str, num_bytes: int) -> str:
    """The sentence for a file over the limit."""
    size, limit = readable_size(num_bytes), readable_size(MAX_FILE_BYTES)
    return f"“{clean_name(name)}” is too large ({size}). The limit is {limit} per file."
