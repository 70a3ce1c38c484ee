"""A checkpoint to a smaller one: the directory that `k3 quantize` makes.

Its weights are INT8 or INT4, either calibrated (see `calibrated.py`) or taken over from a GGUF file as they are. Beside
them lies everything the original has beside its weights, so it loads, and is copied and served, like any other.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from openk3.config import ModelConfig
from openk3.weights import store
from openk3.weights.errors import CheckpointError, reason
from openk3.weights.families import OWN, to_model_config
from openk3.weights.formats import GROUP_SIZES, Int4Matrix, Int8Matrix, Matrix
from openk3.weights.hf import load_config
from openk3.weights.loaded import load_weights
from openk3.weights.progress import bytes_bar
from openk3.weights.quantized_file import quantization_config, write_matrices
from openk3.weights.resolve import resolve, resolve_gguf

if TYPE_CHECKING:
    from openk3.weights.gguf_file import GGUFFile

Format = Literal["int8", "int4", "exact"]
_SEQUENCE_TOKENS = 512
_CALIBRATION_TOKENS = 16384
_DEFAULT_TEXT = Path(__file__).parent / "calibration.txt"
# What a checkpoint has beside config.json and weights: tokenizer, templates, defaults of generation, licence, card.
_COMPANIONS = (
    "tokenizer*.json", "tokenizer.model*", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "*.jinja", "additional_chat_templates/*.jinja", "generation_config.json", "LICENSE*", "NOTICE*", "README*",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A parameter of the result: its name, its form in words, its size, and the relative error of its products."""

    name: str
    form: str
    parameters: int
    nbytes: int
    error: float


