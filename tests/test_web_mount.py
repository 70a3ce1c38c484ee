"""The web chat's place in the server: one server after another, a killed one, bad files, models on their way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from serving import live, until
from web_chat import endless_llm, served_chat

from openk3.serve.app import create_app
from openk3.serve.web import StoreError, mount
from openk3.serve.web.records import ToolUse


def test_several_applications_keep_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with served_chat(tmp_path / f"{name}.sqlite3") as chat:
            chat.conversation(f"only in {name}", "answer")
            page = httpx.get(chat.url).text
            assert f"only in {name}" in page
            assert name == "one" or "only in one" not in page


def test_a_server_that_was_killed_shows_interrupted_replies(tmp_path: Path) -> None:
    with served_chat(tmp_path / "c.sqlite3") as chat:
        conversation = chat.conversation()
        reply = chat.store.begin_turn(conversation.id, "question")
        call = ToolUse("a", "calculator", "{}", status="asking")
        chat.store.save_reply(replace(reply, content="half", work=(call,)))
    with served_chat(tmp_path / "c.sqlite3") as chat:
        assert chat.store.messages(conversation.id)[-1].status == "interrupted"
        page = httpx.get(chat.link(conversation)).text
        assert "Interrupted: the server went down" in page
        assert 'data-status=\\"skipped\\"' in page, "a call that waited for its yes does not wait any more"


def test_a_bad_conversation_file_stops_the_server_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"no database" * 200)
    app = create_app(endless_llm, model_name="debug", store_path=tmp_path / "bad", owns_model=False)
    with pytest.raises(StoreError, match="cannot open the chat history"), TestClient(app):
        pass


def test_a_model_that_loads_or_fails_is_announced(tmp_path: Path) -> None:
    app = FastAPI()
    errors: list[str] = []
    mount(app, lambda: None, tmp_path / "c.sqlite3", load_error=lambda: errors[0] if errors else None)
    with live(app, wait=False) as url:
        until(lambda: httpx.get(url).status_code == 200)
        assert "Loading the model" in httpx.get(url).text
        errors.append("There is no such checkpoint.")
        assert "There is no such checkpoint." in httpx.get(url).text
