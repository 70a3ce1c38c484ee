"""The pacer before machines made of formulas: replies are not stalled, and prompts get on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import numpy as np
import pytest
from test_scheduler import PAGE, request

from openk3.engine.pacing import SMALLEST_CHUNK, Pacer
from openk3.engine.pages import PagePool
from openk3.engine.scheduler import Chunk, Scheduler

LONG = 10_000

Machine = Callable[[Sequence[Chunk]], float]


def split(chunks: Sequence[Chunk]) -> tuple[int, int, int]:
    """Replies, prompt tokens, and the context of the last prompt."""
    prompts = [c for c in chunks if not (c.samples and c.count == 1)]
    return len(chunks) - len(prompts), sum(c.count for c in prompts), max((c.start for c in prompts), default=0)


def compute_bound(chunks: Sequence[Chunk]) -> float:
    replies, tokens, context = split(chunks)
    return 0.010 + 0.002 * replies + tokens * (0.0015 + 2e-7 * context)


def memory_bound(chunks: Sequence[Chunk]) -> float:
    """The first rows of a step are free, as on an accelerator."""
    replies, tokens, context = split(chunks)
    return 0.020 + 1e-4 * max(0, replies + tokens - 128) + 1e-9 * tokens * context


def experts(chunks: Sequence[Chunk]) -> float:
    """Every row loads experts of its own until all are loaded."""
    replies, tokens, _ = split(chunks)
    return 0.010 + 0.0008 * min(64, 4 * (replies + tokens)) + 0.0002 * tokens


MACHINES = {"compute bound": compute_bound, "memory bound": memory_bound, "experts": experts}


def noisy(machine: Machine) -> Machine:
    rng = np.random.default_rng(0)
    return lambda chunks: machine(chunks) * float(rng.uniform(1.0, 1.2))


class Run:
    """An engine without a model, whose steps take what a machine says."""

    def __init__(self, machine: Machine, budget: int = 512, seats: int = 64) -> None:
        self.machine = machine
        self.pacer = Pacer()
        self.scheduler = Scheduler(PagePool(20_000, PAGE), [None], self.pacer, seats, budget, prefix_caching=False)
        self.names = (f"reply {i}" for i in itertools.count())

    def replies(self, count: int) -> None:
        for name in itertools.islice(self.names, count):
            self.scheduler.add(endless(name, 10))

    def steps(self) -> Iterator[tuple[list[Chunk], float]]:
        while True:
            chunks = self.scheduler.schedule(0.0)
            seconds = self.machine(chunks)
            for chunk in chunks:
                self.scheduler.commit(chunk)
                if chunk.samples:
                    chunk.request.tokens.append(7)
            self.pacer.observe(chunks, seconds)
            yield chunks, seconds


def endless(name: str, prompt: int) -> object:
    r = request(name, prompt)
    r.max_new_tokens = 10**9
    return r


@pytest.mark.parametrize("replies", [1, 8, 40])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_a_long_prompt_does_not_stall_replies(machine: Machine, replies: int) -> None:
    run = Run(noisy(machine))
    run.replies(replies)
    steps = run.steps()
    before = [seconds for _, seconds in itertools.islice(steps, 30)][5:]
    run.scheduler.add(endless("long", 4096))
    during = []
    while not (run.scheduler.running[-1].request_id == "long" and run.scheduler.running[-1].num_generated):
        chunks, seconds = next(steps)
        during.append(seconds)
        assert len(chunks) >= replies, "every reply goes on in every step"
    least = machine([*chunks[:replies], Chunk(chunks[-1].request, 0, SMALLEST_CHUNK, samples=False)])
    assert max(during) <= max(3 * median(before), 1.2 * least)
    alone = sum(machine([Chunk(chunks[-1].request, start, 512, False)]) for start in range(0, 4096, 512))
    assert sum(during) <= max(4 * alone, 1.2 * least * 4096 / SMALLEST_CHUNK), "the prompt gets its share of the time"


def test_alone_a_prompt_has_the_whole_step() -> None:
    run = Run(compute_bound)
    run.scheduler.add(endless("long", 2000))
    assert [chunk.count for (chunk,), _ in itertools.islice(run.steps(), 4)] == [512, 512, 512, 464]


def test_a_long_context_is_met_with_care() -> None:
    """What was learned at short contexts does not let the first chunk at a long one take too long."""
    run = Run(compute_bound)
    run.replies(8)
    steps = run.steps()
    run.scheduler.add(endless("short", 300))
    plain = median(seconds for _, seconds in itertools.islice(steps, 60))
    deep = endless("deep", LONG + 500)
    run.scheduler.add(deep)
    next(steps)
    deep.num_computed = LONG  # as if found in the prefix cache
    assert max(seconds for _, seconds in itertools.islice(steps, 60)) <= 2.2 * plain


def test_it_follows_a_machine_that_slows_down_and_recovers() -> None:
    slowness = 1.0
    run = Run(lambda chunks: slowness * compute_bound(chunks))
    run.replies(8)
    steps = run.steps()
    list(itertools.islice(steps, 30))
    for slowness in (1.0, 3.0, 1.0):
        run.scheduler.add(endless(f"long {slowness}", 20_000))
        settled = [split(chunks)[1] for chunks, _ in itertools.islice(steps, 400)][250:]
        expected = 0.026 / (0.0015 + 2e-7 * 5000)
        assert expected / 2 <= median(settled) <= expected * 1.5
        run.scheduler.remove(run.scheduler.running[-1])


def test_replies_that_come_and_go_leave_prompts_their_share() -> None:
    """Only a number of replies unlike those seen lately costs a step without prompts."""
    run = Run(compute_bound, seats=16)
    rng = np.random.default_rng(1)
    steps = run.steps()
    without_prompt = 0
    for i in range(600):
        while len(run.scheduler.waiting) < 3:
            run.scheduler.add(endless(f"{i}", int(rng.integers(10, 200))))
        chunks, _ = next(steps)
        without_prompt += split(chunks)[1] == 0 and len(run.scheduler.running) < 16
        for r in [r for r in run.scheduler.running if r.num_generated > rng.integers(20, 60)]:
            run.scheduler.remove(r)
    assert without_prompt < 60


def test_a_fixed_number_is_kept_whatever_the_times_are() -> None:
    pacer = Pacer(fixed=5)
    assert pacer.limit(replies=3, context=0) == 5
    for seconds in (1.0, 100.0):
        pacer.observe([Chunk(request("a", 9), 8, 1, True, reply=True), Chunk(request("b", 9), 0, 5, False)], seconds)
    assert pacer.limit(replies=3, context=4000) == 5
