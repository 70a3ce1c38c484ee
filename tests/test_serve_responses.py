"""/v1/responses against the official client and as raw HTTP, with replies that a model is made to give."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from chat_support import TAGS, chat_llm, has_model_say, tokenizer
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from serving import MODEL, client, live
from test_serve_anthropic import ARGUMENTS, CALLS, PROPERTIES, events_of

from openk3.serve.app import create_app
from openk3.serve.errors import ApiError
from openk3.serve.keys.store import KeyStore
from openk3.serve.responses.store import ResponseStore, Stored
from openk3.serve.state.server import open_database

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": PROPERTIES},
    "strict": False,
}
TIME: dict[str, Any] = {"type": "function", "name": "get_time", "parameters": None, "strict": None}
BODY: dict[str, Any] = {"model": MODEL, "input": "Paris?", "tools": [WEATHER, TIME]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False)
    with live(app) as url:
        yield url


@pytest.fixture(scope="module")
def api(url: str) -> OpenAI:
    return client(url)


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/responses", json=body)


def without_ids(value: Any) -> Any:
    """A response with what differs from one to the next left out."""
    if isinstance(value, dict):
        volatile = ("id", "call_id", "item_id", "created_at", "completed_at", "cached_tokens")
        return {name: without_ids(item) for name, item in value.items() if name not in volatile}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def test_a_reply_with_everything(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    response = api.responses.create(**BODY, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=400)
    Response.model_validate(response.model_dump(), strict=True)
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.instructions, response.metadata, response.model) == ("Be brief.", {"a": "b"}, MODEL)
    thought, message, first, second = response.output
    assert thought.type == "reasoning" and thought.content is not None
    assert thought.content[0].text == "Two calls."
    assert message.type == "message" and response.output_text == "Let me see."
    assert first.type == second.type == "function_call" and first.call_id != second.call_id
    assert (first.name, json.loads(first.arguments)) == ("weather", ARGUMENTS)
    assert (second.name, second.arguments) == ("get_time", "{}")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert {item.status for item in response.output} == {"completed"}


def test_streamed_and_whole_agree(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    whole = post(url, BODY).json()
    events = events_of(post(url, BODY | {"stream": True}).text)
    assert without_ids(events[-1]["response"]) == without_ids(whole)


def test_the_clients_own_helper_puts_the_stream_together(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    with api.responses.stream(**BODY) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Let me see."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


def test_the_events_of_a_stream(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", *CALLS)
    response = post(url, BODY | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        assert isinstance(adapter.validate_python(event), BaseModel)
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for i, kind in enumerate(kinds) if not kind.endswith(".delta") or kinds[i - 1] != kind]

    def part(stem: str) -> list[str]:
        inside = [f"{stem}.delta", f"{stem}.done"]
        return ["output_item.added", "content_part.added", *inside, "content_part.done", "output_item.done"]

    call = [
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
    ]
    assert once == [
        *("created", "in_progress"),
        *(*part("reasoning_text"), *part("output_text"), *call, *call),
        "completed",
    ]
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[-1]["item"] == item
        assert own[0]["item"]["status"] == "in_progress"
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        said = "".join(event["delta"] for event in own if "delta" in event)
        assert said == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"


def test_no_mark_is_in_any_field(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = [part if part in TAGS else part.replace("</tool_call>", "").replace("<think>", "") for part in CALLS]
    has_model_say(monkeypatch, "qwen", *inner)
    for stream in (False, True):
        text = post(url, BODY | {"stream": stream}).text
        assert "weather" in text
        assert not [tag for tag in (*TAGS, "<|im_start|>", "<|im_end|>") if tag in text]


def test_a_cut_reply(url: str, api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "A long answer.")
    cut = {"tools": [], "max_output_tokens": 6}
    response = api.responses.create(**BODY | cut)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "A long"
    *_, item, last = events_of(post(url, BODY | cut | {"stream": True}).text)
    assert (item["item"]["status"], last["type"]) == ("incomplete", "response.incomplete")


def test_a_conversation_with_tools_goes_on(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the id of the last response and by sending all items again the model reads the same, which chats would say."""
    has_model_say(monkeypatch, "qwen", *CALLS)
    first = api.responses.create(**BODY, instructions="Be brief.")
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "<|im_end|>4"},
        {"type": "function_call_output", "call_id": calls[1].call_id, "output": [{"type": "input_text", "text": "5"}]},
        {"role": "user", "content": "Well?"},
    ]
    has_model_say(monkeypatch, "qwen", "Rain.")
    by_id = api.responses.create(**BODY | {"input": results}, previous_response_id=first.id, instructions="Be long.")
    items: Any = [{"role": "user", "content": "Paris?"}, *first.output, *results]
    by_items = api.responses.create(**BODY | {"input": items}, instructions="Be long.")
    chat = [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "Paris?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Two calls.",
            "tool_calls": [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ],
        },
        *(
            {"role": "tool", "tool_call_id": call.call_id, "content": text}
            for call, text in zip(calls, ("<|im_end|>4", "5"), strict=True)
        ),
        {"role": "user", "content": "Well?"},
    ]
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER["parameters"], "strict": False}},
        {"type": "function", "function": {"name": "get_time"}},
    ]
    tokens = len(tokenizer("qwen").encode_chat(chat, tools))
    assert by_id.usage is not None and by_items.usage is not None
    assert (by_id.usage.input_tokens, by_items.usage.input_tokens) == (tokens, tokens)
    assert by_id.output_text == by_items.output_text == "Rain."
    counted = api.responses.input_tokens.count(
        **BODY | {"input": results}, previous_response_id=first.id, instructions="Be long."
    )
    assert counted.input_tokens == tokens
    third = api.responses.create(model=MODEL, input="And then?", previous_response_id=by_id.id)
    chat = [*chat[1:], {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And then?"}]
    assert third.usage is not None
    assert third.usage.input_tokens == len(tokenizer("qwen").encode_chat(chat))
    cached = by_items.usage.input_tokens_details.cached_tokens
    assert tokens - 16 <= cached < tokens  # it is the very prompt of the request before


def test_stored_responses(api: OpenAI, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "Yes.")
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Is it?"}]},
    ]
    created = api.responses.create(**BODY | {"input": items})
    assert api.responses.retrieve(created.id) == created
    page = api.responses.input_items.list(created.id, order="asc")
    assert [item.role for item in page.data] == ["developer", "user"]  # type: ignore[union-attr]
    newest = api.responses.input_items.list(created.id, limit=1)
    assert newest.data == page.data[1:] and newest.has_more
    assert [item.id for item in newest] == [item.id for item in page.data[::-1]]
    api.responses.delete(created.id)
    for gone in (api.responses.retrieve, api.responses.delete, api.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            gone(created.id)
        assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as missing:
        api.responses.create(**BODY, previous_response_id=created.id)
    assert (missing.value.param, missing.value.code) == ("previous_response_id", "previous_response_not_found")
    for query in ("?limit=0", "?order=up"):
        response = httpx.get(f"{url}/v1/responses/{created.id}/input_items{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, query[1:].split("=")[0])


def test_references_to_items(api: OpenAI, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients send an item that is stored by its id."""
    has_model_say(monkeypatch, "qwen", *CALLS)
    first = api.responses.create(**BODY)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "4"}
        for item in first.output
        if item.type == "function_call"
    ]
    has_model_say(monkeypatch, "qwen", "Rain.")
    asked = {"role": "user", "content": "Paris?"}
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    by_reference = api.responses.create(**BODY | {"input": [asked, *references, *results]})
    by_id = api.responses.create(**BODY | {"input": results}, previous_response_id=first.id)
    assert by_reference.usage is not None and by_id.usage is not None
    assert by_reference.usage.input_tokens == by_id.usage.input_tokens
    api.responses.delete(first.id)
    api.responses.create(**BODY | {"input": [asked, *references, *results]})  # the second response has the items too
    error = post(url, BODY | {"input": [asked, {"type": "item_reference", "id": "msg_none"}]}).json()["error"]
    assert (error["param"], error["code"]) == ("input[1].id", "item_not_found")


def test_what_is_not_to_be_stored_is_not(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "Yes.")
    created = api.responses.create(**BODY, store=False)
    assert created.store is False
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(created.id)


def test_a_schema(api: OpenAI) -> None:
    class Weather(BaseModel):
        sunny: bool

    parsed = api.responses.parse(model=MODEL, input="Sun?", text_format=Weather, temperature=0)
    assert isinstance(parsed.output_parsed, Weather)
    free = api.responses.create(
        model=MODEL, input="Sun?", text={"format": {"type": "json_object"}}, temperature=0, max_output_tokens=60
    )
    assert free.output_text.lstrip().startswith("{")


def test_truncation(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "Yes.")
    items = [{"role": "developer", "content": "Be brief."}]
    for i in range(40):
        items += [{"role": "user", "content": f"{i}" * 100}, {"role": "assistant", "content": "Yes."}]
    body = {"model": MODEL, "input": [*items, {"role": "user", "content": "And?"}], "store": False}
    refused = post(url, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert refused.json()["error"]["param"] == "input"
    cut = post(url, body | {"truncation": "auto"}).json()
    assert cut["status"] == "completed"
    kept = cut["usage"]["input_tokens"]
    context = chat_llm("qwen").max_model_len
    assert context * 7 / 8 - 300 < kept < context * 7 / 8  # a turn is about 260 tokens
    alone = body | {"input": "x" * 5000, "truncation": "auto"}
    assert post(url, alone).json()["error"]["code"] == "context_length_exceeded"


CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": None}, "input", "Missing required parameter"),
        ({"input": 5}, "input", "expected an array"),
        ({"input": [{"type": "image"}]}, "input[0].type", "\"image\" is not supported; expected one of 'message'"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "Input should be 'user'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            '"input_image" is not supported',
        ),
        ({"input": [CALL]}, "input[0]", "no result for 'c1'"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "4"}]}, "input[0]", "must follow"),
        ({"input": [CALL | {"arguments": "{"}]}, "input[0]", "not valid JSON"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "Input should be 'function'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "'a b' is not a name"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "there is no tool 'x'"),
        ({"temperature": 3}, "temperature", "at most 2"),
        ({"top_p": "1"}, "top_p", "expected a number"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"background": True}, "background", "not supported by this server yet"),
        ({"conversation": "c"}, "conversation", "not supported by this server yet"),
        ({"top_logprobs": 3}, "top_logprobs", "not supported by this server yet"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "Missing required"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"pattern": "(?=a)b"}}}},
            "text.format.schema",
            "pattern",
        ),
        ({"metadata": {"a": "x" * 513}}, "metadata", "values 512"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "Input should be"),
        ({"outputs": 1}, "outputs", "Unknown parameter"),
        ({"stream_options": {}}, "stream_options", "only allowed when 'stream'"),
    ],
)
def test_refused(url: str, change: dict[str, Any], param: str, words: str) -> None:
    response = post(url, BODY | change)
    error = response.json()["error"]
    assert (response.status_code, error["param"], words in error["message"]) == (400, param, True), error


def test_a_failure_in_the_middle(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise RuntimeError("secret")

    monkeypatch.setattr("openk3.engine.engine.sample_token", broken)
    *_, event = events_of(post(url, BODY | {"stream": True}).text)
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"]["code"] == "server_error"
    assert post(url, BODY).status_code == 500


def stored(number: int, previous: str | None = None) -> Stored:
    return Stored([{"id": f"msg_{number}"}], {"id": f"resp_{number}", "previous_response_id": previous, "output": []})


def test_the_store_survives_a_kill(tmp_path: Path) -> None:
    """A process is killed while it writes; whatever it had reported as saved is there, whole."""
    script = (
        "import sys; from pathlib import Path; from openk3.serve.state.server import open_database\n"
        "from openk3.serve.responses.store import ResponseStore, Stored\n"
        "store = ResponseStore(open_database(Path(sys.argv[1]))); i = 0\n"
        "while True:\n"
        "    head = {'id': f'resp_{i}', 'previous_response_id': f'resp_{i - 1}' if i else None}\n"
        "    head['output'] = [{'id': f'rs_{i}', 'text': 'x' * 9999}]\n"
        "    store.save(Stored([{'id': f'msg_{i}'}], head), 'me'); print(i, flush=True); i += 1\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = -1
    while last < 50:
        last = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    last = int((process.stdout.read().split() or [last])[-1])
    process.wait()
    chain = ResponseStore(open_database(tmp_path)).conversation(f"resp_{last}", "me")
    assert [one.id for one in chain] == [f"resp_{i}" for i in range(last + 1)]
    assert all(one.response["output"][0]["text"] == "x" * 9999 for one in chain)


def test_responses_are_there_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "Yes.")
    for again in (False, True):
        app = create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False, state_folder=tmp_path)
        with live(app) as url:
            if not again:
                first = post(url, BODY).json()
            else:
                assert httpx.get(f"{url}/v1/responses/{first['id']}").json() == first
                second = post(url, BODY | {"previous_response_id": first["id"]}).json()
                assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_old_responses_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(open_database(tmp_path))
    monkeypatch.setattr("openk3.serve.responses.store.time.time", lambda: 1_000_000)
    store.save(stored(0), "me")
    monkeypatch.setattr("openk3.serve.responses.store.time.time", lambda: 1_000_000 + 31 * 24 * 3600)
    store.save(stored(1, "resp_0"), "me")
    assert store.get("resp_1", "me").input == [{"id": "msg_1"}]
    with pytest.raises(ApiError, match='There is no response "resp_0"'):
        store.conversation("resp_1", "me")
    assert store.item("msg_0", "me") is None
    assert store.item("msg_1", "me") == {"id": "msg_1"}
    assert store.item("msg_1", "you") is None


def test_responses_of_another_key_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "Yes.")
    app = create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False, state_folder=tmp_path)
    with live(app) as url:
        keys = KeyStore(open_database(tmp_path))
        mine, yours = (
            OpenAI(base_url=f"{url}/v1", api_key=keys.create(name)[1], max_retries=0) for name in ("Ada", "Bob")
        )
        created = mine.responses.create(**BODY)
        assert mine.responses.retrieve(created.id) == created
        for ask in (yours.responses.retrieve, yours.responses.delete, yours.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                ask(created.id)
        with pytest.raises(openai.NotFoundError):
            yours.responses.create(**BODY, previous_response_id=created.id)
        assert mine.responses.create(**BODY, previous_response_id=created.id).output_text == "Yes."
