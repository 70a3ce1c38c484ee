"""LiteLLM and LangChain against the server, unchanged. They are heavy and no part of the installation: where they are
not installed, these tests are skipped.

    pip install litellm langchain-openai langchain-anthropic && pytest -m slow tests/test_serve_ecosystem.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from chat_support import chat_llm, has_model_say, tool
from pydantic import BaseModel
from serving import MODEL, live

from openk3.serve.app import create_app

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices at import
os.environ.setdefault("LANGSMITH_TRACING", "false")

pytestmark = pytest.mark.slow

WEATHER = tool("weather", city={"type": "string"})
MESSAGES = [{"role": "user", "content": "Is it raining in Rome?"}]
THOUGHT = ("<think>", "\nI look.\n", "</think>", "\n\n", "Let me see.", "\n")
CALL = ("<tool_call>", '\n{"name": "weather", "arguments": {"city": "Rom"}}\n', "</tool_call>")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False)
    with live(app) as url:
        yield url


def options(url: str, provider: str) -> dict[str, Any]:
    base = f"{url}/v1" if provider == "openai" else url
    return {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "max_tokens": 300, "num_retries": 0}


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch, provider: str, stream: bool) -> None:
    litellm = pytest.importorskip("litellm")
    has_model_say(monkeypatch, "qwen", *THOUGHT, *CALL)
    asked = options(url, provider) | {"messages": MESSAGES, "tools": [WEATHER]}
    if stream:
        chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
        reply = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    else:
        reply = litellm.completion(**asked)
    (choice,) = reply.choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert choice.message.reasoning_content == "I look."
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rom"})
    assert reply.usage.prompt_tokens > 0 and reply.usage.completion_tokens > 0
    has_model_say(monkeypatch, "qwen", "It is dry.")
    result = {"role": "tool", "tool_call_id": call.id, "content": "dry"}
    chat = [*MESSAGES, choice.message.model_dump(exclude_none=True), result]
    answer = litellm.completion(**asked | {"messages": chat})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is dry.", "stop")


def test_litellm_responses(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    litellm = pytest.importorskip("litellm")
    has_model_say(monkeypatch, "qwen", "Yes.")
    asked = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    first = litellm.responses(input="Rain?", **asked)
    assert first.output[0].content[0].text == "Yes."
    events = list(litellm.responses(input="Sure?", stream=True, **asked))
    assert events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Yes."


def test_litellm_errors(url: str) -> None:
    litellm = pytest.importorskip("litellm")
    for provider in ("openai", "anthropic"):
        with pytest.raises(litellm.BadRequestError, match="temperature"):
            litellm.completion(**options(url, provider), messages=MESSAGES, temperature=9)
        with pytest.raises(litellm.NotFoundError):
            litellm.completion(**options(url, provider) | {"model": f"{provider}/gpt"}, messages=MESSAGES)


def said(message: Any) -> str:
    """The text of a LangChain message, whichever form its content has."""
    content = message.content
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
def test_langchain(url: str, monkeypatch: pytest.MonkeyPatch, api: str, stream: bool) -> None:
    """A tool loop: the model calls, the tool answers, the model answers."""
    core = pytest.importorskip("langchain_core")
    assert core
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool as as_tool

    @as_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"dry in {city}"

    if api == "anthropic":
        module = pytest.importorskip("langchain_anthropic")
        model = module.ChatAnthropic(model=MODEL, base_url=url, api_key="none", max_retries=0, max_tokens=300)
    else:
        module = pytest.importorskip("langchain_openai")
        more = {"use_responses_api": True} if api == "responses" else {"stream_usage": True}
        model = module.ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, **more)
    bound = model.bind_tools([weather])
    chat: list[Any] = [HumanMessage("Is it raining in Rome?")]

    def ask() -> Any:
        if not stream:
            return bound.invoke(chat)
        whole = None
        for chunk in bound.stream(chat):
            whole = chunk if whole is None else whole + chunk
        return whole

    has_model_say(monkeypatch, "qwen", *THOUGHT, *CALL)
    reply = ask()
    assert said(reply) == "Let me see."
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rom"})
    assert reply.usage_metadata["input_tokens"] > 0
    chat += [reply, weather.invoke(call)]
    has_model_say(monkeypatch, "qwen", "It is dry.")
    assert said(ask()) == "It is dry."


def test_langchain_structured_output(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("langchain_openai")

    class Weather(BaseModel):
        sunny: bool

    model = module.ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0)
    call = ("<tool_call>", '\n{"name": "Weather", "arguments": {"sunny": true}}\n', "</tool_call>")
    for method, said in (("json_schema", ('{"sunny": true}',)), ("function_calling", call)):
        has_model_say(monkeypatch, "qwen", *said)
        assert model.with_structured_output(Weather, method=method).invoke("Sun?") == Weather(sunny=True)
