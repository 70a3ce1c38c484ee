"""What starts a model up: from a cold process to the first token nothing heavy is imported, and every form loads."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import GREEDY, generate, random_tokens, small_engine, small_model
from serving import debug_llm

from conftest import random_model
from openk3.config import preset
from openk3.engine import runner_cpu
from openk3.engine.compiled import compile_kernels
from openk3.engine.runner_cpu import CpuRunner
from openk3.engine.runner_torch import TorchRunner
from openk3.kernels import are_compiled
from openk3.weights import CheckpointError, LoadedModel, load_model, load_weights
from openk3.weights.formats import Int4Matrix, Int8Matrix, dequantize
from openk3.weights.quantized_file import quantization_config, write_matrices

HEAVY = ("torch", "transformers", "huggingface_hub", "gguf", "fastapi", "nicegui", "llguidance", "jsonschema")
LOADED_MODULES = f"print(sorted(sys.modules.keys() & {set(HEAVY)}))"


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", f"import sys\n{code}\n{LOADED_MODULES}", *arguments]
    return subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout


def test_the_first_token_needs_neither_torch_nor_transformers() -> None:
    code = """
import openk3
with openk3.load(sys.argv[1], progress=False) as llm:
    reply = llm.generate("Hello", temperature=0, max_tokens=1, ignore_eos=True)
    print(reply.usage.completion_tokens)
"""
    assert run(code, str(debug_llm().model_dir)) == "1\n[]\n"


def test_the_command_line_needs_neither() -> None:
    code = """
from openk3 import cli
sys.argv[:1] = ["k3", "generate", "--raw", "Hello", "-n", "1", "-t", "0", "--model"]
try:
    cli.main()
except SystemExit as end:
    assert not end.code
"""
    assert run(code, str(debug_llm().model_dir)).endswith("[]\n")


def test_compiling_ahead_leaves_compiled_kernels() -> None:
    compile_kernels()
    assert are_compiled()


def test_compiling_is_announced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    compile_kernels()
    assert not caplog.records
    monkeypatch.setattr(runner_cpu, "are_compiled", lambda: False)
    compile_kernels()
    assert caplog.messages == ["compiling the CPU kernels for this machine, once: up to a minute"]


def test_a_full_disk_does_not_keep_code_from_running(tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text(
        "from openk3.kernels.team import entry\n\n\n@entry\ndef double(x):\n    return 2 * x\n"
    )
    code = """
import resource, signal
sys.path.insert(0, sys.argv[1])
from doubling import double
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    double.__wrapped__(1)
    print("the disk is not full")
except OSError:
    pass
