"""A progress bar in bytes on standard error, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """What a download reports to: `at` is the number of bytes there are by now."""

    def __call__(self, at: int) -> None: ...


@contextmanager
def bytes_bar(title: str, total: int, visible: bool) -> Iterator[Progress]:
    """
    Args:
        total: bytes at the end.
    """
    if not visible:
        yield lambda at: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=total)
        yield lambda at: bars.update(task, completed=at)
