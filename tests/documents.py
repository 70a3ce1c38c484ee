"""Files for the tests of documents, written byte by byte, so that what is in them is known."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def pdf(pages: Sequence[str], *, extra: str = "", page_count: int | None = None, picture: bool = False) -> bytes:
    """A PDF with one line of text on each page. `extra` goes into the trailer; `picture` draws one on each page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages) if page_count is None else page_count} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    drawn = "q 100 0 0 100 0 0 cm BI /W 1 /H 1 /BPC 8 /CS /G ID x EI Q" if picture else ""
    for i, text in enumerate(pages):
        content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET {drawn}" if text else drawn
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    body, places = b"%PDF-1.4\n", []
    for number, value in enumerate(objects, 1):
        places.append(len(body))
        body += f"{number} 0 obj\n{value}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    trailer = f"trailer << /Size {len(objects) + 1} /Root 1 0 R {extra} >>\nstartxref\n{len(body)}\n%%EOF"
    return body + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode("latin-1")


def paragraph(text: str, style: str = "") -> str:
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{properties}<w:r><w:t>{text}</w:t></w:r></w:p>"


def docx(body: str, *, head: str = "", **parts: str | bytes) -> bytes:
    """A Word document; `parts` are more files of its folder ``word``, such as ``styles``."""
    files: dict[str, str | bytes] = {"document": f"{head}<w:document {W}><w:body>{body}</w:body></w:document>", **parts}
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"word/{name}.xml", content)
    return target.getvalue()
