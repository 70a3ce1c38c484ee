"""Bytes of a text file to text, when nobody says in which encoding they are.

The order is from what proves itself to what fits anything: a byte order mark; UTF-8, which other encodings' text hardly
ever is by chance; UTF-16 without a mark, betrayed by its zero bytes; GB18030, if the result is really Chinese; and last
Latin-1 in the form that everybody means by it (Windows-1252).
"""

from __future__ import annotations

import codecs
import re

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SAMPLE = 1 << 16
_HAN = re.compile(r"[\u4e00-\u9fff\u3000-\u303f\uff00-\uffef]")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")


def decode(data: bytes) -> str:
    """Return the text that `data` is, with lines ended by ``\\n``.

    Raises:
        ValueError: it is no text.
    """
    text = _decoded(data)
    if len(_CONTROL.findall(text[:_SAMPLE])) > len(text[:_SAMPLE]) // 100 or "\0" in text:
        raise ValueError("it is not text: it holds bytes that no text has")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decoded(data: bytes) -> str:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            try:
                return data.decode(encoding)
            except UnicodeDecodeError:
                raise ValueError(f"it is not text: it begins as {encoding.upper()} and does not go on so") from None
    for encoding, likely in (
        ("utf-8", lambda text: True),
        ("utf-16-le", lambda text: data[1:_SAMPLE:2].count(0) > len(data[:_SAMPLE]) // 5),
        ("utf-16-be", lambda text: data[0:_SAMPLE:2].count(0) > len(data[:_SAMPLE]) // 5),
        ("gb18030", _is_chinese),
    ):
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if encoding == "utf-8" and "\0" in text:  # ASCII in UTF-16 is valid UTF-8 too
            continue
        if likely(text):
            return text
    return data.decode("cp1252", "replace").replace("\ufffd", "?")


def _is_chinese(text: str) -> bool:
    """Whether most of what is not ASCII is Chinese: Latin-1 text read as GB18030 is rare characters at random."""
    foreign = [character for character in text[:_SAMPLE] if character > "\x7f"]
    # GB2312 orders the common characters first: a real text is nearly all of those.
    common = sum(_HAN.match(c) is not None and _is_common(c) for c in foreign)
    return common > 0.8 * len(foreign)


def _is_common(character: str) -> bool:
    try:
        return character.encode("gb2312") is not None
    except UnicodeEncodeError:
        return False
