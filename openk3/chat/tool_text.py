"""Tools for checkpoints whose template has no place for them: everything about tools is written into ordinary turns.

The tags are those of Qwen's and Hermes' templates, which more models have seen than any others; the words are few, as
contexts of such models are small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openk3.chat.messages import Message

_INSTRUCTIONS = """You may call functions. For each call write its name and arguments as JSON within tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>
The functions:
{tools}"""

# What of it a vocabulary may have as tokens.
TAGS = "<tool_call></tool_call><tool_response></tool_response>"


def write_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The chat without tools, calls and results in its fields, all of them in its text.

    Tools go to the end of the system's turn, calls to that of the assistant's, and results into a turn of the user's,
    one for all that follow each other, as many templates insist that roles alternate.
    """
    turns: list[Message] = []
    was_result = False
    for message in messages:
        role, content = message["role"], str(message.get("content", ""))
        is_result = role == "tool"
        if is_result:
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        content = "\n".join([*([content] if content else []), *map(_call, message.get("tool_calls", ()))])
        if is_result and was_result:
            turns[-1]["content"] = f"{turns[-1]['content']}\n{content}"
        else:
            turns.append({"role": role, "content": content})
        was_result = is_result
    if tools:
        instructions = _INSTRUCTIONS.format(tools="\n".join(map(_json, tools)))
        if turns[0]["role"] == "system":
            turns[0]["content"] = f"{turns[0]['content']}\n\n{instructions}"
        else:
            turns.insert(0, {"role": "system", "content": instructions})
    return turns


def _call(call: Mapping[str, Any]) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"<tool_call>\n{_json(function)}\n</tool_call>"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
