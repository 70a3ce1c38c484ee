"""Checkpoints in: finding, fetching, converting and loading the weights of every supported family.

Finding is quick; what reads weights is imported at its first use, and only `load_model` needs PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from openk3.weights.errors import CheckpointError
from openk3.weights.pull import local_directory, pull
from openk3.weights.registry import KnownModel, default_model, known_models
from openk3.weights.resolve import resolve

if TYPE_CHECKING:
    from openk3.weights.hf import load_config
    from openk3.weights.load import load_model
    from openk3.weights.loaded import LoadedModel, load_weights

__all__ = [
    "CheckpointError",
    "KnownModel",
    "LoadedModel",
    "default_model",
    "known_models",
    "load_config",
    "load_model",
    "load_weights",
    "local_directory",
    "pull",
    "resolve",
]

_LAZY = {
    "LoadedModel": "openk3.weights.loaded",
    "load_config": "openk3.weights.hf",
    "load_model": "openk3.weights.load",
    "load_weights": "openk3.weights.loaded",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'openk3.weights' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
