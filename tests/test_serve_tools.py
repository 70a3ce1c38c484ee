"""Tools over /v1/chat/completions: the official client and raw HTTP, with replies that a model is made to give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from chat_support import TAGS, allowed, chat_llm, has_model_say, tokenizer, tool
from openai import LengthFinishReasonError, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import MODEL, client, live, sse

from openk3.serve.app import create_app

WEATHER, TIME = tool("weather", city={"type": "string"}, note={"type": "string"}), tool("get_time")
CITY = tool("get_city", code={"type": "integer", "minimum": 10, "maximum": 99}, big={"type": "boolean"})
CITY["function"]["parameters"]["required"] = ["code"]
USER = {"role": "user", "content": "Paris?"}
BODY: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": [WEATHER, TIME], "temperature": 0}
ARGUMENTS = '{"city": "Zürich", "note": "</tool_call> \\"<think>\\""}'
CALLS = (
    *("<think>", "\nTwo calls.\n", "</think>", "\n\n", "Let me see.", "\n"),
    *("<tool_call>", f'\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n', "</tool_call>", "\n"),
    *("<tool_call>", '\n{"name": "get_time", "arguments": {}}\n', "</tool_call>"),
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False)) as url:
        yield url


@pytest.fixture(scope="module")
def api(url: str) -> OpenAI:
    return client(url)


def refused(url: str, change: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/chat/completions", json=BODY | change)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def test_a_reply_with_calls(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    reply = api.chat.completions.create(**BODY)
    ChatCompletion.model_validate(reply.model_dump(exclude={"choices": {0: {"message": {"reasoning_content"}}}}))
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.model_extra == {"reasoning_content": "Two calls."}
    assert choice.message.tool_calls is not None
    assert [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("function", "weather", ARGUMENTS),
        ("function", "get_time", "{}"),
    ]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_a_stream_with_calls(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    chunks = list(api.chat.completions.create(**BODY, stream=True))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert not any(delta.role for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "Two calls."
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    for index, (name, arguments) in enumerate([("weather", ARGUMENTS), ("get_time", "{}")]):
        first, *others = [piece for piece in pieces if piece.index == index]
        assert first.id and first.type == "function"
        assert (first.function.name, first.function.arguments) == (name, "")
        assert not any(piece.id or piece.type or piece.function.name for piece in others)
        assert "".join(piece.function.arguments for piece in others) == arguments
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_the_clients_own_helper_puts_the_stream_together(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    with api.chat.completions.stream(**BODY) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS, "{}"]


def test_the_frames_of_a_stream(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    body = BODY | {"stream": True, "n": 2}
    for usage in (False, True):
        options = {"stream_options": {"include_usage": True}} if usage else {}
        response = httpx.post(f"{url}/v1/chat/completions", json=body | options)
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = sse(response.text)
        assert done == "[DONE]"
        last = chunks.pop() if usage else None
        assert all((chunk.get("usage", "none") is None) is usage for chunk in chunks)
        if last is not None:
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 2 * (last["usage"]["completion_tokens"] // 2)
        for index in (0, 1):
            choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
            assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
            assert choices[-1]["delta"] == {}
    ids = [
        piece["id"] for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", ()) if "id" in piece
    ]
    assert len(set(ids)) == len(ids) == 4


def test_no_mark_is_in_any_field(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [part.replace("</tool_call> ", "").replace("<think>", "x") if part not in TAGS else part for part in CALLS]
    has_model_say(monkeypatch, "qwen", *parts)
    for tools in (BODY["tools"], []):
        for stream in (False, True):
            body = BODY | {"tools": tools, "stream": stream, "logprobs": True, "top_logprobs": 0}
            text = httpx.post(f"{url}/v1/chat/completions", json=body).text
            assert not [tag for tag in (*TAGS, "<|im_start|>") if tag in text]


def test_a_cut_call(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "<tool_call>", '\n{"name": "weather", "arguments": {"city": "a long name')
    (whole,) = api.chat.completions.create(**BODY, max_tokens=51).choices
    stream = api.chat.completions.stream(**BODY, max_tokens=51)
    with stream as events, pytest.raises(LengthFinishReasonError) as caught:
        events.get_final_completion()
    (streamed,) = caught.value.completion.choices
    for choice in (whole, streamed):
        assert choice.finish_reason == "length"
        assert choice.message.tool_calls is not None
        assert choice.message.tool_calls[0].function.arguments == '{"city": "a long'


def test_no_calls_where_none_are_wanted(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "<tool_call>", '{"name": "get_time"}', "</tool_call>")
    for change in ({"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
        (choice,) = api.chat.completions.create(**BODY | change).choices
        assert (choice.message.content, choice.message.tool_calls) == ('{"name": "get_time"}', None)
        assert choice.finish_reason == "stop"


def test_required_and_named_calls_are_kept_to_their_form(api: OpenAI) -> None:
    """By a model with random weights, which has no idea of calls, and would rather go on for ever."""
    body: dict[str, Any] = BODY | {"tools": [CITY, TIME], "max_tokens": 2000, "logit_bias": {"257": 100, "260": -100}}
    named: Any = {"type": "function", "function": {"name": "get_city"}}
    for choice in ("required", named):
        for temperature, stream in ((0, False), (1, False), (1, True)):
            asked = body | {"tool_choice": choice, "temperature": temperature, "seed": 3}
            if stream:
                with api.chat.completions.stream(**asked) as events:
                    (one,) = events.get_final_completion().choices
            else:
                (one,) = api.chat.completions.create(**asked).choices
            assert (one.finish_reason, one.message.content or "") == ("tool_calls", "")
            assert one.message.tool_calls
            for call in one.message.tool_calls:
                schema = {"get_city": CITY, "get_time": TIME}[call.function.name]["function"]["parameters"]
                jsonschema.validate(json.loads(call.function.arguments), schema)
            if choice is named:
                (call,) = one.message.tool_calls
                assert call.function.name == "get_city"


def test_one_call_at_most(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    both = api.chat.completions.create(**BODY)
    one = api.chat.completions.create(**BODY, parallel_tool_calls=False)
    assert one.choices[0].message.tool_calls is not None
    assert [call.function.name for call in one.choices[0].message.tool_calls] == ["weather"]
    assert one.choices[0].finish_reason == "tool_calls"
    assert one.usage is not None and both.usage is not None
    assert one.usage.completion_tokens < both.usage.completion_tokens  # the engine stopped


def test_a_conversation_goes_on(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client got is sent back as it is, with results, and read by the model."""
    has_model_say(monkeypatch, "qwen", *CALLS)
    message = api.chat.completions.create(**BODY).choices[0].message
    assert message.tool_calls is not None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "<|im_end|>4"} for call in message.tool_calls]
    chat = [USER, message.model_dump(exclude_none=True), *reversed(results)]
    has_model_say(monkeypatch, "qwen", "Rain.")
    reply = api.chat.completions.create(**BODY | {"messages": chat})
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Rain.", "stop")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(tokenizer("qwen").encode_chat(chat, BODY["tools"]))


