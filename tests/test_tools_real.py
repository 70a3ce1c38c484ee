"""Tool calls of the real Qwen2.5-Coder-0.5B, over HTTP: asked for, required, named and answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chat_support import tool
from openai import OpenAI
from serving import client, live

from openk3.serve.app import create_app

MODEL = "qwen2.5-coder-0.5b"
CITY = {"type": "string", "description": "name of the city"}
TOOLS: Any = [tool("get_weather", city=CITY), tool("search", query={"type": "string"}), tool("get_time")]
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def api() -> Iterator[OpenAI]:
    from openk3.llm import load

    with live(create_app(lambda: load(MODEL), model_name=MODEL, web=False)) as url:
        yield client(url)


def ask(api: OpenAI, *messages: Any, **options: Any) -> Any:
    body = {"model": MODEL, "messages": list(messages), "tools": TOOLS, "temperature": 0, "max_tokens": 120} | options
    return api.chat.completions.create(**body)


def test_a_call_and_its_answer(api: OpenAI) -> None:
    (choice,) = ask(api, QUESTION).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] == "Paris"
    result = {"role": "tool", "tool_call_id": call.id, "content": "7 °C, rain"}
    # Not asked again, or with tools still to be called, a model of this size writes the call or the result once more.
    chat = [QUESTION, choice.message.model_dump(exclude_none=True), result]
    again = {"role": "user", "content": "How warm is it, in one sentence?"}
    (answer,) = ask(api, *chat, again, tool_choice="none").choices
    assert answer.finish_reason == "stop"
    assert "7" in answer.message.content


def test_the_stream_is_the_same(api: OpenAI) -> None:
    (choice,) = ask(api, QUESTION).choices
    deltas = [chunk.choices[0].delta for chunk in ask(api, QUESTION, stream=True)]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    (call,) = choice.message.tool_calls
    assert pieces[0].function.name == call.function.name
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")


def test_no_call_where_none_is_needed(api: OpenAI) -> None:
    (choice,) = ask(api, {"role": "user", "content": "Hello, how are you?"}).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content


def test_required_and_named(api: OpenAI) -> None:
    hello = {"role": "user", "content": "Hello, how are you?"}
    assert ask(api, hello, tool_choice="required").choices[0].message.tool_calls
    named = {"type": "function", "function": {"name": "search"}}
    (call,) = ask(api, QUESTION, tool_choice=named).choices[0].message.tool_calls
    assert call.function.name == "search"
    assert json.loads(call.function.arguments)
