"""The Files API: what goes in comes out, in pages, for its owner alone; and nothing half-written is ever there."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from serving import client, debug_app, live, until

from openk3.serve.files.store import FileStore
from openk3.serve.files.upload import plain_filename
from openk3.serve.state.database import Database, StateError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with live(debug_app(state_folder=folder, max_file_bytes=1 << 20), wait=False) as url:
        yield url


@pytest.fixture
def openai(url: str) -> OpenAI:
    return client(url)


def left_over(folder: Path) -> set[str]:
    """Bytes on the disk that no row knows of."""
    database = Database(folder / "state.sqlite3")
    known = {row["id"] for row in database.rows("SELECT id FROM files")}
    database.close()
    return {path.name for path in (folder / "files").iterdir()} - known


def test_upload_look_read_delete(openai: OpenAI, folder: Path) -> None:
    data = bytes(range(256)) * 1000 + b"\r\n--not the boundary\r\n"
    made = openai.files.create(file=("tides.jsonl", data), purpose="batch")
    assert re.fullmatch(r"file-[0-9a-f]{32}", made.id)
    assert (made.filename, made.purpose, made.bytes, made.status) == ("tides.jsonl", "batch", len(data), "processed")
    assert openai.files.retrieve(made.id) == made
    assert openai.files.content(made.id).read() == data
    assert openai.files.delete(made.id).deleted
    for call in (openai.files.retrieve, openai.files.content, openai.files.delete):
        with pytest.raises(NotFoundError, match="There is no file"):
            call(made.id)
    assert not (folder / "files" / made.id).exists()


def test_content_is_a_download_of_no_type(url: str, openai: OpenAI) -> None:
    made = openai.files.create(file=("größe.html", b"<script>alert(1)</script>"), purpose="user_data")
    response = httpx.get(f"{url}/v1/files/{made.id}/content")
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-disposition"] == "attachment; filename*=UTF-8''gr%C3%B6%C3%9Fe.html"


def test_a_document_gives_its_text(openai: OpenAI) -> None:
    made = openai.files.create(file=("a.html", b"<h1>Tides</h1><p>The moon pulls.</p>"), purpose="file-extract")
    said = openai.files.content(made.id).json()
    assert "The moon pulls." in said["content"]
    assert "<p>" not in said["content"]
    assert (said["file_type"], said["filename"]) == ("html", "a.html")
    broken = openai.files.create(file=("a.pdf", b"%PDF-1.4 nonsense"), purpose="file-extract")
    with pytest.raises(BadRequestError, match=r"a\.pdf"):
        openai.files.content(broken.id)


def test_pages(openai: OpenAI) -> None:
    made = [openai.files.create(file=(f"{i}.txt", b"x"), purpose="evals").id for i in range(5)]
    openai.files.create(file=("other.txt", b"x"), purpose="vision")
    first = openai.files.list(purpose="evals", limit=2, order="asc")
    assert [file.id for file in first.data] == made[:2]
    assert first.has_more
    assert [file.id for file in first] == made  # the client turns the pages
    last = openai.files.list(purpose="evals", limit=2, order="desc", after=made[2])
    assert [file.id for file in last.data] == [made[1], made[0]]
    assert not last.has_more
    with pytest.raises(BadRequestError, match="'after': there is no file"):
        openai.files.list(after="file-0")
    with pytest.raises(BadRequestError, match="limit"):
        openai.files.list(limit=0)


def test_a_file_expires(openai: OpenAI, folder: Path) -> None:
    made = openai.files.create(
        file=("a.txt", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    database = Database(folder / "state.sqlite3")
    database.change("UPDATE files SET expires_at = 1 WHERE id = ?", (made.id,))
    with pytest.raises(NotFoundError):
        openai.files.retrieve(made.id)
    FileStore(database, folder / "files").sweep()
    assert not (folder / "files" / made.id).exists()
    database.close()


@pytest.mark.parametrize(
    ("options", "message", "param"),
    [
        ({"files": {"file": b"x"}}, "Missing required parameter: 'purpose'", "purpose"),
        ({"files": {"file": b"x"}, "data": {"purpose": "fun"}}, "'purpose': \"fun\" is none of assistants,", "purpose"),
        (
            {"data": {"purpose": "batch"}, "files": {"other": (None, b"x")}},
            "Missing required parameter: 'file'",
            "file",
        ),
        (
            {"data": {"purpose": "batch", "colour": "red"}, "files": {"file": b"x"}},
            'Unknown parameter: "colour"',
            "colour",
        ),
        (
            {"data": {"purpose": "batch", "expires_after[seconds]": "60"}, "files": {"file": b"x"}},
            "Invalid 'expires_after'",
            "expires_after",
        ),
        ({"data": {"purpose": "batch"}, "files": [("file", b"x"), ("file", b"y")]}, "give one file", "file"),
        (
            {"content": b"--b\r\nContent-Dis", "headers": {"Content-Type": "multipart/form-data; boundary=b"}},
            "not a valid multipart form: it ends before its last boundary",
            None,
        ),
        (
            {"content": b"nonsense", "headers": {"Content-Type": "multipart/form-data; boundary=b"}},
            "not a valid multipart form",
            None,
        ),
    ],
)
def test_refused_forms(url: str, folder: Path, options: dict, message: str, param: str | None) -> None:  # type: ignore[type-arg]
    response = httpx.post(f"{url}/v1/files", **options)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == param
    assert left_over(folder) == set()


def test_other_content_types_and_sizes(url: str, folder: Path) -> None:
    assert httpx.post(f"{url}/v1/files", json={}).status_code == 415
    files = {"file": b"x" * (2 << 20)}
    response = httpx.post(f"{url}/v1/files", files=files, data={"purpose": "batch"})
    assert response.status_code == 413
    until(lambda: not left_over(folder))


def test_an_upload_that_is_cut_leaves_nothing(url: str, folder: Path) -> None:
    def half() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhello'
        until(lambda: left_over(folder))
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        httpx.post(f"{url}/v1/files", content=half(), headers={"Content-Type": "multipart/form-data; boundary=b"})
    until(lambda: not left_over(folder))


@pytest.mark.parametrize(
    ("name", "plain"),
    [("../../etc/passwd", "passwd"), (r"C:\temp\a.txt", "a.txt"), ("a\r\nb\x00.txt", "ab.txt"), ("/", "file")],
)
def test_file_names_are_plain(name: str, plain: str) -> None:
    assert plain_filename(name) == plain


def test_kill_9_leaves_whole_files_or_nothing(tmp_path: Path) -> None:
    """A process writes files until it is killed, over and over; another server's sweep leaves a running one alone."""
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from openk3.serve.files.store import FileStore
        from openk3.serve.state.database import Database
        folder = Path(sys.argv[1])
        store = FileStore(Database(folder / "state.sqlite3"), folder / "files")
        print("ready", flush=True)
        while True:
            with store.writer() as writer:
                for _ in range(64):
                    writer.write(b"k" * 4096)
                print(writer.commit(filename="a", purpose="batch").id, flush=True)
    """)
    for round_ in range(3):
        child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        told = [child.stdout.readline().strip() for _ in range(3 + round_)]
        store = FileStore(Database(tmp_path / "state.sqlite3"), tmp_path / "files")
        store.sweep()  # beside the writer
        child.kill()
        told += child.stdout.read().split()
        child.wait()
        store.sweep()
        files, _ = store.list(limit=10_000)
        ids = {file.id for file in files}
        assert set(told) <= ids  # what was acknowledged is there
        assert ids == {path.name for path in store.folder.iterdir()}
        assert {store.path(file).stat().st_size for file in files} == {64 * 4096}


def test_owners_are_kept_apart(tmp_path: Path) -> None:
    store = FileStore(Database(tmp_path / "state.sqlite3"), tmp_path / "files")
    mine = store.add(b"x", filename="a", purpose="batch", owner="me")
    assert store.get(mine.id, "you") is None
    assert not store.delete(mine.id, "you")
    assert store.list("you", limit=5) == ([], False)
    assert store.get(mine.id, "me") == mine


def test_a_database_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"not a database, but long enough to be read as the head of one" * 20)
    with pytest.raises(StateError, match=r"cannot open .*bad: file is not a database"):
        Database(tmp_path / "bad")
    newer = Database(tmp_path / "newer")
    newer.change("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(StateError, match="newer OpenK3"):
        Database(tmp_path / "newer")
