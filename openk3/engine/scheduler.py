"""Decides what each step computes: continuous batching under a budget of tokens.

Requests that are generating come first (one token each), then prompts that are partly computed, then waiting requests
in order of priority and arrival. A prompt longer than what is left of the budget is computed in chunks over several
steps. A request gets the pages of all its known tokens when it is admitted and one more page at a time while it
generates. When pages run out, the running request that ranks last gives all of its pages back and waits again; it
will recompute them, or find them in the prefix cache. Waiting requests may displace running ones of a strictly lower
priority, and nobody overtakes a waiting request of its own or a higher priority.

There is no deadlock: every request fits into the pages that pins leave (the engine checks that), and the request that
ranks first can take the pages of all others.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from openk3.engine.pages import PagePool, extend_page_hashes, pages_for
from openk3.engine.request import Request

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a step: compute `count` tokens of `request` from position `start` on.

    `samples` says that these reach the request's last token, so that the next one follows from their logits.
    """

    request: Request
    start: int
    count: int
    samples: bool


class Scheduler:
    """Owns the waiting and running requests and their block tables.

    A request is in exactly one of `waiting` and `running` from `add` to `remove`; only running requests hold pages.
    """

    def __init__(self, pool: PagePool, max_num_seqs: int, max_num_batched_tokens: int, prefix_caching: bool) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._pool = pool
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
        step = _Step(self._max_num_batched_tokens)
        generating = [r for r in self.running if r.num_computed == len(r.tokens) - 1]
        prefilling = [r for r in self.running if r.num_computed < len(r.tokens) - 1]
        for request in generating:
            if request not in step.preempted and self._grow(request, step):
                step.compute(request)
        for request in prefilling:
            if request not in step.preempted and step.budget > 0:
                step.compute(request)
        while self.waiting and step.budget > 0 and self.waiting[0] not in step.preempted:
            if not self._admit(self.waiting[0], step, now):
                break
        return list(step.chunks.values())

    def commit(self, chunk: Chunk) -> None:
        """Note that a chunk was computed, and make the pages it filled known to later requests."""
        request, size = chunk.request, self._pool.page_size
        first = request.num_computed // size
        request.num_computed += chunk.count
        if self._prefix_caching:
            full = request.num_computed // size
            extend_page_hashes(request.page_hashes, request.tokens, size, full)
            for page, page_hash in zip(request.pages[first:full], request.page_hashes[first:full], strict=True):
                self._pool.register(page, page_hash)

    def _grow(self, request: Request, step: _Step) -> bool:
        """Get the page for a generating request's next token, from whoever ranks last; False if that is itself."""
        if len(request.pages) * self._pool.page_size >= len(request.tokens):
            return True
        while self._pool.num_available == 0:
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        request.pages += self._pool.allocate(1)
        return True

    def _admit(self, request: Request, step: _Step, now: float) -> bool:
        """Move a request from waiting to running and compute its first chunk, if seats and pages allow."""
        while len(self.running) >= self._max_num_seqs or not self._allocate(request):
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
        step.compute(request)
        return True

    def _allocate(self, request: Request) -> bool:
        """Get pages for all known tokens of a waiting request, known prefixes first; all or nothing."""
        assert not request.pages and request.num_computed == 0
        size, known = self._pool.page_size, len(request.tokens)
        hits: list[int] = []
        if self._prefix_caching:
            # The last token is always computed: the next one follows from its logits, which no page holds.
            extend_page_hashes(request.page_hashes, request.tokens, size, (known - 1) // size)
            hits = self._pool.match(request.page_hashes[: (known - 1) // size])
            self._pool.acquire(hits)
        missing = pages_for(known, size) - len(hits)
        if missing > self._pool.num_available:
            self._pool.release(hits)
            return False
        request.pages = hits + self._pool.allocate(missing)
        request.num_computed = len(hits) * size
        return True

    def _preempt(self, request: Request, step: _Step) -> None:
        """Send a running request back to wait, without its pages and without the work already planned for it."""
        self.num_preemptions += 1
        self.running.remove(request)
        self._release_pages(request)
        insort(self.waiting, request, key=_rank)
        step.cancel(request)

    def _release_pages(self, request: Request) -> None:
        self._pool.release(request.pages)
        request.pages = []
        request.num_computed = 0


class _Step:
    """The step being planned: its chunks, what is left of its budget, and who was preempted for it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: dict[Request, Chunk] = {}
        self.preempted: set[Request] = set()

    def compute(self, request: Request) -> None:
        remaining = len(request.tokens) - request.num_computed
        count = min(remaining, self.budget)
        self.chunks[request] = Chunk(request, request.num_computed, count, samples=count == remaining)
        self.budget -= count

    def cancel(self, request: Request) -> None:
        self.preempted.add(request)
        if request in self.chunks:
            self.budget += self.chunks.pop(request).count
