"""From the chats and prompts of requests to token ids that the engine will take.

Tokenizing runs in a thread, so that a long prompt does not hold up the streams of others. It is also what costs most in
a hostile request: a text of the largest body would take a minute and gigabytes of memory, only to be refused for its
length. So a text is refused unread when it has more characters than the context's tokens could ever stand for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from openk3.chat.messages import Message
from openk3.serve.errors import ApiError

if TYPE_CHECKING:
    from openk3.chat.tokenizer import Tokenizer
    from openk3.llm import LLM


async def chat_prompt(llm: LLM, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of a chat, up to where the assistant's reply begins.

    Raises:
        ApiError: 400, the chat is too long, or the model's template refuses it or is missing.
    """
    return await asyncio.to_thread(_read_chat, llm, messages)


async def text_prompts(llm: LLM, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Return the token ids of each prompt, which may be token ids already.

    Raises:
        ApiError: 400, a prompt is empty, too long, or has ids that the model does not know.
    """
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
    return await asyncio.to_thread(lambda: [_read_text(llm, *pair) for pair in zip(prompts, names, strict=True)])


def _read_chat(llm: LLM, messages: Sequence[Message]) -> list[int]:
    _refuse_unread(llm, sum(map(_characters, messages)), "messages")
    try:
        ids = llm.tokenizer.encode_chat(messages)
    except ValueError as error:
        raise ApiError(400, f"Invalid 'messages': {error}.", param="messages", code="invalid_value") from None
    return _checked(llm, ids, "messages")


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


def _characters(message: Message) -> int:
    content = message.get("content", "")
    assert isinstance(content, str), "validate_messages joins the parts"
    return len(content)


def _too_long(llm: LLM, tokens: str, param: str) -> ApiError:
    return ApiError(
        400,
        f"This model's maximum context length is {llm.max_model_len} tokens, prompt and reply together, but '{param}' "
        f"has {tokens} tokens. Shorten it.",
        param=param,
        code="context_length_exceeded",
    )
