"""GGUF files of every supported architecture and tensor type become directories that Transformers and we agree on."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf
import torch
import transformers
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from test_families import assert_same_logits, random_theirs

from openk3.weights import CheckpointError, gguf_convert, load_model, resolve, store
from openk3.weights.gguf_convert import convert, converted
from openk3.weights.gguf_file import SUPPORTED_TYPES, open_gguf

KINDS = [kind.name for kind in SUPPORTED_TYPES]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENK3_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    return {name: random_theirs(tiny_gguf.config(name)) for name in tiny_gguf.ARCHITECTURES}


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory, theirs: dict[str, Any]) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    tiny_gguf.write(path, theirs["llama"])
    return path.read_bytes()


@pytest.mark.parametrize("architecture", tiny_gguf.ARCHITECTURES)
def test_there_and_back(architecture: str, theirs: dict[str, Any], tmp_path: Path) -> None:
    """In float32 nothing is lost: tensors, configuration and logits are those of the model the file was made from."""
    model = theirs[architecture]
    tiny_gguf.write(tmp_path / "m.gguf", model)
    directory = resolve(str(tmp_path / "m.gguf"))
    found = load_file(directory / "model.safetensors")
    wanted = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight" or "lm_head.weight" in found}
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-6 if architecture == "gemma3" else 0, rtol=0)
    ours, again = load_model(directory), transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert type(again) is type(model)
    assert again.config.rope_parameters == model.config.rope_parameters
    assert_same_logits(ours, model, vocab=300)
    assert_same_logits(ours, again, vocab=300)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_type_is_dequantized(kind: str, architecture: str, theirs: dict[str, Any], tmp_path: Path) -> None:
    written = tiny_gguf.write(tmp_path / "m.gguf", theirs[architecture], GGMLQuantizationType[kind])
    directory = converted(tmp_path / "m.gguf")
    found = load_file(directory / "model.safetensors")
    for ours, there in {
        "model.embed_tokens": "token_embd",
        "model.layers.1.self_attn.v_proj": "blk.1.attn_v",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    }.items():
        want = gguf.dequantize(*written[f"{there}.weight"])
        assert np.array_equal(found[f"{ours}.weight"].numpy(), want), ours
    queries = gguf.dequantize(*written["blk.0.attn_q.weight"])
    if architecture == "llama":  # `_reverse_permute_weights` of Transformers' GGUF reader
        queries = queries.reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    assert np.array_equal(found["model.layers.0.self_attn.q_proj.weight"].numpy(), queries)
    again = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    ids = torch.arange(30)[None] * 9
    with torch.no_grad():
        got, want = load_model(directory)(ids).logits, again(ids).logits
    assert torch.isfinite(want).all()
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_large_tensors_are_written_in_slices(
    theirs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", theirs["llama"], GGMLQuantizationType.Q8_0)
    whole = (converted(tmp_path / "m.gguf", "whole") / "model.safetensors").read_bytes()
    monkeypatch.setattr(gguf_convert, "_SLICE_VALUES", 7 * 256)
    assert (converted(tmp_path / "m.gguf", "sliced") / "model.safetensors").read_bytes() == whole


def test_files_of_the_directory(theirs: dict[str, Any], tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", theirs["llama"])
    directory = converted(tmp_path / "m.gguf")
    assert sorted(p.name for p in directory.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 261, "eos_token_id": [262]}
    assert json.loads((directory / "config.json").read_text())["rms_norm_eps"] == 1e-5


# --- the cache ------------------------------------------------------------------------------------------------------


def test_converted_once_and_again_when_the_file_changes(
    theirs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    tiny_gguf.write(file, theirs["llama"])
    first = converted(file)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "open_gguf", lambda path: pytest.fail("opened again"))
        assert converted(file) == first
    tiny_gguf.write(file, theirs["qwen2"])
    second = converted(file)
    assert second != first
    assert json.loads((second / "config.json").read_text())["model_type"] == "qwen2"


def test_two_at_once_convert_once(theirs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", theirs["llama"])
    calls, results = [], []

    def counted(*args: Any) -> None:
        calls.append(args)
        convert(*args)

    monkeypatch.setattr(gguf_convert, "convert", counted)
    threads = [threading.Thread(target=lambda: results.append(converted(tmp_path / "m.gguf"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(results) == 4
    assert len(set(results)) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from openk3.weights import gguf_convert

real = gguf_convert._dequantized

def dying(plan, progress):
    for i, piece in enumerate(real(plan, progress)):
        if i == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield piece

gguf_convert._dequantized = dying
gguf_convert.converted(Path(sys.argv[1]))
"""


def test_killed_conversion_leaves_nothing_that_counts(home: Path, theirs: dict[str, Any], tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", theirs["llama"])
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "m.gguf")], check=False)
    assert killed.returncode == -9
    left = list((home / "models").iterdir())
    assert len(left) == 1
    assert left[0].name.startswith(".making-")
    directory = converted(tmp_path / "m.gguf")
    assert list((home / "models").iterdir()) == [directory]
    load_model(directory)


