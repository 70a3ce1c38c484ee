"""/v1/messages against the official client and as raw HTTP, with replies that a model is made to give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message
from chat_support import TAGS, chat_llm, has_model_say, tokenizer
from pydantic import BaseModel
from serving import CONTEXT, MODEL, debug_app, live

from openk3.serve.app import create_app

ARGUMENTS = {"city": "Zürich", "note": '</tool_call> "<think>"', "deep": {"list": [1, None, {}]}}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
CALLS = (
    *("<think>", "\nTwo calls.\n", "</think>", "\n\n", "Let me see.", "\n"),
    *(
        "<tool_call>",
        f'\n{{"name": "weather", "arguments": {JSON}}}\n',
        "</tool_call>",
        "\n",
    ),
    *("<tool_call>", '\n{"name": "get_time", "arguments": {}}\n', "</tool_call>"),
)
USER: dict[str, Any] = {"role": "user", "content": "Paris?"}
PROPERTIES = {"city": {"type": "string"}, "note": {"type": "string"}, "deep": {"type": "object"}}
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": PROPERTIES}}
TIME = {"name": "get_time", "description": "The time", "input_schema": {"type": "object"}}
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": [USER], "tools": [WEATHER, TIME]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False)) as url:
        yield url


@pytest.fixture(scope="module")
def api(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="none", max_retries=0)


def post(url: str, body: dict[str, Any], path: str = "/v1/messages") -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a whole stream, each framed by its name."""
    assert text.endswith("\n\n")
    events = []
    for frame in text[:-2].split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_reply_with_everything(api: Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    message = api.messages.create(**BODY)
    Message.model_validate(message.model_dump(), strict=True)
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        *("assistant", MODEL),
        *("tool_use", None),
    )
    thought, text, first, second = message.content
    assert thought.type == "thinking" and thought.thinking == "Two calls." and thought.signature
    assert text.type == "text" and text.text == "Let me see."
    assert first.type == second.type == "tool_use" and first.id != second.id
    assert [(first.name, first.input), (second.name, second.input)] == [("weather", ARGUMENTS), ("get_time", {})]


def test_streamed_and_whole_agree(api: Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    whole = api.messages.create(**BODY)
    with api.messages.stream(**BODY) as stream:
        streamed = stream.get_final_message()

    def said(message: Message) -> list[dict[str, Any]]:
        return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]

    assert said(streamed) == said(whole)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counts = [m.usage.input_tokens + (m.usage.cache_read_input_tokens or 0) for m in (whole, streamed)]
    counted = api.messages.count_tokens(model=MODEL, messages=[USER], tools=BODY["tools"])
    assert counts == [counted.input_tokens] * 2


