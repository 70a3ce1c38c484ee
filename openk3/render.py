"""`k3 render`: the tokens that a model reads for a request, one by one, control tokens told apart from text."""

from __future__ import annotations

import json
from typing import Any

import typer

from openk3.chat.messages import validate_messages, validate_tools
from openk3.chat.tokenizer import Tokenizer
from openk3.chat.turn import prepare_turn

_REQUEST_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort")


def read_request(text: str, where: str) -> dict[str, Any]:
    """The arguments of `rendered` in a JSON text: a list of messages, or a request body, whose other fields do not bear
    on the prompt.

    Raises:
        ValueError: not JSON, or neither of the two.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if isinstance(value, list):
        return {"messages": value}
    if not isinstance(value, dict) or "messages" not in value:
        raise ValueError(
            f'{where}: expected a list of messages, or an object like {{"messages": [...], "tools": [...]}}'
        )
    given = {name: value[name] for name in _REQUEST_FIELDS if value.get(name) is not None}
    return {"messages": value["messages"], **given}


def rendered(tokenizer: Tokenizer, messages: object, tools: object = None, **choices: Any) -> dict[str, Any]:
    """The prompt of a chat as JSON values: ``tokens`` with id, text and whether it is a control token, and counts.

    Raises:
        ValueError: as `prepare_turn`, `validate_messages` and `validate_tools`.
    """
    turn = prepare_turn(tokenizer, validate_messages(messages), validate_tools(tools), **choices)
    control = set(tokenizer.dialect.control.ids.values())
    tokens = [
        {"id": i, "text": tokenizer.decode([i], skip_special_tokens=False), "control": i in control}
        for i in turn.prompt_ids
    ]
    return {"tokens": tokens, "num_tokens": len(tokens), "num_control": sum(token["control"] for token in tokens)}


def rendered_text(card: dict[str, Any]) -> str:
    """The same as lines for a terminal; control tokens are coloured, and marked with a star for who sees no colours."""
    lines = []
    for place, token in enumerate(card["tokens"]):
        text = json.dumps(token["text"], ensure_ascii=False)
        line = f"{place:>6} {token['id']:>7} {'*' if token['control'] else ' '} {text}"
        lines.append(typer.style(line, fg="cyan", bold=True) if token["control"] else line)
    lines.append(f"{card['num_tokens']} tokens, {card['num_control']} of them control tokens (*)")
    return "\n".join(lines)
