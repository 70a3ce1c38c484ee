"""Hugging Face directories: safetensors, single or sharded, memory-mapped and checked by name and shape.

Weights that need no change stay in the mapped file, so a checkpoint opens in the time it takes to read two small JSON
files and its pages are shared between processes. PyTorch is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openk3.config import ModelConfig
from openk3.parameters import EMBEDDING, HEAD, Shape, parameter_shapes
from openk3.weights.errors import CheckpointError, reason
from openk3.weights.families import Source, ignorable, source_of, to_model_config
from openk3.weights.formats import Matrix
from openk3.weights.quantized_file import is_quantized, read_matrix, tensor_names
from openk3.weights.safetensors_reader import is_floating, read_arrays, to_float32, type_name

_MAX_JSON_BYTES = 64 * 2**20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that may be damaged.

    Raises:
        CheckpointError: the file is missing, too large, or not a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_JSON_BYTES} bytes: it is not a model's JSON file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: give a directory that holds a whole checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({reason(error)}): download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object: download it again")
    return value


def load_config(directory: Path) -> ModelConfig:
    """The configuration of the checkpoint in `directory`, of any supported family.

    Raises:
        CheckpointError: there is no such directory, or `config.json` is missing, damaged or describes something
            unsupported.
    """
    return to_model_config(_config_json(directory), directory / "config.json")


def _config_json(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory: give one in Hugging Face layout, as resolve() returns it"
        )
    return read_json(directory / "config.json")


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a directory, and how the model's parameters are made of them.

    Attributes:
        config: the model's; the head is tied where the tensors say so.
        tensors: as they lie in the files, by name.
        files: the file that each tensor lies in.
        shapes: of the model's parameters, as `parameter_shapes` gives them.
        sources: the tensors that each parameter is made of.
    """

    directory: Path
    config: ModelConfig
    tensors: dict[str, NDArray[Any]]
    files: dict[str, Path]
    shapes: dict[str, Shape]
    sources: dict[str, Source]

    def parameter(self, name: str) -> Matrix:
        """A parameter, quantized where it is stored so, else in float32: the mapped tensor itself where nothing has to
        change.

        Raises:
            CheckpointError: it is stored as something else than floating-point numbers or a quantized matrix.
        """
        if _quantized(name, self.tensors):
            return read_matrix(name, self.tensors, self.shapes[name], self.files[name])
        source = self.sources[name]
        if not source.stacked:
            array = to_float32(self._floating(source.experts[0][0]))
            return array + np.float32(1) if source.plus_one else array
        stacked = np.empty(self.shapes[name], np.float32)
        for expert, names in enumerate(source.experts):
            rows = stacked.shape[1] // len(names)
            for i, part in enumerate(names):
                stacked[expert, i * rows : (i + 1) * rows] = to_float32(self._floating(part))
        return stacked

    def as_stored(self, name: str) -> NDArray[Any] | None:
        """The one tensor that a parameter is, in the type it is stored in; None where it is made of it or of several.

        Raises:
            CheckpointError: as `parameter`.
        """
        source = self.sources[name]
        if source.stacked or source.plus_one or _quantized(name, self.tensors):
            return None
        return self._floating(source.experts[0][0])

    def _floating(self, name: str) -> NDArray[Any]:
        array = self.tensors[name]
        if not is_floating(array):
            raise CheckpointError(
                f"{self.files[name]} stores {name} as {type_name(array)}: unquantized floating-point weights are needed"
            )
        return array


def open_checkpoint(directory: Path) -> Checkpoint:
    """Map the checkpoint in `directory` and find the tensors of every parameter.

    Raises:
        CheckpointError: a file is missing or damaged, the family is not supported, or a tensor is missing, unexpected
            or of the wrong shape; named are all that are missing or unexpected.
    """
    described = _config_json(directory)
    config = to_model_config(described, directory / "config.json")
    tensors: dict[str, NDArray[Any]] = {}
    files: dict[str, Path] = {}
    for path in _safetensors(directory):
        for name, array in read_arrays(path).items():
            if name in tensors:
                raise CheckpointError(f"{path} repeats the tensor {name} of {files[name].name}")
            tensors[name], files[name] = array, path
    config = _settle_head(config, tensors)
    shapes = parameter_shapes(config)
    sources = {name: source_of(name, tensors, described["model_type"], config.num_experts) for name in shapes}
    if config.tie_word_embeddings and EMBEDDING not in tensors and HEAD in tensors:
        sources[EMBEDDING] = Source([[HEAD]])
    checkpoint = Checkpoint(directory, config, tensors, files, shapes, sources)
    _check_names(checkpoint, described["model_type"])
    for name, shape in shapes.items():
        if not _quantized(name, tensors):
            _check_shape(checkpoint, sources[name], shape)
    return checkpoint


def _safetensors(directory: Path) -> list[Path]:
    """The files that make up the checkpoint, every one of which exists."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map: download it again")
        paths = []
        for name in sorted({str(file) for file in weight_map.values()}):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(f"{index} names {name!r}: shards must be safetensors files beside the index")
            if not (directory / name).is_file():
                raise CheckpointError(f"{directory / name} is missing, which {index.name} names: download it again")
            paths.append(directory / name)
        return paths
    for path in sorted(directory.iterdir()):
        if path.suffix in _PICKLES:
            raise CheckpointError(
                f"{path} is a pickle, which can run code when it is read: convert the checkpoint to safetensors"
            )
    raise CheckpointError(
        f"{directory} holds neither model.safetensors nor model.safetensors.index.json: give the directory of a whole "
        f"checkpoint"
    )


def _settle_head(config: ModelConfig, tensors: dict[str, NDArray[Any]]) -> ModelConfig:
    """Untie a head the configuration calls tied when the file holds another matrix for it, as Transformers does."""
    if not (config.tie_word_embeddings and HEAD in tensors and EMBEDDING in tensors):
        return config
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    same = head.dtype == embedding.dtype and np.array_equal(head, embedding)
    return replace(config, tie_word_embeddings=same)


def _quantized(name: str, tensors: dict[str, NDArray[Any]]) -> bool:
    return is_quantized(name, tensors) and tensor_names(name, tensors)[1] in tensors


def _check_names(checkpoint: Checkpoint, model_type: str) -> None:
    there = checkpoint.tensors
    used = {name for source in checkpoint.sources.values() for name in source.names()}
    used |= {part for name in checkpoint.shapes if _quantized(name, there) for part in tensor_names(name, there)}
    if missing := sorted(used - there.keys()):
        raise CheckpointError(
            f"{checkpoint.directory} lacks {_some(missing)}, which its config.json asks for: download it again"
        )
    tied = {HEAD} if checkpoint.config.tie_word_embeddings else set()
    if unexpected := sorted(name for name in there.keys() - used - tied if not ignorable(name)):
        raise CheckpointError(
            f"{checkpoint.directory} holds {_some(unexpected)}, which a {model_type} model of its config.json does "
            f"not have: config.json and weights do not belong together, or the model is another variant"
        )


def _check_shape(checkpoint: Checkpoint, source: Source, shape: Shape) -> None:
    if source.stacked:
        parts = len(source.experts[0])
        shape = (shape[1] // parts, *shape[2:])
    for name in source.names():
        found = checkpoint.tensors[name].shape
        if found != shape:
            raise CheckpointError(
                f"{checkpoint.files[name]} has {name} of shape {list(found)} where config.json asks for "
                f"{list(shape)}: config.json and weights do not belong together"
            )


def _some(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:4])
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}{rest}"
