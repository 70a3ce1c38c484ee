"""A prefix that was prefilled once and stays in the cache for a while: what `LLM.prefix_cache` returns.

The engine shares pages by content: any request that begins with the same token ids finds them. So a `PrefixCache` holds
no state of the model, only the ids and a pin that keeps their pages from being evicted, and using it can never change
an answer, only how soon it begins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from openk3.chat.messages import Message
from openk3.chat.tokenizer import Tokenizer
from openk3.engine.loop import EngineLoop
from openk3.engine.pins import PinnedPrefix


class PrefixCache:
    """A pinned prefix.

    Attributes:
        id: a name for logs and requests.
        token_ids: the prefix as the model reads it.
        num_tokens: how many that are.
        expires_at: when it expires, in seconds since 1970 (`time.time()`).
    """

    def __init__(
        self,
        loop: EngineLoop,
        pinned: PinnedPrefix,
        messages: list[Message] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        self.id = pinned.id
        self.token_ids = pinned.token_ids
        self.num_tokens = pinned.num_tokens
        self.expires_at = pinned.expires_at
        self._loop = loop
        self._pinned = pinned
        self._messages = messages
        self._tools = tools
        self._released = False

    def release(self) -> None:
        """Let the pages go before the time is up. May be called twice."""
        if not self._released:
            self._released = True
            self._loop.unpin(self._pinned)

    def before_prompt(self, loop: EngineLoop) -> tuple[int, ...]:
        """The ids to put before a prompt that runs on `loop`.

        Raises:
            ValueError: the cache has expired, was released, or belongs to another model.
        """
        self._check(loop)
        return self.token_ids

    def before_chat(
        self, loop: EngineLoop, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """The whole chat and its tools, given those that follow the cached ones.

        Raises:
            ValueError: as `before_prompt`, or the cache was made from plain text.
        """
        self._check(loop)
        if self._messages is None:
            raise ValueError(
                f"cache: {self.id} was made from plain text, which has no place in a chat; "
                'make it with prefix_cache([{"role": "system", "content": ...}])'
            )
        return [*self._messages, *messages], self._tools if tools is None else tools

    def _check(self, loop: EngineLoop) -> None:
        again = "make it again with prefix_cache()"
        if self._released:
            raise ValueError(f"cache: {self.id} was released; {again}")
        if (late := time.time() - self.expires_at) >= 0:
            raise ValueError(f"cache: {self.id} expired {late:.0f} seconds ago; {again}, or give it a longer ttl")
        if loop is not self._loop:
            raise ValueError(f"cache: {self.id} belongs to another loaded model; {again} on this one")


def chat_prefix_ids(
    tokenizer: Tokenizer, messages: list[Message], tools: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    """The token ids that every chat beginning with `messages` begins with.

    That is the messages' own rendering where a longer chat begins with it (ChatML and most others). Some templates fold
    a system message into the first user turn (Gemma) or refuse to end there; for them it is what two different
    continuations share.
    """
    role = "assistant" if messages[-1]["role"] == "user" else "user"
    first, second = (
        tokenizer.encode_chat([*messages, {"role": role, "content": text}], tools, add_generation_prompt=False)
        for text in ("a", "b")
    )
    shared = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]
    try:
        alone = tokenizer.encode_chat(messages, tools, add_generation_prompt=False)
    except ValueError:
        return shared
    return alone if shared[: len(alone)] == alone and 2 * len(alone) > len(shared) else shared
