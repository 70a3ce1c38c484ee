"""OpenK3's own dialect: a chat written with control tokens of its own, so that no text has to be told from a mark.

A conversation is a row of turns, and a turn is a role token, channels and ``<|end|>``::

    <|system|>Be brief.<|tools|>{"name": "weather", ...}<|end|>
    <|user|>How is Paris?<|end|>
    <|assistant|><|think|>I should look.<|response|>Let me see.<|tools|><|call|>weather<|argument|>{"city":
    "Paris"}<|end|> <|tool|>weather<|response|>rain<|end|> <|assistant|><|response|>It
    rains<|citation|>1<|end_citation|>.<|end|>

Channels are think, response and tools; in the system's turn, think holds the effort that is asked for. The layout
tokens mark the structure of documents that the model reads. A tokenizer that has all of these tokens, and no template,
speaks this dialect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openk3.chat.marks import Mark, Marks
from openk3.chat.messages import Message
from openk3.engine.grammar.tools import CallForm

END = "<|end|>"
ROLE_TOKENS = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
CHANNEL_TOKENS = ("<|think|>", "<|response|>", "<|tools|>")
CALL_TOKENS = ("<|call|>", "<|argument|>")
CITATION_TOKENS = ("<|citation|>", "<|end_citation|>")
LAYOUT_TOKENS = tuple(
    f"<|{name}|>" for name in ("heading", "table", "row", "cell", "header", "footer", "footnote", "end_layout")
)
# The reserved tokens, in the order in which a new vocabulary is to have them.
NATIVE_TOKENS = (END, *ROLE_TOKENS.values(), *CHANNEL_TOKENS, *CALL_TOKENS, *CITATION_TOKENS, *LAYOUT_TOKENS)

NATIVE = Marks(
    {
        "<|think|>": Mark.THINK,
        "<|response|>": Mark.RESPONSE,
        "<|tools|>": Mark.SILENCE,
        "<|call|>": Mark.CALL_NAME,
        "<|argument|>": Mark.CALL_ARGUMENTS,
    },
    shown={"<|citation|>": "[", "<|end_citation|>": "]"},
    plain_calls=False,
    calls=CallForm("<|tools|>", prefix="<|call|>", middle="<|argument|>", suffix="", separator=""),
    thoughts_end=False,
)


def write_native(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    effort: str | None = None,
) -> str:
    """The text of a checked chat. `tools` and the `effort` of reasoning go into the first turn if that is the system's,
    else into one before it.
    """
    turns: list[str] = []
    thought = f"<|think|>{effort}" if effort else ""
    if (tools or thought) and messages[0]["role"] != "system":
        turns.append(_turn("system", thought + (_tools(tools) if tools else "")))
        tools, thought = None, ""
    called: dict[str, str] = {}
    for i, message in enumerate(messages):
        role, content = message["role"], str(message.get("content", ""))
        if role == "assistant":
            called |= {str(call.get("id")): call["function"]["name"] for call in message.get("tool_calls", ())}
            turns.append(_turn(role, _assistant(message)))
        elif role == "tool":
            name = called.get(str(message.get("tool_call_id")), str(message.get("name", "")))
            turns.append(_turn(role, f"{name}<|response|>{content}"))
        else:
            added = [*((tools or ()) if i == 0 else ()), *message.get("tools", ())]
            turns.append(_turn(role, content + (thought if i == 0 else "") + (_tools(added) if added else "")))
    thinks = "<|think|>" if effort not in (None, "none") else ""
    return "".join(turns) + (ROLE_TOKENS["assistant"] + thinks if add_generation_prompt else "")


def _turn(role: str, text: str) -> str:
    return f"{ROLE_TOKENS[role]}{text}{END}"


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    return "<|tools|>" + "\n".join(_json(tool["function"]) for tool in tools)


def _assistant(message: Message) -> str:
    reasoning, content = message.get("reasoning_content", ""), str(message.get("content", ""))
    calls = message.get("tool_calls", ())
    written = f"<|think|>{reasoning}" if reasoning else ""
    if content or not calls:
        written += f"<|response|>{content}"
    if calls:
        written += "<|tools|>"
        functions = [call["function"] for call in calls]
        written += "".join(f"<|call|>{f['name']}<|argument|>{_json(f['arguments'])}" for f in functions)
    return written


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
