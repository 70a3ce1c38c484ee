"""Replies that a model is made to give, one after the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from chat_support import ids_of, tokenizer

from openk3.agents.tools.calculator import evaluate


def call_parts(name: str, **arguments: Any) -> tuple[str, ...]:
    """The parts of a call, as `chat_support.ids_of` takes them."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return "<tool_call>", f"\n{body}\n", "</tool_call>"


def has_model_reply(monkeypatch: pytest.MonkeyPatch, *replies: Sequence[str]) -> list[str]:
    """Have the "qwen" model say these replies, each to a prompt of its own; return the prompts, as they come.

    All but the choice of the token is the real thing.
    """
    scripts = [[*ids_of("qwen", *parts), *tokenizer("qwen").eos_token_ids[:1]] for parts in replies]
    seen: dict[tuple[int, ...], int] = {}
    prompts: list[str] = []

    def chosen(logits: Any, params: Any, seed: int, tokens: Sequence[int], prompt_length: int, *_: Any) -> int:
        prompt = tuple(tokens[:prompt_length])
        if prompt not in seen:
            seen[prompt] = len(seen)
            prompts.append(tokenizer("qwen").decode(list(prompt), skip_special_tokens=False))
        return scripts[seen[prompt]][len(tokens) - prompt_length]

    monkeypatch.setattr("openk3.engine.engine.sample_token", chosen)
    return prompts


def calls_parts(*calls: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of several calls in one reply, with what templates have between them."""
    return tuple(part for call in calls for part in ("\n", *call))[1:]


@pytest.fixture
def calculator_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the calculator compute in this process: starting its own each time would be most of a test's time.

    Its process is tested in test_agents_tools and, from outside, in test_agents_mcp.
    """

    def run(function: str, data: bytes, **limits: Any) -> bytes:
        return evaluate(data)

    monkeypatch.setattr("openk3.agents.tools.calculator.run_confined", run)
