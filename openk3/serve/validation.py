"""A request body to a checked model, or the one error that tells the client what to change.

Bodies are parsed here and not by FastAPI, for three reasons: pydantic's JSON parser refuses what Python's lets through
(NaN, lone surrogates), a large body is parsed off the event loop so that running streams do not stall, and its errors
become the API's own, with the field's path as the client wrote it and OpenAI's code words.
"""

from __future__ import annotations

import asyncio
import difflib
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from openk3.serve.errors import ApiError, shown

_Body = TypeVar("_Body", bound=BaseModel)

# Below this size parsing takes less time than the trip to another thread.
_INLINE_BYTES = 1 << 17

_EXPECTED = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer",
    "int_type": "an integer",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
    "union_tag_not_found": "an object",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than", "below_min_value"),
    "greater_than_equal": ("ge", "of at least", "below_min_value"),
    "less_than": ("lt", "less than", "above_max_value"),
    "less_than_equal": ("le", "of at most", "above_max_value"),
}


async def parse_body(request: Request, model: type[_Body]) -> _Body:
    """Read the request's JSON body as a `model`.

    Raises:
        ApiError: 415 for another content type; 400 for an empty body, text that is not UTF-8, invalid JSON, and every
            unknown, missing, mistyped or out-of-range field, which it names.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415,
            f"Unsupported content type {shown(media_type)}; send JSON, with 'Content-Type: application/json'.",
            code="unsupported_content_type",
        )
    raw = await request.body()
    if len(raw) < _INLINE_BYTES:
        return _parse(raw, model)
    return await asyncio.to_thread(_parse, raw, model)


def checked(fields: dict[str, Any], model: type[_Body]) -> _Body:
    """The `model` of fields that another protocol's request was translated into.

    Raises:
        ApiError: as `parse_body`.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _api_error(error, model) from None


def _parse(raw: bytes, model: type[_Body]) -> _Body:
    if not raw.strip():
        raise ApiError(400, "The request body is empty; it should be a JSON object.", code="invalid_json")
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(
            400,
            f"The request body is not valid UTF-8: byte 0x{raw[error.start]:02x} at position {error.start}. "
            "JSON is sent as UTF-8.",
            code="invalid_json",
        ) from None
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _api_error(error, model) from None


def _api_error(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """Translate the first of pydantic's errors."""
    first = error.errors(include_url=False)[0]
    kind, value, context = first["type"], first.get("input"), first.get("ctx", {})
    param = _path(first["loc"])
    if kind == "json_invalid":
        return ApiError(
            400, f"We could not parse the JSON body of your request: {context['error']}.", code="invalid_json"
        )
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return ApiError(400, _unknown(param, model), param=param, code="unknown_parameter")
    if kind in _BOUNDS:
        key, words, code = _BOUNDS[kind]
        bound = context[key]
        number = "decimal" if isinstance(bound, float) else "integer"
        return ApiError(
            400,
            f"Invalid '{param}': expected a value {words} {bound:{'g' if number == 'decimal' else 'd'}}, "
            f"but got {shown(value)} instead.",
            param=param,
            code=f"{number}_{code}",
        )
    if kind in _EXPECTED and not (kind == "union_tag_not_found" and isinstance(value, dict)):
        what = f"'{param}'" if param else "the request body"
        return ApiError(
            400,
            f"Invalid type for {what}: expected {_EXPECTED[kind]}, but got {_kind(value)} instead.",
            param=param,
            code="invalid_type",
        )
    if kind == "union_tag_not_found" and isinstance(value, dict):
        param = ".".join(filter(None, (param, _discriminator(context))))
        if value.get(_discriminator(context)) is None:
            message = f"Missing required parameter: '{param}'."
            return ApiError(400, message, param=param, code="missing_required_parameter")
        return ApiError(400, f"Invalid type for '{param}': expected a string.", param=param, code="invalid_type")
    if kind == "union_tag_invalid":
        param = ".".join(filter(None, (param, _discriminator(context))))
        tag, expected = context["tag"].strip("<>"), context["expected_tags"].replace("<", "").replace(">", "")
        message = f"Invalid '{param}': {shown(tag)} is not supported; expected one of {expected}."
        return ApiError(400, message, param=param, code="invalid_value")
    if "message" in context:  # raised by one of our own validators
        return ApiError(400, str(context["message"]), param=context.get("param") or param, code=kind)
    return ApiError(400, f"Invalid '{param}': {first['msg']}.", param=param, code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str | None:
    """``("messages", 0, "role")`` to ``messages[0].role``; tags of unions, in angle brackets, are no part of it."""
    path = ""
    for part in location:
        if isinstance(part, str) and part.startswith("<"):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None


def _discriminator(context: dict[str, Any]) -> str:
    """The field that tells the members of a union apart (`bodies.by`)."""
    return str(context["discriminator"]).removesuffix("()")


def _unknown(param: str | None, model: type[BaseModel]) -> str:
    close = difflib.get_close_matches(param, sorted(model.model_fields), n=1) if param and "." not in param else []
    return f"Unknown parameter: {shown(param)}." + (f" Did you mean '{close[0]}'?" if close else "")


def _kind(value: Any) -> str:
    names = {
        bool: "a boolean",
        dict: "an object",
        float: "a decimal number",
        int: "an integer",
        list: "an array",
        str: "a string",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
