"""From a Messages request to the chat request that asks for the same, and from the places of the one to the other.

What the chat layer refuses it names by its own paths; `Translated.named_as_sent` gives the client those of its request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openk3.serve.anthropic.types import (
    CountTokensRequest,
    MessagesRequest,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from openk3.serve.errors import ApiError
from openk3.serve.openai_types import ChatRequest
from openk3.serve.validation import checked

# The least budget for reasoning that stands for an effort.
_EFFORTS = ((16_384, "high"), (4_096, "medium"), (0, "low"))

_NAMES = (
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    (r"response_format", "output_config.format"),
    (r"reasoning_effort", "thinking"),
    (r"stop\b", "stop_sequences"),
)


@dataclass(frozen=True)
class Translated:
    """A chat request, and where each of its messages came from."""

    chat: ChatRequest
    places: Sequence[str]

    def named_as_sent(self, error: ApiError) -> ApiError:
        """The error with the path of the client's own field in place of the chat request's."""
        return _named_as_sent(error, self.places)


def translate(body: CountTokensRequest) -> Translated:
    """Say a Messages request in the words of chat completions.

    Raises:
        ApiError: 400, for what only the chat request's own checks find.
    """
    messages: list[dict[str, Any]] = []
    places: list[str] = []

    def add(message: dict[str, Any], place: str) -> None:
        last = messages[-1] if messages else None
        if last is not None and message["role"] == last["role"] and message["role"] in ("user", "assistant"):
            for name, value in message.items():  # turns of the same role are one
                if name != "role":
                    last[name] = last[name] + value if name in last else value
        else:
            messages.append(message)
            places.append(place)

    if body.system:
        add({"role": "system", "content": _parts(body.system)}, "system")
    for i, message in enumerate(body.messages):
        place = f"messages[{i}]"
        if isinstance(message, SystemMessage):
            add({"role": "system", "content": _parts(message.content)}, place)
        elif isinstance(message, UserMessage):
            _add_user(message, place, add)
        else:
            add(_assistant(message.content), place)
    if messages[-1]["role"] == "assistant":
        messages[-1]["partial"] = True
    fields: dict[str, Any] = {"model": body.model, "messages": messages, **_tools(body), **_form(body)}
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
        }
    try:
        return Translated(checked(fields, ChatRequest), places)
    except ApiError as error:
        raise _named_as_sent(error, places) from None


def _add_user(message: UserMessage, place: str, add: Any) -> None:
    """A user's turn: the results of calls, each a message of its own, and what the user says."""
    for k, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            content = "\n".join(text.text for text in block.content or ())
            if block.is_error and not content.lower().startswith("error"):
                content = f"Error: {content}" if content else "Error"
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            add(result, f"{place}.content[{k}]")
        else:
            add({"role": "user", "content": _parts([block])}, f"{place}.content[{k}]")


def _assistant(blocks: Sequence[Any]) -> dict[str, Any]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _parts(blocks: Sequence[TextBlock]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": block.text} for block in blocks]


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "parameters": tool.input_schema,
                    **({} if tool.description is None else {"description": tool.description}),
                    **({} if tool.strict is None else {"strict": tool.strict}),
                },
            }
            for tool in body.tools
        ]
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else "required" if choice.type == "any" else choice.type
        if choice.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _form(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.output_config is not None and (form := body.output_config.format) is not None:
        schema = {"name": "output", "schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    effort = body.output_config and body.output_config.effort
    if body.thinking is not None and body.thinking.type == "disabled":
        fields["reasoning_effort"] = "none"
    elif effort is not None:
        fields["reasoning_effort"] = "xhigh" if effort == "max" else effort
    elif body.thinking is not None and (budget := body.thinking.budget_tokens) is not None:
        fields["reasoning_effort"] = next(name for least, name in _EFFORTS if budget >= least)
    return fields


def _named_as_sent(error: ApiError, places: Sequence[str]) -> ApiError:
    if error.param is None:
        return error
    param = error.param
    if found := re.match(r"messages\[(\d+)\]", param):
        param = places[int(found.group(1))]
    for pattern, replacement in _NAMES:
        param = re.sub(rf"^{pattern}", replacement, param)
    return error.renamed(param)
