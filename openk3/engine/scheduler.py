"""Decides what each step computes: continuous batching under a budget of tokens.

Requests that are generating come first (one token each, or several where a grammar forced some), then prompts, partly
computed or waiting, in order of priority and arrival. A prompt longer than what is left of the budget is computed in
chunks over several steps; beside requests that generate, the budget is what the pacer allows. A request gets the pages
of all its known tokens when it is admitted and one more page at a time while it generates; those of layers with a
window it gets chunk by chunk, and gives them back when they lie behind the window. When pages run out, the running
request that ranks last gives all of its pages back and waits again; it will recompute them, or find them in the prefix
cache. Waiting requests may displace running ones of a strictly lower priority, and nobody overtakes a waiting request
of its own or a higher priority. Priorities are strict: as long as requests of a higher priority keep the engine full,
those of a lower one wait.

There is no deadlock: every request fits into the pages that pins leave (the engine checks that), and the request that
ranks first can take the pages of all others.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter

from openk3.engine.groups import GIVEN_BACK, first_page, match_prefix, page_key
from openk3.engine.pacing import Pacer
from openk3.engine.pages import PagePool, extend_page_hashes, pages_for
from openk3.engine.request import Request

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a step: compute `count` tokens of `request` from position `start` on.

    `samples` says that these reach the request's last token, so that the next one follows from their logits; `reply`,
    that they go on with a reply.
    """

    request: Request
    start: int
    count: int
    samples: bool
    reply: bool = False


