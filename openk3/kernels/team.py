"""A team of threads that walks through one compiled step together.

Every thread runs the same code. Between two barriers lies a phase, whose work is cut into items; each thread takes the
next items by a ticket, so a thread that the system interrupts holds nobody up for longer than the items it has. A
thread that waits spins for about 0.1 ms and then sleeps: a thread that spins while its comrade has no core keeps the
system from giving it that very core. How often threads slept tells the caller that they disturb each other.

The members of a team other than the caller live in compiled code (`openk3.kernels.step.take_part`), where they need no
interpreter lock, and sleep between steps. Everything they share is one array of int64, each word on its own cache line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from openk3.kernels.code import I64, call
from openk3.kernels.machine import X86

LINE = 16  # int64 per word of the shared array: two cache lines, because processors fetch them in pairs
# Words: threads that reached the barrier, barriers passed, two tickets, jobs begun (-1 ends the members), threads that
# sleep at the barrier, how often one did; then a mutex and a condition.
ARRIVED, PASSED, TICKET, JOB, SLEEPERS, SLEEPS, MUTEX, CONDITION = 0, 1, 2, 4, 5, 6, 7, 8
WORDS = 10

# Spins before a waiting thread sleeps, at a barrier and between steps. One takes 10 to 70 ns.
BARRIER_SPINS = 4000
IDLE_SPINS = 40000

# Options of compiled functions that other ones call; those that Python calls are an `entry`.
SERIAL: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that Python calls, keeping the code on disk.

    On a full disk Numba raises OSError, but by then it has the code: the next call runs it.
    """
    compiled = njit(nogil=True, error_model="numpy", cache=True)(function)

    @wraps(compiled)
    def call_compiled(*args: Any) -> Any:
        try:
            return compiled(*args)
        except OSError:
            return compiled(*args)

    return call_compiled


def variant(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile one of several functions that come from one definition, under a name of its own.

    Numba tells such functions apart by numbers that it gives out anew in every process. When compiled code is loaded
    from the disk beside code compiled now, one of them could be called in place of another.
    """

    def compile_named(function: Callable[..., Any]) -> Any:
        function.__qualname__ = f"{function.__name__}_{name}"
        return njit(**SERIAL)(function)

    return compile_named


_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.int64))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.int64))
_wait = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))
_broadcast = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.int64))
_init_mutex = types.ExternalFunction("pthread_mutex_init", types.int32(types.int64, types.int64))
_init_condition = types.ExternalFunction("pthread_cond_init", types.int32(types.int64, types.int64))


def _at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def _load(typingctx: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        # Whoever passes a barrier says so, then looks for sleepers: in that order on every processor.
        return builder.load_atomic(_at(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _store(typingctx: Any, address: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _at(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _add(typingctx: Any, address: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    """The value before the addition."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _at(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _pause(typingctx: Any) -> tuple[Any, Callable[..., Any]]:
    """Tell the core that this is a waiting loop."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if X86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        else:  # not a hint, but keeps the loop from being optimised away
            builder.fence("acquire")
        return context.get_dummy_value()

    return types.void(), codegen


@njit(**SERIAL)
def _word(team, word):
    return team.ctypes.data + 8 * LINE * word


@njit(**SERIAL)
def take(team, threads, count):
    """The first of the next `count` items of this phase."""
    if threads == 1:
        first = team[LINE * TICKET]
        team[LINE * TICKET] += count
        return first
    return _add(_word(team, TICKET + (team[LINE * PASSED] & 1)), count)


@njit(**SERIAL)
def _sleep_until_passed(team, passed):
    """Either we see that the barrier was passed, or the thread that passes it sees that we sleep."""
    _add(_word(team, SLEEPERS), 1)
    _add(_word(team, SLEEPS), 1)
    _lock(_word(team, MUTEX))
    while _load(_word(team, PASSED)) == passed:
        _wait(_word(team, CONDITION), _word(team, MUTEX))
    _unlock(_word(team, MUTEX))
    _add(_word(team, SLEEPERS), -1)


@njit(**SERIAL)
def meet(team, threads):
    """Wait until all threads are here; what they wrote before is then seen by all. A new phase begins."""
    if threads == 1:
        team[LINE * TICKET] = 0
        return
    passed = _load(_word(team, PASSED))
    if _add(_word(team, ARRIVED), 1) == threads - 1:
        _store(_word(team, ARRIVED), 0)
        _store(_word(team, TICKET + (passed & 1)), 0)
        _add(_word(team, PASSED), 1)
        if _load(_word(team, SLEEPERS)) > 0:
            _lock(_word(team, MUTEX))
            _broadcast(_word(team, CONDITION))
            _unlock(_word(team, MUTEX))
        return
    spins = 0
    while _load(_word(team, PASSED)) == passed:
        if spins < BARRIER_SPINS:
            _pause()
            spins += 1
        else:
            _sleep_until_passed(team, passed)


@entry
def set_up(team):
    """Make a zeroed array ready."""
    _init_mutex(_word(team, MUTEX), 0)
    _init_condition(_word(team, CONDITION), 0)


@njit(**SERIAL)
def _announce(team, job):
    _lock(_word(team, MUTEX))
    _store(_word(team, JOB), job)
    _broadcast(_word(team, CONDITION))
    _unlock(_word(team, MUTEX))


@njit(**SERIAL)
def call_members(team):
    """Begin the next job."""
    _announce(team, team[LINE * JOB] + 1)


@entry
def dismiss(team):
    """End the members."""
    _announce(team, -1)


@njit(**SERIAL)
def wait_for_job(team, last):
    """Sleep until there is another job than `last`; its number."""
    for _ in range(IDLE_SPINS):
        if _load(_word(team, JOB)) != last:
            return _load(_word(team, JOB))
        _pause()
    _lock(_word(team, MUTEX))
    while _load(_word(team, JOB)) == last:
        _wait(_word(team, CONDITION), _word(team, MUTEX))
    _unlock(_word(team, MUTEX))
    return _load(_word(team, JOB))


def new_team() -> NDArray[np.int64]:
    """The shared array of a new team."""
    team = np.zeros(LINE * (WORDS + 1), np.int64)
    start = -team.ctypes.data // 8 % LINE
    team = team[start : start + LINE * WORDS]
    set_up(team)
    return team
