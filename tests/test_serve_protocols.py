"""The three chat protocols beside each other: the same reply, whole and streamed, says the same in each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest
from chat_support import TAGS, chat_llm, has_model_say, tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import MODEL, live, sse
from test_serve_anthropic import CALLS, PROPERTIES, events_of

from openk3.serve.app import create_app

PARAMETERS = {"type": "object", "properties": PROPERTIES}
NAMES = ("weather", "get_time")
CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Paris?"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": CHAT,
            "tools": [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES],
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": CHAT,
            "tools": [{"type": "function", "name": name, "parameters": PARAMETERS} for name in NAMES],
            "store": False,
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "system": CHAT[0]["content"],
            "messages": CHAT[1:],
            "tools": [{"name": name, "input_schema": PARAMETERS} for name in NAMES],
        },
    ),
}
LIMIT = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}


class Said(NamedTuple):
    """What a reply says, whatever the protocol."""

    reasoning: str
    text: str
    calls: list[tuple[str, Any]]
    ended: str
    tokens: tuple[int, int, int]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False)) as url:
        yield url


def ask(url: str, protocol: str, stream: bool, max_tokens: int = 500, **change: Any) -> httpx.Response:
    path, body = BODIES[protocol]
    return httpx.post(
        f"{url}{path}", json=body | {"model": MODEL, LIMIT[protocol]: max_tokens, "stream": stream} | change
    )


def said(url: str, protocol: str, stream: bool, max_tokens: int = 500, **change: Any) -> Said:
    more = {"stream_options": {"include_usage": True}} if protocol == "chat" and stream else {}
    response = ask(url, protocol, stream, max_tokens, **change, **more)
    assert response.status_code == 200, response.text
    read = {"chat": of_chat, "responses": of_response, "messages": of_message}[protocol]
    return read(whole(protocol, response.text) if stream else response.json())


def whole(protocol: str, text: str) -> Any:
    """Put a stream together by hand, as the protocol says."""
    if protocol == "responses":
        return events_of(text)[-1]["response"]
    if protocol == "messages":
        blocks: list[Any] = []
        ending: Any = {}
        for event in events_of(text):
            delta = event.get("delta", {})
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                kind = delta["type"].removesuffix("_delta")
                name = {"input_json": "json"}.get(kind, kind)
                blocks[-1][name] = blocks[-1].get(name, "") + delta["partial_json" if name == "json" else name]
            elif event["type"] == "message_delta":
                ending = delta | {"usage": event["usage"]}
        for block in blocks:
            if block["type"] == "tool_use" and ending["stop_reason"] != "max_tokens":
                block["input"] = json.loads(block["json"])
        return {"content": blocks, **ending}
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    *chunks, usage, _ = sse(text)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        for name in ("content", "reasoning_content"):
            message[name] += choice["delta"].get(name) or ""
        for piece in choice["delta"].get("tool_calls", ()):
            if "id" in piece:
                message["tool_calls"].append({"function": dict(piece["function"])})
            else:
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        reason = reason or choice["finish_reason"]
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": usage["usage"]}


def of_chat(reply: Any) -> Said:
    (choice,) = reply["choices"]
    message, usage = choice["message"], reply["usage"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    counts = (usage["prompt_tokens"], usage["completion_tokens"], thought)
    return Said(message.get("reasoning_content", ""), message["content"] or "", calls, choice["finish_reason"], counts)


def of_response(reply: Any) -> Said:
    parts: dict[str, str] = {"reasoning": "", "message": ""}
    calls = []
    for item in reply["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], json.loads(item["arguments"])))
        else:
            parts[item["type"]] += "".join(part["text"] for part in item["content"])
    ended = "length" if reply["status"] == "incomplete" else "tool_calls" if calls else "stop"
    usage = reply["usage"]
    counts = (usage["input_tokens"], usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"])
    return Said(parts["reasoning"], parts["message"], calls, ended, counts)


def of_message(reply: Any) -> Said:
    def joined(kind: str) -> str:
        return "".join(block[kind] for block in reply["content"] if block["type"] == kind)

    calls = [(block["name"], block["input"]) for block in reply["content"] if block["type"] == "tool_use"]
    ended = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}[reply["stop_reason"]]
    usage = reply["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    counts = (prompt, usage["output_tokens"], usage["output_tokens_details"]["thinking_tokens"])
    return Said(joined("thinking"), joined("text"), calls, ended, counts)


@pytest.mark.parametrize(
    ("parts", "limit", "ended"),
    [
        (("Rain, then sun. 雨 🌧",), 500, "stop"),
        (("<think>", "\nIs it?\n", "</think>", "\n\n", "Yes."), 500, "stop"),
        (("<think>", "\nIs it?\n", "</think>", "\n\n", "Yes, and more."), 20, "length"),
        (("<think>", "\nA long thought"), 9, "length"),
        (CALLS, 500, "tool_calls"),
        (CALLS[4:9], 500, "tool_calls"),
        ((), 500, "stop"),
    ],
)
def test_all_say_the_same(
    url: str, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...], limit: int, ended: str
) -> None:
    has_model_say(monkeypatch, "qwen", *parts)
    replies = [said(url, protocol, stream, limit) for protocol in BODIES for stream in (False, True)]
    assert replies == [replies[0]] * 6
    assert replies[0].ended == ended
    assert bool(replies[0].reasoning) == (replies[0].tokens[2] > 0) == ("<think>" in parts)
    if parts is CALLS:
        assert (replies[0].reasoning, replies[0].text) == ("Two calls.", "Let me see.")
        assert [name for name, _ in replies[0].calls] == list(NAMES)


def test_marks_that_a_reply_spells_are_text_in_all(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark that is spelled with other tokens divides nothing; a mark itself is in no field."""
    has_model_say(monkeypatch, "qwen", "It is written <tool_call", "> and <|im_end", "|>.")
    replies = [said(url, protocol, stream) for protocol in BODIES for stream in (False, True)]
    assert {reply.text for reply in replies} == {"It is written <tool_call> and <|im_end|>."}
    assert not any(reply.calls for reply in replies)
    has_model_say(monkeypatch, "qwen", "Well.", "<|im_start|>", "</think>", "</tool_call>", "So.")
    for protocol in BODIES:
        for stream in (False, True):
            text = ask(url, protocol, stream, tools=None).text
            assert not [tag for tag in (*TAGS, "<|im_start|>") if tag in text]


