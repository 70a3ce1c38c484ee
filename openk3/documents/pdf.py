"""The text of a PDF, page by page, by PDFium. Pages are divided by a form feed, as pdftotext does it."""

from __future__ import annotations

PAGE_BREAK = "\f"
MAX_PAGES = 5000


def read_pdf(data: bytes) -> bytes:
    """Return the text of all pages as UTF-8, pages divided by a form feed. Runs confined.

    Raises:
        ValueError: the PDF is damaged, locked by a password, has too many pages, or is a scan without text.
    """
    from pypdfium2 import PdfDocument, PdfiumError

    try:
        document = PdfDocument(data)
    except PdfiumError as error:
        reason = "it is locked by a password: save it without one" if "assword" in str(error) else "it is damaged"
        raise ValueError(f"the PDF cannot be read: {reason}") from None
    if len(document) > MAX_PAGES:
        raise ValueError(f"the PDF has {len(document):,} pages; at most {MAX_PAGES:,} are read: split it")
    pages, pictures = [], False
    for number in range(len(document)):
        try:
            page = document[number]
            text = page.get_textpage().get_text_bounded()
            pictures = pictures or (not text.strip() and any(page.get_objects(filter=[3], max_depth=2)))
        except PdfiumError:
            raise ValueError(f"the PDF cannot be read: page {number + 1} is damaged") from None
        # PDFium marks a hyphen at a line's end by U+FFFE, and ends lines with \r\n.
        pages.append(text.replace("\ufffe", "-").replace("\r\n", "\n").replace("\0", "").replace(PAGE_BREAK, "\n"))
    if not any(map(str.strip, pages)):
        what = "is a scan: its pages are pictures without text, which needs OCR" if pictures else "has no text"
        raise ValueError(f"the PDF {what}")
    return PAGE_BREAK.join(page.strip() for page in pages).encode("utf-8", "replace")
