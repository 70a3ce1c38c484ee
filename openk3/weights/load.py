"""From a checkpoint to the PyTorch model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig

from openk3.config import ModelConfig
from openk3.model import K3ForCausalLM
from openk3.parameters import SELECTION_BIAS
from openk3.weights.errors import CheckpointError, reason
from openk3.weights.formats import Matrix, dequantize
from openk3.weights.hf import Checkpoint, open_checkpoint, read_json
from openk3.weights.safetensors_reader import BF16

_STORED = {np.dtype(np.float32): torch.float32, np.dtype(np.float16): torch.float16, BF16: torch.bfloat16}


def load_model(path: Path, *, dtype: torch.dtype = torch.float32) -> K3ForCausalLM:
    """The model in directory `path`, of any supported family, in eval mode; quantized weights are dequantized.

    Weights stored in `dtype` stay in the memory-mapped file; others are converted.

    Raises:
        CheckpointError: a file is missing or damaged, or config and tensors do not fit a supported family.
    """
    checkpoint = open_checkpoint(path)
    model = _assembled(
        checkpoint.config, {name: _read(checkpoint, name, _dtype(name, dtype)) for name in checkpoint.shapes}, dtype
    )
    defaults = path / "generation_config.json"
    if defaults.is_file():
        try:
            model.generation_config = GenerationConfig.from_dict(read_json(defaults))
        except CheckpointError:
            raise
        except Exception as error:  # Transformers' validation raises errors of many kinds
            raise CheckpointError(f"{defaults} is not usable: {reason(error)}") from error
    return model


def build_model(config: ModelConfig, tensors: Mapping[str, Matrix], dtype: torch.dtype | None = None) -> K3ForCausalLM:
    """The model of these parameters (see `LoadedModel`), in eval mode.

    Args:
        dtype: of the parameters, float32 by default.
    """
    dtype = dtype or torch.float32
    converted = {name: _tensor(dequantize(matrix)).to(_dtype(name, dtype)) for name, matrix in tensors.items()}
    return _assembled(config, converted, dtype)


def _assembled(config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype) -> K3ForCausalLM:
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    return model.eval()


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Selection biases stay in float32 whatever the parameters are in."""
    return torch.float32 if name.endswith(SELECTION_BIAS) else dtype


def _read(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    stored = checkpoint.as_stored(name)
    if stored is not None and stored.flags.aligned and _STORED.get(stored.dtype) == dtype:
        return _tensor(stored)
    return _tensor(dequantize(checkpoint.parameter(name))).to(dtype)


def _tensor(array: NDArray[Any]) -> Tensor:
    """The array as a tensor over the same memory."""
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
