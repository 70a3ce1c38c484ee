"""What works batches off, in the background: every line is a request to the server's own endpoint.

Lines go to the engine with the lowest priority, a few at a time, so that whoever waits for an answer goes first. Each
batch is a task, and all of them share the places for lines, so a small batch does not wait for the end of a large one.
One server at a time works for a model on a state folder: it holds a lock that the system lets go when the process dies.

Whatever happens to the process, a batch goes on from what the database says: validating, lines without a result, or
files to be written. Only the answer of a line under way can be lost, and then the line is asked again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from starlette.datastructures import State
from starlette.types import ASGIApp

from openk3.serve.batches.lines import MAX_LINES, Line, read_lines
from openk3.serve.batches.store import Batch, BatchStore, LineResult, Status
from openk3.serve.caller import Caller
from openk3.serve.files.store import FileStore, FileWriter
from openk3.serve.inner import Answer, ask
from openk3.serve.keys.account import Account
from openk3.serve.keys.store import ApiKey

log = logging.getLogger("openk3.serve")

LINES_AT_A_TIME = 8
# How often the database is asked for what other processes have changed.
_POLL_S = 1.0
_LONGEST_PAUSE_S = 60.0
_FINAL: dict[str, Status] = {"finalizing": "completed", "cancelling": "cancelled"}


class BatchRunner:
    """Runs the batches of the application `app` with `state`. All from the event loop's thread.

    Args:
        folder: where the lock lies.
        model: the model's id in the API.
    """

    def __init__(self, app: ASGIApp, state: State, folder: Path, model: str) -> None:
        self._app = app
        self._state = state
        self._model = model
        self._batches: BatchStore = state.batches
        self._files: FileStore = state.files
        name = hashlib.sha256(model.encode()).hexdigest()[:12]
        self._lock = FileLock(folder / f"batches-{name}.lock", thread_local=False)
        self._places = asyncio.Semaphore(LINES_AT_A_TIME)
        self._news = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look at the batches now: one was made or cancelled."""
        self._news.set()

    async def close(self) -> None:
        """Stop where it is; the next server goes on."""
        tasks = [task for task in (self._task, *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lock.release()

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("the batches cannot be read; trying again")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _POLL_S)
            self._news.clear()

    async def _look(self) -> None:
        """Start a task for every batch that needs one, and end those of batches that were cancelled."""
        if not self._lock.is_locked:
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                return
        for batch in await asyncio.to_thread(self._active):
            task = self._running.get(batch.id)
            if task is None:
                self._running[batch.id] = task = asyncio.create_task(self._work(batch), name=batch.status)
                task.add_done_callback(partial(self._done, batch.id))
            elif batch.status == "cancelling" and task.get_name() != "cancelling":
                task.cancel()  # and the next look starts the one that finishes it

    def _active(self) -> list[Batch]:
        """The batches to work on. Those of revoked keys are cancelled."""
        for batch in self._batches.active(self._model):
            key = self._key(batch)
            if key is not None and key.revoked_at is not None:
                self._batches.move(batch.id, "cancelling", of=("validating", "in_progress"))
        return self._batches.active(self._model)

    def _done(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._running[batch_id]
        self._news.set()

    async def _work(self, batch: Batch) -> None:
        try:
            if batch.status == "validating":
                batch = await self._validate(batch)
            if batch.status == "in_progress":
                batch = await self._answer(batch)
            if batch.status in _FINAL:
                await asyncio.to_thread(self._write_files, batch, _FINAL[batch.status])
        except Exception as error:
            log.exception("batch %s failed", batch.id)
            message = f"The server could not run the batch: {type(error).__name__}."
            self._fail(batch, "server_error", message)

    async def _validate(self, batch: Batch) -> Batch:
        file = self._files.get(batch.input_file_id, batch.owner)
        total = 0
        if file is not None:
            lines = read_lines(self._files.path(file), batch.endpoint)
            total = await asyncio.to_thread(lambda: sum(1 for _ in islice(lines, MAX_LINES + 1)))
        if file is None:
            self._fail(batch, "input_file_missing", "The input file was deleted.")
        elif total == 0:
            self._fail(batch, "empty_file", "The input file has no lines.")
        elif total > MAX_LINES:
            self._fail(batch, "too_many_lines", f"The input file has more than {MAX_LINES:,} lines.")
        else:
            self._batches.move(batch.id, "in_progress", of=("validating",), total=total)
        return self._batches.require(batch.id)

    async def _answer(self, batch: Batch) -> Batch:
        """Answer every line that has no answer yet; then the batch is being finalized, or has expired."""
        file = self._files.get(batch.input_file_id, batch.owner)
        if file is None:
            self._fail(batch, "input_file_missing", "The input file was deleted before all of its lines were read.")
            return self._batches.require(batch.id)
        answered = await asyncio.to_thread(self._batches.answered, batch.id)
        lines = read_lines(self._files.path(file), batch.endpoint)
        try:
            async with asyncio.timeout(max(0.0, batch.expires_at - time.time())), asyncio.TaskGroup() as group:
                while (line := await asyncio.to_thread(next, lines, None)) is not None:
                    if line.number in answered:
                        continue
                    await self._places.acquire()
                    group.create_task(self._answer_line(batch, line)).add_done_callback(
                        lambda _: self._places.release()
                    )
        except TimeoutError:
            await asyncio.to_thread(self._expire, batch)
            return self._batches.require(batch.id)
        self._batches.move(batch.id, "finalizing", of=("in_progress",))
        return self._batches.require(batch.id)

    async def _answer_line(self, batch: Batch, line: Line) -> None:
        if line.error is not None:
            error = {"code": "invalid_request", "message": f"Line {line.number + 1}: {line.error}."}
            result = LineResult(line.number, False, _output(line, None, error))
        else:
            answer = await self._ask(batch, line)
            response = {
                "status_code": answer.status,
                "request_id": answer.headers.get("x-request-id"),
                "body": answer.body,
            }
            result = LineResult(line.number, answer.status < 400, _output(line, response, None))
        await asyncio.to_thread(self._batches.add_result, batch.id, result)

    async def _ask(self, batch: Batch, line: Line) -> Answer:
        """The answer to a line. What will pass (a model that loads, a day's tokens used up) is waited for."""
        while True:
            pause_s = 1.0
            key = await asyncio.to_thread(self._key, batch)
            if key is None or key.tokens_per_day is None or not await asyncio.to_thread(self._spent, key):
                account = Account(key, batch.endpoint, self._state.limiter, self._state.ledger, None)
                answer = await ask(self._app, batch.endpoint, line.body, Caller(key, account, in_background=True))
                if answer.status not in (429, 503):
                    return answer
                pause_s = float(answer.headers.get("retry-after", "1"))
            await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))

    def _key(self, batch: Batch) -> ApiKey | None:
        return self._state.keys.get(batch.owner) if batch.owner else None

    def _spent(self, key: ApiKey) -> bool:
        return self._state.ledger.tokens_today(key.id) >= (key.tokens_per_day or 0)

    def _expire(self, batch: Batch) -> None:
        """Give the lines that were not answered in time an error, and write the files."""
        file = self._files.get(batch.input_file_id, batch.owner)
        answered = self._batches.answered(batch.id)
        lines: Iterator[Line] = iter(()) if file is None else read_lines(self._files.path(file), batch.endpoint)
        for line in lines:
            if line.number not in answered:
                error = {"code": "batch_expired", "message": "The batch's completion window was over before."}
                self._batches.add_result(batch.id, LineResult(line.number, False, _output(line, None, error)))
        self._write_files(self._batches.require(batch.id), "expired")

    def _write_files(self, batch: Batch, status: Status) -> None:
        """Make the output files and the batch's last status exist together, or not at all."""
        with ExitStack() as stack:
            writers: dict[str, FileWriter] = {}
            for field, succeeded in (("output_file_id", True), ("error_file_id", False)):
                writer = stack.enter_context(self._files.writer())
                for result in self._batches.results(batch.id, succeeded=succeeded):
                    writer.write(result.encode() + b"\n")
                if writer.size:
                    writer.sync()
                    writers[field] = writer
            with self._state.database.transaction():
                made = {field: writer.id for field, writer in writers.items()}
                if not self._batches.move(batch.id, status, of=(batch.status,), **made):
                    return  # cancelled at the last moment
                for field, writer in writers.items():
                    name = f"{batch.id}_{field.removesuffix('_file_id')}.jsonl"
                    writer.commit(filename=name, purpose="batch_output", owner=batch.owner)
                self._batches.forget_lines(batch.id)

    def _fail(self, batch: Batch, code: str, message: str) -> None:
        errors = json.dumps([{"code": code, "message": message, "param": None, "line": None}])
        self._batches.move(batch.id, "failed", of=("validating", "in_progress", "finalizing"), errors=errors)


def _output(line: Line, response: dict[str, Any] | None, error: dict[str, str] | None) -> dict[str, Any]:
    request_id = f"batch_req_{secrets.token_hex(12)}"
    return {"id": request_id, "custom_id": line.custom_id, "response": response, "error": error}
