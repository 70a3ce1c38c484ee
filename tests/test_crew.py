"""When a step is computed by one thread instead of all."""

from __future__ import annotations

from openk3.engine.crew import SHORT_STEP_ROWS, Crew


def run(
    crew: Crew, steps: int, now: float, sleeps: int, step_s: float = 0.01, rows: int = 1
) -> tuple[list[int], float]:
    """The threads of each of `steps` steps, of which those with company sleep so often; and the time after them."""
    used = []
    for _ in range(steps):
        used.append(crew.threads(rows, now))
        now += 0.01
        crew.observe(rows, used[-1], sleeps if used[-1] > 1 else 0, now)
    return used, now


def test_undisturbed_threads_stay_together() -> None:
    used, _ = run(Crew(2), 100, 0.0, sleeps=0)
    assert set(used) == {2}


def test_clients_that_read_their_replies_disturb_nobody() -> None:
    used, _ = run(Crew(2), 300, 0.0, sleeps=3)
    assert set(used) == {2}


def test_a_single_hiccup_changes_nothing() -> None:
    crew = Crew(2)
    for _ in range(20):
        used, now = run(crew, 1, 0.0, sleeps=99)
        more, now = run(crew, 9, now, sleeps=0)
        assert set(used + more) == {2}


def test_disturbed_threads_give_way_and_try_again_ever_less_often() -> None:
    used, _ = run(Crew(4), 2000, 0.0, sleeps=60)
    assert set(used) == {1, 4}
    assert used.count(4) < 100
    first = used.index(1)
    assert first <= 4
    assert 4 in used[first : first + 40]


def test_they_come_back_when_the_disturbance_is_over() -> None:
    crew = Crew(2)
    _, now = run(crew, 500, 0.0, sleeps=60)
    used, _ = run(crew, 1000, now, sleeps=0)
    assert used[-1] == 2
    assert used.count(2) > 500


def test_long_steps_always_have_all_threads() -> None:
    crew = Crew(2)
    run(crew, 10, 0.0, sleeps=60)
    assert crew.threads(SHORT_STEP_ROWS + 1, 0.05) == 2
    used, _ = run(Crew(2), 50, 0.0, sleeps=90, rows=SHORT_STEP_ROWS + 1)
    assert set(used) == {2}
