"""Hugging Face directories into the one model: safetensors, single or sharded, memory-mapped and checked by name.

Weights that need no change stay in the mapped file, so a model opens in the time it takes to read two small JSON files
and its pages are shared between processes.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig

from openk3.config import K3Config
from openk3.model import K3ForCausalLM
from openk3.weights.errors import CheckpointError, reason
from openk3.weights.families import Source, ignorable, source_of, to_k3_config

_MAX_JSON_BYTES = 64 * 2**20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


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


def read_config(directory: Path) -> K3Config:
    """The configuration of the checkpoint in `directory`, of any supported family."""
    return to_k3_config(read_json(directory / "config.json"), directory / "config.json")


def load_directory(directory: Path, dtype: torch.dtype) -> K3ForCausalLM:
    """The model in `directory`, in eval mode.

    Raises:
        CheckpointError: a file is missing or damaged, the family is not supported, or a tensor is missing, unexpected
            or of the wrong shape.
    """
    json = read_json(directory / "config.json")
    config = to_k3_config(json, directory / "config.json")
    with ExitStack() as files:
        checkpoint = _Checkpoint(directory, files)
        _settle_head(config, checkpoint)
        with torch.device("meta"):
            model = K3ForCausalLM(config)
        state = _state(model, checkpoint, json["model_type"], dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    defaults = directory / "generation_config.json"
    if defaults.is_file():
        try:
            model.generation_config = GenerationConfig.from_dict(read_json(defaults))
        except CheckpointError:
            raise
        except Exception as error:  # Transformers' validation raises errors of many kinds
            raise CheckpointError(f"{defaults} is not usable: {reason(error)}") from error
    return model.eval()


class _Checkpoint:
    """The tensors of a directory by name, wherever they lie."""

    def __init__(self, directory: Path, files: ExitStack) -> None:
        self.directory = directory
        self.where: dict[str, tuple[Path, Any]] = {}
        for path in _safetensors(directory):
            try:
                file = files.enter_context(safe_open(path, framework="pt", device="cpu"))
                names = list(file.keys())
            except Exception as error:  # SafetensorError or OSError, whatever the damage is
                raise CheckpointError(f"{path} is damaged or truncated ({reason(error)}): download it again") from error
            for name in names:
                if name in self.where:
                    raise CheckpointError(f"{path} repeats the tensor {name} of {self.where[name][0].name}")
                self.where[name] = (path, file)

    def __contains__(self, name: str) -> bool:
        return name in self.where

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.where[name][1].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        path, file = self.where[name]
        tensor: Tensor = file.get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise CheckpointError(
                f"{path} stores {name} as {str(tensor.dtype).removeprefix('torch.')}: unquantized floating-point "
                f"weights are needed"
            )
        return tensor


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


def _settle_head(config: K3Config, checkpoint: _Checkpoint) -> None:
    """Untie a head the configuration calls tied when the file holds another matrix for it, as Transformers does."""
    if config.tie_word_embeddings and _HEAD in checkpoint and _EMBEDDING in checkpoint:
        same = torch.equal(checkpoint.tensor(_HEAD), checkpoint.tensor(_EMBEDDING))
        config.tie_word_embeddings = same


def _state(model: K3ForCausalLM, checkpoint: _Checkpoint, model_type: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every parameter of `model` from the checkpoint.

    Raises:
        CheckpointError: naming every tensor that is missing, unexpected, or of the wrong shape.
    """
    tied = model.config.tie_word_embeddings
    wanted = {name: value for name, value in model.state_dict().items() if not (tied and name == _HEAD)}
    sources = {name: source_of(name, checkpoint.where, model_type, model.config.num_experts) for name in wanted}
    if tied and _EMBEDDING not in checkpoint and _HEAD in checkpoint:
        sources[_EMBEDDING] = Source([[_HEAD]])
    used = {name for source in sources.values() for name in source.names()}
    missing = sorted(used - checkpoint.where.keys())
    if missing:
        raise CheckpointError(
            f"{checkpoint.directory} lacks {_some(missing)}, which its config.json asks for: download it again"
        )
    unexpected = sorted(n for n in checkpoint.where.keys() - used if not ignorable(n) and not (tied and n == _HEAD))
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.directory} holds {_some(unexpected)}, which a {model_type} model of its config.json does "
            f"not have: config.json and weights do not belong together, or the model is another variant"
        )
    for name, source in sources.items():
        _check_shape(checkpoint, source, tuple(wanted[name].shape))
    parameters = {name for name, _ in model.named_parameters()}
    return {
        name: _assemble(checkpoint, sources[name], value, dtype if name in parameters else value.dtype)
        for name, value in wanted.items()
    }


def _check_shape(checkpoint: _Checkpoint, source: Source, shape: tuple[int, ...]) -> None:
    if source.stacked:
        parts = len(source.experts[0])
        shape = (shape[1] // parts, *shape[2:])
    for name in source.names():
        found = checkpoint.shape(name)
        if found != shape:
            raise CheckpointError(
                f"{checkpoint.where[name][0]} has {name} of shape {list(found)} where config.json asks for "
                f"{list(shape)}: config.json and weights do not belong together"
            )


def _assemble(checkpoint: _Checkpoint, source: Source, meta: Tensor, dtype: torch.dtype) -> Tensor:
    """One parameter: the mapped tensor itself where nothing has to change."""
    if not source.stacked:
        tensor = checkpoint.tensor(source.experts[0][0])
        return (tensor.float() + 1).to(dtype) if source.plus_one else tensor.to(dtype)
    stacked = torch.empty(meta.shape, dtype=dtype)
    for expert, names in enumerate(source.experts):
        rows = meta.shape[1] // len(names)
        for i, name in enumerate(names):
            stacked[expert, i * rows : (i + 1) * rows] = checkpoint.tensor(name).to(dtype)
    return stacked


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}{rest}"
