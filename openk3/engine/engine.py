"""The engine's core: requests in, one step at a time, pieces of replies out. Single-threaded; `loop` adds the thread.

A step asks the scheduler what to compute, has the runner compute it, samples a token for every request whose last known
token was among it, and decides which requests are done. What one request does wrong ends that request; a failing model
run ends the requests that were in it; the others never notice.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from openk3.engine.config import EngineConfig
from openk3.engine.detokenizer import TextStream, TokenizerLike
from openk3.engine.grammar.compiler import GrammarCompiler
from openk3.engine.grammar.matcher import Matcher, compute_masks
from openk3.engine.grammar.spec import Grammar
from openk3.engine.groups import GIVEN_BACK, LayerGroup, layer_groups, most_pages, prefix_keys
from openk3.engine.pacing import Pacer
from openk3.engine.pages import PagePool, extend_page_hashes, page_bytes
from openk3.engine.pins import PinTable
from openk3.engine.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from openk3.engine.runner import chosen_kv_format, make_runner
from openk3.engine.sampler import fresh_seed, log_probabilities, needs_mask, sample_token
from openk3.engine.scheduler import Chunk, Scheduler
from openk3.weights.loaded import LoadedModel

if TYPE_CHECKING:
    from openk3.config import ModelConfig
    from openk3.model import K3ForCausalLM

__all__ = ["Engine", "EngineConfig", "EngineStats"]

logger = logging.getLogger(__name__)

# What a request that only computes a prefix runs with; it ends before it would sample.
_PREFILL_ONLY = SamplingParams(temperature=0, max_tokens=1)

# Tokens that a grammar forces and one step takes beside the one that was chosen: a tile of the kernels in all. Longer
# texts take several steps, so that other replies do not wait for them.
_MOST_FORCED = 15


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment. From `steps` on the numbers only grow, except that `Engine.reset` clears some.

    Attributes:
        running, waiting: requests that hold pages, and those that do not yet or not any more.
        pages_total, pages_free, pages_cached, pages_used: the cache; the last three add up to the first. Where some
            layers have a window, tokens take a page in each group of layers (`openk3.engine.groups`).
        pages_pinned: pages of `pinned_prefixes`, part of `pages_used`.
        steps: model runs.
        requests: requests accepted, prefixes to be pinned included.
        prompt_tokens: tokens of their prompts.
        generated_tokens: tokens of their replies.
        prefix_query_tokens, prefix_hit_tokens: prompt tokens looked up in the prefix cache, and found there.
        prefix_evictions: pages of the prefix cache that were forgotten because their memory was needed.
        preemptions: times a running request had to give its pages back.
        finished: requests by finish reason.
    """

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_used: int
    pages_pinned: int
    pinned_prefixes: int
    steps: int
    requests: int
    prompt_tokens: int
    generated_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_evictions: int
    preemptions: int
    finished: Mapping[str, int]


