"""What the bodies of requests are made of, whatever the protocol.

The rule for parameters is that none is silently ignored if it would change the answer. A parameter is either honoured;
or it is known and does not bear on the answer here (`Harmless`: who the user is, what to store or cache); or it asks
for something this server does not do yet (`unsupported`) and is refused by name unless it has its neutral value; or
it is unknown and refused. Types are strict: ``"0.7"`` is not a temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError, core_schema

Harmless = Any


class Body(BaseModel):
    """A JSON object of a request: no unknown fields, no types but the field's own."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, hide_input_in_errors=True)


def wrong(message: str, *, param: str | None = None, code: str = "invalid_value") -> PydanticCustomError:
    """The error a validator raises: `message` as the client will read it, `param` where the field's own path is too
    coarse."""
    return PydanticCustomError(code, "{message}", {"message": message, "param": param})


@dataclass(frozen=True)
class Unsupported:
    """A field that must be absent, null, or one of the `neutral` values that ask for nothing."""

    neutral: tuple[object, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return BeforeValidator(self._check).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.neutral]}

    def _check(self, value: object, info: ValidationInfo) -> None:
        # By type as well: to Python, 0 is False.
        if value is not None and not any(type(value) is type(one) and value == one for one in self.neutral):
            raise wrong(
                f"Unsupported parameter: '{info.field_name}' is not supported by this server yet; leave it out.",
                code="unsupported_parameter",
            )


def unsupported(*neutral: object) -> Unsupported:
    return Unsupported(neutral)


def by(field: str) -> Discriminator:
    """Tells the members of a union apart, which are annotated with ``Tag("<...>")``, by what their `field` holds.

    `validation` knows the angle brackets for no part of a field's path.
    """

    def tag(value: object) -> str | None:
        name = value.get(field) if isinstance(value, dict) else getattr(value, field, None)
        return f"<{name}>" if isinstance(name, str) else None

    tag.__name__ = field  # which is in the error
    return Discriminator(tag)
