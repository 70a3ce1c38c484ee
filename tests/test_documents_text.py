"""The text of files: what each format gives, and what hostile, damaged and foreign files are told."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from documents import W, docx, paragraph, pdf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openk3.confined import ConfinedError, run_confined
from openk3.documents.docx import MAX_XML_BYTES, read_docx
from openk3.documents.encoding import decode
from openk3.documents.html import read_html
from openk3.documents.text import Document, file_format, read_document

CHINESE = "本合同由甲乙双方签订。每月租金为九百元，押金两个月。"


# Encodings


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
def test_encodings_of_western_text(encoding: str) -> None:
    text = "Le loyer mensuel est de 900 francs, dû à l’échéance.\n".replace("’", "'")
    assert decode(text.encode(encoding)) == text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "gb18030", "gbk"])
def test_encodings_of_chinese_text(encoding: str) -> None:
    assert decode((CHINESE * 3).encode(encoding)) == CHINESE * 3


def test_windows_quotes_and_line_ends() -> None:
    assert decode("“So” – 5 €\r\nja\rnein".encode("cp1252")) == "“So” – 5 €\nja\nnein"


@pytest.mark.parametrize("data", [bytes(range(256)) * 20, b"\x00\x01\x02" * 100, b"\xff\xfe\x00\xd8", b"a\0b"])
def test_what_is_no_text(data: bytes) -> None:
    with pytest.raises(ValueError, match="it is not text"):
        decode(data)


@given(st.text())
def test_utf8_is_always_read_as_it_is(text: str) -> None:
    clean = "".join(c for c in text if c >= " " and c != "\ufeff") + "x"
    assert decode(clean.encode()) == clean


@given(st.binary(min_size=1, max_size=300))
def test_any_bytes_are_text_or_refused(data: bytes) -> None:
    try:
        assert "\0" not in decode(data)
    except ValueError as error:
        assert str(error).startswith("it is not text")


# Formats


def test_what_a_file_is() -> None:
    assert file_format("a.html", b"hello") == "html"
    assert file_format("a.txt", b"  <!-- x --> <!DOCTYPE html><p>") == "html"
    assert file_format("a.MD", b"# A") == "markdown"
    assert file_format("a.py", b"import os") == "text"
    assert file_format("a.txt", pdf(["x"])) == "pdf"
    assert file_format("a.txt", docx("")) == "docx"


def test_a_page() -> None:
    page = (
        "<!doctype html><html><head><title>no</title><style>no</style></head><body><h2>Rent <i>due</i></h2>"
        "<p>900\n  euros<br>a &amp; b</p><script>no</script><!-- no --><ul><li>one<li>two</ul>"
        "<table><tr><td>x</td><td>1</td></tr><tr><td>y</td><td>2</td></tr></table>end</body></html>"
    )
    assert read_document("a.html", page.encode()) == Document(
        "a.html", "html", "## Rent due\n\n900 euros\na & b\n\n- one\n- two\n\nx\t1\ny\t2\n\nend"
    )
    declared = '<meta charset="gb2312"><p>' + CHINESE
    assert read_html(declared.encode("gb2312")).decode() == CHINESE


def test_a_word_document() -> None:
    styles = (
        f'<w:styles {W}><w:style w:styleId="berschrift2"><w:pPr><w:outlineLvl w:val="1"/></w:pPr></w:style></w:styles>'
    )
    table = "".join(f"<w:tr><w:tc>{paragraph(a)}</w:tc><w:tc>{paragraph(b)}</w:tc></w:tr>" for a, b in ("x1", "y2"))
    body = (
        paragraph("Lease", "Title")
        + paragraph("Rent", "berschrift2")
        + paragraph("900 &lt;euros&gt;")
        + "<w:p><w:r><w:t>new</w:t></w:r><w:del><w:r><w:delText>old</w:delText></w:r></w:del></w:p>"
        + f"<w:tbl>{table}</w:tbl>"
    )
    notes = f"<w:footnotes {W}><w:footnote>{paragraph('A note.')}</w:footnote></w:footnotes>"
    document = read_document("lease.docx", docx(body, styles=styles, footnotes=notes))
    assert document.text == "# Lease\n\n## Rent\n\n900 <euros>\n\nnew\n\nx\t1\ny\t2\n\nA note."
    assert document.page_at(3) is None


def test_a_pdf_has_pages() -> None:
    document = read_document("a.pdf", pdf(["First page", "", "Third page"]))
    assert document.text == "First page\f\fThird page"
    assert [document.page_at(document.text.index(word)) for word in ("First", "Third")] == [1, 3]
    assert document.page_starts == [0, 11, 12]


# What is refused


def refused(name: str, data: bytes, **options: float) -> str:
    with pytest.raises(ValueError) as caught:
        read_document(name, data, **options)
    assert str(caught.value).startswith(f"{name}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{name}: ")


def test_scans_and_locked_files_are_told_apart() -> None:
    assert "is a scan" in refused("a.pdf", pdf(["", ""], picture=True))
    assert refused("a.pdf", pdf([""])) == "the PDF has no text"
    lock = "/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O (" + "o" * 32 + ") /U (" + "u" * 32 + ") >> /ID [(a) (a)]"
    assert "password" in refused("a.pdf", pdf(["x"], extra=lock))
    assert "damaged" in refused("a.pdf", b"%PDF-1.7\nnothing")


def test_foreign_and_empty_files() -> None:
    assert refused("a.png", b"\x89PNG\r\n\x1a\n").startswith("it is an image; what can be read is")
    assert "save it as .docx" in refused("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")
    assert refused("a.txt", b" \n") == "it is empty"
    assert refused("a.html", b"<html><script>x</script>") == "the page has no text"
    assert refused("a.zip", b"PK\x03\x04 nonsense").startswith("the Word document is damaged")
    assert "no text" in refused("a.docx", docx(""))


def test_a_zip_bomb() -> None:
    bomb = docx("", styles=b" " * (MAX_XML_BYTES + 1000))
    assert len(bomb) < 1 << 20
    assert "unpacks to more than" in refused("bomb.docx", bomb)


@pytest.mark.parametrize(
    "head",
    [
        '<!DOCTYPE w [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>',
        '<!DOCTYPE w [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
    ],
)
def test_xml_entities(head: str) -> None:
    assert "declares XML entities" in refused("a.docx", docx(paragraph("&a;"), head=head))


def test_deep_nesting() -> None:
    assert read_html(b"<div>" * 5000 + b"deep").decode() == "deep"
    deep = "<w:sdt>" * 5000 + paragraph("deep") + "</w:sdt>" * 5000
    assert read_docx(docx(deep)).decode() == "deep"


def test_endless_pages() -> None:
    loop = pdf(["x"] * 3).replace(b"/Kids [4 0 R 6 0 R 8 0 R] /Count 3", b"/Kids [2 0 R 2 0 R 2 0 R] /Count 3")
    refused("loop.pdf", loop)
    many = pdf(["x"], page_count=2_000_000_000)
    try:
        assert read_document("many.pdf", many).text.strip() == "x"
    except ValueError as error:
        assert "pages" in str(error) or "damaged" in str(error)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_files_give_text_or_a_sentence(data: st.DataObject) -> None:
    """Bytes of good files changed at random. In this process where the parser is Python, else confined as always."""
    name, whole = data.draw(
        st.sampled_from([("a.pdf", pdf(["One", "Two"])), ("a.docx", docx(paragraph("One"))), ("a.html", b"<p>One<b>x")])
    )
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 8))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert read_document(name, bytes(broken[: data.draw(st.integers(1, len(broken)))])).text.strip()
    except ValueError as error:
        assert str(error).startswith(f"{name}: ")


# The process that parsers run in


def spins(data: bytes) -> bytes:
    while True:
        pass


def eats(data: bytes) -> bytes:
    return b"x" * (4 << 30)


def crashes(data: bytes) -> bytes:
    os.abort()


def refuses(data: bytes) -> bytes:
    raise ValueError("no: " + data.decode())


def writes(data: bytes) -> bytes:
    try:
        with open(data.decode(), "wb") as file:  # noqa: PTH123 (as little as possible between it and the system)
            file.write(b"x")
    except OSError:
        return b"refused"
    return b"written"


def looks(data: bytes) -> bytes:
    return os.environ.get("OPENK3_SECRET", "nothing").encode()


@pytest.mark.parametrize(
    ("function", "words"), [("spins", "longer than 0.5 seconds"), ("eats", "more than 300 MB"), ("crashes", "crashed")]
)
def test_what_does_not_come_back(function: str, words: str, here: None) -> None:
    with pytest.raises(ConfinedError, match=words):
        run_confined(f"test_documents_text:{function}", b"", seconds=0.5 if function == "spins" else 20, megabytes=300)


def test_what_comes_back(here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    written = run_confined("test_documents_text:writes", str(path).encode(), seconds=20, megabytes=300)
    assert written == b"refused"
    assert not path.stat().st_size
    monkeypatch.setenv("OPENK3_SECRET", "key")
    with pytest.raises(ValueError, match=r"^no: ä$"):
        run_confined("test_documents_text:refuses", "ä".encode(), seconds=20, megabytes=300)
    assert run_confined("test_documents_text:looks", b"", seconds=20, megabytes=300) == b"nothing"


def naps(data: bytes) -> bytes:
    time.sleep(0.1)
    return data


def test_more_than_fit_wait_for_their_turn(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its whole time from when it begins, however many are asked for at once."""
    monkeypatch.setattr("openk3.confined._SLOTS", threading.BoundedSemaphore(2))
    with ThreadPoolExecutor(4) as pool:
        run = [pool.submit(run_confined, "test_documents_text:naps", b"x", seconds=20, megabytes=300) for _ in range(4)]
        assert [future.result() for future in run] == [b"x"] * 4


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the confined process find this file as a module."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    monkeypatch.setattr("openk3.confined._ROOT", os.pathsep.join((root, os.path.join(root, "tests"))))  # noqa: PTH118


def test_a_parser_that_does_not_end_is_given_up() -> None:
    begun = time.monotonic()
    assert "longer than 0.01 seconds" in refused("a.html", b"<p>x", seconds=0.01)
    assert time.monotonic() - begun < 30  # not the seconds of the default, whatever the machine does
