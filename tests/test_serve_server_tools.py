"""Tools that the server runs: over the official client and raw HTTP, with replies that a model is made to give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agents import calculator_here, call_parts, calls_parts, has_model_reply
from chat_support import chat_llm, tokenizer, tool
from documents import pdf
from openai import InternalServerError, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import MODEL, client, idle, live, sse, until

from openk3.serve.app import create_app

pytestmark = pytest.mark.usefixtures(calculator_here.__name__)
USER = {"role": "user", "content": "How much?"}
BODY: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": [{"type": "calculator"}], "temperature": 0}
SUM = call_parts("calculator", expression="2 + 3")
WEATHER = tool("weather", city={"type": "string"})
MIXED = calls_parts(SUM, call_parts("weather", city="Rome"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(create_app(lambda: chat_llm("qwen"), model_name=MODEL, web=False, owns_model=False)) as url:
        yield url


@pytest.fixture(scope="module")
def api(url: str) -> OpenAI:
    return client(url)


def refused(url: str, change: dict[str, Any], status: int = 400) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/chat/completions", json=BODY | change)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    "entry", [{"type": "calculator"}, {"type": "builtin_function", "function": {"name": "$calculator"}}]
)
def test_the_server_runs_the_call(api: OpenAI, monkeypatch: pytest.MonkeyPatch, entry: Any) -> None:
    prompts = has_model_reply(monkeypatch, ("I compute.\n", *SUM), ("It is 5.",))
    reply = api.chat.completions.create(**BODY | {"tools": [entry]})
    ChatCompletion.model_validate(reply.model_dump(exclude={"choices": {0: {"message": {"server_tool_calls"}}}}))
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == "I compute.It is 5."
    assert choice.message.model_extra is not None
    (ran,) = choice.message.model_extra["server_tool_calls"]
    assert ran.pop("duration_s") >= 0 and ran.pop("id")
    assert ran == {
        "index": 0,
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression": "2 + 3"}'},
        "result": "5",
        "is_error": False,
        "round": 0,
    }
    assert "<tool_response>\n5\n</tool_response>" in prompts[1]
    assert reply.usage is not None
    encode = tokenizer("qwen").dialect.control.encode
    assert reply.usage.prompt_tokens == sum(len(encode(prompt)) for prompt in prompts)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.completion_tokens > len("I compute.It is 5.")


def test_the_stream(url: str, api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_reply(monkeypatch, ("I compute.\n", *SUM), ("It is 5.",))
    whole = api.chat.completions.create(**BODY)
    has_model_reply(monkeypatch, ("I compute.\n", *SUM), ("It is 5.",))
    response = httpx.post(
        f"{url}/v1/chat/completions", json=BODY | {"stream": True, "stream_options": {"include_usage": True}}
    )
    *chunks, last, done = sse(response.text)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert sum("role" in delta for delta in deltas) == 1
    assert "".join(delta.get("content") or "" for delta in deltas) == whole.choices[0].message.content
    assert not any("tool_calls" in delta for delta in deltas)
    (ran,) = [entry for delta in deltas for entry in delta.get("server_tool_calls", ())]
    assert (ran["function"]["name"], ran["result"]) == ("calculator", "5")
    place = next(i for i, delta in enumerate(deltas) if "server_tool_calls" in delta)
    said = "".join(delta.get("content") or "" for delta in deltas[:place])
    assert said == "I compute."  # what was said before is there before the result is
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert whole.usage is not None
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][field] == getattr(whole.usage, field)


def test_the_clients_helper_puts_the_stream_together(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_reply(monkeypatch, calls_parts(SUM, call_parts("calculator", expression="4 + 5")), ("5 and 9.",))
    with api.chat.completions.stream(**BODY) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "5 and 9."
    assert message.model_extra is not None
    assert sorted(entry["result"] for entry in message.model_extra["server_tool_calls"]) == ["5", "9"]


def test_the_clients_calls_come_back(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply with calls of both kinds: ours are run, the client's come back, and the chat goes on with both."""
    tools = [WEATHER, {"type": "calculator"}]
    for stream in (False, True):
        has_model_reply(monkeypatch, MIXED)
        if stream:
            with api.chat.completions.stream(**BODY | {"tools": tools}) as events:
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = api.chat.completions.create(**BODY | {"tools": tools}).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
        (ran,) = choice.message.model_extra["server_tool_calls"]
        assert ran["result"] == "5"

        back = choice.message.model_dump(exclude_none=True, exclude={"parsed": True})
        result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
        prompts = has_model_reply(monkeypatch, ("Done.",))
        reply = api.chat.completions.create(**BODY | {"tools": tools, "messages": [USER, back, result]})
        assert reply.choices[0].message.content == "Done."
        seen = prompts[0]
        places = [seen.index(words) for words in ("2 + 3", "\n5\n", "Rome", "\nSunny\n")]
        assert places == sorted(places)


