"""The full-text index: passages and their places, what is found and in which order, any query, and kill -9."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.documents.passages import LONGEST, passages
from openk3.documents.search import SNIPPET, SearchIndex, match_expression
from openk3.documents.text import Document

LEASE = """# Lease

## Rent

The monthly rent is 900 euros. It is due on the third day of each month.

The tenant pays for heating.

## Pets

Dogs are allowed; cats running free are not. Café owners may keep a parrot.

## 租金

每月租金为九百欧元，押金相当于两个月租金。
"""


@pytest.fixture
def index() -> SearchIndex:
    index = SearchIndex()
    index.add("lease", Document("lease.md", "markdown", LEASE))
    index.add("other", Document("other.txt", "text", "Nothing about rent here, but rent is a word. Zebras.\n\n" * 3))
    return index


# Passages


@given(st.lists(st.sampled_from(["word ", "# Head\n", "\n\n", "\n", "\f", "。", "x" * 900, "Go. ", "  "]), max_size=60))
def test_passages_cover_the_text_in_order(parts: list[str]) -> None:
    text = "".join(parts)
    document = Document("a.pdf", "pdf", text)
    end = 0
    for passage in passages(document):
        assert not text[end : passage.start].strip()
        piece = text[passage.start : passage.end]
        assert piece == piece.strip() and piece and len(piece) <= LONGEST
        assert "\f" not in piece
        assert passage.page == document.page_at(passage.start) == text[: passage.start].count("\f") + 1
        end = passage.end
    assert not text[end:].strip()


def test_passages_keep_to_their_heading() -> None:
    cut = [(p.heading, LEASE[p.start : p.end]) for p in passages(Document("a.md", "markdown", LEASE))]
    assert [heading for heading, _ in cut] == ["Rent", "Pets", "租金"]
    assert cut[0][1].startswith("# Lease\n\n## Rent\n\nThe monthly") and cut[0][1].endswith("heating.")


def test_paragraphs_stay_whole() -> None:
    paragraphs = [f"{letter} " * 250 + "end" for letter in "abcd"]
    text = "\n\n".join(paragraphs) + "\n\nshort\nlines\n \nmore"
    cut = [text[p.start : p.end] for p in passages(Document("a.txt", "text", text))]
    assert cut == [*paragraphs[:3], paragraphs[3] + "\n\nshort\nlines\n \nmore"]


def test_a_long_paragraph_is_cut_at_its_sentences() -> None:
    text = "This is a sentence of some words. " * 200
    cut = [text[p.start : p.end] for p in passages(Document("a.txt", "text", text))]
    assert len(cut) > 4
    assert all(piece.endswith("words.") and piece.startswith("This") for piece in cut)


# What is found


@pytest.mark.parametrize(
    ("query", "heading"),
    [
        ("How much is the rent per month?", "Rent"),
        ("MONTHLY", "Rent"),
        ("tenants paying", "Rent"),
        ("dog", "Pets"),
        ("cats run", "Pets"),
        ("cafe", "Pets"),
        ('"running free"', "Pets"),
        ("租金", "租金"),
        ("押金是多少？", "租金"),
        ("两个月租金", "租金"),
        ("押", "租金"),
        ("元", "租金"),
        ("“相当于”", "租金"),
        ("ＥＵＲＯＳ", "Rent"),
    ],
)
def test_found(index: SearchIndex, query: str, heading: str) -> None:
    best = index.search(query, document_ids=["lease"])[0]
    assert best.heading == heading
    assert LEASE[best.start : best.end] == best.text
    assert best.place == f"lease.md, “{heading}”"


@pytest.mark.parametrize("query", ['"free running"', "金租", '"两月"', "unicorn", "", "?!", "the of"])
def test_not_found(index: SearchIndex, query: str) -> None:
    assert index.search(query, document_ids=["lease"]) == [] or query == "the of"


def test_order_documents_and_limit(index: SearchIndex) -> None:
    everywhere = index.search("zebras rent", limit=10)
    assert {hit.document_id for hit in everywhere} == {"lease", "other"}
    assert everywhere[0].document_id == "other"  # has both words
    assert [hit.score for hit in everywhere] == sorted((hit.score for hit in everywhere), reverse=True)
    assert len(index.search("rent", limit=1)) == 1
    assert index.search("rent", document_ids=[]) == index.search("rent", limit=0) == []
    assert index.search("rent", document_ids=["nobody's"]) == []


def test_headings(index: SearchIndex) -> None:
    assert index.headings(["lease", "other"]) == ["Rent", "Pets", "租金"]
    assert index.headings() == ["Rent", "Pets", "租金"]
    assert index.headings(["other"]) == index.headings([]) == []
    assert index.headings(["lease"], limit=1) == ["Rent"]


def test_a_snippet_shows_the_words() -> None:
    index = SearchIndex()
    index.add("a", Document("a.txt", "text", "filler words " * 50 + "the needle is here " + "more filler " * 20))
    (hit, *_) = index.search("needles")
    assert "needle" in hit.snippet
    assert len(hit.snippet) <= SNIPPET + 2
    assert hit.snippet.startswith("…") and hit.snippet.endswith("…")


@given(st.text(max_size=60))
def test_any_query_is_safe(query: str) -> None:
    index = SearchIndex()
    index.add("a", Document("a.txt", "text", "some text 一些文字"))
    index.search(query)
    index.close()


@pytest.mark.parametrize(
    "query", ["NEAR(a b, 3)", 'a" OR b', "body:x", "a* ^b -c", "\ud800 x", "a\0b", '"' * 9, "x" * 10**6]
)
def test_operators_are_text(index: SearchIndex, query: str) -> None:
    index.search(query)
    assert match_expression("NEAR(rent)") == '"NEAR" OR "rent"'


# What is kept


def test_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "index.sqlite3"
    index = SearchIndex(path)
    index.add("a", Document("a.txt", "text", "old words"))
    index.add("a", Document("a.txt", "text", "new text"))
    assert index.search("old") == []
    index.add("b", Document("b.txt", "text", "other text"))
    index.close()
    again = SearchIndex(path)
    assert again.ids() == ["a", "b"]
    assert again.remove("a") and not again.remove("a")
    assert "a" not in again and "b" in again
    assert [hit.document_id for hit in again.search("text")] == ["b"]
    again.close()
    with sqlite3.connect(path) as db:  # nothing of what is gone is left to be found
        assert db.execute("SELECT count(*) FROM words").fetchone() == (1,)
    assert path.stat().st_mode & 0o077 == 0


def test_many_threads(tmp_path: Path) -> None:
    index = SearchIndex(tmp_path / "i")
    failures: list[Exception] = []

    def work(number: int) -> None:
        try:
            for i in range(5):
                index.add(f"{number}.{i}", Document("a", "text", f"word{number} text"))
                assert index.search(f"word{number}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(index.ids()) == 30


def test_a_file_that_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no database" * 100)
    with pytest.raises(ValueError, match=r"cannot open the search index .*move the file away"):
        SearchIndex(tmp_path / "x")
    with sqlite3.connect(tmp_path / "y") as db:
        db.execute("CREATE TABLE t (a)")
    with pytest.raises(ValueError, match="no search index of version 1"):
        SearchIndex(tmp_path / "y")


WRITER = """
import sys
from pathlib import Path
from openk3.documents.search import SearchIndex
from openk3.documents.text import Document
index = SearchIndex(Path(sys.argv[1]))
for number in range(10**6):
    index.add(f"d{number % 7}", Document("a", "text", f"version{number} text\\n\\n" * 40))
    print(number, flush=True)
"""


def test_kill_9(tmp_path: Path) -> None:
    """Killed in the middle of writing, the index holds whole documents only, and those that were reported."""
    path = tmp_path / "i"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(25):
        last = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    last = max([last, *map(int, process.stdout.read().split()[:-1])])
    process.wait()
    index = SearchIndex(path)
    assert len(index.ids()) == 7
    for number in range(last - 4, last + 1):  # the two after may have replaced the oldest
        hits = index.search(f"version{number}", limit=100)
        assert "".join(hit.text for hit in hits).count(f"version{number} ") == 40
    assert not index._rows("SELECT rowid FROM words EXCEPT SELECT key FROM passages")
    assert not index._rows("SELECT key FROM passages EXCEPT SELECT rowid FROM words")
