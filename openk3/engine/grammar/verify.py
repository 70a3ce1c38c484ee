"""Whether JSON is valid under a schema, for what no grammar has kept to it.

That is done by `jsonschema_rs`: its regular expressions take time in proportion to the text, where Python's may take
for ever, and nothing that a schema refers to is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import NoReturn, TypeAlias

Check: TypeAlias = Callable[[object], str]


@lru_cache(maxsize=256)
def check_of(schema: str) -> Check:
    """What says why a value is not valid under `schema`, as JSON; it says nothing of one that is.

    Raises:
        ValueError: the schema is malformed, refers to something outside of it, or has a pattern that is not supported.
    """
    import jsonschema_rs

    value = json.loads(schema)
    named = isinstance(value, dict) and isinstance(value.get("$schema"), str)
    make = jsonschema_rs.validator_for if named else jsonschema_rs.Draft202012Validator
    try:
        validator = make(value, retriever=_refuse, pattern_options=jsonschema_rs.RegexOptions())
    except jsonschema_rs.ValidationError as error:
        raise ValueError(f"the JSON schema cannot be checked: {str(error).splitlines()[0]}") from None

    def check(instance: object) -> str:
        problem = next(iter(validator.iter_errors(instance)), None)
        return "" if problem is None else _where(problem.instance_path) + problem.message.splitlines()[0][:200]

    return check


def _where(path: list[str | int]) -> str:
    return f"{'.'.join(map(str, path))}: " if path else ""


def _refuse(uri: str) -> NoReturn:
    raise ValueError(f"{uri} lies outside of the schema")
