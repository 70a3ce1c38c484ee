"""What a request to the OpenAI-compatible endpoints may say: names, types, ranges, and what is refused.

Fields, defaults and ranges are those of https://platform.openai.com/docs/api-reference, plus ``top_k``, ``min_p`` and
``repetition_penalty`` under the names that vLLM and llama.cpp gave them, and ``priority`` (default 0): requests with a
larger number go first and may displace those with a smaller one, as in SGLang; vLLM's counts the other way.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from openk3.chat.messages import MAX_TOOLS, Message, validate_messages, validate_tools
from openk3.engine.grammar.spec import Grammar
from openk3.serve.bodies import Body, Harmless, unsupported, wrong
from openk3.serve.errors import shown
from openk3.serve.server_tools import checked_tools, unfolded

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_PROMPTS = 2048

# How hard the model is to think before it answers; "none": not at all.
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("Invalid type for 'stop': expected a string or an array of strings.", code="invalid_type")
    if len(stops) > MAX_STOPS:
        raise wrong(
            f"Invalid 'stop': {len(stops)} stop sequences; at most {MAX_STOPS} are possible.",
            code="array_above_max_length",
        )
    if "" in stops:
        raise wrong("Invalid 'stop': a stop sequence is empty, which would stop every reply at once; leave it out.")
    return tuple(stops)


def _logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("Invalid type for 'logit_bias': expected an object from token ids to numbers.", code="invalid_type")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not re.fullmatch(r"[0-9]{1,9}", key):
            raise wrong(f"Invalid key in 'logit_bias': {shown(key)} is not a token id.")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise wrong(
                f"Invalid 'logit_bias.{key}': {shown(bias)} is not a number from -100 to 100.",
                param=f"logit_bias.{key}",
            )
        biases[int(key)] = float(bias)
    return biases


def _messages(value: object) -> list[Message]:
    """The chat, checked by the chat layer. 'developer' is OpenAI's newer name for the system role."""
    prepared: object = value
    if isinstance(value, list):
        prepared = [_message(message, f"messages[{i}]") for i, message in enumerate(value)]
    try:
        return unfolded(validate_messages(prepared))
    except ValueError as error:
        path, _, reason = str(error).partition(": ")
        raise wrong(f"Invalid '{path}': {reason}.", param=path) from None


def _tools(value: object) -> list[dict[str, Any]] | None:
    try:
        return validate_tools(value)
    except ValueError as error:
        path, _, reason = str(error).partition(": ")
        raise wrong(f"Invalid '{path}': {reason}.", param=path) from None


def _chat_tools(value: object) -> list[dict[str, Any]] | None:
    try:
        return checked_tools(value)
    except ValueError as error:
        path, _, reason = str(error).partition(": ")
        raise wrong(f"Invalid '{path}': {reason}.", param=path) from None


def _message(message: object, where: str) -> object:
    if not isinstance(message, dict):
        return message
    for field in ("audio", "function_call"):
        if message.get(field) is not None:
            raise wrong(
                f"Unsupported parameter: '{where}.{field}' is not supported by this server yet; leave it out.",
                param=f"{where}.{field}",
                code="unsupported_parameter",
            )
    return message | {"role": "system"} if message.get("role") == "developer" else message


