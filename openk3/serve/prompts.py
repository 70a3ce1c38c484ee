"""From the chats and prompts of requests to token ids that the engine will take.

Tokenizing runs in a thread, so that a long prompt does not hold up the streams of others. It is also what costs most in
a hostile request: a text of the largest body would take a minute and gigabytes of memory, only to be refused for its
length. So a text is refused unread when it has more characters than the context's tokens could ever stand for.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from openk3.serve.errors import ApiError

if TYPE_CHECKING:
    from openk3.chat.tokenizer import Tokenizer
    from openk3.chat.turn import Turn
    from openk3.engine.grammar.spec import Grammar
    from openk3.llm import LLM
    from openk3.serve.openai_types import ChatRequest


async def chat_turn(llm: LLM, body: ChatRequest) -> Turn:
    """Return the turn that a request asks for: the tokens up to where the reply begins, and how that is read.

    Raises:
        ApiError: 400, the chat is too long, calls and results or tools and tool choice do not fit each other, or
            the model's template refuses it or is missing, or a response_format cannot be kept.
    """
    return await asyncio.to_thread(_read_chat, llm, body)


async def text_prompts(llm: LLM, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Return the token ids of each prompt, which may be token ids already.

    Raises:
        ApiError: 400, a prompt is empty, too long, or has ids that the model does not know.
    """
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
    return await asyncio.to_thread(lambda: [_read_text(llm, *pair) for pair in zip(prompts, names, strict=True)])


async def text_ids(llm: LLM, text: str, param: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text, which may be empty.

    Raises:
        ApiError: 400, it is far too long for the context.
    """

    def read() -> list[int]:
        _refuse_unread(llm, len(text), param)
        return llm.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    return await asyncio.to_thread(read)


def _read_chat(llm: LLM, body: ChatRequest) -> Turn:
    from openk3.chat.turn import prepare_turn

    _refuse_unread(llm, _characters([*body.messages, *(body.tools or ())]), "messages")
    try:
        turn = prepare_turn(
            llm.tokenizer,
            body.messages,
            body.tools,
            body.tool_choice or "auto",
            body.parallel_tool_calls is not False,
            reasoning_effort=body.effort,
            grammar=_form(body),
        )
        _checked(llm, turn.prompt_ids, "messages")
        turn.check(llm.loop.engine)
    except ValueError as error:
        path, _, reason = str(error).partition(": ")
        if path == "grammar":
            path = "response_format"
            if body.response_format is not None and body.response_format.type == "json_schema":
                path = "response_format.json_schema.schema"
        elif not re.match(r"(messages|tools|tool_choice|reasoning_effort)\b", path):
            path, reason = "messages", str(error)
        raise ApiError(400, f"Invalid '{path}': {reason}.", param=path, code="invalid_value") from None
    return turn


def _form(body: ChatRequest) -> Grammar | None:
    try:
        return None if body.response_format is None else body.response_format.grammar()
    except ValueError as error:
        raise ValueError(f"grammar: {error}") from None


def _read_text(llm: LLM, prompt: str | list[int], param: str) -> list[int]:
    if isinstance(prompt, str):
        _refuse_unread(llm, len(prompt), param)
        prompt = llm.tokenizer.encode(prompt, add_special_tokens=True)
    return _checked(llm, prompt, param)


def _checked(llm: LLM, prompt: list[int], param: str) -> list[int]:
    if not prompt:
        raise ApiError(
            400, f"Invalid '{param}': the prompt is empty; give at least one token.", param=param, code="empty_prompt"
        )
    if len(prompt) >= llm.max_model_len:
        raise _too_long(llm, f"{len(prompt)}", param)
    if max(prompt) >= llm.config.vocab_size:
        raise ApiError(
            400,
            f"Invalid '{param}': {max(prompt)} is not a token id; they go from 0 to {llm.config.vocab_size - 1}.",
            param=param,
            code="invalid_value",
        )
    return prompt


def _refuse_unread(llm: LLM, characters: int, param: str) -> None:
    tokens = characters // longest_token(llm.tokenizer)
    if tokens >= llm.max_model_len:
        raise _too_long(llm, f"at least {tokens}", param)


@lru_cache(maxsize=1)
def longest_token(tokenizer: Tokenizer) -> int:
    """Return the most characters that one token can stand for; at least 16, for normalizers shorten some texts."""
    return max(16, max(map(len, tokenizer.backend.get_vocab(with_added_tokens=True))))


def _characters(value: object) -> int:
    """How much text a JSON value holds, keys not counted."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _too_long(llm: LLM, tokens: str, param: str) -> ApiError:
    return ApiError(
        400,
        f"This model's maximum context length is {llm.max_model_len} tokens, prompt and reply together, but '{param}' "
        f"has {tokens} tokens. Shorten it.",
        param=param,
        code="context_length_exceeded",
    )