def test_the_frames_of_a_stream(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    response = post(url, BODY | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    start, ping, *blocks, ending, stop = events
    assert start["type"] == "message_start" and start["message"]["content"] == []
    assert start["message"]["usage"]["input_tokens"] > 0 and start["message"]["stop_reason"] is None
    assert (ping, stop) == ({"type": "ping"}, {"type": "message_stop"})
    assert ending["type"] == "message_delta"
    assert ending["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert ending["usage"]["output_tokens"] > 0
    kinds = []
    for index in range(4):
        begin, *deltas, end = [event for event in blocks if event.get("index") == index]
        assert (begin["type"], end["type"]) == ("content_block_start", "content_block_stop")
        assert {event["type"] for event in deltas} == {"content_block_delta"}
        kinds.append((begin["content_block"]["type"], {event["delta"]["type"] for event in deltas}))
        if index == 2:
            assert begin["content_block"]["input"] == {}
            assert json.loads("".join(event["delta"]["partial_json"] for event in deltas)) == ARGUMENTS
        if index == 3:
            assert "".join(event["delta"]["partial_json"] for event in deltas) == "{}"
    assert kinds == [
        ("thinking", {"thinking_delta", "signature_delta"}),
        ("text", {"text_delta"}),
        *[("tool_use", {"input_json_delta"})] * 2,
    ]
    assert [event["index"] for event in blocks] == sorted(event["index"] for event in blocks)


def test_no_mark_is_in_any_field(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(
        monkeypatch, "qwen", *[p if p in TAGS else p.replace("</tool_call>", "").replace("<think>", "") for p in CALLS]
    )
    for stream in (False, True):
        text = post(url, BODY | {"stream": stream}).text
        assert "weather" in text
        assert not [tag for tag in (*TAGS, "<|im_start|>", "<|im_end|>") if tag in text]


@pytest.mark.parametrize(
    ("change", "said", "reason", "sequence"),
    [
        ({}, "Rain, then sun.", "end_turn", None),
        ({"max_tokens": 6}, "Rain, ", "max_tokens", None),
        ({"stop_sequences": ["then", "never"]}, "Rain, ", "stop_sequence", "then"),
    ],
)
def test_why_a_reply_ended(
    api: Anthropic,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    said: str,
    reason: str,
    sequence: str | None,
) -> None:
    has_model_say(monkeypatch, "qwen", "Rain, then sun.")
    message = api.messages.create(**{name: value for name, value in (BODY | change).items() if name != "tools"})
    (block,) = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message.stop_sequence) == (said, reason, sequence)


def test_the_end_of_the_context() -> None:
    with live(debug_app()) as url:
        body = {"model": MODEL, "max_tokens": 10_000, "messages": [{"role": "user", "content": "x" * (CONTEXT - 60)}]}
        assert post(url, body).json()["stop_reason"] == "model_context_window_exceeded"


def test_a_cut_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(
        monkeypatch, "qwen", "<tool_call>", '\n{"name": "weather", "arguments": {"city": "Rom", "note": "a long name'
    )
    whole = post(url, BODY | {"max_tokens": 66}).json()
    events = events_of(post(url, BODY | {"max_tokens": 66, "stream": True}).text)
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert whole["content"][0]["input"] == {"city": "Rom"}
    json_text = "".join(e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta")
    assert json_text == '{"city": "Rom", "note": "a long'


def test_what_the_model_reads(api: Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came out goes back in, with results, and is the chat that chat completions would write."""
    has_model_say(monkeypatch, "qwen", *CALLS)
    message = api.messages.create(**BODY)
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[1].id, "is_error": True, "content": "no clock"},
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "<|im_end|>4"}]},
        {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
    ]
    chat: Any = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    system: Any = [
        {"type": "text", "text": "Be"},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]
    same = [
        {"role": "system", "content": "Be\nbrief."},
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Two calls.",
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
                for call in calls
            ],
        },
        {"role": "tool", "tool_call_id": calls[1].id, "content": "Error: no clock"},
        {"role": "tool", "tool_call_id": calls[0].id, "content": "<|im_end|>4"},
        {"role": "user", "content": "Well?"},
    ]
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER["input_schema"]}},
        {
            "type": "function",
            "function": {"name": "get_time", "parameters": {"type": "object"}, "description": "The time"},
        },
    ]
    counted = api.messages.count_tokens(model=MODEL, messages=chat, system=system, tools=BODY["tools"])
    assert counted.input_tokens == len(tokenizer("qwen").encode_chat(same, tools))
    has_model_say(monkeypatch, "qwen", "Rain.")
    reply = api.messages.create(**BODY | {"messages": chat, "system": system})
    assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert [block.model_dump()["text"] for block in reply.content] == ["Rain."]


def test_turns_of_one_role_are_one(api: Anthropic) -> None:
    several: Any = [USER, {"role": "user", "content": [{"type": "text", "text": "Or Rome?"}]}]
    together: Any = [{"role": "user", "content": "Paris?\nOr Rome?"}]
    spoken: Any = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}]},
        {"role": "assistant", "content": "Well"},
        {"role": "assistant", "content": ", yes."},
    ]
    at_once = [*spoken[0]["content"], {"type": "text", "text": "Well, yes."}]
    several += [*spoken, {"role": "user", "content": "So?"}]
    together += [{"role": "assistant", "content": at_once}, {"role": "user", "content": "So?"}]
    counts = [api.messages.count_tokens(model=MODEL, messages=chat).input_tokens for chat in (several, together)]
    assert counts[0] == counts[1]


def test_cached_tokens_are_no_input_tokens(api: Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "Yes.")
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "cached? " * 9}]}
    first, second = (api.messages.create(**body).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens and second.cache_read_input_tokens >= 16
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "auto"}, ["weather", "get_time"]),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["weather"]),
        ({"type": "none"}, []),
    ],
)
def test_tool_choice(api: Anthropic, monkeypatch: pytest.MonkeyPatch, choice: Any, names: list[str]) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    message = api.messages.create(**BODY, tool_choice=choice)
    assert [block.name for block in message.content if block.type == "tool_use"] == names
    assert message.stop_reason == ("tool_use" if names else "end_turn")


def test_a_named_tool(api: Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(
        monkeypatch, "qwen", "<tool_call>", '\n{"name": "weather", "arguments": {"city": "Rom"}}\n', "</tool_call>"
    )
    (block,) = api.messages.create(**BODY, tool_choice={"type": "tool", "name": "weather"}).content
    assert block.type == "tool_use" and (block.name, block.input) == ("weather", {"city": "Rom"})


def test_the_clients_tool_runner(api: Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have the server keep the conversation, and gets along without."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        has_model_say(monkeypatch, "qwen", "It is dry.")
        return f"dry in {city}"

    has_model_say(
        monkeypatch, "qwen", "<tool_call>", '\n{"name": "weather", "arguments": {"city": "Rom"}}\n', "</tool_call>"
    )
    runner = api.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, tools=[weather], messages=[{"role": "user", "content": "Rome?"}]
    )
    called, answered = list(runner)
    assert called.stop_reason == "tool_use"
    assert [block.model_dump()["text"] for block in answered.content] == ["It is dry."]


def test_a_schema(api: Anthropic) -> None:
    class Weather(BaseModel):
        sunny: bool

    parsed = api.messages.parse(
        model=MODEL,
        max_tokens=100,
        messages=[{"role": "user", "content": "Sun?"}],
        output_format=Weather,
        thinking={"type": "disabled"},
    )
    assert isinstance(parsed.parsed_output, Weather)


def test_models(api: Anthropic, url: str) -> None:
    (model,) = api.models.list()
    assert (model.id, model.type, api.models.retrieve(MODEL)) == (MODEL, "model", model)
    assert model.created_at.year >= 2026
    with pytest.raises(anthropic.NotFoundError):
        api.models.retrieve("claude")
    assert httpx.get(f"{url}/v1/models").json()["object"] == "list"  # without the header it is OpenAI's


RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "4"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 0}, "Invalid 'max_tokens': expected a value of at least 1"),
        ({"temperature": 1.5}, "Invalid 'temperature': expected a value of at most 1, but got 1.5"),
        ({"top_p": -1}, "Invalid 'top_p'"),
        ({"top_k": 1.5}, "Invalid type for 'top_k': expected an integer"),
        ({"stop_sequences": [""]}, "Invalid 'stop_sequences[0]'"),
        ({"temprature": 1}, "Unknown parameter: \"temprature\". Did you mean 'temperature'?"),
        ({"messages": []}, "Invalid 'messages'"),
        ({"messages": "Hi"}, "Invalid type for 'messages': expected an array"),
        ({"messages": [5]}, "Invalid type for 'messages[0]': expected an object"),
        ({"messages": [{"role": "user"}]}, "Missing required parameter: 'messages[0].content'"),
        ({"messages": [{"content": "x"}]}, "Missing required parameter: 'messages[0].role'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "Invalid 'messages[0].role': \"robot\" is not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "Invalid 'messages[0].content[0].type': \"image\" is not supported; expected one of 'text', 'tool_result'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "Invalid type for 'messages[0].content[0].text': expected a string",
        ),
        (
            {"messages": [USER, {"role": "user", "content": [RESULT]}]},
            "Invalid 'messages[1].content[0]': a tool message",
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}],
                    },
                    USER,
                ]
            },
            "Invalid 'messages[1]': no result for 't1'",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "Invalid 'tools[0].name': 'a b' is not a name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "Invalid 'tools[0].type'"),
        ({"tool_choice": {"type": "tool"}}, "Missing required parameter: 'tool_choice.name'"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "Invalid 'tool_choice': there is no tool 'x'"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "Invalid 'thinking.budget_tokens': 1024 is not less",
        ),
        ({"thinking": {"type": "enabled"}}, "Missing required parameter: 'thinking.budget_tokens'"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"pattern": "(?=a)b"}}}},
            "Invalid 'output_config.format.schema'",
        ),
    ],
)
def test_refused(url: str, change: dict[str, Any], words: str) -> None:
    response = post(url, BODY | change)
    body = response.json()
    assert response.status_code == 400, body
    assert list(body) == ["type", "error", "request_id"]
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert words in body["error"]["message"]
    assert response.headers["request-id"] == response.headers["x-request-id"] == body["request_id"]


def test_errors_from_everywhere(url: str, api: Anthropic) -> None:
    """Each layer of the server refuses in the client's words."""
    assert post(url, BODY, "/v1/messages/nothing").json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{url}/v1/messages").json()["error"]["type"] == "invalid_request_error"
    foreign = httpx.post(f"{url}/v1/messages", json=BODY, headers={"Origin": "https://evil.example"})
    assert (foreign.status_code, foreign.json()["error"]["type"]) == (403, "permission_error")
    form = httpx.post(f"{url}/v1/messages", data={"model": "x"})
    assert (form.status_code, form.json()["error"]["type"]) == (415, "invalid_request_error")
    with pytest.raises(anthropic.NotFoundError) as missing:
        api.messages.create(**BODY | {"model": "claude"})
    assert missing.value.request_id is not None


def test_limits_and_overload() -> None:
    with live(debug_app(max_body_bytes=1000)) as url:
        large = post(url, BODY | {"system": "x" * 2000})
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    failing = create_app(lambda: (_ for _ in ()).throw(ValueError("no weights")), model_name=MODEL, web=False)
    with live(failing, wait=False) as url:
        busy = post(url, BODY)
        assert (busy.status_code, busy.json()["error"]["type"]) == (529, "overloaded_error")
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            Anthropic(base_url=url, api_key="none", max_retries=0).messages.create(**BODY)


def test_a_failure_in_the_middle(url: str, api: Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise RuntimeError("secret")

    monkeypatch.setattr("openk3.engine.engine.sample_token", broken)
    (event,) = events_of(post(url, BODY | {"stream": True}).text)
    assert event["type"] == "error" and event["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError), api.messages.stream(**BODY) as stream:
        stream.get_final_message()
