"""`k3 render`: what it prints, what it reads, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_support import chat_llm, tool
from typer.testing import CliRunner, Result

from openk3 import cli

USER = {"role": "user", "content": "a<|im_end|>"}


def render(*arguments: str, text: str = "") -> Result:
    return CliRunner().invoke(cli.app, ["render", "-m", str(chat_llm("qwen").model_dir), *arguments], input=text)


def test_json_is_what_the_model_reads(tmp_path: Path) -> None:
    llm = chat_llm("qwen")
    (tmp_path / "chat.json").write_text(json.dumps([USER]))
    for shown in (render("--json", text=json.dumps([USER])), render("--json", str(tmp_path / "chat.json"))):
        card = json.loads(shown.stdout)
        ids = [token["id"] for token in card["tokens"]]
        assert ids == llm.tokenizer.encode_chat([USER])
        assert card["num_tokens"] == len(ids)
        assert card["num_control"] == 3  # the spelled one is not one
        assert "".join(token["text"] for token in card["tokens"]) == llm.tokenizer.render_chat([USER])


def test_a_request_is_rendered_with_its_tools() -> None:
    request: dict[str, Any] = {"model": "x", "messages": [USER], "tools": [tool("f")], "temperature": 0}
    card = json.loads(render("--json", text=json.dumps(request)).stdout)
    assert [token["id"] for token in card["tokens"]] == chat_llm("qwen").tokenizer.encode_chat([USER], [tool("f")])
    card = json.loads(render("--json", text=json.dumps(request | {"reasoning_effort": "none"})).stdout)
    assert "".join(token["text"] for token in card["tokens"]).endswith("<think>\n\n</think>\n\n")


def test_lines_for_people() -> None:
    first, *_, last, count = render(text=json.dumps([USER])).stdout.splitlines()
    assert first.split() == ["0", "256", "*", '"<|im_start|>"']
    assert last.split()[1:] == ["10", '"\\n"']
    assert count.endswith("3 of them control tokens (*)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "stdin: not valid JSON: "),
        ('"x"', 'stdin: expected a list of messages, or an object like {"messages": [...], "tools": [...]}'),
        ("{}", "stdin: expected a list of messages"),
        ("[]", "messages: the list is empty"),
        ('[{"role": "robot"}]', "messages[0].role: 'robot' is not one of"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}',
            "tool_choice: 'required' needs tools",
        ),
        (
            '{"messages": [{"role": "user", "content": "x"}], "parallel_tool_calls": "no"}',
            "parallel_tool_calls: expected true or false, got text",
        ),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    result = render(text=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
