"""Which runner computes a model: the compiled CPU kernels where they can, PyTorch everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from openk3.engine.config import EngineConfig
from openk3.engine.groups import LayerGroup
from openk3.engine.threads import default_threads
from openk3.weights.loaded import LoadedModel

if TYPE_CHECKING:
    from openk3.engine.scheduler import Chunk
    from openk3.model import K3ForCausalLM

_COLUMN_MULTIPLE = 16


class Runner(Protocol):
    """Computes the chunks of a step over the paged cache it owns."""

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """The logits after the last token of each chunk that samples, `[chunks that sample, V]`."""


def make_runner(
    model: LoadedModel | K3ForCausalLM,
    groups: Sequence[LayerGroup],
    num_pages: int,
    config: EngineConfig,
    num_threads: int | None = None,
) -> Runner:
    """
    Args:
        groups: the layers, in the order of the block tables of a request.
        num_pages: pages of all groups together, each for as many layers as the first group has.
        num_threads: CPU threads; None takes one per usable core, and of PyTorch what it takes itself.

    Raises:
        ValueError: the configuration asks for the kernels and they cannot run the model.
    """
    problem = unsupported(model)
    if config.runner == "cpu" and problem:
        raise ValueError(f"runner is 'cpu', but {problem}: use 'torch' or 'auto'")
    # Each runner is imported only where it is used: PyTorch takes seconds, and so may the compiler.
    if config.runner == "torch" or problem:
        import torch

        from openk3.engine.runner_torch import TorchRunner

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        kv_format = chosen_kv_format(model, config)
        return TorchRunner(_torch_model(model, config), groups, num_pages, config.page_size, kv_format=kv_format)
    from openk3.engine.runner_cpu import CpuRunner

    loaded = _with_weights(model if isinstance(model, LoadedModel) else LoadedModel.from_torch(model), config)
    threads = default_threads() if num_threads is None else num_threads
    return CpuRunner(
        loaded.config,
        loaded.tensors,
        groups,
        num_pages,
        config.page_size,
        kv_format="float16" if chosen_kv_format(model, config) == "float16" else "float32",
        num_threads=threads,
    )


def chosen_kv_format(model: LoadedModel | K3ForCausalLM, config: EngineConfig) -> str:
    """The dtype in which the runner of `make_runner` is to hold keys and values, by name."""
    if config.kv_format != "auto":
        return config.kv_format
    if config.runner == "torch" or unsupported(model):
        return "float32" if isinstance(model, LoadedModel) else str(model.dtype).removeprefix("torch.")
    stored = model.format if isinstance(model, LoadedModel) else "float32"
    weights = stored if config.weights == "auto" else config.weights
    return "float32" if weights == "float32" else "float16"


def unsupported(model: LoadedModel | K3ForCausalLM) -> str | None:
    """Why the kernels cannot run this model; None when they can."""
    if not isinstance(model, LoadedModel):
        if model.device.type != "cpu":
            return f"the model is on {model.device}"
        if (dtype := str(model.dtype).removeprefix("torch.")) != "float32":
            return f"the model is in {dtype}, not float32"
    for name in ("hidden_size", "head_dim", "intermediate_size", "moe_intermediate_size"):
        size = getattr(model.config, name)
        if size % _COLUMN_MULTIPLE:
            return f"{name} is {size}, not a multiple of {_COLUMN_MULTIPLE}"
    from openk3.kernels.machine import MISSING

    return MISSING


def _with_weights(model: LoadedModel, config: EngineConfig) -> LoadedModel:
    return model if config.weights == "auto" else model.quantized(config.weights)


def _torch_model(model: LoadedModel | K3ForCausalLM, config: EngineConfig) -> K3ForCausalLM:
    """The model for PyTorch; weights that are asked for in integers are rounded to them and back."""
    if isinstance(model, LoadedModel):
        return _with_weights(model, config).to_torch()
    if config.weights in ("auto", "float32"):
        return model
    return _with_weights(LoadedModel.from_torch(model), config).to_torch(model.dtype).to(model.device)