def test_a_partial_message_is_continued(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "rain.")
    messages: Any = [USER, {"role": "assistant", "content": "There is ", "partial": True}]
    reply = api.chat.completions.create(**BODY | {"messages": messages})
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("rain.", "stop")
    chunks = api.chat.completions.create(**BODY | {"messages": messages}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "rain."


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_no_grammar_keeps_is_kept_all_the_same(api: OpenAI, stream: bool) -> None:
    bits = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    asked: dict[str, Any] = BODY | {
        "tools": [tool("pick", bits=bits)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1,
        "logit_bias": {"260": -100},
        "max_tokens": 200,
    }
    schema = asked["tools"][0]["function"]["parameters"]
    for seed in range(4):
        if stream:
            with api.chat.completions.stream(**asked, seed=seed) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = api.chat.completions.create(**asked, seed=seed).choices[0].message
        assert message.tool_calls is not None
        jsonschema.validate(json.loads(message.tool_calls[0].function.arguments), schema)


def test_tools_of_a_message(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "<tool_call>", '\n{"name": "search", "arguments": {}}\n', "</tool_call>")
    messages: Any = [USER, {"role": "system", "tools": [tool("search")]}]
    (choice,) = api.chat.completions.create(**BODY | {"messages": messages, "tools": []}).choices
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.name == "search"


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": "weather"}, "tools", "expected a list of tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "'a b' is not a name of 1 to 64 letters"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name", "there is a tool 'f' already"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "129 tools; at most 128 are possible"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
            "expected a JSON schema, got a list",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools[0].function.strict",
            "expected true or false, got text",
        ),
        ({"tool_choice": "any"}, "tool_choice", "expected 'auto', 'none', 'required' or"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "there is no tool 'x'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "'required' needs tools"),
        ({"tool_choice": allowed("auto", "x")}, "tool_choice.allowed_tools.tools[0]", "there is no tool 'x'"),
        (
            {"tools": [tool("f", x={"$ref": "https://a.org/b"})]},
            "tools",
            "'f' cannot be called: the JSON schema has the",
        ),
        (
            {"tools": [tool("f", x={"type": "no"})]},
            "tools",
            "the tool 'f' cannot be called: the JSON schema is malformed",
        ),
        (
            {"messages": [USER | {"partial": True}]},
            "messages[0].partial",
            "only an assistant message without tool_calls",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "expected a boolean"),
        ({"messages": [USER, ASKED]}, "messages[1].tool_calls", "no result for 'c1'"),
        (
            {"messages": [USER, ASKED, {"role": "tool", "content": "4", "tool_call_id": "c2"}]},
            "messages[2].tool_call_id",
            "'c2' is the id of no call",
        ),
        (
            {"messages": [{"role": "tool", "content": "4", "tool_call_id": "c"}]},
            "messages[0]",
            "a tool message must follow",
        ),
        (
            {"messages": [{**ASKED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "not valid JSON",
        ),
        (
            {"messages": [USER, {"role": "system", "content": "x", "tools": [tool("f")]}]},
            "messages[1].tools",
            "only a system message without content can add tools",
        ),
        (
            {"messages": [USER, {"role": "system", "tools": [WEATHER]}]},
            "messages[1].tools[0].function.name",
            "there is a tool 'weather' already",
        ),
        ({"messages": [{"role": "system", "tools": [tool("f")]}]}, "messages", "nothing but tools"),
    ],
)
def test_refused(url: str, change: dict[str, Any], param: str, words: str) -> None:
    error = refused(url, change)
    assert (error["param"], words in error["message"]) == (param, True), error
    assert error["message"].startswith("Invalid")


def test_tools_too_long_to_be_read(url: str) -> None:
    described = json.loads(json.dumps(WEATHER))
    described["function"]["description"] = "x" * 200_000
    assert refused(url, {"tools": [described]})["code"] == "context_length_exceeded"


def test_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = chat_llm("qwen")
    has_model_say(monkeypatch, "qwen", *CALLS)
    response = llm.chat([USER], tools=[WEATHER, TIME])
    assert (response.text, response.reasoning, response.finish_reason) == ("Let me see.", "Two calls.", "tool_calls")
    assert [(call.name, call.parsed) for call in response.tool_calls] == [
        ("weather", json.loads(ARGUMENTS)),
        ("get_time", {}),
    ]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in response.tool_calls]
    pieces = list(llm.chat_stream([USER], tools=[WEATHER, TIME]))
    assert "".join(piece.text for piece in pieces) == response.text
    assert "".join(piece.reasoning for piece in pieces) == response.reasoning
    assert pieces[-1].finish_reason == "tool_calls"
    assert [call.name for piece in pieces for call in piece.tool_calls if call.id] == ["weather", "get_time"]
    has_model_say(monkeypatch, "qwen", "Rain.")
    assert llm.chat([USER, response.message, *results], tools=[WEATHER, TIME]).text == "Rain."
    with pytest.raises(ValueError, match=r"^messages\[1\]\.tool_calls: no result for "):
        llm.chat([USER, response.message], tools=[WEATHER, TIME])
    with pytest.raises(ValueError, match=r"^tool_choice: there is no tool 'x'"):
        llm.chat([USER], tools=[TIME], tool_choice={"type": "function", "function": {"name": "x"}})


@pytest.mark.parametrize("dialect", ["native", "plain"])
def test_other_dialects(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = chat_llm(dialect)
    said = ("<|response|>", "So.", "<|tools|>", "<|call|>", "weather", "<|argument|>", ARGUMENTS)
    if dialect == "plain":
        said = ("So.\n", f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>')
    has_model_say(monkeypatch, dialect, *said)
    response = llm.chat([USER], tools=[WEATHER])
    assert (response.text, response.finish_reason) == ("So.", "tool_calls")
    assert [call.parsed for call in response.tool_calls] == [json.loads(ARGUMENTS)]
