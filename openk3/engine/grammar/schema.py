"""JSON Schemas that cannot be kept are refused here, before a grammar is made of them.

The compiler refuses most of what it does not implement. What it would take and not keep is refused in this file, and so
are schemas that are malformed, whose mistyped keywords it would take for annotations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *("items", "prefixItems", "additionalItems", "contains", "unevaluatedItems"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
)


def check_schema(source: str) -> None:
    """
    Args:
        source: a JSON Schema as JSON.

    Raises:
        ValueError: it is not JSON, not a schema, or asks for what the grammar would not keep; the message says where,
            and names the keyword.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        schema = json.loads(source)
        if not isinstance(schema, (dict, bool)):
            raise ValueError(f"it is {_kind(schema)}, not an object")
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the JSON schema is malformed at {error.json_path}: {_cut(error.message)}") from None
    except RecursionError:
        raise ValueError("the JSON schema is nested too deeply: flatten it, or use $ref and $defs") from None
    except ValueError as error:
        raise ValueError(f"the JSON schema is malformed: {error}") from None
    for part in _subschemas(schema):
        _check_part(part)


def _check_part(schema: dict[str, Any]) -> None:
    if "x-guidance" in schema:  # would let a schema switch off its own enforcement
        raise ValueError("the JSON schema has the keyword x-guidance, which is not supported: remove it")
    # The grammar counts the members of an object and not their names, and lets the names that no property lists repeat.
    required = schema.get("required")
    least, named = schema.get("minProperties", 0), len(required) if isinstance(required, list) else 0
    if least > named + 1:
        raise ValueError(
            f"the JSON schema has the keyword minProperties with the value {least}, which is supported up to one more "
            f"than the number of required properties ({named}): lower it, or name the properties in required"
        )


def _subschemas(schema: object) -> Iterator[dict[str, Any]]:
    """The schema and every schema in it. Instances such as those of `enum` and `const` are none."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for keyword in _MAPS_OF_SCHEMAS:
            parts = part.get(keyword)
            pending += parts.values() if isinstance(parts, dict) else ()
        for keyword in _SCHEMAS:
            value = part.get(keyword)
            pending += value if isinstance(value, list) else [value]


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", type(None): "null"}.get(type(value), "a number")


def _cut(message: str, limit: int = 300) -> str:
    return message if len(message) <= limit else message[: limit - 1] + "…"
