"""The CPU kernels: the model's arithmetic, compiled by Numba on the user's machine, each beside its definition.

Numba keeps compiled code on disk and takes it for good as long as the file of the function itself is unchanged. A
kernel is compiled together with those it calls, from other files, so each state of the whole folder gets a directory of
its own: compiled code of another version is never run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from importlib import import_module
from pathlib import Path

from numba import config

from openk3.kernels.machine import MISSING, describe
from openk3.weights.store import cache_root

__all__ = ["MISSING", "are_compiled", "describe", "source_digest"]


def source_digest(files: Iterable[Path]) -> str:
    """One digest of the names and contents of `files`, in hexadecimal."""
    digest = blake2b(digest_size=8)
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def are_compiled() -> bool:
    """Whether code of this version lies in the compile cache. Only where nothing is `MISSING`."""
    compiled = import_module("openk3.kernels.step").take_part.__wrapped__
    return any(Path(compiled.stats.cache_path).glob(f"*{compiled.py_func.__name__}-*.nbi"))


def _import_kernels() -> None:
    """Import every kernel while Numba's cache directory is ours; it is looked at when a function is declared."""
    here, before = Path(__file__).parent, config.CACHE_DIR
    place = here / "__pycache__" if os.access(here, os.W_OK) else cache_root() / "kernels"
    kind = describe().replace(" ", "-").lower()  # Numba knows the CPU, but not whether the system permits AMX
    config.CACHE_DIR = str(place / f"{source_digest(here.glob('*.py'))}-{kind}")
    try:
        for name in ("step", "plan"):
            import_module(f"openk3.kernels.{name}")
    finally:
        config.CACHE_DIR = before


if MISSING is None:
    _import_kernels()