class Scheduler:
    """Owns the waiting and running requests and their block tables.

    A request is in exactly one of `waiting` and `running` from `add` to `remove`; only running requests hold pages.

    Args:
        windows: of each group of layers (`openk3.engine.groups`).
    """

    def __init__(
        self,
        pool: PagePool,
        windows: Sequence[int | None],
        pacer: Pacer,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool,
    ) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._pool = pool
        self._windows = windows
        self._pacer = pacer
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefix_caching = prefix_caching
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a request. The engine has checked that it fits into the pages that pins leave."""
        request.order = self._arrivals
        self._arrivals += 1
        insort(self.waiting, request, key=_rank)

    def remove(self, request: Request) -> None:
        """Forget a request, finished or not, and release its pages."""
        if request in self.running:
            self.running.remove(request)
            self._release_pages(request)
        else:
            self.waiting.remove(request)

    def schedule(self, now: float) -> list[Chunk]:
        """Choose the work of one step; empty only when there are no requests.

        Args:
            now: monotonic time, kept as the moment a request was first computed.
        """
        step = _Step(self._max_num_batched_tokens, self._pacer)
        generating = [r for r in self.running if r.is_replying]
        prefilling = [r for r in self.running if not r.is_replying]
        for behind, request in zip(range(len(generating) - 1, -1, -1), generating, strict=True):
            count = step.room_for_reply(request, behind)
            if request not in step.preempted and self._grow(request, request.num_computed + count, step):
                step.generate(request, count)
        admitting = True
        while True:
            prefilling = [r for r in prefilling if r not in step.preempted]
            admitting = admitting and bool(self.waiting) and self.waiting[0] not in step.preempted
            prompt = min(prefilling[:1] + (self.waiting[:1] if admitting else []), key=_rank, default=None)
            if prompt is None or step.room(prompt) == 0:
                return list(step.chunks.values())
            if prefilling and prompt is prefilling[0]:
                prefilling.pop(0)
                count = step.room(prompt)
                if self._grow(prompt, prompt.num_computed + count, step):
                    step.prefill(prompt, count)
            else:
                admitting = self._admit(prompt, step, now)

    def commit(self, chunk: Chunk) -> None:
        """Note that a chunk was computed, make the pages it filled known to later requests, and give back pages."""
        request, size = chunk.request, self._pool.page_size
        before, after = request.num_computed, request.num_computed + chunk.count
        request.num_computed = after
        if before // size == after // size:  # no page was filled, and none fell behind a window
            return
        filled = slice(before // size, after // size)
        if self._prefix_caching:
            extend_page_hashes(request.page_hashes, request.tokens, size, filled.stop)
        for group, (window, table) in enumerate(zip(self._windows, request.pages, strict=True)):
            if self._prefix_caching:
                for page, page_hash in zip(table[filled], request.page_hashes[filled], strict=True):
                    self._pool.register(page, page_key(page_hash, group))
            behind = slice(first_page(window, before, size), first_page(window, after, size))
            self._pool.release(table[behind])
            table[behind] = [GIVEN_BACK] * (behind.stop - behind.start)

    def _grow(self, request: Request, num_tokens: int, step: _Step) -> bool:
        """Get the pages that a running request lacks for so many tokens, from whoever ranks last; False if that is
        itself."""
        pages = pages_for(num_tokens, self._pool.page_size)
        if all(len(table) >= pages for table in request.pages):
            return True
        while sum(max(0, pages - len(table)) for table in request.pages) > self._pool.num_available:
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        for table in request.pages:
            table += self._pool.allocate(max(0, pages - len(table)))
        return True

    def _admit(self, request: Request, step: _Step, now: float) -> bool:
        """Move a request from waiting to running and compute its first chunk, if seats and pages allow."""
        while len(self.running) >= self._max_num_seqs or not self._allocate(request, step):
            if not self.running or self.running[-1].priority >= request.priority:
                assert self.running, "a request that fits alone was not admitted to an idle engine"
                return False
            self._preempt(self.running[-1], step)
        self.waiting.remove(request)
        insort(self.running, request, key=_rank)
        if request.scheduled_at is None:
            request.scheduled_at = now
            request.cached_tokens = request.num_computed
            if self._prefix_caching:
                self.prefix_query_tokens += len(request.prompt_ids)
                self.prefix_hit_tokens += request.num_computed
        step.prefill(request, step.room(request))
        return True

    def _allocate(self, request: Request, step: _Step) -> bool:
        """Get pages for a waiting request, known prefixes first; all or nothing.

        They are those of all its known tokens, and where there is a window, of its first chunk.
        """
        assert not request.pages and request.num_computed == 0
        size, known = self._pool.page_size, len(request.tokens)
        request.pages = [[] for _ in self._windows]
        if self._prefix_caching:
            # The last token is always computed: the next one follows from its logits, which no page holds.
            extend_page_hashes(request.page_hashes, request.tokens, size, (known - 1) // size)
            request.pages = match_prefix(self._pool, self._windows, request.page_hashes[: (known - 1) // size])
            for table in request.pages:
                self._pool.acquire(page for page in table if page != GIVEN_BACK)
            request.num_computed = len(request.pages[0]) * size
        chunk_end = request.num_computed + step.room(request)
        missing = [
            pages_for(known if window is None else chunk_end, size) - len(table)
            for window, table in zip(self._windows, request.pages, strict=True)
        ]
        if sum(missing) > self._pool.num_available:
            self._release_pages(request)
            return False
        for table, count in zip(request.pages, missing, strict=True):
            table += self._pool.allocate(count)
        return True

    def _preempt(self, request: Request, step: _Step) -> None:
        """Send a running request back to wait, without its pages and without the work already planned for it."""
        self.num_preemptions += 1
        self.running.remove(request)
        self._release_pages(request)
        insort(self.waiting, request, key=_rank)
        step.cancel(request)

    def _release_pages(self, request: Request) -> None:
        """Give back all pages, so that of all groups those at the end are forgotten first."""
        in_order = zip_longest(*request.pages, fillvalue=GIVEN_BACK)
        self._pool.release([page for pages in in_order for page in pages if page != GIVEN_BACK])
        request.pages = []
        request.num_computed = 0


class _Step:
    """The step being planned: its chunks, what is left of its budget, and who was preempted for it."""

    def __init__(self, budget: int, pacer: Pacer) -> None:
        self.chunks: dict[Request, Chunk] = {}
        self.preempted: set[Request] = set()
        self._budget = budget
        self._pacer = pacer
        self._replies = 0
        self._prompt_tokens = 0

    def room(self, prompt: Request) -> int:
        """Tokens of this prompt that may still be computed."""
        room = min(self._budget, len(prompt.tokens) - prompt.num_computed)
        if self._replies > 0:
            room = min(room, self._pacer.limit(self._replies, prompt.num_computed) - self._prompt_tokens)
        return max(room, 0)

    def room_for_reply(self, request: Request, behind: int) -> int:
        """New tokens of this reply that may be computed, when `behind` others each need one."""
        return min(self._budget - behind, len(request.tokens) - request.num_computed)

    def generate(self, request: Request, count: int) -> None:
        """Compute new tokens of a reply. All replies come before the first prompt."""
        self._replies += 1
        self._compute(request, count)

    def prefill(self, request: Request, count: int) -> None:
        """Compute the next tokens of a prompt; none is allowed too."""
        if count > 0:
            self._prompt_tokens += count
            self._compute(request, count)

    def _compute(self, request: Request, count: int) -> None:
        start = request.num_computed
        samples = start + count == len(request.tokens)
        self.chunks[request] = Chunk(request, start, count, samples, request.is_replying)
        self._budget -= count

    def cancel(self, request: Request) -> None:
        """Plan nothing more for a request that was preempted, and take back what was planned."""
        self.preempted.add(request)
        if request in self.chunks:
            self._budget += self.chunks.pop(request).count