def _prompt(value: object) -> list[str] | list[list[int]]:
    """One prompt or several, as text or as token ids, to a list of one kind."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list):
        raise wrong(
            "Invalid type for 'prompt': expected a string, an array of strings, an array of token ids, or an array of "
            "arrays of token ids.",
            code="invalid_type",
        )
    if not prompts:
        raise wrong("Invalid 'prompt': empty array; give at least one prompt.", code="empty_array")
    if len(prompts) > MAX_PROMPTS:
        raise wrong(
            f"Invalid 'prompt': {len(prompts)} prompts; at most {MAX_PROMPTS} are possible in one request.",
            code="array_above_max_length",
        )
    first_is_text = isinstance(prompts[0], str)
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) if first_is_text else _is_ids(prompt) or prompt == []:
            if not prompt:
                place = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
                raise wrong(
                    f"Invalid '{place}': the prompt is empty; give at least one token.",
                    param=place,
                    code="empty_prompt",
                )
        else:
            raise wrong(
                f"Invalid type for 'prompt[{i}]': expected all prompts to be strings, or all to be arrays of token ids "
                "(integers from 0).",
                param=f"prompt[{i}]",
                code="invalid_type",
            )
    return prompts


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(type(i) is int and i >= 0 for i in value)


_OBJECTS = {"type": "array", "items": {"type": "object"}}

# Any: pydantic cannot read typing.TypedDict on Python 3.11; the validator returns Messages.
Messages: TypeAlias = Annotated[
    list[Any],
    PlainValidator(_messages),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                    "content": {
                        "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1}, {"type": "null"}],
                        "description": "Text, or a list of parts {type: text, text}.",
                    },
                    "name": {"type": ["string", "null"]},
                    "reasoning_content": {"type": ["string", "null"]},
                    "tool_calls": {"anyOf": [_OBJECTS, {"type": "null"}]},
                    "tool_call_id": {"type": ["string", "null"]},
                    "server_tool_calls": {"anyOf": [_OBJECTS, {"type": "null"}]},
                    "tools": {"anyOf": [_OBJECTS, {"type": "null"}]},
                },
            },
        }
    ),
]
_FUNCTION = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
_SERVER_TOOL = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["builtin_function", "calculator", "datetime", "search_documents", "mcp"]},
        "search_documents": {
            "type": ["object", "null"],
            "properties": {"file_ids": {"type": "array", "minItems": 1, "items": {"type": "string"}}},
        },
        "server_label": {"type": "string"},
        "allowed_tools": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    },
}
Tools: TypeAlias = Annotated[
    list[Any] | None,
    PlainValidator(_tools),
    WithJsonSchema({"type": ["array", "null"], "maxItems": MAX_TOOLS, "items": _FUNCTION}),
]
# Those of a chat: functions of the client, and tools that the server runs.
ChatTools: TypeAlias = Annotated[
    list[Any] | None,
    PlainValidator(_chat_tools),
    WithJsonSchema(
        {"type": ["array", "null"], "maxItems": MAX_TOOLS, "items": {"anyOf": [_FUNCTION, _SERVER_TOOL]}},
    ),
]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Harmless = None


class SamplingBody(Body):
    """What both endpoints have in common. None means "not given": the engine's default holds."""

    model: str
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)  # less would overflow
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[str, ...], PlainValidator(_stop, json_schema_input_type=str | list[str] | None)] = ()
    logit_bias: Annotated[
        dict[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None)
    ] = Field(default_factory=dict)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)

    user: Harmless = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise wrong(
                "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
                param="stream_options",
                code="invalid_parameter_combination",
            )
        return self

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling keywords of the SDK for what was given; without the seed, which differs by choice."""
        given = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "stop": self.stop or None,
            "logit_bias": self.logit_bias or None,
        }
        return {name: value for name, value in given.items() if value is not None}


class JsonSchemaFormat(Body):
    """A named schema. It is always kept to the letter, `strict` or not."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form that replies are to have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        where = "response_format.json_schema"
        if self.type == "json_schema" and self.json_schema is None:
            raise wrong(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
        if self.type != "json_schema" and self.json_schema is not None:
            raise wrong(
                f"The '{where}' parameter is only allowed when 'response_format.type' is 'json_schema'.",
                param=where,
                code="invalid_parameter_combination",
            )
        return self

    def grammar(self) -> Grammar | None:
        """What keeps replies to this form; None for plain text. Without a schema, any JSON object will do.

        Raises:
            ValueError: a schema that is too large, or holds numbers that JSON does not have.
        """
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema else None
        return Grammar.json_object() if schema is None else Grammar.json_schema(schema)


class Thinking(Body):
    """Kimi's switch for reasoning before the answer."""

    type: Literal["enabled", "disabled"]


class ChatRequest(SamplingBody):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: ChatTools | None = None
    tool_choice: Any = None  # checked with the tools, which the messages may hold
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None

    metadata: Harmless = None
    prediction: Harmless = None
    prompt_cache_key: Harmless = None
    prompt_cache_options: Harmless = None
    prompt_cache_retention: Harmless = None
    safety_identifier: Harmless = None
    service_tier: Harmless = None
    store: Harmless = None

    audio: Annotated[None, unsupported()] = None
    function_call: Annotated[None, unsupported("none", "auto")] = None
    functions: Annotated[None, unsupported([])] = None
    modalities: Annotated[None, unsupported(["text"])] = None
    moderation: Annotated[None, unsupported()] = None
    verbosity: Annotated[None, unsupported("medium")] = None
    web_search_options: Annotated[None, unsupported()] = None

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong(
                "The 'top_logprobs' parameter is only allowed when 'logprobs' is true.",
                param="top_logprobs",
                code="invalid_parameter_combination",
            )
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise wrong(
                "'max_tokens' and 'max_completion_tokens' cannot both be given; the second is the newer name.",
                param="max_tokens",
                code="invalid_parameter_combination",
            )
        if self.thinking is not None and self.reasoning_effort is not None:
            asked_off = self.thinking.type == "disabled"
            if asked_off != (self.reasoning_effort == "none"):
                raise wrong(
                    f"'thinking' is {self.thinking.type}, but 'reasoning_effort' is '{self.reasoning_effort}'; give "
                    "one of them.",
                    param="thinking",
                    code="invalid_parameter_combination",
                )
        return self

    @property
    def effort(self) -> Effort | None:
        """How hard to think, whichever of the two parameters said it; None: as the model's template has it."""
        if self.reasoning_effort is None and self.thinking is not None:
            return "none" if self.thinking.type == "disabled" else "medium"
        return self.reasoning_effort

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if self.response_format is not None and (grammar := self.response_format.grammar()) is not None:
            given["grammar"] = grammar
        return given


class CompletionRequest(SamplingBody):
    """The body of POST /v1/completions. As in the original API, a reply ends after 16 tokens unless `max_tokens` is
    given."""

    prompt: Annotated[
        list[str] | list[list[int]],
        PlainValidator(_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)

    best_of: int | None = Field(default=None, ge=1)
    suffix: Annotated[None, unsupported("")] = None

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            raise wrong(
                "Unsupported parameter: 'best_of' other than 'n' is not supported by this server yet; leave it out.",
                param="best_of",
                code="unsupported_parameter",
            )
        if len(self.prompt) * self.choices_per_prompt > MAX_PROMPTS:
            raise wrong(
                f"Invalid 'n': {len(self.prompt)} prompts with {self.n} choices each; at most {MAX_PROMPTS} are "
                "possible in one request.",
                param="n",
            )
        if self.echo and self.logprobs is not None:
            raise wrong(
                "'echo' and 'logprobs' cannot be given together: there are no log probabilities of prompt tokens yet.",
                param="logprobs",
                code="invalid_parameter_combination",
            )
        return self

    def sampling(self) -> dict[str, Any]:
        given = {"max_tokens": 16} | super().sampling()
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
        return given
