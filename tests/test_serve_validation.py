"""What a request body may say, and the words in which it is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from openk3.serve.errors import ApiError
from openk3.serve.openai_types import ChatRequest, CompletionRequest
from openk3.serve.validation import _parse

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "Hi"}


def refused(raw: bytes | dict[str, Any] | list[Any], model: Any = ChatRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        _parse(raw if isinstance(raw, bytes) else json.dumps(raw).encode(), model)
    error = caught.value
    assert error.status == 400
    assert error.type == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("field", "value", "code", "message"),
    [
        ("temperature", -0.1, "decimal_below_min_value", "expected a value of at least 0, but got -0.1 instead."),
        ("temperature", 2.5, "decimal_above_max_value", "expected a value of at most 2, but got 2.5 instead."),
        ("temperature", "0.7", "invalid_type", "expected a number, but got a string instead."),
        ("temperature", True, "invalid_type", "expected a number, but got a boolean instead."),
        ("top_p", 1.01, "decimal_above_max_value", "expected a value of at most 1, but got 1.01 instead."),
        ("top_k", -2, "integer_below_min_value", "expected a value of at least -1, but got -2 instead."),
        ("min_p", -1, "decimal_below_min_value", "expected a value of at least 0, but got -1 instead."),
        ("presence_penalty", -3, "decimal_below_min_value", "expected a value of at least -2, but got -3 instead."),
        ("frequency_penalty", 9, "decimal_above_max_value", "expected a value of at most 2, but got 9 instead."),
        ("repetition_penalty", 0, "decimal_below_min_value", "expected a value of at least 0.01, but got 0 instead."),
        ("n", 0, "integer_below_min_value", "expected a value of at least 1, but got 0 instead."),
        ("n", 1000000, "integer_above_max_value", "expected a value of at most 128, but got 1000000 instead."),
        ("n", 1.5, "invalid_type", "expected an integer, but got a decimal number instead."),
        ("max_tokens", -5, "integer_below_min_value", "expected a value of at least 1, but got -5 instead."),
        ("max_tokens", 0, "integer_below_min_value", "expected a value of at least 1, but got 0 instead."),
        ("seed", 2**63, "integer_above_max_value", f"expected a value less than {2**63}, but got {2**63} instead."),
        ("seed", "7", "invalid_type", "expected an integer, but got a string instead."),
        ("priority", "high", "invalid_type", "expected an integer, but got a string instead."),
        ("priority", 2**31, "integer_above_max_value", f"expected a value less than {2**31}, but got {2**31} instead."),
        ("stream", "yes", "invalid_type", "expected a boolean, but got a string instead."),
        ("model", None, "invalid_type", "expected a string, but got null instead."),
        ("stop", 5, "invalid_type", "expected a string or an array of strings."),
        ("stop", ["a", None], "invalid_type", "expected a string or an array of strings."),
        ("stop", ["x"] * 17, "array_above_max_length", "17 stop sequences; at most 16 are possible."),
        ("stop", "", "invalid_value", "a stop sequence is empty"),
        ("logit_bias", [], "invalid_type", "expected an object from token ids to numbers."),
        ("logit_bias", {"cat": 1}, "invalid_value", '"cat" is not a token id.'),
        ("logit_bias", {"-1": 1}, "invalid_value", '"-1" is not a token id.'),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_bad_parameter(endpoint: str, field: str, value: object, code: str, message: str) -> None:
    base, model = (CHAT, ChatRequest) if endpoint == "chat" else (TEXT, CompletionRequest)
    error = refused(base | {field: value}, model)
    assert (error.param, error.code) == (field, code)
    assert f"'{field}'" in error.message
    assert error.message.endswith(message) or message in error.message


@pytest.mark.parametrize(
    ("change", "param", "code", "message"),
    [
        ({"messages": []}, "messages", "invalid_value", "the list is empty; give at least one message"),
        ({"messages": "Hi"}, "messages", "invalid_value", "expected a list of messages, got text"),
        (
            {"messages": [{"role": "robot", "content": "Hi"}]},
            "messages[0].role",
            "invalid_value",
            "Invalid 'messages[0].role': 'robot' is not one of system, user, assistant, tool.",
        ),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "invalid_value", "missing; give one of system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value", "missing; give text"),
        (
            {"messages": [*CHAT["messages"], {"role": "user", "content": 5}]},
            "messages[1].content",
            "invalid_value",
            "expected text or a list of text parts, got int",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "invalid_value",
            "'image_url' is not supported",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}]},
            "messages[0].function_call",
            "unsupported_parameter",
            "Unsupported parameter: 'messages[0].function_call' is not supported by this server yet; leave it out.",
        ),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value", "at most 20, but got 21"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_parameter_combination", "only allowed when 'logprobs' is true"),
        ({"logprobs": 1}, "logprobs", "invalid_type", "expected a boolean, but got an integer instead."),
        (
            {"max_tokens": 5, "max_completion_tokens": 5},
            "max_tokens",
            "invalid_parameter_combination",
            "'max_tokens' and 'max_completion_tokens' cannot both be given",
        ),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "invalid_parameter_combination",
            "only allowed when 'stream' is enabled",
        ),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
            "invalid_type",
            "expected a boolean, but got a string instead.",
        ),
        ({"temprature": 1}, "temprature", "unknown_parameter", "Did you mean 'temperature'?"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value", "101 is not a number from -100 to 100"),
    ],
)
def test_bad_chat(change: dict[str, Any], param: str, code: str, message: str) -> None:
    error = refused(CHAT | change)
    assert (error.param, error.code) == (param, code)
    assert message in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("modalities", ["text", "audio"]),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("moderation", {"model": "x"}),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(field: str, value: object) -> None:
    error = refused(CHAT | {field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert error.message == f"Unsupported parameter: '{field}' is not supported by this server yet; leave it out."


def test_harmless_and_neutral_parameters_are_accepted() -> None:
    harmless = {
        "user": "u1",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "x"},
    }
    neutral: dict[str, Any] = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "functions": None,
        "audio": None,
    }
    null = {"temperature": None, "max_tokens": None, "n": None, "stop": None, "logit_bias": None, "seed": None}
    body = _parse(json.dumps(CHAT | harmless | neutral | null).encode(), ChatRequest)
    assert body.sampling() == {}
    assert body.choices_per_prompt == 1


def test_sampling_keywords() -> None:
    asked = {"temperature": 0, "top_p": 1, "top_k": -1, "stop": "x", "logit_bias": {"7": -100}, "seed": 3}
    body = _parse(json.dumps(CHAT | asked | {"logprobs": True, "max_completion_tokens": 4}).encode(), ChatRequest)
    assert body.sampling() == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop": ("x",),
        "logit_bias": {7: -100.0},
        "logprobs": 0,
        "max_tokens": 4,
    }
    assert _parse(json.dumps(TEXT).encode(), CompletionRequest).sampling() == {"max_tokens": 16}


def test_messages_are_prepared_for_the_template() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        # What clients send back: the reply as they got it.
        {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "audio": None, "tool_calls": None},
    ]
    body = _parse(json.dumps(CHAT | {"messages": messages}).encode(), ChatRequest)
    assert [(message["role"], message["content"]) for message in body.messages] == [
        ("system", "Be brief."),
        ("user", "a\nb"),
        ("assistant", "c"),
    ]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompt_forms(prompt: object, read: object) -> None:
    assert _parse(json.dumps(TEXT | {"prompt": prompt}).encode(), CompletionRequest).prompt == read


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        ("", "prompt", "empty_prompt"),
        ([], "prompt", "empty_array"),
        ([""], "prompt", "empty_prompt"),
        (["a", ""], "prompt[1]", "empty_prompt"),
        ([[1], []], "prompt[1]", "empty_prompt"),
        (None, "prompt", "invalid_type"),
        (5, "prompt", "invalid_type"),
        ({"text": "a"}, "prompt", "invalid_type"),
        (["a", 1], "prompt[1]", "invalid_type"),
        ([1, "a"], "prompt[0]", "invalid_type"),
        ([[1], "a"], "prompt[1]", "invalid_type"),
        ([-1], "prompt[0]", "invalid_type"),
        ([1.5], "prompt[0]", "invalid_type"),
        ([True], "prompt[0]", "invalid_type"),
        (["a"] * 2049, "prompt", "array_above_max_length"),
    ],
)
def test_bad_prompt(prompt: object, param: str, code: str) -> None:
    error = refused(TEXT | {"prompt": prompt}, CompletionRequest)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": []}, "messages"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ],
)
def test_bad_completion(change: dict[str, Any], param: str) -> None:
    assert refused(TEXT | change, CompletionRequest).param == param


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "The request body is empty; it should be a JSON object."),
        (b"   ", "The request body is empty; it should be a JSON object."),
        (b'{"model": "m",', "We could not parse the JSON body of your request: EOF while parsing"),
        (b"{'model': 1}", "We could not parse the JSON body of your request: key must be a string"),
        (b'{"model": "\\ud800"}', "We could not parse the JSON body of your request: "),
        (b"[" * 100_000, "We could not parse the JSON body of your request: recursion limit exceeded"),
        (b'{"model": "\xff"}', "not valid UTF-8: byte 0xff at position 11."),
        (b'{"model": "\xed\xa0\x80"}', "not valid UTF-8: byte 0xed at position 11."),
    ],
)
def test_broken_body(raw: bytes, message: str) -> None:
    error = refused(raw)
    assert error.code == "invalid_json"
    assert message in error.message


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_must_be_finite(number: str) -> None:
    raw = json.dumps(CHAT)[:-1] + f', "temperature": {number}}}'
    assert refused(raw.encode()).param == "temperature"


@pytest.mark.parametrize("body", [[], "text", 5, None])
def test_body_must_be_an_object(body: Any) -> None:
    error = refused(body if body is not None else b"null")
    assert error.code == "invalid_type"
    assert "expected an object" in error.message


def test_missing_parameters() -> None:
    assert refused({}).message == "Missing required parameter: 'model'."
    assert refused({"model": "m"}).param == "messages"
    assert refused({"model": "m"}, CompletionRequest).param == "prompt"


@pytest.mark.parametrize(
    "change",
    [
        {"logit_bias": {"x" * 100_000: 1}},
        {"x" * 100_000: 1},
        {"messages": [{"role": "x" * 100_000, "content": "Hi"}]},
        {"n": int("9" * 1000)},
    ],
)
def test_refusals_quote_little(change: dict[str, Any]) -> None:
    error = refused(CHAT | change)
    assert len(error.message) <= 1000
    assert len(error.param or "") <= 200