def test_failed_conversion_leaves_nothing(home: Path, theirs: dict[str, Any], tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", theirs["llama"], drop=("output_norm.weight",))
    with pytest.raises(CheckpointError, match=r"lacks the tensor output_norm.weight"):
        converted(tmp_path / "m.gguf")
    assert list((home / "models").iterdir()) == []


def test_no_disk_space(theirs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", theirs["llama"])
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"no disk space for converting m.gguf: it needs .* MB below .* 1.0 kB"):
        converted(tmp_path / "m.gguf")


def test_disk_fills_up_on_the_way(
    home: Path, theirs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", theirs["llama"])

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_convert, "write_float32", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device; make room, or set OPENK3_HOME"):
        converted(tmp_path / "m.gguf")
    assert list((home / "models").iterdir()) == []


# --- what is refused ------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"drop": ("blk.1.ffn_up.weight",)}, "lacks the tensor blk.1.ffn_up.weight"),
    ("qwen2", {"drop": ("blk.0.attn_k.bias",)}, "lacks the tensor blk.0.attn_k.bias"),
    (
        "llama",
        {"tensors": {"blk.0.attn_k.weight": np.zeros((64, 256), np.float32)}},
        "has blk.0.attn_k.weight of shape [64, 256] where its metadata ask for [128, 256]",
    ),
    ("qwen3", {"tensors": {"blk.0.ssm_a": np.zeros(4, np.float32)}}, "holds 1 tensors that the architecture qwen3"),
    (
        "llama",
        {"tensors": {"rope_freqs.weight": np.linspace(1, 8, 32, dtype=np.float32)}},
        "by a table (rope_freqs.weight) that is not Llama 3.1's",
    ),
    ("llama", {"metadata": {"general.architecture": "mamba"}}, "has the architecture 'mamba': GGUF files of llama"),
    ("llama", {"metadata": {"llama.block_count": None}}, "has llama.block_count = None: a single positive number"),
    ("llama", {"metadata": {"llama.block_count": "two"}}, "has llama.block_count = 'two': a single positive number"),
    ("llama", {"metadata": {"llama.block_count": 2.5}}, "has llama.block_count = 2.5: a whole number is needed"),
    ("llama", {"metadata": {"llama.block_count": 2**31 - 1}}, "claims 2147483647 layers and holds"),
    ("llama", {"metadata": {"llama.attention.head_count": [4, 4]}}, "has llama.attention.head_count = [4, 4]"),
    ("llama", {"metadata": {"llama.rope.dimension_count": 32}}, "llama.rope.dimension_count = 32 with heads of 64"),
    ("llama", {"metadata": {"llama.expert_count": 8}}, "sets llama.expert_count, which is not supported"),
    ("gemma3", {"metadata": {"gemma3.final_logit_softcapping": 30.0}}, "sets gemma3.final_logit_softcapping"),
    ("qwen2", {"metadata": {"qwen2.rope.scaling.type": "longrope"}}, "qwen2.rope.scaling.type = 'longrope'"),
    ("llama", {"metadata": {"split.count": 3}}, "is one of 3 pieces: join them with llama-gguf-split --merge"),
    ("llama", {"metadata": {"tokenizer.ggml.tokens": None}}, "holds no tokenizer (tokenizer.ggml.tokens)"),
    ("llama", {"metadata": {"tokenizer.ggml.merges": None}}, "has no usable tokenizer.ggml.merges"),
    ("llama", {"metadata": {"tokenizer.ggml.merges": ["he"]}}, "has no usable tokenizer.ggml.merges"),
    ("llama", {"metadata": {"tokenizer.ggml.merges": ["q xyz"]}}, "holds a damaged tokenizer"),
    ("llama", {"metadata": {"tokenizer.ggml.pre": "novel"}}, "splits text by the rule 'novel' (tokenizer.ggml.pre)"),
    ("llama", {"metadata": {"tokenizer.ggml.model": "bert"}}, "has a tokenizer of the kind 'bert'"),
    ("llama", {"metadata": {"tokenizer.ggml.token_type": [1, 1]}}, "has 300 tokens, 2 token types and 300 scores"),
    ("llama", {"metadata": {"tokenizer.ggml.eos_token_id": 300}}, "tokenizer.ggml.eos_token_id = 300 with 300 tokens"),
    ("llama", {"metadata": {"tokenizer.ggml.tokens": ["a"] * 301}}, "has 301 tokens and 300 embeddings"),
]


@pytest.mark.parametrize(("architecture", "changes", "message"), REFUSED)
def test_refused(
    architecture: str, changes: dict[str, Any], message: str, theirs: dict[str, Any], tmp_path: Path
) -> None:
    tiny_gguf.write(tmp_path / "m.gguf", theirs[architecture], **changes)
    expect_error(tmp_path / "m.gguf", message)


def test_unsupported_type_is_named(theirs: dict[str, Any], tmp_path: Path) -> None:
    blocks = (np.zeros((300, 84), np.uint8), GGMLQuantizationType.Q2_K)
    real = tiny_gguf.quantized
    tiny_gguf.quantized = lambda v, k: blocks if v.shape[0] == 300 else real(v, k)
    try:
        tiny_gguf.write(tmp_path / "m.gguf", theirs["llama"])
    finally:
        tiny_gguf.quantized = real
    expect_error(tmp_path / "m.gguf", "stores tensor token_embd.weight as Q2_K: supported are F32, F16, BF16, Q8_0")


def expect_error(path: Path, message: str = "") -> None:
    """Exactly one clear sentence, about this file."""
    with pytest.raises(CheckpointError) as raised:
        converted(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


# --- damage ---------------------------------------------------------------------------------------------------------

HEADER = b"GGUF" + struct.pack("<I", 3)


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


DAMAGED = {
    "empty": (b"", "damaged GGUF file|cannot read|not a GGUF file"),
    "short": (b"GGUF", "is truncated"),
    "other magic": (b"PK\x03\x04" + bytes(60), "is not a GGUF file"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 1, 1), "is GGUF version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "is GGUF version 50331648"),
    "2^60 tensors": (HEADER + struct.pack("<QQ", 2**60, 0) + bytes(100), "claims 1152921504606846976 tensors"),
    "2^60 keys": (HEADER + struct.pack("<QQ", 0, 2**60) + bytes(100), "claims 1152921504606846976 metadata keys"),
    "2^60 characters": (HEADER + struct.pack("<QQQ", 0, 1, 2**60) + bytes(100), "is truncated"),
    "2^60 numbers": (
        HEADER + struct.pack("<QQ", 0, 1) + key("a", 9, struct.pack("<IQ", 0, 2**60)),
        "claims 1152921504606846976 entries in arrays up to a",
    ),
    "5M numbers in 100 bytes": (
        HEADER + struct.pack("<QQ", 0, 1) + key("a", 9, struct.pack("<IQ", 0, 5 * 10**6)) + bytes(100),
        "is truncated",
    ),
    "nested arrays": (
        HEADER + struct.pack("<QQ", 0, 1) + key("a", 9, struct.pack("<IQ", 9, 1)) + bytes(100),
        "a has a value of type 9",
    ),
    "unknown value type": (HEADER + struct.pack("<QQ", 0, 1) + key("a", 77, bytes(8)), "a has a value of type 77"),
    "alignment 0": (
        HEADER + struct.pack("<QQ", 0, 1) + key("general.alignment", 4, struct.pack("<I", 0)),
        "general.alignment is 0",
    ),
    "9 dimensions": (
        HEADER + struct.pack("<QQ", 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 9) + bytes(200),
        "tensor t has 9 dimensions",
    ),
    "2^62 values": (
        HEADER
        + struct.pack("<QQ", 1, 0)
        + struct.pack("<Q", 1)
        + b"t"
        + struct.pack("<IQQIQ", 2, 2**31, 2**31, 0, 0)
        + bytes(200),
        "is truncated: tensor t ends at byte",
    ),
    "the same key twice": (
        HEADER + struct.pack("<QQ", 0, 2) + key("a", 0, b"1") * 2 + bytes(64),
        "is a damaged GGUF file",
    ),
    "no architecture": (HEADER + struct.pack("<QQ", 0, 1) + key("a", 0, b"1") + bytes(64), "no general.architecture"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_hostile_headers(case: str, tmp_path: Path) -> None:
    content, message = DAMAGED[case]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        converted(tmp_path / "m.gguf")
    assert "m.gguf" in str(raised.value)


def test_truncated_anywhere(whole_file: bytes, tmp_path: Path) -> None:
    for share in (0.001, 0.01, 0.05, 0.1, 0.3, 0.7, 0.999):
        (tmp_path / "m.gguf").write_bytes(whole_file[: int(len(whole_file) * share)])
        expect_error(tmp_path / "m.gguf", "truncated")


def test_flipped_bytes_never_surprise(whole_file: bytes, tmp_path: Path) -> None:
    """Whatever byte of the header is damaged, the file is read or refused with a sentence."""
    header = whole_file.index(b"token_embd.weight") + 400
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole_file)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[rng.randrange(header)] = rng.choice((0, 1, 0x20, 0x7F, 0x80, 0xFF))
        (tmp_path / "m.gguf").write_bytes(damaged)
        try:
            file = open_gguf(tmp_path / "m.gguf")
            gguf_convert.hf_config(file)
            gguf_convert.targets(file, gguf_convert.hf_config(file))
            (tmp_path / "out").mkdir(exist_ok=True)
            gguf_convert.write_tokenizer(file, tmp_path / "out", 128)
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 30


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no.gguf does not exist or cannot be read"):
        converted(tmp_path / "no.gguf")