def test_a_chat_goes_on_with_what_was_run(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_reply(monkeypatch, SUM, ("It is 5.",))
    message = api.chat.completions.create(**BODY).choices[0].message.model_dump(exclude_none=True)
    for tools in (BODY["tools"], None):
        prompts = has_model_reply(monkeypatch, ("Yes.",))
        chat = [USER, message, {"role": "user", "content": "Sure?"}]
        body = BODY | {"messages": chat, "tools": tools}
        assert api.chat.completions.create(**body).choices[0].message.content == "Yes."
        assert "2 + 3" in prompts[0] and "<tool_response>\n5\n" in prompts[0] and "It is 5." in prompts[0]


def test_errors_are_told_to_the_model(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = has_model_reply(monkeypatch, call_parts("calculator", expression="1/0"), ("It has no value.",))
    message = api.chat.completions.create(**BODY).choices[0].message
    assert message.content == "It has no value."
    assert message.model_extra is not None
    assert message.model_extra["server_tool_calls"][0]["is_error"] is True
    assert "Error: division by zero" in prompts[1]


def test_tokens_are_limited_over_all_rounds(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(SUM[1]) + 3
    for field in ("max_tokens", "max_completion_tokens"):
        has_model_reply(monkeypatch, SUM, ("y" * 50,))
        reply = api.chat.completions.create(**BODY, **{field: size + 7})
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("y" * 7, "length")
        assert reply.usage is not None
        assert reply.usage.completion_tokens == size + 7
        has_model_reply(monkeypatch, SUM)
        (choice,) = api.chat.completions.create(**BODY, **{field: size}).choices
        assert (choice.message.content, choice.finish_reason) == ("", "length")


def test_a_tool_may_be_required_or_forbidden(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    named: Any = {"type": "function", "function": {"name": "calculator"}}
    has_model_reply(monkeypatch, SUM, ("Five.",))
    message = api.chat.completions.create(**BODY, tool_choice=named).choices[0].message
    assert (message.content, message.model_extra is not None) == ("Five.", True)
    has_model_reply(monkeypatch, ("No.",))
    reply = api.chat.completions.create(**BODY, tool_choice="none").choices[0].message
    assert (reply.content, (reply.model_extra or {}).get("server_tool_calls")) == ("No.", None)


def test_the_last_round_is_an_answer(api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_parts("calculator", expression="1 + 1")
    has_model_reply(monkeypatch, call, call, ("Two.",))  # it repeats itself, and has to answer
    choice = api.chat.completions.create(**BODY).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Two.", "stop")
    assert choice.message.model_extra is not None
    assert len(choice.message.model_extra["server_tool_calls"]) == 1
    has_model_reply(monkeypatch, call, (), ("Two.",))  # or says nothing
    assert api.chat.completions.create(**BODY).choices[0].message.content == "Two."
    has_model_reply(monkeypatch, call, call, ('{"name": "calculator"}',))
    with pytest.raises(InternalServerError, match="the grammar does not allow token"):
        api.chat.completions.create(**BODY)


def upload(url: str, name: str, data: bytes) -> str:
    answer = httpx.post(f"{url}/v1/files", files={"file": (name, data)}, data={"purpose": "user_data"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def test_search_in_files(url: str, api: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = upload(url, "lease.pdf", pdf(["Parties", "The monthly rent is 900 euros."]))
    other = upload(url, "secret.txt", b"The rent of the neighbours is 5 euros.")
    tools: Any = [{"type": "search_documents", "search_documents": {"file_ids": [lease]}}]
    for _ in range(2):  # the second time it is indexed already
        has_model_reply(monkeypatch, call_parts("search_documents", query="rent"), ("900 euros.",))
        message = api.chat.completions.create(**BODY | {"tools": tools}).choices[0].message
        assert message.content == "900 euros."
        assert message.model_extra is not None
        (ran,) = message.model_extra["server_tool_calls"]
        assert ran["result"] == "[1] lease.pdf, page 2:\nThe monthly rent is 900 euros."
    httpx.delete(f"{url}/v1/files/{lease}")
    error = refused(url, {"tools": tools}, 404)
    assert (error["code"], error["param"]) == ("file_not_found", "tools[0].search_documents.file_ids[0]")
    broken = upload(url, "broken.pdf", b"%PDF-1.7 nothing")
    tools[0]["search_documents"]["file_ids"] = [other, broken]
    error = refused(url, {"tools": tools})
    assert error["param"] == "tools[0].search_documents.file_ids[1]"
    assert "broken.pdf: the PDF cannot be read: it is damaged" in error["message"]


def test_the_text_of_a_file(url: str) -> None:
    sent: Any = {"files": {"file": ("lease.pdf", pdf(["Parties", "The rent."]))}, "data": {"purpose": "file-extract"}}
    file_id = httpx.post(f"{url}/v1/files", **sent).json()["id"]
    assert httpx.get(f"{url}/v1/files/{file_id}/content").json() == {
        "content": "Parties\fThe rent.",
        "file_type": "pdf",
        "filename": "lease.pdf",
        "title": "",
        "type": "file",
    }
    sent["files"] = {"file": ("scan.pdf", pdf([""], picture=True))}
    file_id = httpx.post(f"{url}/v1/files", **sent).json()["id"]
    answer = httpx.get(f"{url}/v1/files/{file_id}/content")
    assert answer.status_code == 400
    assert "scan.pdf: the PDF is a scan: its pages are pictures without text" in answer.json()["error"]["message"]


def test_a_damaged_index_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"model_name": MODEL, "web": False, "owns_model": False, "state_folder": tmp_path}
    found: list[str] = []
    file_id = ""
    for damage in (False, True):
        if damage:
            assert (tmp_path / "search.sqlite3").exists()
            (tmp_path / "search.sqlite3").write_bytes(b"no database" * 1000)
        with live(create_app(lambda: chat_llm("qwen"), **options)) as url:
            file_id = file_id or upload(url, "a.txt", b"The rent is 900 euros.")
            tools: Any = [{"type": "search_documents", "search_documents": {"file_ids": [file_id]}}]
            has_model_reply(monkeypatch, call_parts("search_documents", query="rent"), ("900.",))
            message = client(url).chat.completions.create(**BODY | {"tools": tools}).choices[0].message
            found.append((message.model_extra or {})["server_tool_calls"][0]["result"])
    assert found == ["[1] a.txt:\nThe rent is 900 euros."] * 2


def test_a_client_that_goes_away(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second round, with the first behind it: nothing goes on running."""
    has_model_reply(monkeypatch, SUM, ("x" * 3000,))
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY | {"stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if '"content":"x' in line:
                break
    until(lambda: idle(chat_llm("qwen")))


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported; there are"),
        (
            {"tools": [WEATHER, {"type": "builtin_function", "function": {"name": "$web_search"}}]},
            "tools[1].function.name",
            "there are $calculator and $datetime",
        ),
        ({"tools": [{"type": "builtin_function"}]}, "tools[0].function.name", "None is no built-in function"),
        ({"tools": [{"type": "calculator", "digits": 5}]}, "tools[0].digits", "unknown"),
        ({"tools": [{"type": "calculator", "calculator": {"a": 1}}]}, "tools[0].calculator", "has no settings"),
        ({"tools": [{"type": "calculator"}] * 2}, "tools[1].function.name", "there is a tool 'calculator' already"),
        (
            {"tools": [tool("calculator"), {"type": "calculator"}]},
            "tools[1].function.name",
            "there is a tool 'calculator' already",
        ),
        ({"tools": [{"type": "calculator"}, {"type": "function"}]}, "tools[1].function", "expected an object"),
        ({"tools": [{"type": "search_documents"}]}, "tools[0].search_documents.file_ids", "missing"),
        (
            {"tools": [{"type": "search_documents", "search_documents": {"file_ids": []}}]},
            "tools[0].search_documents.file_ids",
            "one file id or more",
        ),
        (
            {"tools": [{"type": "mcp", "server_label": "shop"}]},
            "tools[0].server_label",
            "there is no MCP server 'shop'; this server was started without any",
        ),
        ({"n": 2}, "n", "one choice"),
        (
            {"messages": [USER, {"role": "assistant", "content": "It", "partial": True}]},
            "messages[1].partial",
            "not possible beside tools that the server runs",
        ),
        (
            {"messages": [USER | {"server_tool_calls": [{}]}]},
            "messages[0].server_tool_calls",
            "only an assistant message has them",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "x", "server_tool_calls": [{"id": "1"}]}]},
            "messages[1].server_tool_calls[0].function",
            "missing",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "x",
                        "server_tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}, "result": ""}],
                    }
                ]
            },
            "messages[0].server_tool_calls",
            "not valid JSON",
        ),
    ],
)
def test_refused(url: str, change: dict[str, Any], param: str, words: str) -> None:
    error = refused(url, change)
    assert (error["param"], words in error["message"]) == (param, True), error


def test_the_other_protocols_refuse_them(url: str) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 5,
        "messages": [USER],
        "tools": [{"type": "calculator", "name": "calculator"}],
    }
    assert httpx.post(f"{url}/v1/messages", json=body).status_code == 400
