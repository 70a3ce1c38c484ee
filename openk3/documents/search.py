"""A full-text index over documents, in one SQLite file: BM25 over passages, by FTS5.

English words are found in all their forms (Porter's stemmer), whatever their case and accents. Chinese and Japanese are
written without spaces, so a run of their characters is indexed as its pairs: a word of two characters is a pair, a
longer one is pairs in a row, and a single character is the beginning of a pair (or the run's last one, which is indexed
alone). Any text is a query: its words are looked for, with "..." around them as a phrase, and nothing is an operator.

The file is in write-ahead-log mode and a document is added or removed in one transaction, so a killed process leaves
the index as it was before or after. Calls are safe from any thread.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openk3.documents.passages import passages
from openk3.documents.text import Document

SCHEMA_VERSION = 1
MAX_QUERY = 2000
SNIPPET = 240

# In the rowid order of passages: 'words' holds what is searched, 'passages' what is shown.
_SCHEMA = """
CREATE TABLE documents (key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL);
CREATE TABLE passages (
    key INTEGER PRIMARY KEY,
    document INTEGER NOT NULL REFERENCES documents(key) ON DELETE CASCADE,
    start INTEGER NOT NULL,
    end INTEGER NOT NULL,
    page INTEGER,
    heading TEXT NOT NULL,
    text TEXT NOT NULL
);
CREATE INDEX passages_of_document ON passages(document);
CREATE VIRTUAL TABLE words USING fts5(body, heading, tokenize = "porter unicode61 remove_diacritics 2");
CREATE TRIGGER passage_gone AFTER DELETE ON passages BEGIN DELETE FROM words WHERE rowid = old.key; END;
"""

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_CJK_RUN = re.compile(f"[{_CJK}]+")
_WORD = re.compile(f"[{_CJK}]+|(?:(?![{_CJK}_])\\w)+")
_PHRASE = re.compile(r'"([^"]*)"|“([^”]*)”|「([^」]*)」')
_STOP_WORD = re.compile(
    "a|an|and|are|as|at|be|but|by|can|did|do|does|for|from|had|has|have|how|i|if|in|into|is|it|its|me|my|no|not|of|on|or|"
    "our|should|so|than|that|the|their|them|then|there|these|they|this|to|was|we|were|what|when|where|which|who|why|"
    "will|with|would|you|your",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Hit:
    """A passage that was found.

    Attributes:
        document_id, name: the document.
        start, end: its place in the document's text.
        page: the page, from 1, in a document that has pages.
        heading: the heading that it stands under, or "".
        text: the passage.
        snippet: the part of it around the words that were looked for, at most some 240 characters.
        score: BM25, higher is better; comparable within one search.
    """

    document_id: str
    name: str
    start: int
    end: int
    page: int | None
    heading: str
    text: str
    snippet: str = ""
    score: float = 0.0

    @property
    def place(self) -> str:
        """Where it is, in words."""
        parts = [self.name, f"page {self.page}" if self.page else "", f"“{self.heading}”" if self.heading else ""]
        return ", ".join(filter(None, parts))


class SearchIndex:
    """The index in the SQLite file at `path`, made if need be, for this user only; ``None`` keeps it in memory.

    Raises:
        ValueError: the file cannot be opened, or is no index of this version.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.RLock()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)
            # Cached statements would hold the WAL's snapshot no longer than needed, as cursors here are always closed.
            self._db = sqlite3.connect(path or ":memory:", timeout=10, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA foreign_keys=ON")
            self._create_tables()
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"cannot open the search index {path}: {error}; move the file away") from error

    def _create_tables(self) -> None:
        with self._transaction() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                for statement in re.split(r";\n(?=CREATE|\Z)", _SCHEMA):  # executescript() would commit first
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise sqlite3.DatabaseError(f"it is no search index of version {SCHEMA_VERSION}")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def add(self, document_id: str, document: Document) -> None:
        """Add a document, in place of the one that has this id."""
        rows = [
            (piece.start, piece.end, piece.page, piece.heading, document.text[piece.start : piece.end])
            for piece in passages(document)
        ]
        words = [(indexed(text), indexed(heading)) for _, _, _, heading, text in rows]
        with self._transaction() as db:
            db.execute("DELETE FROM documents WHERE id = ?", (document_id,))
            insert = "INSERT INTO documents (id, name) VALUES (?, ?)"
            key = db.execute(insert, (document_id, document.name)).lastrowid
            for row, (body, heading) in zip(rows, words, strict=True):
                number = db.execute(
                    "INSERT INTO passages (document, start, end, page, heading, text) VALUES (?, ?, ?, ?, ?, ?)",
                    (key, *row),
                ).lastrowid
                db.execute("INSERT INTO words (rowid, body, heading) VALUES (?, ?, ?)", (number, body, heading))

    def remove(self, document_id: str) -> bool:
        """Remove a document; whether it was there."""
        with self._transaction() as db:
            return db.execute("DELETE FROM documents WHERE id = ?", (document_id,)).rowcount > 0

    def __contains__(self, document_id: object) -> bool:
        return bool(self._rows("SELECT 1 FROM documents WHERE id = ?", (document_id,)))

    def ids(self) -> list[str]:
        """The documents that are there, in the order in which they were added."""
        return [row[0] for row in self._rows("SELECT id FROM documents ORDER BY key")]

    def search(self, query: str, *, document_ids: Sequence[str] | None = None, limit: int = 5) -> list[Hit]:
        """Return the passages that fit best, best first.

        Args:
            query: any text. A passage need not have all of its words; those that are rare count most.
            document_ids: where to look; None: everywhere.
            limit: how many passages at most.
        """
        match = match_expression(query)
        if not match or limit < 1 or (document_ids is not None and not document_ids):
            return []
        among, values = _among(document_ids)
        found = self._rows(
            "SELECT d.id, d.name, p.start, p.end, p.page, p.heading, p.text, bm25(words, 1.0, 0.5) AS rank FROM words "
            "JOIN passages p ON p.key = words.rowid JOIN documents d ON d.key = p.document "
            f"WHERE words MATCH ? {among} ORDER BY rank, p.key LIMIT ?",
            (match, *values, limit),
        )
        terms = _looked_for(query)
        return [replace(Hit(*row), snippet=_snippet(row[6], terms), score=-rank) for *row, rank in found]

    def headings(self, document_ids: Sequence[str] | None = None, *, limit: int = 20) -> list[str]:
        """The first headings of some documents, or of all."""
        among, values = _among(document_ids)
        found = self._rows(
            "SELECT p.heading FROM passages p JOIN documents d ON d.key = p.document WHERE p.heading != '' "
            f"{among} GROUP BY p.heading ORDER BY min(p.key) LIMIT ?",
            (*values, limit),
        )
        return [heading for (heading,) in found]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _rows(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._lock, closing(self._db.execute(sql, values)) as cursor:
            return cursor.fetchall()


def _among(document_ids: Sequence[str] | None) -> tuple[str, list[str]]:
    """The SQL condition that a document is one of these, and its values."""
    if document_ids is None:
        return "", []
    return f"AND d.id IN ({', '.join('?' * len(document_ids))})", list(document_ids)


def indexed(text: str) -> str:
    """What FTS5 is given for a text: the same, but runs of Chinese and Japanese characters as their pairs."""
    return _CJK_RUN.sub(lambda run: f" {' '.join(_pairs(run.group()))} ", unicodedata.normalize("NFKC", text))


def match_expression(query: str) -> str:
    """The FTS5 expression for a query, "" if it has no words: phrases and words, any of which will do."""
    query = unicodedata.normalize("NFKC", query[:MAX_QUERY])
    phrases = ["".join(groups) for groups in _PHRASE.findall(query)]
    parts = []
    for phrase in phrases:
        tokens = [token for run in _WORD.findall(phrase) for token in (_run_tokens(run))]
        if tokens:
            parts.append('"' + " ".join(tokens) + '"')
    words = _WORD.findall(_PHRASE.sub(" ", query))
    telling = [word for word in words if not _STOP_WORD.fullmatch(word)]
    for word in telling or ([] if parts else words):
        if not _CJK_RUN.fullmatch(word):
            parts.append(f'"{word}"')
        elif len(word) == 1:
            parts.append(f'"{word}" *')
        else:
            # All of a long run in a row is rarely there, for it is a sentence more often than a word.
            parts += [f'"{word[i : i + 2]}"' for i in range(len(word) - 1)]
    return " OR ".join(dict.fromkeys(parts))


def _pairs(run: str) -> list[str]:
    return [run[i : i + 2] for i in range(len(run))]


def _run_tokens(run: str) -> list[str]:
    if not _CJK_RUN.fullmatch(run):
        return [run]
    return _pairs(run)[:-1] or [run]


def _looked_for(query: str) -> list[str]:
    """Lower-case beginnings of the words of a query: what to look for in a passage that is to be shown."""
    words = [word.lower() for word in _WORD.findall(query) if not _STOP_WORD.fullmatch(word)]
    terms: list[str] = []
    for word in words:
        if _CJK_RUN.fullmatch(word):
            terms += _run_tokens(word)
        else:
            terms.append(word if len(word) < 5 else word[: max(4, len(word) - 3)])
    return list(dict.fromkeys(terms))


def _snippet(text: str, terms: Sequence[str]) -> str:
    """The part of a passage with most of the terms in it, on one line, with … where it was cut."""
    if len(text) <= SNIPPET:
        return " ".join(text.split())
    lower = text.lower()
    places = sorted({match.start() for term in terms for match in re.finditer(re.escape(term), lower)})
    begins = places or [0]
    best = max(begins, key=lambda begin: (len({t for t in terms if t in lower[begin : begin + SNIPPET - 40]}), -begin))
    begin = max(0, min(best - 40, len(text) - SNIPPET))
    end = min(len(text), begin + SNIPPET)
    if begin and " " in text[begin : begin + 20]:
        begin = text.index(" ", begin) + 1
    if end < len(text) and " " in text[end - 20 : end]:
        end = text.rindex(" ", begin, end)
    return ("…" if begin else "") + " ".join(text[begin:end].split()) + ("…" if end < len(text) else "")
