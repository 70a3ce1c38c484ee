"""`k3 search`, and tools in `k3 chat`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import calculator_here, call_parts, has_model_reply
from chat_support import chat_llm
from documents import pdf
from typer.testing import CliRunner, Result

from openk3 import cli
from openk3.agents.tools import builtin
from openk3.agents.tools.tool import Tool
from openk3.chat.history import check_tool_history
from openk3.chat.messages import validate_messages
from openk3.repl import Repl

pytestmark = pytest.mark.usefixtures(calculator_here.__name__)


def k3(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lease.pdf").write_bytes(pdf(["Parties", "The monthly rent is 900 euros."]))
    (tmp_path / "notes.md").write_text("# Pets\n\nDogs are allowed.\n")
    (tmp_path / "ignored.bin").write_bytes(b"\0rent")
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.7 nothing")
    return tmp_path


def test_search(folder: Path) -> None:
    shown = k3("search", str(folder / "lease.pdf"), "-q", "rents")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout == f"{folder}/lease.pdf, page 2\n  The monthly rent is 900 euros.\n"


def test_search_in_a_folder(folder: Path) -> None:
    shown = k3("search", str(folder), "-q", "dog", "--json")
    (hit,) = json.loads(shown.stdout)["hits"]
    assert (hit["name"], hit["heading"], hit["page"]) == (f"{folder}/notes.md", "Pets", None)
    assert f"k3: left out: {folder}/broken.pdf: the PDF cannot be read: it is damaged" in shown.stderr
    nothing = k3("search", str(folder), "-q", "unicorn")
    assert (nothing.exit_code, nothing.stdout) == (1, "nothing found\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["search", "nowhere.txt", "-q", "x"], "nowhere.txt: No such file"),
        (["search", "broken.pdf", "-q", "x"], "broken.pdf: the PDF cannot be read"),
        (["search", "empty", "-q", "x"], "empty: no documents in this folder"),
        (["search", "notes.md"], "Missing option"),
        (["chat", "--tool", "shell"], "there is no built-in tool 'shell'; there are calculator, datetime"),
        (["chat", "--mcp", "nowhere.json"], "nowhere.json: No such file"),
        (["serve", "--mcp", "notes.md"], "notes.md: not valid JSON"),
    ],
)
def test_mistakes(folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir()
    result = k3(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert words in result.stderr and result.stderr.count("\n") == 1


def talk(*lines: str, tools: list[Tool]) -> tuple[str, Repl]:
    left = iter(lines)
    shown: list[str] = []

    def read(prompt: str) -> str:
        shown.append(prompt)
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    repl = Repl(chat_llm("qwen"), tools=tools, read=read, write=shown.append)
    repl.run()
    return "".join(shown), repl


def test_tools_in_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_reply(
        monkeypatch, ("I compute.\n", *call_parts("calculator", expression="2 + 3")), ("It is 5.",), ("Yes.",)
    )
    text, repl = talk("How much?", "Sure?", tools=[builtin("calculator")])
    assert 'I compute.[calculator {"expression": "2 + 3"} → 5]\nIt is 5.\n>>> Yes.' in text
    assert [message["role"] for message in repl.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    check_tool_history(validate_messages(repl.messages))


def test_others_tools_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def delete(path: str) -> str:
        """Deletes a file."""
        ran.append(path)
        return "deleted"

    for answer, expected in (("n", []), ("", []), ("y", ["x"])):
        ran.clear()
        has_model_reply(monkeypatch, call_parts("delete", path="x"), ("Done.",))
        text, _ = talk("Delete x", answer, tools=[Tool.of(delete)])
        assert ran == expected
        assert 'run delete {"path": "x"}? [y/N] ' in text
        assert text.count("The user did not allow") == (not expected)


def test_help_stays_light() -> None:
    code = "import sys, openk3.cli; print(sys.modules.keys() & {'mcp', 'sympy', 'pydantic', 'fastapi', 'jsonschema'})"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