class Engine:
    """Continuous batching over one model.

    Attributes:
        config: as given.
        max_model_len: longest request, prompt and reply together, in tokens.
        vocab_size: ids that may be asked for and generated.

    Args:
        model: a checkpoint in memory; or a PyTorch model, which runs on its device and in its dtype and is left alone.
        tokenizer: turns generated ids into text.
        num_threads: CPU threads for the arithmetic; None takes one per usable core.

    Raises:
        ValueError: `max_model_len` does not fit the model or the cache, or the cache is too small for any request.
    """

    def __init__(
        self,
        model: LoadedModel | K3ForCausalLM,
        tokenizer: TokenizerLike,
        config: EngineConfig | None = None,
        *,
        num_threads: int | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.vocab_size: int = model.config.vocab_size
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(tokenizer.eos_token_ids)
        self._grammars = GrammarCompiler(tokenizer, self.vocab_size)
        self._mask_thread = ThreadPoolExecutor(1, "openk3-masks")  # it starts with its first work
        groups = layer_groups(model.config, config.max_model_len or model.config.max_position_embeddings)
        self._windows = [group.window for group in groups]
        self._num_pages = _number_of_pages(model, groups, config)
        self.max_model_len = _longest_request(model.config, self._windows, config, self._num_pages)
        self._runner = make_runner(model, groups, self._num_pages, config, num_threads)
        self._pacer = Pacer(None if config.prefill_beside_decode == "auto" else config.prefill_beside_decode)
        self._requests: dict[str, Request] = {}
        self._steps = self._accepted = self._prompt_tokens = self._generated_tokens = 0
        self._finished: Counter[str] = Counter()
        self._start_empty()

    def _start_empty(self) -> None:
        config = self.config
        self._pool = PagePool(self._num_pages, config.page_size)
        self._pins = PinTable(self._pool, _most_pages(self._windows, self.max_model_len, config))
        self._scheduler = Scheduler(
            self._pool,
            self._windows,
            self._pacer,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.enable_prefix_caching,
        )

    def make_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> Request:
        """A request for `add`, checked. Touches no state, so any thread may call it.

        Args:
            priority: requests with a larger number go first and may displace those with a smaller one, for as long as
                there are any.

        Raises:
            ValueError: an empty or too long prompt, token ids outside the vocabulary, or a grammar that cannot be used.
        """
        self._check_prompt(prompt_ids)
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for i in ids:
                if i >= self.vocab_size:
                    raise ValueError(f"{name} names token {i}: the vocabulary ends at {self.vocab_size - 1}")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ValueError(f"priority is {priority!r}: it must be an integer")
        grammar = params.grammar
        room = self.max_model_len - len(prompt_ids)
        return Request(
            request_id=request_id or f"req-{uuid.uuid4().hex}",
            prompt_ids=tuple(prompt_ids),
            params=params,
            priority=priority,
            seed=fresh_seed() if params.seed is None else params.seed,
            max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            text=TextStream(self._tokenizer, params.stop),
            arrived_at=time.monotonic(),
            matcher=None if grammar is None else self._grammars.matcher(grammar, ignore_eos=params.ignore_eos),
        )

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar that a request is going to ask for, which may take a while. For any thread.

        Raises:
            ValueError: it cannot be used; the message says why.
        """
        self._grammars.compile(grammar)

    def keepable(self, grammar: Grammar) -> tuple[Grammar, str]:
        """As `GrammarCompiler.keepable`. For any thread."""
        return self._grammars.keepable(grammar)

    def make_pin_request(self, prompt_ids: Sequence[int], ttl_s: float) -> Request:
        """A request that computes a prefix and pins it for `ttl_s` seconds; `Request.pinned` holds the result.

        Raises:
            ValueError: a bad prompt or time, or prefix caching is off.
        """
        if not self.config.enable_prefix_caching:
            raise ValueError("a prefix cannot be pinned while enable_prefix_caching is off")
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not 0 < ttl_s <= sys.float_info.max:
            raise ValueError(f"ttl_s is {ttl_s!r}: it must be a positive number of seconds")
        request = self.make_request(prompt_ids, _PREFILL_ONLY)
        request.pin_ttl_s = float(ttl_s)
        return request

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if len(prompt_ids) == 0:
            raise ValueError("the prompt is empty: it needs at least one token")
        if len(prompt_ids) > self.max_model_len - 1:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens but the context holds {self.max_model_len}, of which a reply "
                f"needs at least one: shorten the prompt to {self.max_model_len - 1} tokens"
            )
        for i in prompt_ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < self.vocab_size:
                raise ValueError(f"the prompt holds {i!r}: token ids are integers from 0 to {self.vocab_size - 1}")

    def add(self, request: Request) -> None:
        """Take a request in; the steps from now on work on it.

        Raises:
            ValueError: another request with this id is in the engine, or a prefix to be pinned leaves no room for
            others.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by another request")
        if request.pin_ttl_s is not None:
            self._pins.expire(time.monotonic())
            size = self.config.page_size
            extend_page_hashes(request.page_hashes, request.tokens, size, len(request.tokens) // size)
            self._pins.check_room(self._pin_keys(request))
        self._requests[request.request_id] = request
        self._accepted += 1
        self._prompt_tokens += len(request.prompt_ids)
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> Delta | None:
        """End a request now and free its pages; its last delta, or None if there is no such request (any more)."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, "cancelled", text=request.text.finish()[0])

    def unpin(self, pin_id: str) -> bool:
        """Give up a pinned prefix; False if there is no such pin (any more)."""
        return self._pins.unpin(pin_id)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def next_expiry(self) -> float | None:
        """Monotonic time at which the next pinned prefix is given up."""
        return self._pins.next_expiry

    def expire_pins(self) -> None:
        """Give up pinned prefixes whose time has come, as every step does."""
        self._pins.expire(time.monotonic())

    def step(self) -> list[Delta]:
        """Advance every scheduled request; their deltas, in no particular order."""
        now = time.monotonic()
        self._pins.expire(now)
        chunks = self._scheduler.schedule(now)
        if not chunks:
            return []
        self._steps += 1
        masks = self._start_masks(chunks)
        try:
            rows = iter(self._runner.run(chunks))
        except Exception as error:
            logger.exception("a model run failed and ends its %d requests", len(chunks))
            return [self._fail(chunk.request, error) for chunk in chunks]
        finally:
            if masks is not None:
                masks.result()
        deltas = []
        for chunk in chunks:
            logits_V = next(rows) if chunk.samples else None
            try:
                delta = self._advance(chunk, logits_V)
            except Exception as error:
                logger.exception("request %s failed", chunk.request.request_id)
                delta = self._fail(chunk.request, error)
            if delta is not None:
                deltas.append(delta)
        self._pacer.observe(chunks, time.monotonic() - now)
        return deltas

    def _start_masks(self, chunks: Sequence[Chunk]) -> Future[None] | None:
        """Begin to compute what grammars allow next, for the time that the model runs; None where nothing needs it."""
        requests = [chunk.request for chunk in chunks if chunk.samples and chunk.request.matcher is not None]
        matchers = [r.matcher for r in requests if r.matcher is not None and needs_mask(r.params)]
        return self._mask_thread.submit(compute_masks, matchers) if matchers else None

    def _advance(self, chunk: Chunk, logits_V: NDArray[np.float32] | None) -> Delta | None:
        """Note what was computed for one request and, where it samples, generate what comes next."""
        request = chunk.request
        self._scheduler.commit(chunk)
        if logits_V is None:
            return None
        if request.pin_ttl_s is not None:
            request.pinned = self._pins.pin(
                request.prompt_ids, self._pin_keys(request), request.pin_ttl_s, time.monotonic()
            )
            return self._finish(request, "stop")
        params = request.params
        token = sample_token(logits_V, params, request.seed, request.tokens, len(request.prompt_ids), request.matcher)
        logprobs = None if params.logprobs is None else (self._logprob(logits_V, token, params.logprobs),)
        request.last_token_at = time.monotonic()
        request.first_token_at = request.first_token_at or request.last_token_at
        return self._emit(request, token, logprobs)

    def _pin_keys(self, request: Request) -> list[bytes]:
        return prefix_keys(self._windows, request.page_hashes, self.config.page_size)

    def _emit(self, request: Request, token: int, logprobs: tuple[TokenLogprob, ...] | None) -> Delta:
        """The delta of a token that was just chosen and those that a grammar forces after it, up to the reply's end.

        The forced ones go through the model with it, as part of the next step, and without being chosen. Where
        log-probabilities are asked for, they go one by one, as each needs its logits.
        """
        text, tokens = "", [token]
        while True:
            request.tokens.append(tokens[-1])
            piece, reason, stop_match = self._take(request, tokens[-1])
            text += piece
            forced = None if reason is not None or request.matcher is None else request.matcher.forced
            if forced is None or logprobs is not None or len(tokens) > _MOST_FORCED:
                break
            tokens.append(forced)
        request.num_new = len(tokens)
        self._generated_tokens += len(tokens)
        if reason is None:
            return self._delta(request, text, tuple(tokens), logprobs)
        return self._finish(
            request, reason, text=text, token_ids=tuple(tokens), logprobs=logprobs, stop_match=stop_match
        )

    def _take(self, request: Request, token: int) -> tuple[str, FinishReason | None, str | int | None]:
        """The text that a new token adds and, if the reply ends with it, why, and the stop text or token that did."""
        reason: FinishReason | None = None
        stop_match: str | int | None = None
        text = ""
        matcher = request.matcher
        if token in request.params.stop_token_ids:
            reason, stop_match = "stop", token
        elif token in self._eos_ids and not request.params.ignore_eos:
            reason = "stop"
        else:
            if matcher is not None:
                matcher.consume(token)
            text, stop_match = request.text.push(token)
            if stop_match is not None or (matcher is not None and matcher.ended):
                reason = "stop"
            elif request.num_generated == request.max_new_tokens:
                reason = "length"
        if reason is not None and not isinstance(stop_match, str):
            rest, stop_in_rest = request.text.finish()
            text += rest
            if stop_in_rest is not None:
                reason, stop_match = "stop", stop_in_rest
        if matcher is not None and stop_match is not None and not self._is_complete(request, matcher, stop_match):
            reason = "length"
        return text, reason, stop_match

    def _is_complete(self, request: Request, matcher: Matcher, stop_match: str | int) -> bool:
        """Whether a reply that a stop text or token ended is all that its grammar asks for."""
        if isinstance(stop_match, int):
            return matcher.accepting  # it was not consumed
        reply = self._tokenizer.decode(request.tokens[len(request.prompt_ids) :], skip_special_tokens=False)
        text, found, _ = reply.partition(stop_match)
        return bool(found) and matcher.accepts(text)

    def _logprob(self, logits_V: NDArray[np.float32], token: int, count: int) -> TokenLogprob:
        logprob, top = log_probabilities(logits_V, token, count)
        alternatives = tuple(TokenLogprob(i, self._show(i), value) for i, value in top)
        return TokenLogprob(token, self._show(token), logprob, alternatives)

    def _show(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _delta(
        self, request: Request, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None
    ) -> Delta:
        return Delta(
            request_id=request.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.cached_tokens,
            completion_tokens=request.num_generated,
        )

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        stop_match: str | int | None = None,
        error: str | None = None,
    ) -> Delta:
        """Forget a request, release its pages, and make its last delta."""
        self._scheduler.remove(request)
        del self._requests[request.request_id]
        self._finished[reason] += 1
        return Delta(
            request_id=request.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            stop_match=stop_match,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.cached_tokens,
            completion_tokens=request.num_generated,
            error=error,
            timings=request.timings(time.monotonic()),
        )

    def _fail(self, request: Request, error: Exception) -> Delta:
        request.failure = error
        return self._finish(request, "error", error=f"{type(error).__name__}: {error}")

    def reset(self, error: Exception) -> list[Delta]:
        """End every request with `error` and start over with an empty cache, pins included.

        For a fault in the engine itself, after which its books cannot be trusted.
        """
        requests, self._requests = list(self._requests.values()), {}
        self._start_empty()
        for request in requests:  # so that ending them is the ordinary thing
            request.pages, request.num_computed = [], 0
            self._requests[request.request_id] = request
            self._scheduler.add(request)
        return [self._fail(request, error) for request in requests]

    def stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            pages_used=pool.num_used,
            pages_pinned=self._pins.num_pages,
            pinned_prefixes=len(self._pins),
            steps=self._steps,
            requests=self._accepted,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_evictions=pool.num_evictions,
            preemptions=scheduler.num_preemptions,
            finished=dict(self._finished),
        )

    def check_integrity(self) -> None:
        """Prove that every page is accounted for.

        Raises:
            AssertionError: the books do not balance.
        """
        tables = [table for request in self._scheduler.running for table in request.pages]
        held = [[page for page in table if page != GIVEN_BACK] for table in tables]
        self._pool.check_integrity(held + self._pins.held_pages)
        assert all(not r.pages for r in self._scheduler.waiting)
        assert len(self._scheduler.running) + len(self._scheduler.waiting) == len(self._requests)


def _number_of_pages(model: LoadedModel | K3ForCausalLM, groups: Sequence[LayerGroup], config: EngineConfig) -> int:
    """Pages in the pool. Each is one group's, so tokens in all layers take one for each group."""
    if config.num_pages is not None:
        return config.num_pages * len(groups)
    size = page_bytes(model.config, len(groups[0].layers), config.page_size, chosen_kv_format(model, config))
    if config.kv_cache_bytes < size * len(groups):
        raise ValueError(
            f"kv_cache_bytes is {config.kv_cache_bytes}: one page of this model takes {size * len(groups)}"
        )
    # More than every seat at full length could never be used at once.
    windows = [group.window for group in groups]
    most = config.max_num_seqs * _most_pages(windows, model.config.max_position_embeddings, config)
    return min(config.kv_cache_bytes // size, most)


def _most_pages(windows: Sequence[int | None], num_tokens: int, config: EngineConfig) -> int:
    return most_pages(windows, num_tokens, config.page_size, config.max_num_batched_tokens)


def _longest_request(model: ModelConfig, windows: Sequence[int | None], config: EngineConfig, num_pages: int) -> int:
    positions, wanted = model.max_position_embeddings, config.max_model_len
    if wanted is not None and wanted > positions:
        raise ValueError(f"max_model_len is {wanted}: the model has {positions} positions")
    if wanted is not None and _most_pages(windows, wanted, config) > num_pages:
        capacity = _longest_in(num_pages, windows, wanted, config)
        raise ValueError(
            f"max_model_len is {wanted}: the cache holds {capacity} tokens, raise kv_cache_bytes (or num_pages)"
        )
    longest = _longest_in(num_pages * 3 // 4, windows, positions, config) if wanted is None else wanted
    if longest < 2:
        raise ValueError(
            f"the cache has {num_pages} pages: a prompt and a reply need more, raise kv_cache_bytes (or num_pages)"
        )
    return longest


def _longest_in(num_pages: int, windows: Sequence[int | None], positions: int, config: EngineConfig) -> int:
    """Tokens of the longest request that so many pages hold, up to `positions`."""
    return bisect_right(range(1, positions + 1), num_pages, key=lambda tokens: _most_pages(windows, tokens, config))
