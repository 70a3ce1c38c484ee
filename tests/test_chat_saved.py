"""Chats on disk: round trip, one-step replacement, and what is refused."""

import json
import os
from pathlib import Path

import pytest

from openk3.chat.messages import Message
from openk3.chat.saved import load_chat, save_chat

MESSAGES: list[Message] = [{"role": "user", "content": "你好 🙂\n"}, {"role": "assistant", "content": "Hi"}]


def test_round_trip_and_replacement(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    save_chat(file, MESSAGES[:1], "a")
    save_chat(file, MESSAGES, "b")
    saved = load_chat(str(file))
    assert (saved.messages, saved.model) == (MESSAGES, "b")
    assert "你好" in file.read_text(encoding="utf-8")
    assert [file.name for file in tmp_path.iterdir()] == ["chat.json"]


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("# mine")
    with pytest.raises(ValueError, match=r"notes\.md is there and is not a saved chat; choose another name"):
        save_chat(file, MESSAGES, "m")
    assert file.read_text() == "# mine"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chat.json"
    save_chat(file, MESSAGES[:1], "a")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_chat(file, MESSAGES, "b")
    assert load_chat(file).model == "a"
    assert [file.name for file in tmp_path.iterdir()] == ["chat.json"]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"\xff\xfe", "is not valid JSON: .*can't decode byte"),
        (b"{", "is not valid JSON"),
        (b"[]", "is not a chat saved by k3"),
        (b'{"messages": []}', "is not a chat saved by k3"),
        (json.dumps({"format": "openk3-chat", "version": 9}).encode(), "has format version 9; this k3 reads version 1"),
        (json.dumps({"format": "openk3-chat", "version": 1}).encode(), "messages: expected a list"),
        (
            json.dumps({"format": "openk3-chat", "version": 1, "messages": [{"role": "robot"}]}).encode(),
            r"messages\[0\]\.role: 'robot' is not one of",
        ),
    ],
)
def test_refused(tmp_path: Path, content: bytes, error: str) -> None:
    file = tmp_path / "chat.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=error):
        load_chat(file)


def test_a_folder_that_is_not_there_is_named_by_the_users_own_words(tmp_path: Path) -> None:
    file = tmp_path / "no" / "chat.json"
    with pytest.raises(FileNotFoundError) as error:
        save_chat(file, MESSAGES, "m")
    assert error.value.filename == str(file)


def test_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="messages: the list is empty"):
        save_chat(tmp_path / "chat.json", [], "m")
    assert [file.name for file in tmp_path.iterdir()] == []