@dataclass(frozen=True)
class Outcome:
    """What `quantize` made."""

    directory: Path
    format: Format
    parts: list[Part]

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the file of weights."""
        return (self.directory / "model.safetensors").stat().st_size


def quantize(
    model: str,
    *,
    format: Format | None = None,
    group_size: int | None = None,
    calibration: Path | None = None,
    output: Path | None = None,
    progress: bool = True,
) -> Outcome:
    """Write a quantized checkpoint of `model`.

    Args:
        model: as `resolve` takes it.
        format: "int8", "int4", or "exact" for the numbers of a GGUF file as they are; by default "exact" where the
            model comes in such a file, else "int4".
        group_size: columns that share a scale in INT4, 32, 64 or 128; by default 32, and 64 where it costs least.
        calibration: a text file like what the model will read; by default a text that comes with the package.
        output: the directory to make; by default named after the model, in the current one.

    Raises:
        ValueError: an option that contradicts the format, an output that is there already, a text that is too short.
        CheckpointError: the model cannot be found, read or written.
    """
    gguf = None
    if format in (None, "exact"):
        gguf = _exact_gguf(model, progress)
        format = format or ("int4" if gguf is None else "exact")
    if format == "exact" and gguf is None:
        raise CheckpointError(
            f"{model} does not come as a GGUF file of Q4_0, Q4_1 and Q8_0 alone: choose --format int4 or int8"
        )
    if format != "int4" and group_size is not None:
        raise ValueError(f"the group size belongs to the format int4, not {format}: leave it out")
    if format == "exact" and calibration is not None:
        raise ValueError("a calibration text changes nothing about the format exact: leave it out")
    if group_size is not None and group_size not in GROUP_SIZES:
        raise ValueError(f"the group size is {group_size}: it must be one of {', '.join(map(str, GROUP_SIZES))}")
    name = Path(model).absolute().name.removesuffix(".gguf")
    try:
        final = (output or Path(f"{name}-{format}")).expanduser().absolute()
    except RuntimeError as error:  # no such user
        raise ValueError(f"the output {output} cannot be looked up: {reason(error)}") from error
    _require_free(final)
    if gguf is not None:
        make = partial(_take_over, gguf)
    else:
        assert format != "exact"
        directory = resolve(model, progress=progress)
        tokens = calibration_tokens(directory, calibration)
        make = partial(_calibrated, directory, tokens, format, group_size, progress)
    with store.exclusive(f"quantize-{hashlib.sha256(str(final).encode()).hexdigest()[:12]}"):
        _require_free(final)
        with store.new_directory(final) as making:
            parts = make(making)
    return Outcome(final, format, parts)


def _require_free(final: Path) -> None:
    if final.is_symlink():
        raise ValueError(f"{final} is a symbolic link: choose another --output, or remove it")
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise ValueError(f"{final} is there already: choose another --output, or remove it")


def _exact_gguf(model: str, progress: bool) -> GGUFFile | None:
    """The GGUF file of `model` if its numbers can be taken over."""
    if (path := resolve_gguf(model, progress=progress)) is None:
        return None
    from openk3.weights.gguf_exact import is_exact
    from openk3.weights.gguf_file import open_gguf

    return file if is_exact(file := open_gguf(path)) else None


def _take_over(file: GGUFFile, making: Path) -> list[Part]:
    from openk3.weights.gguf_convert import write_companions
    from openk3.weights.gguf_exact import exact_matrices

    theirs, pairs = exact_matrices(file)
    write_companions(file, theirs, making)
    matrices = dict(pairs)
    _write(making, to_model_config(theirs, file.path), matrices)
    return [_part(name, matrix, 0.0) for name, matrix in matrices.items()]


def _calibrated(
    directory: Path,
    tokens: np.ndarray,
    format: Literal["int8", "int4"],
    group_size: int | None,
    progress: bool,
    making: Path,
) -> list[Part]:
    loaded = load_weights(directory)
    import torch

    from openk3.weights.calibrated import quantize_calibrated

    matrices: dict[str, Matrix] = {}
    parts: dict[str, Part] = {}
    whole = 4 * sum(math.prod(tensor.shape) for tensor in loaded.tensors.values())
    with bytes_bar("quantizing", whole, progress) as bar:

        def done(name: str, matrix: Matrix, error: float) -> None:
            matrices[name] = matrix
            parts[name] = _part(name, matrix, error)
            bar(4 * sum(part.parameters for part in parts.values()))

        quantize_calibrated(loaded, format, group_size, torch.from_numpy(tokens), done)
    _copy_companions(directory, making)
    _write(making, loaded.config, {name: matrices[name] for name in loaded.tensors})
    return [parts[name] for name in loaded.tensors]


def _copy_companions(directory: Path, making: Path) -> None:
    for pattern in _COMPANIONS:
        for file in directory.glob(pattern):
            if file.is_file():
                try:
                    content = file.read_bytes()
                except OSError as error:
                    raise CheckpointError(f"cannot read {file}: {reason(error)}") from error
                copy = making / file.relative_to(directory)
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(content)


def calibration_tokens(directory: Path, text: Path | None = None) -> np.ndarray:
    """A calibration text in the tokens of the model in `directory`.

    Args:
        text: a UTF-8 file; by default the text of the package.

    Returns:
        int64 `[B, T]`: sequences from all over the text, as many as calibration takes.

    Raises:
        ValueError: the file cannot be read, is no text or is shorter than one sequence.
        CheckpointError: the tokenizer cannot be read, or makes tokens that the model does not have.
    """
    import tokenizers

    config = load_config(directory)
    limit = min(_SEQUENCE_TOKENS, config.max_position_embeddings)
    try:
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{directory / 'tokenizer.json'} cannot be read ({reason(error)})") from error
    backend.no_truncation()
    backend.no_padding()
    text = text or _DEFAULT_TEXT
    ids = backend.encode(_text(text), add_special_tokens=False).ids
    if (most := max(ids, default=0)) >= config.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {directory} makes token {most} of {text}, and config.json knows 0 to "
            f"{config.vocab_size - 1}: tokenizer and weights do not belong together"
        )
    count = len(ids) // limit
    if count == 0:
        raise ValueError(
            f"{text} has {len(ids)} tokens: a calibration text needs {limit}, better {_CALIBRATION_TOKENS}"
        )
    sequences = np.array(ids[: count * limit], np.int64).reshape(count, limit)
    wanted = min(count, _CALIBRATION_TOKENS // limit)
    return sequences[np.arange(wanted) * count // wanted]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the calibration text {path} cannot be read ({reason(error)}): name a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the calibration text {path} is not UTF-8 ({reason(error)}): name a text file") from error


def _write(making: Path, config: ModelConfig, matrices: dict[str, Matrix]) -> None:
    kinds = [matrix for matrix in matrices.values() if isinstance(matrix, Int8Matrix | Int4Matrix)]
    main = max(kinds, key=lambda matrix: (isinstance(matrix, Int4Matrix), math.prod(matrix.shape)), default=None)
    if main is None:
        raise CheckpointError("the model has no matrix that can be quantized")
    fields: dict[str, Any] = {name: value for name, value in asdict(config).items() if value is not None}
    head = {"architectures": ["K3ForCausalLM"], "model_type": OWN, "dtype": "float32"}
    kind = "int4" if isinstance(main, Int4Matrix) else "int8"
    described = head | fields | {"quantization_config": quantization_config(kind, main.group_size)}
    text = json.dumps(described, indent=2, ensure_ascii=False) + "\n"
    (making / "config.json").write_text(text, encoding="utf-8")
    write_matrices(making / "model.safetensors", matrices)


def _part(name: str, matrix: Matrix, error: float) -> Part:
    form = "float32"
    if isinstance(matrix, Int8Matrix | Int4Matrix):
        group = "per row" if matrix.group_size is None else f"in groups of {matrix.group_size}"
        form = f"{'INT4' if isinstance(matrix, Int4Matrix) else 'INT8'} {group}"
    return Part(name, form, math.prod(matrix.shape), matrix.nbytes, error)
