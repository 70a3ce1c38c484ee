"""What a request in Anthropic's Messages protocol may say.

Fields and ranges are those of https://docs.anthropic.com/en/api/messages; the rule for them is that of
`openk3.serve.bodies`: honoured, harmless, or refused by name. Marks for the prompt cache are harmless, as every
prompt is cached here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, Tag, model_validator

from openk3.serve.bodies import Body, Harmless, by, unsupported, wrong

MAX_STOPS = 16


def _as_blocks(content: object) -> object:
    """Text is short for one block of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: Harmless = None
    citations: Annotated[None, unsupported([])] = None


class ThinkingBlock(Body):
    """What the model thought earlier. Signatures are not checked: who sends the chat may write in it what they like."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Reasoning that only Anthropic can read."""

    type: Literal["redacted_thinking"]
    data: Harmless = None


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Harmless = None
    caller: Harmless = None


Texts: TypeAlias = Annotated[list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: Harmless = None


UserBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")], by("type")
]
AssistantBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    by("type"),
]


class UserMessage(Body):
    role: Literal["user"]
    content: Annotated[
        list[UserBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[UserBlock]), Field(min_length=1)
    ]


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: Annotated[
        list[AssistantBlock],
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[AssistantBlock]),
        Field(min_length=1),
    ]


class SystemMessage(Body):
    role: Literal["system"]
    content: Annotated[Texts, Field(min_length=1)]


InputMessage: TypeAlias = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    by("role"),
]


class Tool(Body):
    """A function of the client. Tools that run at Anthropic's have other types and are refused."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Harmless = None
    eager_input_streaming: Harmless = None
    input_examples: Harmless = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_with_its_type(self) -> Self:
        if self.type == "tool" and self.name is None:
            where = "tool_choice.name"
            raise wrong(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
        return self


class ThinkingConfig(Body):
    """Whether the model reasons before it answers. The budget says how hard; it is no limit."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1024)
    display: Annotated[None, unsupported("summarized")] = None

    @model_validator(mode="after")
    def _budget_with_its_type(self) -> Self:
        if self.type == "enabled" and self.budget_tokens is None:
            where = "thinking.budget_tokens"
            raise wrong(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
        return self


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountTokensRequest(Body):
    """The body of POST /v1/messages/count_tokens: a chat, and what it may call."""

    model: str
    messages: list[InputMessage] = Field(min_length=1, max_length=100_000)
    system: Texts | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    cache_control: Harmless = None
    speed: Harmless = None
    user_profile_id: Harmless = None
    context_management: Annotated[None, unsupported({"edits": []})] = None
    mcp_servers: Annotated[None, unsupported([])] = None
    thread: Annotated[None, unsupported()] = None  # a conversation that the server keeps; clients send it whole then


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, max_length=MAX_STOPS)
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)

    diagnostics: Harmless = None
    inference_geo: Harmless = None
    metadata: Harmless = None
    service_tier: Harmless = None
    container: Annotated[None, unsupported()] = None

    @model_validator(mode="after")
    def _budget_within_the_reply(self) -> Self:
        budget = self.thinking and self.thinking.budget_tokens
        if budget and budget >= self.max_tokens:
            where = "thinking.budget_tokens"
            raise wrong(f"Invalid '{where}': {budget} is not less than 'max_tokens' ({self.max_tokens}).", param=where)
        return self
