"""The engine's thread: many clients at once, cancels at random, faults of every kind, and no client ever hangs."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import Any

import pytest
from engine_support import GREEDY, ByteTokenizer, random_tokens, small_engine, small_model

from openk3.engine import Delta, EngineLoop, Handle, SamplingParams, naive
from openk3.engine.grammar.spec import Grammar

LIMIT_S = 60  # for what should take a moment, so that a hang fails instead of hanging
PROMPT = random_tokens(20)
LONG = SamplingParams(temperature=0, ignore_eos=True)  # goes on to the end of the context


@cache
def expected(seed: int) -> Delta:
    return naive.generate(small_model(), ByteTokenizer(), random_tokens(5 + 7 * seed, seed), GREEDY)


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    with EngineLoop(small_engine(num_pages=256)) as loop:
        yield loop
        loop.close()
        loop.engine.check_integrity()
        assert loop.stats().pages_used == loop.stats().pages_pinned


def until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_reply_as_a_whole_and_in_pieces(loop: EngineLoop) -> None:
    handle = loop.submit(random_tokens(5, 0), GREEDY)
    whole, pieces = handle.result(LIMIT_S), list(handle)
    assert (whole.text, whole.token_ids) == (expected(0).text, expected(0).token_ids)
    assert "".join(delta.text for delta in pieces) == whole.text
    assert list(handle) == pieces
    assert handle.done
    assert whole.timings == pieces[-1].timings is not None


def test_many_threads_with_cancels_at_random(loop: EngineLoop) -> None:
    def client(number: int) -> None:
        rng = random.Random(number)
        for _ in range(4):
            seed = rng.randrange(6)
            handle = loop.submit(random_tokens(5 + 7 * seed, seed), GREEDY, priority=rng.randrange(3))
            leave_after = rng.choice([None, None, 0, 2, 7])
            text = ""
            for count, delta in enumerate(handle):
                if count == leave_after:
                    handle.cancel()
                    handle.cancel()
                text += delta.text
            if leave_after is None:
                assert (text, delta.finish_reason) == (expected(seed).text, expected(seed).finish_reason)
            else:
                assert delta.finish_reason in ("cancelled", expected(seed).finish_reason)
                assert expected(seed).text.startswith(text.rstrip("\ufffd"))

    for seed in range(6):
        expected(seed)
    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(client, i) for i in range(16)]:
            future.result(LIMIT_S)
    stats = loop.stats()
    assert (stats.running, stats.waiting, stats.requests) == (0, 0, 64)
    assert sum(stats.finished.values()) == 64


async def test_many_tasks_on_an_event_loop(loop: EngineLoop) -> None:
    async def client(number: int) -> None:
        seed = number % 6
        handle = loop.submit(random_tokens(5 + 7 * seed, seed), GREEDY)
        if number % 3 == 0:
            assert (await handle.aresult()).text == expected(seed).text
        elif number % 3 == 1:
            assert "".join([delta.text async for delta in handle]) == expected(seed).text
        else:
            async for _ in handle:
                handle.cancel()
            assert handle.done

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(client(i) for i in range(40)))


def interrupted(call: Callable[[], object], line: int) -> bool:
    """Call, and raise KeyboardInterrupt at the given one of the lines that run in it; False if it has fewer."""

    def trace(frame: FrameType, event: str, value: object) -> Any:
        nonlocal line
        line -= event == "line"
        if line == 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_while_waiting_is_a_keyboard_interrupt_wherever_it_strikes() -> None:
    for line in itertools.count(1):
        handle = Handle("r", lambda: None)
        pusher = threading.Timer(0.02, handle.push, [Delta("r", finish_reason="stop")])
        pusher.start()
        struck = interrupted(handle.result, line)
        pusher.join()
        assert handle.result(LIMIT_S).finish_reason == "stop"
        if not struck:
            break
    assert line > 10


def test_a_pin_of_a_thousand_years_leaves_the_engine_running(loop: EngineLoop) -> None:
    pinned = loop.pin(PROMPT, 3e10)
    until(lambda: loop.stats().pinned_prefixes == 1)
    time.sleep(0.05)  # the thread has gone to sleep until the pin expires
    assert loop.submit(PROMPT, GREEDY).result(LIMIT_S).finish_reason == "length"
    loop.unpin(pinned)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a platform without fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_is_told_instead_of_waiting_forever(loop: EngineLoop) -> None:
    child = os.fork()
    if child == 0:
        try:
            loop.submit(PROMPT, GREEDY)
        except RuntimeError as error:
            os._exit(0 if "load the model in this one" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert loop.submit(PROMPT, GREEDY).result(LIMIT_S).finish_reason == "length"


async def test_a_task_that_is_cancelled_leaves_the_handle_usable(loop: EngineLoop) -> None:
    handle = loop.submit(PROMPT, LONG)
    task = asyncio.create_task(handle.aresult())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    handle.cancel()
    async with asyncio.timeout(LIMIT_S):
        assert (await handle.aresult()).finish_reason == "cancelled"


def test_an_event_loop_that_closes_while_waiting_harms_nobody(loop: EngineLoop) -> None:
    handle = loop.submit(PROMPT, GREEDY)

    async def leave() -> None:
        waiting = asyncio.ensure_future(handle.aresult())
        await asyncio.sleep(0)
        del waiting

    asyncio.run(leave())
    assert handle.result(LIMIT_S).finish_reason == "length"
    assert loop.submit(PROMPT, GREEDY).result(LIMIT_S).finish_reason == "length"


def test_cancelling_frees_the_pages(loop: EngineLoop) -> None:
    handles = [loop.submit(random_tokens(20, i), LONG) for i in range(12)]
    for handle in handles[:8]:
        next(iter(handle))
    assert loop.stats().running == 8
    for handle in handles:
        handle.cancel()
    assert {handle.result(LIMIT_S).finish_reason for handle in handles} == {"cancelled"}
    until(lambda: loop.stats().pages_used == 0)


def test_waiting_has_a_limit(loop: EngineLoop) -> None:
    handle = loop.submit(PROMPT, LONG)
    with pytest.raises(TimeoutError, match=f"request {handle.request_id} did not end within 0.01 s"):
        handle.result(0.01)
    handle.cancel()
    handle.result(LIMIT_S)
    handle.cancel()


def test_bad_requests_are_refused_in_the_callers_thread(loop: EngineLoop) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        loop.submit([], GREEDY)
    running = loop.submit(PROMPT, LONG, request_id="one")
    with pytest.raises(ValueError, match="request_id 'one' is in use by another request"):
        loop.submit(PROMPT, GREEDY, request_id="one")
    running.cancel()
    running.result(LIMIT_S)
    assert loop.submit(PROMPT, GREEDY, request_id="one").result(LIMIT_S).finish_reason == "length"


# Faults


def test_a_failing_model_ends_requests_and_not_the_engine(loop: EngineLoop) -> None:
    run, broken = loop.engine._runner.run, threading.Event()

    def flaky(chunks: Any) -> Any:
        if broken.is_set():
            raise MemoryError("no room")
        return run(chunks)

    loop.engine._runner.run = flaky  # type: ignore[method-assign]
    handle = loop.submit(PROMPT, LONG)
    next(iter(handle))
    broken.set()
    end = handle.result(LIMIT_S)
    assert (end.finish_reason, end.error) == ("error", "MemoryError: no room")
    broken.clear()
    assert loop.submit(random_tokens(5, 0), GREEDY).result(LIMIT_S).text == expected(0).text


def test_a_fault_in_the_engine_ends_all_requests_and_starts_over(loop: EngineLoop) -> None:
    handles = [loop.submit(random_tokens(20, i), LONG) for i in range(10)]
    next(iter(handles[0]))
    loop.engine._scheduler.schedule = None  # type: ignore[method-assign,assignment]
    for handle in handles:
        end = handle.result(LIMIT_S)
        assert (end.finish_reason, end.error) == ("error", "TypeError: 'NoneType' object is not callable")
    assert loop.submit(random_tokens(5, 0), GREEDY).result(LIMIT_S).text == expected(0).text


@pytest.mark.parametrize("place", ["_scheduler.remove", "_delta", "cancel"])
def test_no_request_is_lost_wherever_the_fault_is(loop: EngineLoop, place: str) -> None:
    handles = [loop.submit(random_tokens(20, i), LONG if i else GREEDY) for i in range(4)]
    next(iter(handles[0]))
    *path, name = place.split(".")
    part = loop.engine if not path else getattr(loop.engine, path[0])
    setattr(part, name, lambda *_: 1 / 0)
    handles[1].cancel()
    handles[1].result(LIMIT_S)
    until(lambda: loop.engine.stats().finished.get("error"))
    vars(loop.engine).pop(name, None)
    for handle in handles:
        handle.cancel()
        assert handle.result(LIMIT_S).finish_reason in ("error", "cancelled", "length")
    assert loop.submit(random_tokens(5, 0), GREEDY).result(LIMIT_S).text == expected(0).text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_nobody_waits_for_it() -> None:
    loop = EngineLoop(small_engine())

    def die(*_: Any) -> None:
        raise SystemExit("killed")

    handles = [loop.submit(random_tokens(20, i), LONG) for i in range(10)]
    next(iter(handles[0]))
    loop.engine.step = die  # type: ignore[method-assign]
    for handle in handles:
        end = handle.result(LIMIT_S)
        assert (end.finish_reason, end.error) == ("error", "the engine stopped: SystemExit: killed")
    assert loop.closed
    with pytest.raises(RuntimeError, match="the engine is closed"):
        loop.submit(PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        loop.pin(PROMPT, 5)
    loop.close()


# Closing


def test_closing_ends_everything() -> None:
    loop = EngineLoop(small_engine(max_num_seqs=2))
    handles = [loop.submit(random_tokens(20, i), LONG) for i in range(6)]
    next(iter(handles[0]))
    waiting = threading.Thread(target=lambda: list(handles[5]))
    waiting.start()
    loop.close()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    assert {handle.result(LIMIT_S).finish_reason for handle in handles} == {"cancelled"}
    assert loop.stats().pages_used == 0
    loop.engine.check_integrity()
    loop.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        loop.submit(PROMPT, GREEDY)
    handles[0].cancel()


def test_submitting_while_closing_never_hangs() -> None:
    for attempt in range(10):
        loop = EngineLoop(small_engine())
        handles: list[Handle] = []

        def submit(loop: EngineLoop = loop, handles: list[Handle] = handles) -> None:
            try:
                while True:
                    handles.append(loop.submit(PROMPT, LONG))
            except RuntimeError:
                return

        threads = [threading.Thread(target=submit) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.002 * attempt)
        loop.close()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        assert all(handle.result(LIMIT_S).finish_reason == "cancelled" for handle in handles)


# Prefixes


def test_pinning(loop: EngineLoop) -> None:
    pinned = loop.pin(PROMPT, ttl_s=60)
    assert loop.stats().pinned_prefixes == 1
    end = loop.submit([*PROMPT, 1], GREEDY).result(LIMIT_S)
    assert (end.cached_tokens, end.prompt_tokens) == (20, 21)
    loop.unpin(pinned)
    loop.unpin(pinned.id)
    until(lambda: loop.stats().pinned_prefixes == 0)
    assert loop.stats().pages_used == 0


def test_pins_expire_while_nothing_happens(loop: EngineLoop) -> None:
    loop.pin(PROMPT, ttl_s=0.05)
    until(lambda: loop.stats().pinned_prefixes == 0)


def test_pins_that_do_not_fit_are_refused() -> None:
    with EngineLoop(small_engine(num_pages=20, max_model_len=80)) as loop:
        with pytest.raises(ValueError, match="unpin another prefix, raise kv_cache_bytes"):
            loop.pin(PROMPT, ttl_s=60)
        with pytest.raises(ValueError, match="ttl_s is 0"):
            loop.pin(PROMPT, ttl_s=0)
        assert loop.submit(random_tokens(5, 0), GREEDY).result(LIMIT_S).text == expected(0).text


def test_a_pin_that_is_interrupted_says_so() -> None:
    loop = EngineLoop(small_engine())
    gate = threading.Event()
    run = loop.engine._runner.run

    def slow(chunks: Any) -> Any:
        gate.wait(LIMIT_S)
        return run(chunks)

    loop.engine._runner.run = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        pinning = pool.submit(loop.pin, random_tokens(100), 60)
        until(lambda: loop.engine.has_requests)
        closing = pool.submit(loop.close)
        until(lambda: loop.closed)
        gate.set()
        with pytest.raises(RuntimeError, match="the prefix was not pinned: the engine was closed"):
            pinning.result(LIMIT_S)
        closing.result(LIMIT_S)


# Replies that are looked at before anybody sees them

EITHER = SamplingParams(temperature=0, seed=1, grammar=Grammar.regex("[a-z]{6}"))


def test_what_is_not_accepted_is_drawn_again_and_never_seen(loop: EngineLoop) -> None:
    shown: list[str] = []

    def third(whole: Delta) -> str:
        shown.append(whole.text)
        return "" if len(shown) == 3 else "not yet"

    handle = loop.submit(PROMPT, EITHER, accept=third, request_id="one")
    (only,) = list(handle)
    assert (only.text, only.finish_reason, only.request_id) == (shown[2], "stop", "one")
    assert shown[0] == loop.submit(PROMPT, EITHER).result(LIMIT_S).text  # greedy at first
    assert len(set(shown)) == 3
    again = list(shown)
    shown.clear()
    assert loop.submit(PROMPT, EITHER, accept=third).result(LIMIT_S).text == again[2]
    assert shown == again  # the same seed, the same tries


def test_tries_have_an_end(loop: EngineLoop) -> None:
    tries: list[Delta] = []
    whole = loop.submit(PROMPT, EITHER, accept=lambda reply: tries.append(reply) or "too short").result(LIMIT_S)
    assert len(tries) == 4
    assert (whole.finish_reason, whole.text, whole.token_ids) == ("error", "", ())
    assert whole.error == "no reply was valid of 4 that were tried; of the last one, too short"
    assert loop.submit(PROMPT, GREEDY).result(LIMIT_S).finish_reason == "length"


def test_what_does_not_end_by_itself_is_not_judged(loop: EngineLoop) -> None:
    refused: list[Delta] = []
    cut = loop.submit(PROMPT, replace(EITHER, max_tokens=3), accept=lambda reply: refused.append(reply) or "no")
    assert (cut.result(LIMIT_S).finish_reason, len(cut.result(LIMIT_S).token_ids)) == ("length", 3)
    endless = loop.submit(PROMPT, LONG, accept=lambda reply: refused.append(reply) or "no")
    until(lambda: loop.stats().running)
    endless.cancel()
    assert endless.result(LIMIT_S).finish_reason == "cancelled"
    assert not refused


def test_a_judge_that_fails_ends_its_own_request(loop: EngineLoop) -> None:
    failing = loop.submit(PROMPT, EITHER, accept=lambda reply: [][1])
    assert failing.result(LIMIT_S).error == "IndexError: list index out of range"
    assert loop.submit(PROMPT, EITHER).result(LIMIT_S).finish_reason == "stop"


def test_cancelling_between_two_tries(loop: EngineLoop) -> None:
    handles: list[Handle] = []
    ready = threading.Event()

    def refuse(_: Delta) -> str:
        ready.wait(LIMIT_S)
        handles[0].cancel()
        return "again"

    handles.append(loop.submit(PROMPT, EITHER, accept=refuse))
    ready.set()
    assert handles[0].result(LIMIT_S).finish_reason in ("cancelled", "error")
    until(lambda: not loop.stats().running and not loop.stats().waiting)