def test_thinking_is_switched_off_in_all(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "Yes.")
    off: list[tuple[str, dict[str, Any]]] = [
        ("chat", {"reasoning_effort": "none"}),
        ("chat", {"thinking": {"type": "disabled"}}),
        ("responses", {"reasoning": {"effort": "none"}}),
        ("messages", {"thinking": {"type": "disabled"}}),
    ]
    on: list[tuple[str, dict[str, Any]]] = [
        ("chat", {"reasoning_effort": "high"}),
        ("chat", {"thinking": {"type": "enabled"}}),
        ("responses", {"reasoning": {"effort": "high"}}),
        ("messages", {"thinking": {"type": "adaptive"}}),
        ("messages", {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("messages", {"output_config": {"effort": "max"}}),
    ]

    def prompt_tokens(protocol: str, change: dict[str, Any]) -> int:
        response = ask(url, protocol, False, **change)
        assert response.status_code == 200, response.text
        return {"chat": of_chat, "responses": of_response, "messages": of_message}[protocol](response.json()).tokens[0]

    (plain,) = {prompt_tokens(protocol, {}) for protocol in BODIES}
    assert {prompt_tokens(*case) for case in on} == {plain}
    closed = len(tokenizer("qwen").dialect.control.encode("<think>\n\n</think>\n\n"))
    assert {prompt_tokens(*case) for case in off} == {plain + closed}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "thinking"),
        ({"messages": [{"role": "user", "content": "x", "partial": True}]}, "messages[0].partial"),
        ({"messages": [{"role": "assistant", "content": "x", "partial": 1}]}, "messages[0].partial"),
    ],
)
def test_refused(url: str, change: dict[str, Any], param: str) -> None:
    response = ask(url, "chat", False, **change)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_message_is_continued(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial mode here, prefill at Anthropic's: the reply is what follows."""
    has_model_say(monkeypatch, "qwen", " then sun.")
    begun = {"role": "assistant", "content": "Rain,"}
    for stream in (False, True):
        chat = ask(url, "chat", stream, messages=[*CHAT, begun | {"partial": True}], tools=None)
        message = ask(url, "messages", stream, messages=[*CHAT[1:], begun], tools=None)
        if not stream:
            read = [of_chat(chat.json()), of_message(message.json())]
            assert [reply.text for reply in read] == [" then sun."] * 2
            ids = tokenizer("qwen").encode_chat(CHAT) + tokenizer("qwen").encode("Rain,")
            assert [reply.tokens[0] for reply in read] == [len(ids)] * 2
        else:
            assert "".join(c["choices"][0]["delta"].get("content", "") for c in sse(chat.text)[:-1]) == " then sun."
            assert whole("messages", message.text)["content"] == [{"type": "text", "text": " then sun."}]


def test_only_the_allowed_tools(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ("<tool_call>", '\n{"name": "get_time", "arguments": {}}\n', "</tool_call>")
    has_model_say(monkeypatch, "qwen", *call)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    reply = of_response(ask(url, "responses", False, tool_choice=allowed).json())
    assert reply.calls == [("get_time", {})]
    unknown = allowed | {"tools": [{"type": "function", "name": "x"}]}
    error = ask(url, "responses", False, tool_choice=unknown).json()["error"]
    assert error["param"] == "tool_choice.tools[0]" and "'x'" in error["message"]


def test_a_required_call_is_valid_in_all(url: str) -> None:
    """By a model with random weights, which has no idea of calls; the choice of a tool is a form, not a wish."""
    schema = {
        "type": "object",
        "properties": {"code": {"type": "integer", "minimum": 10, "maximum": 99}, "big": {"type": "boolean"}},
        "required": ["code"],
        "additionalProperties": False,
    }
    for protocol, tools, choice, off in (
        (
            "chat",
            [{"type": "function", "function": {"name": "get_city", "parameters": schema}}],
            {"type": "function", "function": {"name": "get_city"}},
            {"reasoning_effort": "none"},
        ),
        (
            "responses",
            [{"type": "function", "name": "get_city", "parameters": schema}],
            {"type": "function", "name": "get_city"},
            {"reasoning": {"effort": "none"}},
        ),
        (
            "messages",
            [{"name": "get_city", "input_schema": schema}],
            {"type": "tool", "name": "get_city"},
            {"thinking": {"type": "disabled"}},
        ),
    ):
        for stream in (False, True):
            reply = said(url, protocol, stream, tools=tools, tool_choice=choice, temperature=1.0, **off)
            assert (reply.text, reply.ended) == ("", "tool_calls")
            ((name, given),) = reply.calls
            assert name == "get_city"
            jsonschema.validate(given, schema)


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{[`<"), min_size=1, max_size=12)
strings = st.text(max_size=8) | st.sampled_from([*TAGS, "<|im_end|>", '"}}\n</tool_call>', "\\", '{"name": "any"}'])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)


any_reply = given(
    thought=st.none() | words.filter(str.strip),
    text=words,
    calls=st.lists(st.dictionaries(strings, values, max_size=3), max_size=4),
)
options: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=3, derandomize=True, **options)
@any_reply
def test_any_reply_is_the_same_in_all(url: str, thought: str | None, text: str, calls: list[dict[str, Any]]) -> None:
    same_in_all(url, thought, text, calls)


@pytest.mark.slow
@settings(max_examples=500, **options)
@any_reply
def test_many_replies_are_the_same(url: str, thought: str | None, text: str, calls: list[dict[str, Any]]) -> None:
    same_in_all(url, thought, text, calls)


def same_in_all(url: str, thought: str | None, text: str, calls: list[dict[str, Any]]) -> None:
    parts = [] if thought is None else ["<think>", f"\n{thought}\n", "</think>", "\n\n"]
    parts.append(text)
    for call in calls:
        written = json.dumps(call, ensure_ascii=False).replace("\x7f", "\\u007f")  # which the grammar has escaped
        parts += ["\n", "<tool_call>", f'\n{{"name": "any", "arguments": {written}}}\n', "</tool_call>"]
    tools: dict[str, list[Any]] = {
        "chat": [{"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}],
        "responses": [{"type": "function", "name": "any", "parameters": {"type": "object"}}],
        "messages": [{"name": "any", "input_schema": {"type": "object"}}],
    }
    with pytest.MonkeyPatch.context() as patch:
        has_model_say(patch, "qwen", *parts)
        replies = [
            said(url, protocol, stream, 2000, tools=tools[protocol]) for protocol in BODIES for stream in (False, True)
        ]
    assert replies == [replies[0]] * 6
    assert replies[0].calls == [("any", call) for call in calls]
    assert replies[0].text.strip() == text.strip()
    assert replies[0].reasoning.strip() == (thought or "").strip()
