"""Files and whole checkpoints from the Hugging Face hub, where a network is there.

The hub's own library does the transfer (resumable, into its shared cache). It retries for half a minute when there is
no network, so one quick question decides beforehand whether to ask it at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfFileMetadata,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    is_offline_mode,
    snapshot_download,
)
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import tqdm

from openk3.weights import store
from openk3.weights.errors import CheckpointError, reason
from openk3.weights.registry import HubSource

_TIMEOUT_S = 5.0
# Everything a checkpoint consists of; not the pickles, originals and other formats that lie beside it.
_WANTED = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"]
_WANTED += ["tokenizer*", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "*.jinja"]


class _UnreachableError(CheckpointError):
    """No network, or the hub does not answer: what is in the cache has to do."""


class _Silent(tqdm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"disable": True}))


def fetch_known(source: HubSource, sha256: str, final: Path, progress: bool) -> None:
    """Download the registry's file to `final`, which the caller checks.

    Raises:
        CheckpointError: the hub cannot be reached, or has another file under that name.
    """
    if _ask(source.repo, source.file, source.revision).etag != sha256:
        raise CheckpointError(f"{source.repo} has another version of {source.file}")
    _download(source.repo, source.file, source.revision, final.with_suffix(".hub"), progress).replace(final)


def fetch_file(repo: str, file: str, progress: bool) -> Path:
    """One file of a repository, from the hub's cache where there is no network.

    Raises:
        CheckpointError: not in the cache and no network, no such repository or file, no access, no disk space.
    """
    try:
        found = _ask(repo, file, "main")
    except _UnreachableError as error:
        try:
            return Path(hf_hub_download(repo, file, local_files_only=True))
        except Exception:  # which of several errors says "not cached" depends on what part of it is
            raise _offline(f"{repo}/{file}", error) from error
    store.require_space(store.cache_root(), found.size or 0, f"downloading {repo}/{file}")
    return _download(repo, file, "main", None, progress)


def fetch_checkpoint(repo: str, progress: bool) -> Path:
    """The directory of the checkpoint `repo` in the hub's cache, brought up to date where a network is there.

    Raises:
        CheckpointError: not in the cache and no network, no such repository, no access, no disk space.
    """
    try:
        _ask(repo, "config.json", "main")
    except _UnreachableError as error:
        try:
            return Path(snapshot_download(repo, allow_patterns=_WANTED, local_files_only=True))
        except Exception:
            raise _offline(repo, error) from error
    try:
        plan = snapshot_download(repo, allow_patterns=_WANTED, dry_run=True)
        needed = sum(file.file_size or 0 for file in plan if not isinstance(file, str) and file.will_download)
        store.require_space(store.cache_root(), needed, f"downloading {repo}")
        return Path(snapshot_download(repo, allow_patterns=_WANTED, tqdm_class=None if progress else _Silent))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"downloading {repo} failed ({reason(error)}): run it again to resume") from error


def _download(repo: str, file: str, revision: str, local_dir: Path | None, progress: bool) -> Path:
    bar = None if progress else _Silent
    try:
        return Path(hf_hub_download(repo, file, revision=revision, local_dir=local_dir, tqdm_class=bar))
    except Exception as error:
        raise CheckpointError(f"downloading {repo}/{file} failed ({reason(error)}): run it again to resume") from error


def _offline(what: str, error: _UnreachableError) -> CheckpointError:
    return CheckpointError(
        f"{what} is not on this machine and {error}: connect to a network, or give a local directory or .gguf file"
    )


def _ask(repo: str, file: str, revision: str) -> HfFileMetadata:
    """What the hub says about one file, or the error in a sentence, within seconds."""
    if is_offline_mode():
        raise _UnreachableError("the hub is switched off (HF_HUB_OFFLINE)")
    try:
        return get_hf_file_metadata(hf_hub_url(repo, file, revision=revision), timeout=_TIMEOUT_S)
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is gated: accept its terms on its page on the hub, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"the hub has no repository {repo}, or you may not see it: check the name") from error
    except EntryNotFoundError as error:
        hint = f" (for a GGUF file in it give {repo}/NAME.gguf)" if file == "config.json" else ""
        raise CheckpointError(f"{repo} has no {file} on the hub: check the name{hint}") from error
    except Exception as error:  # the errors of the HTTP client, whichever the hub's library uses
        raise _UnreachableError(f"the hub cannot be reached ({reason(error)})") from error
