"""What a command owes the terminal it runs in: a spinner while it loads, Ctrl-C that stops a reply, clean text."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from openk3.responses import Stream

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")]

_SPINNER_AFTER_S = 2.0
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """A spinner on stderr for work that turns out to take over two seconds; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status(f"{what} ...")
    timer = threading.Timer(_SPINNER_AFTER_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def ctrl_c_stops(stream: Stream) -> Iterator[None]:
    """Within the block Ctrl-C cancels `stream`, which then ends as "cancelled"; pressed again it interrupts as usual.

    A KeyboardInterrupt can strike between any two instructions, between a lock's release and its bookkeeping too; a
    cancelled request ends at a place made for it.
    """
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield
        return
    usual = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, usual)
        stream.close()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def harmless(text: str) -> str:
    """Text without control characters: a model may repeat escape sequences that a document holds."""
    return text.translate(_CONTROLS)


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))
