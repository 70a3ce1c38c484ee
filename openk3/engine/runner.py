"""Which runner computes a model: the compiled CPU kernels where they can, PyTorch everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from openk3.engine.config import EngineConfig
from openk3.engine.runner_torch import TorchRunner

if TYPE_CHECKING:
    from openk3.engine.scheduler import Chunk
    from openk3.model import K3ForCausalLM

_COLUMN_MULTIPLE = 16


class Runner(Protocol):
    """Computes the chunks of a step over the paged cache it owns."""

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """The logits after the last token of each chunk that samples, `[chunks that sample, V]`, float32 on the CPU."""


def make_runner(model: K3ForCausalLM, num_pages: int, config: EngineConfig) -> Runner:
    """
    Raises:
        ValueError: the configuration asks for the kernels, or for INT8 weights, which only they have, and they cannot
            run the model.
    """
    problem = unsupported(model)
    if config.runner == "torch" or (config.runner == "auto" and problem):
        if config.weights != "float32":
            why = problem or "runner is 'torch'"
            raise ValueError(f"weights is {config.weights!r}: only the CPU kernels have that format, but {why}")
        return TorchRunner(model, num_pages, config.page_size)
    if problem:
        raise ValueError(f"runner is 'cpu', but {problem}: use 'torch' or 'auto'")
    # Imported here: a machine that computes with PyTorch need not load the compiler.
    from openk3.engine.runner_cpu import CpuRunner

    threads = torch.get_num_threads()
    return CpuRunner(model, num_pages, config.page_size, weights=config.weights, num_threads=threads)


def unsupported(model: K3ForCausalLM) -> str | None:
    """Why the kernels cannot run this model; None when they can."""
    if model.device.type != "cpu":
        return f"the model is on {model.device}"
    if model.dtype != torch.float32:
        return f"the model is in {str(model.dtype).removeprefix('torch.')}, not float32"
    for name in ("hidden_size", "head_dim", "intermediate_size", "moe_intermediate_size"):
        size = getattr(model.config, name)
        if size % _COLUMN_MULTIPLE:
            return f"{name} is {size}, not a multiple of {_COLUMN_MULTIPLE}"
    return None
