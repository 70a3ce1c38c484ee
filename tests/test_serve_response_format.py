"""`response_format` over HTTP: valid replies, whole and streamed, and refusals that name the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from grammars import SCHEMAS
from openai import BadRequestError, InternalServerError, OpenAI
from serving import MODEL, client, debug_app, debug_llm, idle, live, until

FORMAT = "response_format"
MESSAGES: list[Any] = [{"role": "user", "content": "Give me an example."}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(debug_app()) as url:
        yield url


@pytest.fixture(scope="module")
def openai(url: str) -> OpenAI:
    return client(url)


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "example", "schema": schema} | more}


@pytest.mark.parametrize("name", ["object", "nested", "anyOf", "tuple", "names to be escaped"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_replies_are_valid_whole_and_streamed(openai: OpenAI, name: str, temperature: float) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "temperature": temperature,
        "seed": 11,
        "max_tokens": 300,
        FORMAT: schema_format(SCHEMAS[name], strict=True, description="an example"),
    }
    (choice,) = openai.chat.completions.create(**asked).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMAS[name])
    chunks = list(openai.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_several_choices_with_logprobs(openai: OpenAI) -> None:
    schema = {"enum": ["red", "green", "blue", None]}
    reply = openai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        n=4,
        seed=1,
        logprobs=True,
        top_logprobs=2,
        response_format=schema_format(schema),  # type: ignore[arg-type]
    )
    for choice in reply.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), schema)
        assert choice.logprobs is not None and len(choice.logprobs.content or ()) >= 4


def test_any_object(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    quick = {"logit_bias": {str(ord("}")): 100, str(ord('"')): 50}}  # a random model would write for ever
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any"}}):
        (choice,) = openai.chat.completions.create(**asked | quick, response_format=form).choices  # type: ignore[call-overload]
        assert choice.finish_reason == "stop"
        assert isinstance(json.loads(choice.message.content), dict)
    (cut,) = openai.chat.completions.create(**asked | {"max_tokens": 1}, response_format=form).choices  # type: ignore[call-overload]
    assert (cut.message.content, cut.finish_reason) == ("{", "length")


def test_plain_text_is_as_without(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    free, plain = (openai.chat.completions.create(**asked, **more) for more in ({}, {FORMAT: {"type": "text"}}))
    assert free.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("form", "param", "code", "message"),
    [
        ("json", FORMAT, "invalid_type", "expected an object"),
        ({}, f"{FORMAT}.type", "missing_required_parameter", "Missing required parameter: 'response_format.type'"),
        ({"type": "xml"}, f"{FORMAT}.type", "invalid_value", "Input should be 'text', 'json_object' or 'json_schema'"),
        ({"type": "json_schema"}, f"{FORMAT}.json_schema", "missing_required_parameter", "Missing required parameter"),
        (
            {"type": "json_object", "json_schema": {"name": "x"}},
            f"{FORMAT}.json_schema",
            "invalid_parameter_combination",
            "only allowed when 'response_format.type' is 'json_schema'",
        ),
        ({"type": "text", "schema": {}}, f"{FORMAT}.schema", "unknown_parameter", "Unknown parameter"),
        (
            {"type": "json_schema", "json_schema": {"schema": {}}},
            f"{FORMAT}.json_schema.name",
            "missing_required_parameter",
            "Missing required parameter",
        ),
        (schema_format({}, name="a b"), f"{FORMAT}.json_schema.name", "invalid_value", "should match pattern"),
        (schema_format({}, name=""), f"{FORMAT}.json_schema.name", "invalid_value", "should match pattern"),
        (schema_format({}, strict="yes"), f"{FORMAT}.json_schema.strict", "invalid_type", "expected a boolean"),
        (schema_format([]), f"{FORMAT}.json_schema.schema", "invalid_type", "expected an object"),
        (schema_format(True), f"{FORMAT}.json_schema.schema", "invalid_type", "expected an object"),
        (schema_format({}, extra=1), f"{FORMAT}.json_schema.extra", "unknown_parameter", "Unknown parameter"),
        (
            schema_format({"type": "strin"}),
            f"{FORMAT}.json_schema.schema",
            "invalid_value",
            "the JSON schema is malformed at $.type: 'strin'",
        ),
        (
            schema_format({"properties": {"a": {"$ref": "https://example.org/schema.json"}}}),
            f"{FORMAT}.json_schema.schema",
            "invalid_value",
            "the JSON schema has the keyword $ref in a way that is not supported",
        ),
    ],
)
def test_refusals_name_the_field(url: str, form: Any, param: str, code: str, message: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, FORMAT: form})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert message in error["message"]
    until(lambda: idle(debug_llm()))


def test_numbers_that_json_does_not_have(url: str) -> None:
    body = json.dumps({"model": MODEL, "messages": MESSAGES, FORMAT: schema_format({"const": 5})}).replace("5", "1e999")
    response = httpx.post(f"{url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(FORMAT)


def test_the_client_sees_its_own_exception(openai: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="has the keyword pattern in a way that is not supported") as refused:
        openai.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            response_format=schema_format({"type": "string", "pattern": "(?=a)b"}),  # type: ignore[arg-type]
        )
    assert refused.value.param == f"{FORMAT}.json_schema.schema"


BITS = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}


@pytest.mark.parametrize("stream", [False, True])
def test_what_no_grammar_keeps_is_checked_and_drawn_again(openai: OpenAI, stream: bool) -> None:
    """Half of the arrays that the grammar allows are wrong."""
    seen = set()
    for seed in range(6):
        options: Any = {"response_format": schema_format(BITS), "temperature": 1, "seed": seed}
        if stream:
            chunks = openai.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **options)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            reply = openai.chat.completions.create(model=MODEL, messages=MESSAGES, **options)
            text = reply.choices[0].message.content or ""
            assert reply.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(text), BITS)
        seen.add(text)
    assert seen


def test_where_nothing_is_valid_the_keyword_is_named(openai: OpenAI, url: str) -> None:
    schema = BITS | {"items": {"const": 1}}
    with pytest.raises(InternalServerError, match=r"no reply was valid of 4 .* keyword uniqueItems"):
        openai.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=schema_format(schema))  # type: ignore[arg-type]
    until(lambda: idle(debug_llm()))


def test_text_completions_have_no_response_format(url: str) -> None:
    body = {"model": MODEL, "prompt": "Hi", FORMAT: {"type": "json_object"}}
    error = httpx.post(f"{url}/v1/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == (FORMAT, "unknown_parameter")
