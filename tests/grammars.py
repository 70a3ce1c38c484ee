"""What the grammars' tests share: JSON Schemas of every supported kind, none of which allows an endless instance."""

from __future__ import annotations

from typing import Any

NAME = {"type": "string", "maxLength": 12}

SCHEMAS: dict[str, Any] = {
    "object": {
        "type": "object",
        "properties": {"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"enum": [1, 2]}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "person": {
                "type": "object",
                "properties": {"name": NAME, "tags": {"type": "array", "items": NAME, "maxItems": 3}},
                "required": ["name", "tags"],
                "additionalProperties": False,
            }
        },
        "required": ["person"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "green", 3, None, {"a": [1]}, "é 🌊"]},
    "const": {"const": {"kind": "point", "at": [0, -1.5]}},
    "string": {"type": "string", "minLength": 2, "maxLength": 10},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "integer": {"type": "integer", "exclusiveMinimum": -20, "maximum": 1000},
    "number": {"type": "number", "minimum": -1, "exclusiveMaximum": 2, "multipleOf": 0.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    "boolean": {"type": "boolean"},
    "several types": {"type": ["boolean", "null"]},
    "array": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 5},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}],
        "items": False,
        "minItems": 1,
    },
    "anyOf": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 5}, {"const": 7}]},
    "oneOf": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, kind: schema},
                "required": ["kind", kind],
                "additionalProperties": False,
            }
            for kind, schema in (("flag", {"type": "boolean"}), ("label", NAME))
        ]
    },
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 9}, "b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "recursion": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "leaf": {"type": "boolean"},
                    "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/twig"}]},
                },
                "required": ["leaf", "left"],
                "additionalProperties": False,
            },
            "twig": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
    },
    "map": {
        "type": "object",
        "patternProperties": {"^.{1,4}$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "named by a pattern": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "names to be escaped": {
        "type": "object",
        "properties": {'say "hi"': {"const": "\\ \n"}, "naïve\t🌊": {"const": True}},
        "required": ['say "hi"', "naïve\t🌊"],
        "additionalProperties": False,
    },
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"size": {"enum": ["S", "M", "L"]}},
        "type": "array",
        "items": [{"$ref": "#/definitions/size"}, {"type": "boolean"}],
        "additionalItems": False,
        "minItems": 2,
    },
}

# These allow instances without an end, which a model may write until its tokens are used up.
ENDLESS: dict[str, Any] = {
    "any": True,
    "additional properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": {"type": "null"},
    },
    "recursion": {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    },
}

UNSUPPORTED: dict[str, Any] = {
    "uniqueItems": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    "not": {"not": {"type": "string"}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "contains": {"type": "array", "contains": {"const": 1}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "minProperties": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 2},
    "format": {"type": "string", "format": "iri"},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    "x-guidance": {"type": "string", "x-guidance": {"lenient": True}, "uniqueItems": True},
}
