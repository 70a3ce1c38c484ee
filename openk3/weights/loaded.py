"""A checkpoint in memory: its configuration and its parameters as arrays, which every runner can compute with.

Reading one needs neither PyTorch nor Transformers; `to_torch` makes Transformers' model of it where one is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from openk3.config import ModelConfig
from openk3.parameters import HEAD, is_matrix
from openk3.weights.errors import CheckpointError
from openk3.weights.formats import Int4Matrix, Int8Matrix, Matrix, dequantize, quantize_int4, quantize_int8
from openk3.weights.hf import open_checkpoint

if TYPE_CHECKING:
    import torch

    from openk3.model import K3ForCausalLM

Format = Literal["float32", "int8", "int4"]
_GROUP_SIZE = 32  # of matrices that are rounded to INT4 when they are loaded: the finest there is


@dataclass(frozen=True)
class LoadedModel:
    """A model's configuration and parameters.

    Attributes:
        tensors: the parameters of `K3ForCausalLM` by name, with the routers' selection biases and without a tied head;
            memory-mapped where a file holds them as they are.
    """

    config: ModelConfig
    tensors: dict[str, Matrix]

    @property
    def format(self) -> Format:
        """How the matrices are held: the format of the fewest bits among them."""
        kinds = {type(tensor) for tensor in self.tensors.values()}
        return "int4" if Int4Matrix in kinds else "int8" if Int8Matrix in kinds else "float32"

    def quantized(self, format: Format) -> LoadedModel:
        """The model with its matrices rounded to the nearest numbers of `format`; itself where it has that already.

        Norms, biases and routers stay as they are. A matrix becomes INT8 where its columns do not fill groups of INT4,
        and stays float32 where they are no multiple of 4. Nothing of the result lies in the checkpoint's mapped file,
        whose pages would count as this process's memory.

        Raises:
            CheckpointError: a matrix is not finite, or too large for the format's scales.
        """
        if format == self.format:
            return self
        tensors = {
            name: _rounded(name, dequantize(tensor), format) if is_matrix(name, tensor.shape) else np.array(tensor)
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors)

    def to_torch(self, dtype: torch.dtype | None = None) -> K3ForCausalLM:
        """Transformers' model of the same parameters, in eval mode, dequantized; those in `dtype` (float32) shared."""
        from openk3.weights.load import build_model

        return build_model(self.config, self.tensors, dtype)

    @classmethod
    def from_torch(cls, model: K3ForCausalLM) -> LoadedModel:
        """The parameters of a model in float32; those that are so on a CPU are shared."""
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        tensors: dict[str, Matrix] = {
            name: tensor.detach().float().cpu().contiguous().numpy()
            for name, tensor in named.items()
            if name != HEAD or not model.config.tie_word_embeddings
        }
        return cls(model.config, tensors)


def load_weights(directory: Path) -> LoadedModel:
    """The checkpoint in `directory`, of any supported family.

    Raises:
        CheckpointError: as `openk3.weights.hf.open_checkpoint`.
    """
    checkpoint = open_checkpoint(directory)
    return LoadedModel(checkpoint.config, {name: checkpoint.parameter(name) for name in checkpoint.shapes})


def _rounded(name: str, matrix: NDArray[np.float32], format: Format) -> Matrix:
    columns = matrix.shape[-1]
    try:
        if format == "int4" and columns % _GROUP_SIZE == 0:
            return quantize_int4(matrix, _GROUP_SIZE)
        return matrix if format == "float32" or columns % 4 else quantize_int8(matrix)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
