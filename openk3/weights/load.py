"""From a directory in Hugging Face layout to the configuration and the model."""

from __future__ import annotations

from pathlib import Path

import torch

from openk3.config import K3Config
from openk3.model import K3ForCausalLM
from openk3.weights import hf
from openk3.weights.errors import CheckpointError


def load_config(path: Path) -> K3Config:
    """The configuration of the checkpoint in directory `path`, of any supported family.

    Raises:
        CheckpointError: `config.json` is missing, damaged or describes something unsupported.
    """
    return hf.read_config(_directory(path))


def load_model(path: Path, *, dtype: torch.dtype = torch.float32) -> K3ForCausalLM:
    """The model in directory `path`, of any supported family, in eval mode.

    Weights stored in `dtype` stay in the memory-mapped file; others are converted.

    Raises:
        CheckpointError: a file is missing or damaged, or config and tensors do not fit a supported family.
    """
    return hf.load_directory(_directory(path), dtype)


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory: give one in Hugging Face layout, as resolve() returns it")
    return path
