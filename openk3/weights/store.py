"""Where downloaded and converted checkpoints live on disk, and how they get there whole.

Everything lies under one root: `downloads/` holds GGUF files, `models/` ready directories, `locks/` one lock file per
thing being made. A directory under `models/` exists only when it is complete: it is written beside its place, flushed
to the disk and renamed, so a process killed at any moment leaves nothing that could be mistaken for a checkpoint.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from openk3.weights.errors import CheckpointError, reason

# Part of every cache key: raise it when conversion writes something else, and every file is converted anew.
_CONVERSION = 1
_SPARE_BYTES = 64 * 2**20
_TEMPORARY = ".making-"
_RANDOM_LETTERS = 8  # that tempfile adds


def cache_root() -> Path:
    """`$OPENK3_HOME`, or `~/.cache/openk3`."""
    return Path(os.environ.get("OPENK3_HOME") or Path.home() / ".cache" / "openk3").expanduser().absolute()


def models_dir() -> Path:
    return cache_root() / "models"


def downloads_dir() -> Path:
    return cache_root() / "downloads"


def converted_path(path: Path, key: str | None = None) -> Path:
    """Where the directory that the GGUF file `path` converts to lies, whether it is there or not.

    Args:
        key: what names the result; by default made of the file's path, size and time of change.

    Raises:
        CheckpointError: there is no key and the file cannot be looked at.
    """
    path = path.absolute()
    if key is None:
        try:
            stat = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path} does not exist or cannot be read: check the path") from error
        key = hashlib.sha256(f"{path}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return models_dir() / f"{path.stem}-{key}-v{_CONVERSION}"


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold the lock called `name` across processes; a second process waits until the first is done."""
    lock = FileLock(_make_dir(cache_root() / "locks") / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another process that is preparing {name} ...", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def require_space(directory: Path, needed: int, purpose: str) -> None:
    """
    Args:
        needed: bytes about to be written below `directory`.

    Raises:
        CheckpointError: the disk has less than that, plus a little to spare.
    """
    _make_dir(directory)
    free = shutil.disk_usage(directory).free
    if free < needed + _SPARE_BYTES:
        raise CheckpointError(
            f"no disk space for {purpose}: it needs {size(needed)} below {directory} and {size(free)} are free; make "
            f"room, or set OPENK3_HOME to a larger disk"
        )


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """A directory to fill that becomes `final` when the block ends without an error, and vanishes otherwise.

    Call it under a lock on `final`. Left-overs of killed processes are removed first. The block only writes: what it
    has to read, it reads under error messages of its own.

    Raises:
        CheckpointError: something cannot be written; an `OSError` of the block is taken for that.
    """
    parent, making = _make_dir(final.parent), None
    for stale in parent.glob(f"{_TEMPORARY}{glob.escape(final.name)}-{'?' * _RANDOM_LETTERS}"):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        making = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{final.name}-", dir=parent))
        making.chmod(0o755)
        yield making
        for path in (*making.rglob("*"), making):
            flush(path)
        making.replace(final)
        flush(parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {final}: {_why(error)}; make room, or {_elsewhere(final)}") from error
    finally:
        if making is not None:
            shutil.rmtree(making, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file or directory has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def size(count: float) -> str:
    """Bytes in words: `491.4 MB`."""
    if count < 1000:
        return f"{count:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def _make_dir(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot create {path}: {_why(error)}; {_elsewhere(path)}") from error
    return path


def _why(error: OSError) -> str:
    """Without the names of temporary files."""
    return error.strerror or reason(error)


def _elsewhere(path: Path) -> str:
    """How the user has `path` lie in another place."""
    ours = path.is_relative_to(cache_root())
    return "set OPENK3_HOME to a writable place" if ours else "choose a writable --output"
