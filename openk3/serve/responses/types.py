"""What a request in OpenAI's Responses protocol may say.

Fields and ranges are those of https://platform.openai.com/docs/api-reference/responses; the rule for them is that of
`openk3.serve.bodies`: honoured, harmless, or refused by name.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, model_validator

from openk3.serve.bodies import Body, Harmless, by, unsupported, wrong
from openk3.serve.openai_types import Effort


class TextPart(Body):
    """Text, of the user or of the model."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Harmless = None
    logprobs: Harmless = None
    prompt_cache_breakpoint: Harmless = None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag("<input_text>")]
    | Annotated[TextPart, Tag("<output_text>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    by("type"),
]


def _as_parts(content: object) -> object:
    """Text is short for one part of text."""
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Parts: TypeAlias = Annotated[list[Part], BeforeValidator(_as_parts, json_schema_input_type=str | list[Part])]


class _Item(Body):
    id: str | None = None
    status: Harmless = None


class MessageItem(_Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Harmless = None

    @property
    def text(self) -> str:
        return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in self.content)

    def stored(self) -> dict[str, Any]:
        kind = "output_text" if self.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if self.role == "assistant" else {}
        parts = [
            {"type": kind, "text": part.text, **more} if isinstance(part, TextPart) else part.model_dump()
            for part in self.content
        ]
        return {
            "id": self.id or new_id("msg"),
            "type": "message",
            "status": "completed",
            "role": self.role,
            "content": parts,
        }


class CallItem(_Item):
    """A call of a function that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    caller: Harmless = None
    namespace: Annotated[None, unsupported()] = None

    def stored(self) -> dict[str, Any]:
        call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {"id": self.id or new_id("fc"), "type": self.type, "status": "completed", **call}


class ResultItem(_Item):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    name: Harmless = None
    caller: Harmless = None
    namespace: Annotated[None, unsupported()] = None

    @property
    def text(self) -> str:
        return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in self.output)

    def stored(self) -> dict[str, Any]:
        result = {"call_id": self.call_id, "output": self.text}
        return {"id": self.id or new_id("fco"), "type": self.type, "status": "completed", **result}


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """What the model thought earlier. Without its text, only a summary of it."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Harmless = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())

    def stored(self) -> dict[str, Any]:
        return {
            "id": self.id or new_id("rs"),
            "type": self.type,
            "summary": [part.model_dump() for part in self.summary or ()],
            "content": [part.model_dump() for part in self.content or ()],
        }


class ReferenceItem(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: str


def _kind_of_item(value: object) -> str | None:
    """An item without a type is a message."""
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind or 'message'}>" if isinstance(kind, str | None) else None


_kind_of_item.__name__ = "type"

Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[ResultItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_kind_of_item),
]
InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[ResultItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ReferenceItem, Tag("<item_reference>")],
    Discriminator(_kind_of_item),
]

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def _as_items(value: object) -> object:
    """Text is short for one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Harmless = None
    defer_loading: Harmless = None
    output_schema: Harmless = None


class NamedChoice(Body):
    type: Literal["function"]
    name: str


class AllowedChoice(Body):
    """Some of the tools, of which the reply may or must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1)


class TextFormat(Body):
    """The form that replies are to have. A schema is always kept to the letter, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        for name, value in (("name", self.name), ("schema", self.schema_)):
            where = f"text.format.{name}"
            if self.type == "json_schema" and value is None:
                raise wrong(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
            if self.type != "json_schema" and value is not None:
                raise wrong(
                    f"The '{where}' parameter is only allowed when 'text.format.type' is 'json_schema'.",
                    param=where,
                    code="invalid_parameter_combination",
                )
        return self


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Annotated[None, unsupported("medium")] = None


class Reasoning(Body):
    """How hard to think. Reasoning is shown as it is, so nobody has to ask for a summary."""

    effort: Effort | None = None
    summary: Harmless = None
    generate_summary: Harmless = None
    context: Harmless = None


class ResponseStreamOptions(Body):
    include_obfuscation: Harmless = None


def _metadata(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if len(value) > 16:
        raise wrong(
            f"Invalid 'metadata': {len(value)} pairs; at most 16 are possible.", code="object_above_max_properties"
        )
    for key, text in value.items():
        if len(key) > 64 or (isinstance(text, str) and len(text) > 512):
            raise wrong("Invalid 'metadata': keys may have 64 characters, values 512.", code="string_above_max_length")
    return value


def _kind_of_choice(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "auto")
    return f"<{kind}>" if isinstance(kind, str) else None


_kind_of_choice.__name__ = "type"


class InputTokensRequest(Body):
    """The body of POST /v1/responses/input_tokens: a conversation, and what it may call."""

    model: str
    input: (
        Annotated[list[InputItem], BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem])] | None
    ) = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["auto", "none", "required"], Tag("<auto>")]
            | Annotated[NamedChoice, Tag("<function>")]
            | Annotated[AllowedChoice, Tag("<allowed_tools>")],
            Discriminator(_kind_of_choice),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None

    conversation: Annotated[None, unsupported()] = None

    @model_validator(mode="after")
    def _something_to_answer(self) -> Self:
        if not self.input and self.previous_response_id is None:
            raise wrong("Missing required parameter: 'input'.", param="input", code="missing_required_parameter")
        return self


class ResponsesRequest(InputTokensRequest):
    """The body of POST /v1/responses."""

    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    metadata: Annotated[dict[str, str], BeforeValidator(_metadata, json_schema_input_type=dict[str, str])] | None = None
    user: str | None = None

    client_metadata: Harmless = None
    max_tool_calls: Harmless = None  # counts calls of tools that the server runs
    prompt_cache_key: Harmless = None
    prompt_cache_options: Harmless = None
    prompt_cache_retention: Harmless = None
    safety_identifier: Harmless = None
    service_tier: Harmless = None

    background: Annotated[None, unsupported(False)] = None
    context_management: Annotated[None, unsupported([])] = None
    include: Annotated[None, unsupported([], ["reasoning.encrypted_content"])] = None  # reasoning is there in plain
    moderation: Annotated[None, unsupported()] = None
    prompt: Annotated[None, unsupported()] = None
    top_logprobs: Annotated[None, unsupported(0)] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise wrong(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
                param="stream_options",
                code="invalid_parameter_combination",
            )
        return self


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
