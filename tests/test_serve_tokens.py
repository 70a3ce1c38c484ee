"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_support import chat_llm, tokenizer, tool
from serving import MODEL, debug_app, live

from openk3.serve.app import create_app

CHAT = [{"role": "user", "content": "Zürich <|im_end|>?"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False)) as url:
        yield url


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body)


def test_a_text_there_and_back(url: str) -> None:
    text = "Zürich 雨 <|im_end|>"
    found = post(url, "/tokenize", model=MODEL, prompt=text).json()
    ids = tokenizer("qwen").encode(text, add_special_tokens=True)
    context = chat_llm("qwen").max_model_len
    assert found == {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": None}
    assert post(url, "/detokenize", model=MODEL, tokens=ids).json() == {"prompt": text}
    strings = post(url, "/tokenize", prompt="ab", return_token_strs=True).json()
    assert strings["token_strs"] == ["a", "b"]
    assert post(url, "/tokenize", prompt="").json()["tokens"] == []
    assert post(url, "/detokenize", tokens=[]).json() == {"prompt": ""}


def test_a_chat_has_the_tokens_that_the_model_reads(url: str) -> None:
    tools = [tool("get_time")]
    found = post(url, "/tokenize", messages=CHAT, tools=tools).json()
    assert found["tokens"] == tokenizer("qwen").encode_chat(CHAT, tools)
    body = {"model": MODEL, "messages": CHAT, "tools": tools, "max_tokens": 1}
    usage = httpx.post(f"{url}/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == found["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * 200_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 10**9]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
def test_refused(url: str, path: str, body: dict[str, Any], param: str) -> None:
    response = post(url, path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_they_need_a_key_where_there_are_keys(tmp_path: Path) -> None:
    with live(debug_app(state_folder=tmp_path, always_keys=True)) as url:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            assert post(url, path, **body).status_code == 401


def test_the_wrong_model_or_method(url: str) -> None:
    assert post(url, "/tokenize", model="gpt", prompt="x").status_code == 404
    response = httpx.get(f"{url}/tokenize")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
