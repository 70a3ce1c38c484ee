"""One API request in the engine: its choices submitted, followed, counted and, whatever happens, cancelled.

A request is one or more prompts with one or more choices each; every choice is a request of its own to the engine. All
choices of a prompt share its prefix: the first is submitted alone, and the others when it has its first token, for by
then the engine's prefix cache holds the prompt and their prefill costs next to nothing.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openk3.engine.request import SamplingParams
from openk3.serve.caller import caller
from openk3.serve.errors import ApiError
from openk3.serve.keys.ledger import Usage
from openk3.serve.metrics import Metrics
from openk3.serve.openai_types import SamplingBody

if TYPE_CHECKING:
    from openk3.chat.turn import Turn
    from openk3.engine.handle import Handle
    from openk3.engine.request import Delta, FinishReason, TokenLogprob
    from openk3.llm import LLM


# Of requests that nobody waits for: under every priority that a client can ask for.
_BACKGROUND_PRIORITY = -(2**32)


@dataclass
class Choice:
    """What one choice has come to. `logprobs` is empty unless they were asked for."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    last_token_at: float | None = None


class Generation:
    """The choices of one request, numbered prompt by prompt: choice i belongs to prompt ``i // choices_per_prompt``.

    Use: `start`, then one pass over `deltas`, and `cancel` in a ``finally``. All from the event loop's thread.

    Args:
        llm: the model.
        prompts: token ids of each prompt.
        body: how many choices, how they are sampled, their priority, and the seed of the first choice of each prompt:
            choice i has ``seed + i``, without a seed all are random.
        metrics: where latencies are counted.
        arrived_at: when the request arrived, by `time.perf_counter`.
        turn: what a chat asks of its replies besides the body's sampling parameters.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[list[int]],
        body: SamplingBody,
        metrics: Metrics,
        arrived_at: float,
        turn: Turn | None = None,
    ) -> None:
        self.tokenizer = llm.tokenizer
        self.prompts = prompts
        self.choices = [Choice() for _ in range(len(prompts) * body.choices_per_prompt)]
        self._llm = llm
        self._per_prompt = body.choices_per_prompt
        self._sampling = body.sampling()
        self._seed = body.seed
        who = caller()
        self._priority = _BACKGROUND_PRIORITY if who.in_background else body.priority or 0
        self._costs = who.account
        self._model = body.model
        self._begun = False
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._turn = turn
        self._handles: list[Handle] = []
        self._followers: list[asyncio.Task[None]] = []
        self._arrived: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue()

    def start(self) -> None:
        """Submit the first choice of every prompt; none runs if one is refused.

        Raises:
            ApiError: 400, the engine refuses the parameters; 503, it is shutting down, or too many others wait.
        """
        if self._costs is not None:
            self._costs.enter(len(self.choices), self._llm.loop.engine.config.max_num_seqs)
        try:
            for index in range(0, len(self.choices), self._per_prompt):
                self._submit(index)
        except BaseException:
            self.cancel()
            raise
        if self._costs is not None:
            self._begun = True
            self._costs.begin(sum(map(len, self.prompts)))

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (choice, delta) as they come, until every choice has finished.

        Raises:
            ApiError: 500, the engine failed; 503, it is shutting down.
        """
        unfinished = len(self.choices)
        while unfinished:
            item = await self._arrived.get()
            if isinstance(item, Exception):
                raise item
            index, delta = item
            if delta.finish_reason == "error":
                raise ApiError(500, f"The engine failed: {delta.error or 'unknown error'}", code="engine_error")
            if delta.finish_reason == "cancelled":
                raise _shutting_down()
            self._account(self.choices[index], delta)
            unfinished -= delta.finish_reason is not None
            yield item

    async def finish(self) -> list[Choice]:
        """Wait for every choice to finish, and return them."""
        async for _ in self.deltas():
            pass
        return self.choices

    def cancel(self) -> None:
        """Stop whatever still runs; the engine frees it within a step; and settle the account. Idempotent."""
        for follower in self._followers:
            follower.cancel()
        for handle in self._handles:
            handle.cancel()
        if self._costs is not None:
            self._costs.leave()
            if self._begun:
                self._begun = False
                self._costs.end(self._model, self._used())

    def usage(self, reasoning_tokens: int | None = None) -> dict[str, Any]:
        """Return the API's usage object. A prompt counts once, however many choices it has.

        Args:
            reasoning_tokens: how many of a chat's tokens were reasoning, as its parsers count them.
        """
        used = self._used()
        usage: dict[str, Any] = {
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "total_tokens": used.prompt_tokens + used.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        }
        if reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return usage

    def _used(self) -> Usage:
        return Usage(
            requests=1,
            prompt_tokens=sum(map(len, self.prompts)),
            cached_tokens=sum(choice.cached_tokens for choice in self.choices[:: self._per_prompt]),
            completion_tokens=sum(choice.completion_tokens for choice in self.choices),
        )

    def _submit(self, index: int) -> None:
        prompt, number = divmod(index, self._per_prompt)
        seed = None if self._seed is None else self._seed + number
        try:
            params = SamplingParams(**self._sampling, seed=seed)
            if self._turn is not None:
                handle = self._turn.submit(self._llm.loop, params, priority=self._priority)
            else:
                handle = self._llm.loop.submit(self.prompts[prompt], params, priority=self._priority)
        except ValueError as error:  # what only the engine can tell, such as a bias for a token beyond the vocabulary
            field = re.match(r"\w+", str(error))
            param = field.group() if field and field.group() in SamplingBody.model_fields else None
            raise ApiError(400, f"Invalid request: {error}.", param=param, code="invalid_value") from None
        except RuntimeError:
            raise _shutting_down() from None
        self._handles.append(handle)
        self._followers.append(asyncio.create_task(self._follow(index, handle)))

    async def _follow(self, index: int, handle: Handle) -> None:
        try:
            siblings = range(index + 1, index + self._per_prompt) if index % self._per_prompt == 0 else ()
            async for delta in handle:
                for sibling in siblings:
                    self._submit(sibling)
                siblings = ()
                self._arrived.put_nowait((index, delta))
        except Exception as error:
            self._arrived.put_nowait(error)

    def _account(self, choice: Choice, delta: Delta) -> None:
        now = time.perf_counter()
        if delta.token_ids:
            if choice.last_token_at is None:
                self._metrics.time_to_first_token.observe(now - self._arrived_at)
            else:
                for _ in delta.token_ids:
                    self._metrics.time_per_token.observe((now - choice.last_token_at) / len(delta.token_ids))
            choice.last_token_at = now
        choice.text += delta.text
        choice.logprobs += delta.logprobs or ()
        choice.finish_reason = delta.finish_reason
        choice.cached_tokens = delta.cached_tokens
        choice.completion_tokens = delta.completion_tokens


def _shutting_down() -> ApiError:
    return ApiError(503, "The request was cancelled because the server is shutting down.", code="shutting_down")
