"""Quantized checkpoints: calibration beats rounding, every kind of model goes through, directories are made whole."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest
import tiny_gguf
import torch
from engine_support import random_tokens, small_model
from gguf import GGMLQuantizationType
from serving import byte_tokenizer
from test_families import random_theirs
from torch import Tensor
from transformers import AutoTokenizer

from openk3.chat.tokenizer import Tokenizer
from openk3.cli import main
from openk3.parameters import EMBEDDING, HEAD, is_matrix
from openk3.weights import CheckpointError, load_model, load_weights, resolve, store
from openk3.weights.calibrated import quantize_calibrated
from openk3.weights.formats import Int4Matrix, Int8Matrix, Matrix, dequantize, quantize_int4, quantize_int8
from openk3.weights.gptq import INT4, INT8, gptq
from openk3.weights.loaded import LoadedModel
from openk3.weights.quantize import Outcome, calibration_tokens, quantize

Format = Literal["int8", "int4"]
KINDS = [(), ("moe", "window"), ("gemma",)]


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> None:
    if "smollm2_dir" not in request.fixturenames:
        monkeypatch.setenv("OPENK3_HOME", str(tmp_path_factory.mktemp("home")))


def directory_of(path: Path, *kinds: str) -> Path:
    """A checkpoint of a tiny random model whose tokens are bytes."""
    small_model(*kinds).save_pretrained(path)
    byte_tokenizer(path)
    return path


def text_file(path: Path, tokens: int = 2048) -> Path:
    rng = np.random.default_rng(0)
    path.write_text("".join(chr(i) for i in rng.integers(33, 127, tokens)))
    return path


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    return text_file(tmp_path / "text.txt")


def correlated(samples: int, columns: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(samples, columns) @ torch.randn(columns, columns) + 3 * torch.randn(samples, 1)


# One matrix


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_calibrated_int4_beats_rounding_to_nearest(group_size: int) -> None:
    x, weight = correlated(600, 256), torch.randn(48, 256)
    found = gptq(weight, x.T @ x, INT4, group_size)
    rounded = torch.from_numpy(dequantize(quantize_int4(weight.numpy(), group_size)))
    ours, theirs = ((x @ (w - weight).T).square().sum() for w in (found.dequantize(), rounded))
    assert ours < 0.5 * theirs
    assert found.q.min() >= 0 and found.q.max() <= 15
    assert torch.equal(found.scale, found.scale.half().float())


def test_calibrated_int8_beats_rounding_to_nearest() -> None:
    x, weight = correlated(600, 256), torch.randn(48, 256)
    found = gptq(weight, x.T @ x, INT8, 256)
    rounded = torch.from_numpy(dequantize(quantize_int8(weight.numpy())))
    ours, theirs = ((x @ (w - weight).T).square().sum() for w in (found.dequantize(), rounded))
    assert ours < 0.5 * theirs
    assert not found.minimum.any() and found.q.abs().max() <= 127


def test_without_inputs_all_columns_count_alike() -> None:
    """So the search alone is at work, which may not lose against the plain grid."""
    weight = torch.randn(48, 64)
    found = gptq(weight, torch.zeros(64, 64), INT4, 32).dequantize()
    rounded = torch.from_numpy(dequantize(quantize_int4(weight.numpy(), 32)))
    assert (found - weight).square().sum() < (rounded - weight).square().sum()


def test_constant_and_zero_columns() -> None:
    weight = torch.zeros(16, 64)
    weight[1], weight[2, ::2] = 0.25, 1.0
    x = torch.randn(100, 64)
    x[:, 5] = 0
    assert torch.allclose(gptq(weight, x.T @ x, INT4, 32).dequantize(), weight, atol=1e-3)
    assert torch.allclose(gptq(weight, x.T @ x, INT8, 64).dequantize(), weight, atol=1e-6)


# One model


def in_memory(loaded: LoadedModel, format: Format, group_size: int | None, tokens_BT: Tensor) -> LoadedModel:
    found: dict[str, Matrix] = {}
    quantize_calibrated(loaded, format, group_size, tokens_BT, lambda name, matrix, _: found.update({name: matrix}))
    return LoadedModel(loaded.config, found)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("format", ["int4", "int8"])
def test_every_kind_of_model(kinds: tuple[str, ...], format: Format) -> None:
    loaded = LoadedModel.from_torch(small_model(*kinds))
    tokens = torch.tensor([random_tokens(256, seed) for seed in range(12)])
    found = in_memory(loaded, format, 32, tokens[:8])
    assert found.tensors.keys() == loaded.tensors.keys()
    for name, tensor in found.tensors.items():
        matrix = is_matrix(name, tensor.shape)
        assert isinstance(tensor, (Int4Matrix if format == "int4" else Int8Matrix) if matrix else np.ndarray), name
        if not matrix:
            assert np.array_equal(tensor, loaded.tensors[name])
    with torch.no_grad():
        want, ours, theirs = (m.to_torch()(tokens[8:]).logits for m in (loaded, found, loaded.quantized(format)))
    # Random networks have hardly any correlated activations, so that there is little to gain in INT8.
    limit = 0.9 if format == "int4" else 1.1
    assert (ours - want).square().mean() < limit * (theirs - want).square().mean()


def test_experts_without_tokens_are_rounded() -> None:
    """One token reaches two of 32 experts; the others are not worse than rounded to nearest."""
    loaded = LoadedModel.from_torch(small_model("moe"))
    found = in_memory(loaded, "int4", 32, torch.tensor([[7]]))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weight = loaded.tensors[name]
    assert isinstance(weight, np.ndarray)
    ours, theirs = (
        np.square(dequantize(m) - weight).sum((1, 2)) for m in (found.tensors[name], quantize_int4(weight, 32))
    )
    assert (ours < theirs).sum() >= 30


def test_groups_that_do_not_fit() -> None:
    """64 columns have no group of 128, and 32 none of 64."""
    found = in_memory(
        LoadedModel.from_torch(small_model("moe")), "int4", 128, torch.tensor([random_tokens(64)])
    ).tensors
    sizes = {name: m.group_size for name, m in found.items() if isinstance(m, Int4Matrix)}
    assert sizes.pop("model.layers.0.mlp.experts.down_proj") == sizes.pop("model.layers.1.mlp.experts.down_proj") == 32
    assert sizes.pop("model.layers.0.mlp.shared_experts.down_proj.weight") == 32
    assert sizes.pop("model.layers.1.mlp.shared_experts.down_proj.weight") == 32
    assert set(sizes.values()) == {64}


@pytest.mark.parametrize("tied", [False, True])
def test_the_recipe_has_coarser_groups_in_attention_and_lookups(tied: bool) -> None:
    model = LoadedModel.from_torch(small_model())
    if tied:
        tensors = {name: tensor for name, tensor in model.tensors.items() if name != HEAD}
        model = LoadedModel(replace(model.config, tie_word_embeddings=True), tensors)
    found = in_memory(model, "int4", None, torch.tensor([random_tokens(64)])).tensors
    for name, matrix in found.items():
        attention = "self_attn" in name and "v_proj" not in name
        coarse = attention or (name == EMBEDDING and not tied)
        assert not isinstance(matrix, Int4Matrix) or matrix.group_size == (64 if coarse else 32), name


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("model.norm.weight", np.inf, r"model\.norm\.weight: the weights are not all finite"),
        (
            "model.layers.0.mlp.up_proj.weight",
            np.nan,
            r"what model\.layers\.0\.mlp\.down_proj\.weight multiplies is not",
        ),
        (
            "model.layers.1.input_layernorm.weight",
            1e30,
            r"what model\.layers\.1\.self_attn\.q_proj\.weight multiplies is",
        ),
        ("model.norm.weight", 1e30, r"what lm_head\.weight multiplies is not finite, or too large for float32"),
        ("model.embed_tokens.weight", 1e30, r"model\.embed_tokens\.weight: the weights are not all finite, or are too"),
    ],
)
def test_damaged_weights_are_named(parameter: str, value: float, message: str) -> None:
    loaded = LoadedModel.from_torch(small_model())
    damaged = np.full(loaded.tensors[parameter].shape, value, np.float32)
    with pytest.raises(CheckpointError, match=message):
        in_memory(
            LoadedModel(loaded.config, loaded.tensors | {parameter: damaged}),
            "int4",
            32,
            torch.tensor([random_tokens(64)]),
        )


def test_damaged_weights_are_named_when_they_are_rounded() -> None:
    loaded = LoadedModel.from_torch(small_model())
    damaged = loaded.tensors | {HEAD: np.full(loaded.tensors[HEAD].shape, np.nan, np.float32)}
    for format in ("int4", "int8"):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: the weights are not all finite"):
            LoadedModel(loaded.config, damaged).quantized(format)


# A checkpoint


@pytest.mark.parametrize("kinds", KINDS)
def test_checkpoint_loads_as_what_it_is(kinds: tuple[str, ...], tmp_path: Path, calibration: Path) -> None:
    source = directory_of(tmp_path / "source", *kinds)
    (source / "LICENSE").write_text("Public domain.")
    (source / "pytorch_model.bin").write_text("of no use")
    outcome = quantize(str(source), group_size=32, calibration=calibration, output=tmp_path / "out", progress=False)
    assert outcome.format == "int4" and outcome.directory == tmp_path / "out"
    names = {path.name for path in outcome.directory.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "LICENSE",
    } <= names and "pytorch_model.bin" not in names
    described = json.loads((outcome.directory / "config.json").read_text())
    assert described["quantization_config"] == {
        "quant_method": "openk3", "version": 1, "format": "int4", "group_size": 32,
    }  # fmt: skip
    loaded = load_weights(outcome.directory)
    assert loaded.format == "int4" and loaded.config == load_weights(source).config
    assert {part.name for part in outcome.parts} == loaded.tensors.keys()
    assert outcome.nbytes >= sum(part.nbytes for part in outcome.parts)
    assert outcome.parameters == sum(tensor.size for tensor in load_weights(source).tensors.values())
    assert all(0 < part.error < 0.2 for part in outcome.parts if part.form != "float32")
    with torch.no_grad():
        logits = load_model(outcome.directory)(torch.tensor([random_tokens(32)])).logits
    assert torch.isfinite(logits).all()


def test_int8_has_no_groups(tmp_path: Path, calibration: Path) -> None:
    source = directory_of(tmp_path / "source")
    outcome = quantize(str(source), format="int8", calibration=calibration, output=tmp_path / "out", progress=False)
    described = json.loads((outcome.directory / "config.json").read_text())["quantization_config"]
    assert described["format"] == "int8" and described["group_size"] is None
    assert {part.form for part in outcome.parts} == {"float32", "INT8 per row"}


def test_the_text_of_the_package_is_the_default(tmp_path: Path) -> None:
    source = directory_of(tmp_path / "source")
    tokens = calibration_tokens(source)
    assert tokens.shape == (32, 512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "exact"}, "does not come as a GGUF file of Q4_0, Q4_1 and Q8_0 alone"),
        ({"format": "int8", "group_size": 32}, "the group size belongs to the format int4"),
        ({"group_size": 48}, "it must be one of 32, 64, 128"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = directory_of(tmp_path / "source")
    with pytest.raises(ValueError, match=message):
        quantize(str(source), output=tmp_path / "out", progress=False, **options)
    assert not (tmp_path / "out").exists()


def test_calibration_texts_that_do_not_do(tmp_path: Path) -> None:
    source = directory_of(tmp_path / "source")
    short, binary = text_file(tmp_path / "short.txt", 100), tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe" * 2000)
    for file, message in (
        (short, "has 100 tokens"),
        (binary, "is not UTF-8"),
        (tmp_path / "none", "cannot be read .*No such file"),
        (tmp_path, "cannot be read .*Is a directory"),
        (Path("/proc/self/mem"), "cannot be read .*Input/output error"),
    ):
        with pytest.raises(ValueError, match=f"{re.escape(str(file))} {message}"):
            calibration_tokens(source, file)
        with pytest.raises(ValueError, match=message):
            quantize(str(source), calibration=file, output=tmp_path / "out", progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "short.txt", "binary"}


def test_tokens_that_the_model_does_not_have(
    tmp_path: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = directory_of(tmp_path / "source") / "tokenizer.json"
    described = json.loads(file.read_text())
    described["model"]["vocab"]["e"] = 5000
    file.write_text(json.dumps(described))
    monkeypatch.setattr(sys, "argv", ["k3", "quantize", str(file.parent), "--calibration", str(calibration)])
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and printed.count("\n") == 1
    assert "makes token 5000" in printed and "knows 0 to 255" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"source", "text.txt"}


def test_the_default_name_keeps_the_dots(tmp_path: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = directory_of(tmp_path / "model-0.5b")
    monkeypatch.chdir(tmp_path)
    outcome = quantize(str(source), format="int8", calibration=calibration, progress=False)
    assert outcome.directory == tmp_path / "model-0.5b-int8"


def test_left_overs_of_another_output_stay(tmp_path: Path) -> None:
    other, mine = tmp_path / ".making-q-int8-abcdefgh", tmp_path / ".making-q-abcdefgh"
    other.mkdir()
    mine.mkdir()
    with store.new_directory(tmp_path / "q"):
        assert other.exists()
        assert not mine.exists()


def test_outputs_that_are_there(tmp_path: Path, calibration: Path) -> None:
    source, output = directory_of(tmp_path / "source"), tmp_path / "out"
    output.mkdir()
    (output / "mine").write_text("keep")
    for there in (output, calibration):
        with pytest.raises(ValueError, match="is there already"):
            quantize(str(source), calibration=calibration, output=there, progress=False)
    (output / "mine").unlink()
    assert quantize(str(source), calibration=calibration, output=output, progress=False).nbytes


@pytest.mark.parametrize("target", ["nowhere", "empty"])
def test_an_output_that_is_a_link(target: str, tmp_path: Path, calibration: Path) -> None:
    """A directory cannot be renamed over one, which would show after all the work."""
    source, link = directory_of(tmp_path / "source"), tmp_path / "link"
    (tmp_path / "empty").mkdir()
    link.symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match=f"{link} is a symbolic link: choose another --output, or remove it"):
        quantize(str(source), calibration=calibration, output=link, progress=False)


def test_an_output_that_cannot_be_written(tmp_path: Path, calibration: Path) -> None:
    source = directory_of(tmp_path / "source")
    for output, message in (
        (Path("/proc/out"), "cannot write /proc/out: No such file or directory; make room, or choose a writable --out"),
        (Path("/proc/a/out"), "cannot create /proc/a: No such file or directory; choose a writable --output"),
        (Path("~no-such-user/out"), "the output ~no-such-user/out cannot be looked up: Could not determine home"),
        (calibration / "out", f"cannot create {calibration}: File exists; choose a writable --output"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize(str(source), calibration=calibration, output=output, progress=False)


def test_everything_of_the_tokenizer_is_copied_and_nothing_that_can_run_code(tmp_path: Path, calibration: Path) -> None:
    source = directory_of(tmp_path / "source")
    theirs = AutoTokenizer.from_pretrained(source)
    theirs.chat_template = {"default": "plain", "tool_use": "tools"}
    theirs.save_pretrained(source)
    for name in ("tokenizer.pkl", "tokenizer.bin", "pytorch_model.bin", "tokenization_own.py", "model.pt"):
        (source / name).write_text("of no use")
    outcome = quantize(str(source), format="int8", calibration=calibration, output=tmp_path / "out", progress=False)
    made = {str(path.relative_to(outcome.directory)) for path in outcome.directory.rglob("*") if path.is_file()}
    assert made == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
    }  # fmt: skip
    assert AutoTokenizer.from_pretrained(outcome.directory).chat_template == theirs.chat_template
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    mine = Tokenizer.from_directory(outcome.directory)
    assert mine.render_chat([{"role": "user", "content": "x"}], tools) == "tools"


def test_a_companion_that_cannot_be_read(tmp_path: Path, calibration: Path) -> None:
    source = directory_of(tmp_path / "source")
    (source / "README.md").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=f"cannot read {source / 'README.md'}: .*Input/output error"):
        quantize(str(source), calibration=calibration, output=tmp_path / "out", progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "text.txt"}


DYING = """
import os, signal, sys
from pathlib import Path
from openk3.weights import quantize

