"""A function of ours run in a process of its own, with limits on its time and memory.

Parsers of foreign files and algebra systems can be made to run for ever, to take all memory, or to crash the process
they are in. So they run in a child that can be lost: it gets bytes, gives bytes back, has nothing of the environment,
can write nothing into a file, and is killed when its time is over. This guards against accidents and hostile input to
correct code; it is no sandbox for foreign code.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_OK, _REFUSED, _MEMORY = b"+", b"-", b"m"
# More at once would only make each other late; who comes later waits, and its time has not begun.
_SLOTS = threading.BoundedSemaphore(max(4, os.cpu_count() or 1))
_ROOT = str(Path(__file__).resolve().parent.parent)


class ConfinedError(ValueError):
    """The function did not come back: it took too long or too much memory, or its process crashed."""


def run_confined(function: str, data: bytes, *, seconds: float, megabytes: int) -> bytes:
    """Return what `function` makes of `data`, in a new process.

    Args:
        function: ``"openk3.some.module:name"`` of a function from bytes to bytes: a literal of the caller's, no input.
        seconds: its time, by the clock; a process that spins is ended as well if the caller is gone by then.
        megabytes: its address space, interpreter included (some 100).

    Raises:
        ValueError: what the function raised, with its text.
        ConfinedError: it took too long or too much memory, or crashed.
    """
    command = [sys.executable, "-m", "openk3.confined", function, str(int(seconds) + 1), str(megabytes)]
    # Nothing of the environment is its business, keys least of all; MALLOC_ARENA_MAX keeps address space small.
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "TMPDIR") if name in os.environ}
    environment = kept | {"PYTHONPATH": _ROOT, "PYTHONDONTWRITEBYTECODE": "1", "MALLOC_ARENA_MAX": "2"}
    try:
        with _SLOTS:
            done = subprocess.run(
                command, input=data, capture_output=True, timeout=seconds, env=environment, check=False
            )
    except subprocess.TimeoutExpired:
        raise ConfinedError(f"it took longer than {seconds:g} seconds") from None
    status, result = done.stdout[:1], done.stdout[1:]
    if done.returncode == 0 and status == _OK:
        return result
    if done.returncode == 0 and status == _REFUSED:
        raise ValueError(result.decode("utf-8", "replace"))
    if done.returncode == 0 and status == _MEMORY:
        raise ConfinedError(f"it took more than {megabytes} MB of memory")
    raise ConfinedError("its process crashed or was stopped by its limits")


def _limit(seconds: int, megabytes: int) -> None:
    with suppress(ImportError):  # Windows has none of these: there, only the clock holds
        import resource

        size = megabytes << 20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _main() -> None:
    name, seconds, megabytes = sys.argv[1:]
    module, _, attribute = name.partition(":")
    _limit(int(seconds), int(megabytes))
    data = sys.stdin.buffer.read()
    try:
        function: Callable[[bytes], bytes] = getattr(importlib.import_module(module), attribute)
        answer = _OK + function(data)
    except ValueError as error:
        answer = _REFUSED + str(error).encode("utf-8", "replace")
    except (MemoryError, RecursionError):
        answer = _MEMORY
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    os._exit(0)  # without destructors: a parser that broke may crash in them


if __name__ == "__main__":
    _main()
