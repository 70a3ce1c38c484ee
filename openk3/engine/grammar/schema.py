"""JSON Schemas that cannot be kept are refused here, before a grammar is made of them.

The compiler refuses most of what it does not implement. What it would take and not keep is refused in this file, and so
are schemas that are malformed, whose mistyped keywords it would take for annotations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *("items", "prefixItems", "additionalItems", "contains", "unevaluatedItems"),
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
)
_ANNOTATIONS = {"title", "description", "$comment", "examples", "default", "deprecated", "readOnly", "writeOnly"}

# Which may be written as 2.0, and that the compiler does not read.
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}

# What llguidance takes grows with the square of some of these.
_MOST_SUBSCHEMAS = 2_000
_MOST_PATTERNS = 32  # patternProperties of one schema, which it compares with each other
_MOST_VALUES = 20_000  # numbers, texts, arrays, objects, and so on, in the whole

_TOO_DEEP = "the JSON schema is nested too deeply: flatten it, or use $ref and $defs"


def check_schema(source: str, lenient: bool = False) -> dict[str, Any]:
    """The JSON Schema that `source` is. `lenient`: the compiler leaves out what it does not keep, and so does this.

    Raises:
        ValueError: it is not JSON, not a schema, too large, or asks for what the grammar would not keep; the message
            says where, and names the keyword.
    """
    try:
        schema = json.loads(source)
        json.dumps(schema, allow_nan=False)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"the JSON schema is malformed: {error}") from None
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("the JSON schema is false: nothing is valid under it")
    if not isinstance(schema, dict):
        raise ValueError(f"the JSON schema is malformed: it is {_kind(schema)}, not an object")
    _check_size(schema)
    try:
        problem = next(_checker_for(schema).iter_errors(schema), None)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if problem is not None:
        raise ValueError(f"the JSON schema is malformed at {problem.json_path}: {_cut(problem.message)}")
    for part in _subschemas(schema):
        _check_part(part, lenient)
        part |= {key: int(part[key]) for key in _COUNTS & part.keys() if isinstance(part[key], float)}
    return schema


def without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a schema without what only people and models read, which is the larger part of many."""
    copied: dict[str, Any] = json.loads(json.dumps(schema))
    for part in _subschemas(copied):
        for keyword in _ANNOTATIONS & part.keys():
            del part[keyword]
    return copied


def _checker_for(schema: dict[str, Any]) -> Any:
    """What checks schemas of the draft that "$schema" names; of the newest where it is unknown."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    named = isinstance(schema.get("$schema"), str)
    return _checker(validator_for(schema, default=Draft202012Validator) if named else Draft202012Validator)


@cache
def _checker(kind: Any) -> Any:
    """It does not compare the values of "enum" with each other, which takes minutes for some large ones."""
    from jsonschema.validators import extend, validator_for

    of_schemas = validator_for(kind.META_SCHEMA, default=kind)
    return extend(of_schemas, {"uniqueItems": lambda validator, wanted, instance, schema: ()})(kind.META_SCHEMA)


def _check_size(schema: dict[str, Any]) -> None:
    values, pending = 0, [schema]
    while pending:
        value = pending.pop()
        values += 1
        if isinstance(value, (dict, list)):
            pending += value.values() if isinstance(value, dict) else value
    for count, most, what in (
        (values, _MOST_VALUES, "values"),
        (sum(1 for _ in _subschemas(schema)), _MOST_SUBSCHEMAS, "schemas"),
        (max(len(_patterns(part)) for part in _subschemas(schema)), _MOST_PATTERNS, "patternProperties in one object"),
    ):
        if count > most:
            raise ValueError(
                f"the JSON schema is too large: it has {count:,} {what}, at most {most:,} are possible, simplify it"
            )


def _patterns(schema: dict[str, Any]) -> dict[str, Any]:
    patterns = schema.get("patternProperties")
    return patterns if isinstance(patterns, dict) else {}


def _check_part(schema: dict[str, Any], lenient: bool) -> None:
    if "x-guidance" in schema:  # would let a schema switch off its own enforcement
        raise ValueError("the JSON schema has the keyword x-guidance, which is not supported: remove it")
    # The grammar counts the members of an object and not their names, and lets the names that no property lists repeat.
    required = schema.get("required")
    least, named = schema.get("minProperties", 0), len(required) if isinstance(required, list) else 0
    if least > named + 1 and lenient:
        schema["minProperties"] = named + 1
    elif least > named + 1:
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