sys.stdout.write(str(double(4)))
"""
    assert run(code, str(tmp_path)).startswith("8")


# The forms of a model


@pytest.mark.parametrize("kinds", [(), ("moe", "window"), ("gemma", "nope")], ids="+".join)
def test_the_same_model_in_both_forms(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """PyTorch's model, saved, read without PyTorch, and made PyTorch's again: the same numbers and tokens."""
    model = small_model(*kinds)
    model.save_pretrained(tmp_path)
    read, shared = load_weights(tmp_path), LoadedModel.from_torch(model)
    assert read.tensors.keys() == shared.tensors.keys()
    for name, tensor in read.tensors.items():
        assert np.array_equal(dequantize(tensor), dequantize(shared.tensors[name]))
    again = read.to_torch()
    assert not again.training
    for name, parameter in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter)
    expected = generate(small_engine(model), random_tokens(30)).token_ids
    for form in (read, shared, again):
        for runner in ("cpu", "torch"):
            assert generate(small_engine(form, runner=runner), random_tokens(30)).token_ids == expected


def test_from_torch_shares_memory() -> None:
    model = small_model("moe")
    tensors = LoadedModel.from_torch(model).tensors
    for name, parameter in model.named_parameters():
        assert dequantize(tensors[name]).ctypes.data == parameter.data_ptr()


def test_a_dtype_may_be_asked_for() -> None:
    model = LoadedModel.from_torch(small_model("moe")).to_torch(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_when_it_is_loaded(weights: Any) -> None:
    """Both runners compute with the same rounded numbers; norms, biases and routers stay exact."""
    exact = LoadedModel.from_torch(small_model("moe"))
    rounded = exact.quantized(weights)
    assert (exact.format, rounded.format) == ("float32", weights)
    assert rounded.quantized(weights) is rounded
    for name, tensor in rounded.tensors.items():
        if "norm" in name or name.endswith("mlp.gate.weight"):
            assert np.array_equal(tensor, exact.tensors[name])
            assert not np.shares_memory(tensor, exact.tensors[name])  # so that the float32 file can go
        else:
            assert isinstance(tensor, Int4Matrix if weights == "int4" else Int8Matrix)
            error = np.abs(dequantize(tensor) - dequantize(exact.tensors[name])).max()
            assert 0 < error < (0.1 if weights == "int8" else 0.6)
    back = rounded.quantized("float32")
    assert back.format == "float32"
    expected = generate(small_engine(back), random_tokens(20), GREEDY).token_ids
    for form in (exact, small_model("moe")):
        engine = small_engine(form, weights=weights, runner="torch")
        assert isinstance(engine._runner, TorchRunner)
        assert generate(engine, random_tokens(20), GREEDY).token_ids == expected
        assert isinstance(small_engine(form, weights=weights)._runner, CpuRunner)


def test_a_model_the_kernels_cannot_run_goes_to_torch(tmp_path: Path) -> None:
    model = random_model(replace(preset("debug"), intermediate_size=72))
    model.save_pretrained(tmp_path)
    loaded = load_weights(tmp_path)
    assert isinstance(small_engine(loaded)._runner, TorchRunner)
    with pytest.raises(ValueError, match="runner is 'cpu', but intermediate_size is 72, not a multiple of 16: use"):
        small_engine(loaded, runner="cpu")


def test_stored_types_reach_torch_unchanged(tmp_path: Path) -> None:
    model = LoadedModel.from_torch(small_model()).to_torch(torch.bfloat16)
    model.save_pretrained(tmp_path)
    same = load_model(tmp_path, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert torch.equal(same.get_parameter(name), parameter)
        assert np.array_equal(dequantize(load_weights(tmp_path).tensors[name]), parameter.float().detach().numpy())


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_checkpoints(weights: Any, tmp_path: Path) -> None:
    model = LoadedModel.from_torch(small_model("moe")).quantized(weights)
    model.config.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization_config(weights, 32)})
    )
    write_matrices(tmp_path / "model.safetensors", model.tensors)
    read = load_weights(tmp_path)
    assert read.format == weights
    for name, tensor in read.tensors.items():
        assert type(tensor) is type(model.tensors[name])
        assert np.array_equal(dequantize(tensor), dequantize(model.tensors[name]))
    for name, parameter in load_model(tmp_path).named_parameters():
        assert np.array_equal(parameter.detach().numpy(), dequantize(model.tensors[name]))
    expected = generate(small_engine(model), random_tokens(20)).token_ids
    assert generate(small_engine(read), random_tokens(20)).token_ids == expected

    broken = dict(model.tensors)
    broken["model.layers.0.self_attn.q_proj.weight.scale"] = np.ones(3, np.float32)
    broken["model.layers.0.self_attn.q_proj.weight"] = np.ones((64, 64), np.int8)  # type: ignore[assignment]
    write_matrices(tmp_path / "model.safetensors", broken)
    with pytest.raises(CheckpointError, match=r"has a damaged tensor model.layers.0.self_attn.q_proj.weight \("):
        load_weights(tmp_path)
    del broken["model.layers.0.self_attn.q_proj.weight.scale"]
    write_matrices(tmp_path / "model.safetensors", broken)
    with pytest.raises(CheckpointError, match=r"stores model.layers.0.self_attn.q_proj.weight as I8: unquantized"):
        load_weights(tmp_path)
