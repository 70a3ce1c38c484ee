"""Checkpoints in: finding, fetching, converting and loading the weights of every supported family.

Finding and fetching need no PyTorch, so `load_config` and `load_model`, which do, are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from openk3.weights.errors import CheckpointError
from openk3.weights.pull import local_directory, pull
from openk3.weights.registry import KnownModel, default_model, known_models
from openk3.weights.resolve import resolve

if TYPE_CHECKING:
    from openk3.weights.load import load_config, load_model

__all__ = [
    "CheckpointError",
    "KnownModel",
    "default_model",
    "known_models",
    "load_config",
    "load_model",
    "local_directory",
    "pull",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name in ("load_config", "load_model"):
        return getattr(importlib.import_module("openk3.weights.load"), name)
    raise AttributeError(f"module 'openk3.weights' has no attribute {name!r}")
