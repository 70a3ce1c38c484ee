"""Damaged, incomplete and foreign checkpoint directories: each is refused with one sentence that names the matter."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import MOE, TINY, assert_same_logits, random_theirs

from openk3.weights import CheckpointError, load_config, load_model, resolve


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A single-file and a sharded checkpoint, not to be written to."""
    root = tmp_path_factory.mktemp("whole")
    model = random_theirs(transformers.LlamaConfig(**TINY))
    model.save_pretrained(root / "single")
    model.save_pretrained(root / "sharded", max_shard_size="60KB")
    random_theirs(transformers.Qwen3MoeConfig(**TINY, **MOE)).save_pretrained(root / "moe")
    return {name: root / name for name in ("single", "sharded", "moe")}


@pytest.fixture
def single(whole: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(whole["single"], tmp_path / "m")


@pytest.fixture
def sharded(whole: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(whole["sharded"], tmp_path / "m")


def expect_error(directory: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        load_model(directory)
    message = str(raised.value)
    for word in (str(directory), *words):
        assert word in message, message
    assert "\n" not in message


def edit(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_missing_tensors_are_named(single: Path) -> None:
    edit(single, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    expect_error(single, "lacks the tensor model.layers.1.mlp.up_proj.weight, which its config.json asks for")


def test_many_missing_tensors_are_counted(single: Path) -> None:
    edit(single, lambda t: [t.pop(name) for name in list(t) if ".layers.2." in name])
    expect_error(single, "lacks the tensors model.layers.2.input_layernorm.weight, ", " and 5 more")


def test_missing_expert_is_named(whole: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(whole["moe"], tmp_path / "m")
    edit(directory, lambda t: t.pop("model.layers.2.mlp.experts.3.up_proj.weight"))
    expect_error(directory, "lacks the tensor model.layers.2.mlp.experts.3.up_proj.weight")


def test_surplus_expert_is_named(whole: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(whole["moe"], tmp_path / "m")
    extra = torch.zeros(24, 64)
    edit(directory, lambda t: t.update({"model.layers.2.mlp.experts.5.up_proj.weight": extra}))
    expect_error(directory, "holds the tensor model.layers.2.mlp.experts.5.up_proj.weight, which a qwen3_moe model")


def test_expert_of_wrong_shape_is_named(whole: dict[str, Path], tmp_path: Path) -> None:
    directory = shutil.copytree(whole["moe"], tmp_path / "m")
    edit(directory, lambda t: t.update({"model.layers.0.mlp.experts.1.down_proj.weight": torch.zeros(64, 23)}))
    expect_error(directory, "model.layers.0.mlp.experts.1.down_proj.weight of shape [64, 23]", "asks for [64, 24]")


def test_unexpected_tensor_is_named(single: Path) -> None:
    edit(single, lambda t: t.update({"model.layers.0.self_attn.q_proj.lora_A": torch.zeros(2)}))
    expect_error(single, "holds the tensor model.layers.0.self_attn.q_proj.lora_A, which a llama model")


def test_unused_rotary_tables_of_old_files_are_ignored(single: Path) -> None:
    edit(single, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load_model(single)


def test_wrong_shape_is_named(single: Path) -> None:
    edit(single, lambda t: t.update({"model.norm.weight": torch.zeros(65)}))
    expect_error(single, "model.safetensors has model.norm.weight of shape [65] where config.json asks for [64]")


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantized_tensor_is_named(dtype: torch.dtype, name: str, single: Path) -> None:
    edit(single, lambda t: t.update({"model.norm.weight": torch.zeros(64).to(dtype)}))
    expect_error(single, f"stores model.norm.weight as {name}: unquantized floating-point weights are needed")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_truncated_safetensors(share: float, single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    expect_error(single, "model.safetensors is damaged or truncated (", "): download it again")


def test_header_of_absurd_length(single: Path) -> None:
    (single / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + bytes(100))
    expect_error(single, "model.safetensors is damaged or truncated")


def test_flipped_header_bytes_never_surprise(single: Path) -> None:
    file = single / "model.safetensors"
    content = file.read_bytes()
    length = 8 + struct.unpack_from("<Q", content)[0]
    rng = random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        damaged[rng.randrange(length)] = rng.choice((0, 0x22, 0x30, 0x39, 0x7D, 0xFF))
        file.write_bytes(damaged)
        try:
            load_model(single)
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_missing_shard_is_named(sharded: Path) -> None:
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.unlink()
    expect_error(sharded, f"{victim} is missing, which model.safetensors.index.json names")


def test_truncated_shard_is_named(sharded: Path) -> None:
    victim = sorted(sharded.glob("model-*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-4])
    expect_error(sharded, f"{victim} is damaged or truncated")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "model.safetensors.index.json is not valid JSON ("),
        ("[]", "model.safetensors.index.json holds no JSON object"),
        ("{}", "model.safetensors.index.json has no weight_map"),
        (
            '{"weight_map": {"a": "../../x.safetensors"}}',
            "names '../../x.safetensors': shards must be safetensors files",
        ),
        ('{"weight_map": {"a": ""}}', "names ''"),
        ('{"weight_map": {"a": ".."}}', "names '..'"),
        ('{"weight_map": {"a": "model.bin"}}', "names 'model.bin'"),
    ],
)
def test_damaged_index(index: str, message: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    expect_error(sharded, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON ("),
        (b"{'a': 1}", "is not valid JSON ("),
        (b"\xff\xfe", "is not valid JSON ("),
        (b"[" * 100_000, "is not valid JSON ("),
        (b"null", "holds no JSON object"),
        (b" " * (65 * 2**20), "is larger than 67108864 bytes"),
    ],
)
def test_damaged_config(content: bytes, message: str, single: Path) -> None:
    (single / "config.json").write_bytes(content)
    expect_error(single, f"config.json {message}")
    with pytest.raises(CheckpointError):
        load_config(single)


def test_damaged_generation_config(single: Path) -> None:
    (single / "generation_config.json").write_text('{"max_new_tokens": -5}')
    expect_error(single, "generation_config.json is not usable: `max_new_tokens` must be greater than 0")


def test_missing_config(single: Path) -> None:
    (single / "config.json").unlink()
    expect_error(single, "config.json is missing: give a directory that holds a whole checkpoint")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_read(name: str, single: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    (single / "model.safetensors").unlink()
    (single / name).write_bytes(pickle.dumps(Bomb()))
    expect_error(single, f"{name} is a pickle, which can run code when it is read: convert the checkpoint to")
    assert not (tmp_path / "exploded").exists()


def test_no_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    expect_error(single, "holds neither model.safetensors nor model.safetensors.index.json")


def test_config_of_another_size(single: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    expect_error(single, "lacks the tensors model.layers.3.")
    (single / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    expect_error(single, "holds the tensors model.layers.2.")
    (single / "config.json").write_text(json.dumps(config | {"vocab_size": 2**31}))
    expect_error(single, "of shape [101, 64] where config.json asks for [2147483648, 64]")


def test_code_beside_the_weights_is_not_run(single: Path, tmp_path: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (single / "config.json").write_text(json.dumps(config))
    (single / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    load_model(single)
    assert not (tmp_path / "ran").exists()


def test_not_a_directory(tmp_path: Path) -> None:
    for call in (load_model, load_config):
        with pytest.raises(CheckpointError, match="is not a directory: give one in Hugging Face layout"):
            call(tmp_path / "none")


def test_resolve_takes_directories_as_they_are(single: Path) -> None:
    assert resolve(str(single)) == single
    assert_same_logits(load_model(single), transformers.AutoModelForCausalLM.from_pretrained(single))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm", "unknown model 'smollm': did you mean smollm2-135m? A directory, a .gguf file or a Hugging Face id"),
        ("Qwen2.5-Coder", "did you mean qwen2.5-coder-0.5b?"),
        ("zzz", "unknown model 'zzz': known names are smollm2-135m, qwen2.5-coder-0.5b. A directory"),
        ("./none", "'./none' does not exist: check the path"),
        ("/no/such/dir", "'/no/such/dir' does not exist: check the path"),
        ("none.gguf", "'none.gguf' does not exist: check the path"),
        ("", "the name of the model is empty"),
        ("  ", "the name of the model is empty"),
        ("a/b/c/d", "unknown model 'a/b/c/d'"),
    ],
)
def test_unresolvable_names(name: str, message: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        resolve(name)
    assert message in str(raised.value)


def test_single_files_other_than_gguf(single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.safetensors is a single file: give its directory"):
        resolve(str(single / "model.safetensors"))
