"""Workers from the outside: start one, ask it, see that it rests while others are measured."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from machine import cores, cpu_time, process_cpu_s
from worker import Request, Run

# Settings that another library made for itself in this process; a worker makes its own.
_NOT_INHERITED = ("MKL_CBWR", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT", "LD_PRELOAD")
_REST_S = 0.3


def plain_environment() -> dict[str, str]:
    """This process's environment without what a library set in it."""
    return {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}


@dataclass(frozen=True)
class Measurement:
    """A run, and who else used the machine during it: shares of all cores, by processes here and by the host."""

    run: Run
    others_share: float
    stolen_share: float


class Worker:
    """A contender's process. It starts on creation and ends with `close` or `with`.

    Args:
        name: what errors call it.
        command: what to run; it speaks the protocol of `worker.py`.
        environment: variables on top of this process's.
        log: where its stderr goes.

    Raises:
        RuntimeError: it ends before it is ready.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**plain_environment(), **environment},
            )
        self._receive()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request) -> Measurement:
        """
        Raises:
            RuntimeError: the process died, or another number of tokens came back than was asked for.
        """
        assert self._process.stdin is not None
        before, own, mine = cpu_time(), process_cpu_s(self.pid), time.process_time()
        self._process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
        self._process.stdin.flush()
        run = Run(**self._receive())
        after = cpu_time()
        here = process_cpu_s(self.pid) - own + time.process_time() - mine
        if [len(tokens) for tokens in run.tokens] != [request.new_tokens] * len(request.prompts):
            counts = [len(tokens) for tokens in run.tokens]
            raise RuntimeError(f"{self.name} gave {counts} tokens, not {request.new_tokens} for each prompt")
        capacity = (after.at - before.at) * cores()
        return Measurement(
            run,
            others_share=max(0.0, after.busy_s - before.busy_s - here) / capacity,
            stolen_share=(after.stolen_s - before.stolen_s) / capacity,
        )

    def rest(self) -> None:
        """Wait until the process uses no CPU, as its threads may spin for a while after the last answer.

        Raises:
            RuntimeError: it goes on for seconds.
        """
        for _ in range(10):
            before = process_cpu_s(self.pid)
            time.sleep(_REST_S)
            if process_cpu_s(self.pid) - before <= 0.1 * _REST_S:
                return
        raise RuntimeError(f"{self.name} keeps a core busy while it waits: others cannot be measured beside it")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
            ending = f"{self.name} ended with exit code {self._process.wait()}; {self._log} says"
            raise RuntimeError("\n".join([ending, *tail]))
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