def dying(path, matrices):
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

quantize.write_matrices = dying
quantize.quantize(sys.argv[1], calibration=Path(sys.argv[2]), output=Path(sys.argv[3]), progress=False)
"""


def test_a_killed_process_leaves_no_checkpoint(tmp_path: Path, calibration: Path) -> None:
    source, output = directory_of(tmp_path / "source"), tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", DYING, str(source), str(calibration), str(output)], check=False)
    assert killed.returncode == -signal.SIGKILL and not output.exists()
    quantize(str(source), calibration=calibration, output=output, progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "text.txt", "out"}


# GGUF files as they are


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "llama-biased", "gemma3"])
def test_gguf_is_taken_over_bit_for_bit(kind: str, architecture: str, tmp_path: Path, calibration: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tiny_gguf.write(file, random_theirs(tiny_gguf.config(architecture)), GGMLQuantizationType[kind])
    outcome = quantize(str(file), output=tmp_path / "out", progress=False)
    assert outcome.format == "exact"
    assert_exact(outcome, resolve(str(file), progress=False))
    form = "INT8 in groups of 32" if kind == "Q8_0" else "INT4 in groups of 32"
    assert {part.form for part in outcome.parts} == {"float32", form}
    with pytest.raises(ValueError, match="changes nothing about the format exact"):
        quantize(str(file), calibration=calibration, output=tmp_path / "other", progress=False)


def assert_exact(outcome: Outcome, converted: Path) -> None:
    ours, theirs = load_weights(outcome.directory), load_weights(converted)
    assert ours.config == theirs.config and ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert np.array_equal(dequantize(tensor), dequantize(theirs.tensors[name])), name
    for file in converted.iterdir():
        mine = outcome.directory / file.name
        if file.name not in ("config.json", "model.safetensors"):
            read = json.loads if file.suffix == ".json" else str
            assert read(mine.read_text()) == read(file.read_text())


def test_gguf_of_other_types(tmp_path: Path, calibration: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tiny_gguf.write(file, random_theirs(tiny_gguf.config("llama")), GGMLQuantizationType.Q5_0)
    with pytest.raises(CheckpointError, match="choose --format int4 or int8"):
        quantize(str(file), format="exact", output=tmp_path / "out", progress=False)
    assert quantize(str(file), calibration=calibration, output=tmp_path / "out", progress=False).format == "int4"


def test_gguf_with_a_damaged_scale(tmp_path: Path) -> None:
    file, raw = tmp_path / "tiny.gguf", gguf.quantize(np.ones((300, 256), np.float32), GGMLQuantizationType.Q4_0)
    raw[3, :2] = (0, 0x7C)  # infinity
    real = tiny_gguf.quantized

    def damaged(values: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, GGMLQuantizationType]:
        return (raw, kind) if values.shape[0] == 300 else real(values, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf, "quantized", damaged)
        tiny_gguf.write(file, random_theirs(tiny_gguf.config("llama")), GGMLQuantizationType.Q4_0)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight of the GGUF file is damaged"):
        quantize(str(file), output=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_default_model_is_taken_over_bit_for_bit(smollm2_dir: Path, tmp_path: Path) -> None:
    outcome = quantize("smollm2-135m", output=tmp_path / "out", progress=False)
    assert outcome.format == "exact"
    assert_exact(outcome, smollm2_dir)
    matrices = load_weights(outcome.directory).tensors
    assert isinstance(matrices[EMBEDDING], Int8Matrix) and HEAD not in matrices
