"""The scheduler without a model: budgets, order, priorities, preemption, windows, and that every request ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.engine.groups import GIVEN_BACK, most_pages, readable
from openk3.engine.pacing import Pacer
from openk3.engine.pages import PagePool
from openk3.engine.request import Request, SamplingParams
from openk3.engine.scheduler import Chunk, Scheduler

PAGE = 4
CONTEXT = 64


def request(name: str, prompt: int, reply: int = 3, priority: int = 0, first_token: int = 0) -> Request:
    return Request(
        request_id=name,
        prompt_ids=tuple(range(first_token, first_token + prompt)),
        params=SamplingParams(),
        priority=priority,
        seed=0,
        max_new_tokens=min(reply, CONTEXT - prompt),
        text=None,  # type: ignore[arg-type]
        arrived_at=0,
    )


@dataclass
class Simulation:
    """Runs steps with a model that always says 7, and checks what must hold in every one of them."""

    num_pages: int = 64
    seats: int = 4
    budget: int = 16
    caching: bool = False
    beside: int = 1000
    windows: tuple[int | None, ...] = (None,)
    log: list[dict[str, int]] = field(default_factory=list)
    first_scheduled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.num_pages, PAGE)
        self.scheduler = Scheduler(self.pool, self.windows, Pacer(self.beside), self.seats, self.budget, self.caching)
        # What a model would have written: by page and slot, for which group, and everything it depends on.
        self.memory: dict[tuple[int, int], tuple[int, list[int]]] = {}

    def add(self, *requests: Request) -> None:
        for r in requests:
            self.scheduler.add(r)

    def step(self) -> list[Chunk]:
        chunks = self.scheduler.schedule(now=float(len(self.log)))
        assert sum(chunk.count for chunk in chunks) <= self.budget
        assert len({chunk.request for chunk in chunks}) == len(chunks) <= self.seats
        for chunk in chunks:
            r = chunk.request
            assert chunk.count > 0
            assert chunk.start == r.num_computed
            assert chunk.samples == (chunk.start + chunk.count == len(r.tokens))
            assert r in self.scheduler.running
            if r.request_id not in self.first_scheduled:
                self.first_scheduled.append(r.request_id)
        self.write_and_read(chunks)
        for chunk in chunks:
            self.scheduler.commit(chunk)
            if chunk.samples:
                chunk.request.tokens.append(7)
                if chunk.request.num_generated == chunk.request.max_new_tokens:
                    self.scheduler.remove(chunk.request)
        self.pool.check_integrity(self.held())
        assert self.scheduler.running == sorted(self.scheduler.running, key=lambda r: r.rank)
        assert self.scheduler.waiting == sorted(self.scheduler.waiting, key=lambda r: r.rank)
        self.log.append({chunk.request.request_id: chunk.count for chunk in chunks})
        return chunks

    def write_and_read(self, chunks: list[Chunk]) -> None:
        """What layers do with the pages of a step: write the new tokens, then read all that each of them sees."""
        cells = [(c, group, table) for c in chunks for group, table in enumerate(c.request.pages)]
        for chunk, group, table in cells:
            for i in range(chunk.start, chunk.start + chunk.count):
                assert table[i // PAGE] != GIVEN_BACK
                self.memory[table[i // PAGE], i % PAGE] = (group, chunk.request.tokens[: i + 1])
        for chunk, group, table in cells:
            first = 0 if self.windows[group] is None else max(0, chunk.start - self.windows[group] + 1)
            for i in range(first, chunk.start + chunk.count):
                assert self.memory[table[i // PAGE], i % PAGE] == (group, chunk.request.tokens[: i + 1])
            for shown in readable(table):
                assert shown != GIVEN_BACK
            if table[0] == GIVEN_BACK:
                assert all((readable(table)[0], slot) in self.memory for slot in range(PAGE))

    def held(self) -> list[list[int]]:
        tables = [table for r in self.scheduler.running for table in r.pages]
        return [[page for page in table if page != GIVEN_BACK] for table in tables]

    def run(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            assert self.step(), "requests wait but nothing is computed"
            assert len(self.log) < 3000


def test_long_prompts_are_cut_into_chunks_and_decodes_come_first() -> None:
    sim = Simulation(budget=16)
    sim.add(request("short", 5, reply=4), request("long", 30, reply=1))
    sim.run()
    assert sim.log == [
        {"short": 5, "long": 11},
        {"short": 1, "long": 15},
        {"short": 1, "long": 4},
        {"short": 1},
    ]


def test_beside_replies_prompts_take_what_the_pacer_allows() -> None:
    sim = Simulation(budget=16, beside=3)
    sim.add(request("first", 5, reply=5))
    sim.step()
    sim.add(request("second", 4, reply=2), request("third", 10, reply=1))
    sim.run()
    assert sim.log == [
        {"first": 5},
        {"first": 1, "second": 3},
        {"first": 1, "second": 1, "third": 3},  # a prompt's last token alone is like a reply's
        {"first": 1, "second": 1, "third": 3},
        {"first": 1, "third": 3},
        {"third": 1},
    ]


def test_an_urgent_prompt_is_computed_before_the_rest_of_a_long_one() -> None:
    sim = Simulation(budget=16)
    sim.add(request("long", 60, reply=1))
    sim.step()
    sim.add(request("urgent", 10, reply=1, priority=1), request("usual", 10, reply=1))
    sim.run()
    assert sim.log[1:4] == [{"urgent": 10, "long": 6}, {"long": 16}, {"long": 16}]
    assert sim.scheduler.num_preemptions == 0


def test_first_come_first_served_without_overtaking() -> None:
    """The big request does not fit beside the first; the small one behind it would, but must wait its turn."""
    sim = Simulation(num_pages=16, budget=64)
    sim.add(request("first", 24, reply=8), request("big", 50, reply=2), request("small", 4, reply=1))
    sim.run()
    assert sim.first_scheduled == ["first", "big", "small"]
    assert sim.scheduler.num_preemptions == 0


def test_higher_priorities_go_first_and_displace_lower_ones() -> None:
    sim = Simulation(num_pages=16, seats=2, budget=64)
    sim.add(request("low", 20, reply=8), request("low too", 20, reply=8))
    sim.step()
    sim.add(request("later", 4, reply=2), request("urgent", 4, reply=2, priority=5))
    sim.step()
    assert sim.log[-1] == {"low": 1, "urgent": 4}
    assert [r.request_id for r in sim.scheduler.waiting] == ["low too", "later"]
    sim.run()
    assert sim.scheduler.num_preemptions == 1


def test_equal_priorities_never_displace_each_other_to_get_in() -> None:
    sim = Simulation(num_pages=16, seats=1, budget=64)
    sim.add(request("a", 20, reply=20), request("b", 20, reply=20))
    sim.run()
    assert sim.scheduler.num_preemptions == 0


def test_the_latest_request_gives_way_and_its_planned_work_is_taken_back() -> None:
    sim = Simulation(num_pages=16, seats=4, budget=64)
    sim.add(request("a", 31, reply=20), request("b", 31, reply=20))
    sim.run()
    assert sim.scheduler.num_preemptions >= 1
    assert sim.first_scheduled == ["a", "b"]
    last_of_a = max(i for i, step in enumerate(sim.log) if "a" in step)
    last_of_b = max(i for i, step in enumerate(sim.log) if "b" in step)
    assert last_of_a < last_of_b


def test_a_preempted_request_finds_its_pages_in_the_cache() -> None:
    sims = [Simulation(num_pages=16, seats=4, budget=64, caching=caching) for caching in (False, True)]
    for sim in sims:
        sim.add(request("a", 31, reply=20), request("b", 31, reply=20, first_token=100))
        sim.run()
        assert sim.scheduler.num_preemptions >= 1
    without, with_cache = (sum(sum(step.values()) for step in sim.log) for sim in sims)
    assert with_cache < without


def test_shared_prefixes_are_computed_once() -> None:
    sim = Simulation(caching=True, budget=64)
    sim.add(request("a", 21, reply=1))
    sim.run()
    sim.add(request("b", 21, reply=1), request("c", 20, reply=1))
    sim.run()
    # 5 full pages of b's 21 tokens are known; all 5 pages of c's 20 are, but its last token must be computed.
    assert sim.log[1] == {"b": 1, "c": 4}
    assert (sim.scheduler.prefix_query_tokens, sim.scheduler.prefix_hit_tokens) == (62, 36)


def test_pages_behind_the_window_are_given_back() -> None:
    sim = Simulation(num_pages=40, budget=8, windows=(None, 6), caching=True)
    sim.add(request("long", 50, reply=10))
    held = []
    while sim.scheduler.running or sim.scheduler.waiting:
        sim.step()
        held.append([len(pages) for pages in sim.held()])
    assert [max(pages) for pages in zip(*held[:-1], strict=True)] == [15, 3]
    assert sim.pool.num_cached == 28, "they stay known until their memory is needed"


def test_a_prefix_is_found_where_every_group_has_what_it_needs() -> None:
    sim = Simulation(num_pages=60, budget=64, windows=(None, 6, 9), caching=True)
    sim.add(request("a", 41, reply=1))
    sim.run()
    sim.add(request("b", 45, reply=1))
    sim.run()
    assert sim.log == [{"a": 41}, {"b": 5}]


def test_removing_a_request_frees_its_pages_wherever_it_is() -> None:
    sim = Simulation(seats=1)
    running, waiting = request("running", 20), request("waiting", 20)
    sim.add(running, waiting)
    sim.step()
    for r in (waiting, running):
        sim.scheduler.remove(r)
    sim.pool.check_integrity([])
    assert sim.pool.num_available == sim.num_pages
    assert sim.scheduler.schedule(0.0) == []


arrivals = st.lists(
    st.tuples(
        st.integers(0, 20),  # step at which it arrives
        st.integers(1, CONTEXT - 1),
        st.integers(1, 20),
        st.integers(0, 2),  # priority
        st.sampled_from([None, None, None, 1, 3]),  # steps after which it is cancelled
        st.integers(0, 2),  # which of three overlapping prompts
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(
    arrivals,
    st.integers(0, 24),
    st.integers(1, 5),
    st.integers(5, 40),
    st.booleans(),
    st.sampled_from([(None,), (None, 5), (3,), (None, None, 9, 1)]),
)
def test_every_request_ends_and_the_books_balance(
    plan: list[tuple[Any, ...]], spare: int, seats: int, budget: int, caching: bool, windows: tuple[int | None, ...]
) -> None:
    sim = Simulation(
        num_pages=most_pages(windows, CONTEXT, PAGE, max(budget, seats)) + spare,
        seats=seats,
        budget=max(budget, seats),
        caching=caching,
        beside=1 + budget // 4,
        windows=windows,
    )
    pending = sorted(enumerate(plan), key=lambda item: item[1][0])
    alive: list[tuple[Request, int | None]] = []
    everyone: list[Request] = []
    step = 0
    while pending or sim.scheduler.running or sim.scheduler.waiting:
        while pending and pending[0][1][0] <= step:
            i, (_, prompt, reply, priority, cancel_after, family) = pending.pop(0)
            r = request(str(i), prompt, reply, priority, first_token=family * 100)
            sim.add(r)
            everyone.append(r)
            alive.append((r, None if cancel_after is None else step + cancel_after))
        for r, deadline in alive:
            if deadline == step and (r in sim.scheduler.running or r in sim.scheduler.waiting):
                sim.scheduler.remove(r)
        if sim.scheduler.running or sim.scheduler.waiting:
            assert sim.step()
        step += 1
        assert step < 3000
    cancelled = {r for r, deadline in alive if deadline is not None}
    assert all(r.num_generated == r.max_new_tokens for r in everyone if r not in cancelled)
    assert sim.pool.num_used == 0
    for priority in range(3):  # those of one priority began in the order in which they came
        ids = [r.request_id for r in everyone if r.priority == priority and r.request_id in sim.first_scheduled]
        assert sorted(ids, key=sim.first_scheduled.index) == ids
