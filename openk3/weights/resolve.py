"""From whatever names a model to the directory it is in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from openk3.weights import registry
from openk3.weights.errors import CheckpointError, reason
from openk3.weights.pull import pull, pull_file

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/([\w./-]+\.gguf)")


def resolve(name_or_path: str, *, progress: bool = True) -> Path:
    """The local directory, in Hugging Face layout, of what `name_or_path` names, after fetching what is missing.

    Args:
        name_or_path: a name of the registry (`smollm2-135m`), a directory, a `.gguf` file, a Hugging Face id
            (`owner/name`), or a GGUF file in a repository (`owner/name/file.gguf`). A name of the registry wins over a
            directory of that name: write `./smollm2-135m` for that.
        progress: whether to show progress bars on standard error.

    Raises:
        CheckpointError: there is no such thing, or it cannot be fetched, read or converted.
    """
    if not name_or_path.strip():
        raise CheckpointError("the name of the model is empty: give an alias, a directory or a .gguf file")
    if (model := registry.find(name_or_path)) is not None:
        return pull(model, progress=progress)
    path, kind = _look_up(name_or_path)
    if kind == "directory":
        return path
    if kind == "file":
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{path} is a single file: give its directory, or a .gguf file")
        return _converted(path, progress)
    if name_or_path[0] in "./~":
        raise CheckpointError(f"{name_or_path!r} does not exist: check the path")
    from openk3.weights import hub  # imported late, as the hub's library takes a while

    if (match := _HUB_FILE.fullmatch(name_or_path)) is not None:
        return _converted(hub.fetch_file(match[1], match[2], progress), progress)
    if path.suffix.lower() == ".gguf":
        raise CheckpointError(f"{name_or_path!r} does not exist: check the path")
    if _HUB_ID.fullmatch(name_or_path):
        return hub.fetch_checkpoint(name_or_path, progress)
    raise registry.unknown(name_or_path)


def resolve_gguf(name_or_path: str, *, progress: bool = True) -> Path | None:
    """The GGUF file that `resolve` makes a directory of, or None where the model comes otherwise.

    Raises:
        CheckpointError: it cannot be looked up or fetched.
    """
    if (model := registry.find(name_or_path)) is not None:
        return pull_file(model, progress=progress)
    path, kind = _look_up(name_or_path)
    if kind == "file":
        return path if path.suffix.lower() == ".gguf" else None
    if (match := _HUB_FILE.fullmatch(name_or_path)) is None:
        return None
    from openk3.weights import hub  # imported late, as the hub's library takes a while

    return hub.fetch_file(match[1], match[2], progress)


def _look_up(name_or_path: str) -> tuple[Path, Literal["directory", "file"] | None]:
    """
    Raises:
        CheckpointError: too long a name, a directory that may not be read, no such user.
    """
    try:
        path = Path(name_or_path).expanduser()
        return path, "directory" if path.is_dir() else "file" if path.is_file() else None
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{name_or_path[:80]!r} cannot be looked up: {reason(error)}") from error


def _converted(path: Path, progress: bool) -> Path:
    from openk3.weights.gguf_convert import converted  # imported late, as most models need nothing of it

    return converted(path, progress=progress)
