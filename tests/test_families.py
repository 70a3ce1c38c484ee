"""Every supported family: a tiny random Transformers model, saved, must give the same logits through our loader."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from openk3.config import FULL, SLIDING, preset
from openk3.model import K3ForCausalLM
from openk3.weights import CheckpointError, load_config, load_model
from openk3.weights.families import FAMILIES, to_model_config

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
MOE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOW = 7

T = transformers
CASES: dict[str, Callable[[], Any]] = {
    "llama": lambda: T.LlamaConfig(**TINY),
    "llama-biased": lambda: T.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-llama3": lambda: T.LlamaConfig(
        **TINY,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-linear": lambda: T.LlamaConfig(
        **TINY, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "llama-yarn": lambda: T.LlamaConfig(
        **TINY,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: T.MistralConfig(**TINY, sliding_window=WINDOW),
    "mistral-full": lambda: T.MistralConfig(**TINY, sliding_window=None),
    "qwen2": lambda: T.Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen2-window": lambda: T.Qwen2Config(**TINY, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": lambda: T.Qwen3Config(**TINY),
    "qwen3-biased-window": lambda: T.Qwen3Config(
        **TINY, attention_bias=True, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3_moe": lambda: T.Qwen3MoeConfig(**TINY, **MOE, norm_topk_prob=True),
    "qwen3_moe-mixed": lambda: T.Qwen3MoeConfig(
        **TINY, **MOE, norm_topk_prob=False, mlp_only_layers=[0], use_sliding_window=True, sliding_window=WINDOW
    ),
    "mixtral": lambda: T.MixtralConfig(**TINY, num_local_experts=5, num_experts_per_tok=2),
    "mixtral-window": lambda: T.MixtralConfig(
        **TINY, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "gemma3_text": lambda: T.Gemma3TextConfig(
        **TINY,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma3_text-linear": lambda: T.Gemma3TextConfig(
        **TINY,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}


def random_theirs(config: Any, seed: int = 0) -> Any:
    """A Transformers model whose every parameter matters: norms and biases away from one and zero."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.3, 1.2) if "norm" in name else parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 0.4 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model


def assert_same_logits(ours: K3ForCausalLM, theirs: Any, vocab: int = 101) -> None:
    """Several lengths (beyond every window), a batch, and padding on either side."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for length in (1, 2, 6, 7, 8, 40):
            ids = torch.randint(0, vocab, (2, length), generator=generator)
            torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-4, rtol=0)
        ids = torch.randint(0, vocab, (3, 20), generator=generator)
        for side in ("left", "right"):
            mask = torch.ones_like(ids)
            for row, padding in enumerate((0, 5, 13)):
                mask[row, :padding] = 0
            if side == "right":
                mask = mask.flip(1)
            positions = (mask.cumsum(1) - 1).clamp_min(0)
            got = ours(ids, attention_mask=mask, position_ids=positions).logits
            want = theirs(ids, attention_mask=mask, position_ids=positions).logits
            real = mask.bool()
            torch.testing.assert_close(got[real], want[real], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shards", ["single", "sharded"])
def test_logits_equal_transformers(case: str, shards: str, tmp_path: Path) -> None:
    theirs = random_theirs(CASES[case]())
    theirs.save_pretrained(tmp_path, max_shard_size="5GB" if shards == "single" else "60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shards == "sharded"
    ours = load_model(tmp_path)
    assert not ours.training
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("form", ["per expert", "stacked"])
def test_experts_in_either_form(case: str, form: str, tmp_path: Path) -> None:
    theirs = random_theirs(CASES[case]())
    theirs.save_pretrained(tmp_path, save_original_format=form == "per expert")
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(".experts.0." in name for name in names) == (form == "per expert")
    assert_same_logits(load_model(tmp_path), theirs)


def test_old_config_spellings(tmp_path: Path) -> None:
    """`rope_theta` beside a `rope_scaling` with `type`, as files from before Transformers 5 have it."""
    theirs = random_theirs(CASES["llama-linear"]())
    theirs.save_pretrained(tmp_path)
    edit_config(tmp_path, rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4.0})
    assert_same_logits(load_model(tmp_path), theirs)
    theirs = random_theirs(CASES["gemma3_text-linear"]())
    theirs.save_pretrained(tmp_path)
    edit_config(
        tmp_path,
        rope_parameters=None,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        layer_types=None,
        sliding_window_pattern=3,
    )
    assert_same_logits(load_model(tmp_path), theirs)


# Configurations as they are found: what is left out is the default of the family, and old spellings are understood.
SPARING: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    {"rope_scaling": None, "rope_theta": 10000, "attention_bias": True, "mlp_bias": True},
    {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 3, "num_hidden_layers": 5},
    {"sliding_window": 9, "eos_token_id": [1, 2], "bos_token_id": None, "tie_word_embeddings": True},
    {"num_local_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "mlp_only_layers": [0, 2]},
    {"sliding_window_pattern": 2, "rope_local_base_freq": 77.0, "query_pre_attn_scalar": 100, "decoder_sparse_step": 2},
    {"hidden_activation": "silu", "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3, "initializer_range": 0.1},
]
SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "initializer_range", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip


@pytest.mark.parametrize("kind", [name for name in FAMILIES if name != "gemma3"])
@pytest.mark.parametrize("given", SPARING, ids=lambda given: " ".join(given) or "nothing")
def test_configurations_mean_what_they_mean_to_transformers(kind: str, given: dict[str, Any]) -> None:
    theirs = transformers.AutoConfig.for_model(kind, **copy.deepcopy(given))
    ours = to_model_config({"model_type": kind, **given}, Path("config.json"))
    assert {name: getattr(ours, name) for name in SAME} == {name: getattr(theirs, name) for name in SAME}
    layers = range(theirs.num_hidden_layers)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.hidden_act == getattr(theirs, "hidden_activation", theirs.to_dict().get("hidden_act"))
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or [SLIDING if window and kind != "llama" else FULL] * len(layers)
    assert ours.layer_windows == [window if kinds[i] == SLIDING else None for i in layers]
    assert ours.layer_types is not None and ours.rope_parameters is not None
    for layer_type in ours.layer_types:
        rope = theirs.rope_parameters.get(layer_type, theirs.rope_parameters)
        assert ours.rope_parameters[layer_type] == rope
    bias = kind == "qwen2" or ("mi" not in kind and theirs.attention_bias)  # Mistral and Mixtral have none
    assert (ours.attention_bias, ours.mlp_bias) == (bias, kind == "llama" and theirs.mlp_bias)
    if "moe" in kind or kind == "mixtral":
        width = theirs.intermediate_size if kind == "mixtral" else theirs.moe_intermediate_size
        assert (ours.num_experts, ours.num_experts_per_tok) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert (ours.moe_intermediate_size, ours.norm_topk_prob) == (width, getattr(theirs, "norm_topk_prob", True))
    if kind == "gemma3_text":
        assert ours.query_pre_attn_scalar == theirs.query_pre_attn_scalar


@pytest.mark.parametrize("layout", ["model.language_model.", "language_model.model."])
def test_text_half_of_multimodal_gemma3(layout: str, tmp_path: Path) -> None:
    theirs = random_theirs(CASES["gemma3_text"]())
    theirs.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}
        )
    )
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {layout + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    tensors["vision_tower.embeddings.weight"] = torch.zeros(2)
    tensors["model.multi_modal_projector.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_logits(load_model(tmp_path), theirs)


def test_own_format_round_trip(debug_model: K3ForCausalLM, tmp_path: Path) -> None:
    debug_model.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    ids = torch.arange(60)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, debug_model(ids).logits)
    assert load_config(tmp_path) == preset("debug")


def test_head_that_is_not_tied_after_all(tmp_path: Path) -> None:
    """Some fine-tunes say the head is tied and store another one; Transformers believes the file."""
    theirs = random_theirs(CASES["llama"]())
    theirs.save_pretrained(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    assert_same_logits(load_model(tmp_path), theirs)


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight", "both"])
def test_tied_head_stored_under_either_name(kept: str, tmp_path: Path) -> None:
    theirs = random_theirs(CASES["qwen2"]())
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    matrix = tensors.pop("model.embed_tokens.weight")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if kept in (name, "both"):
            tensors[name] = matrix.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    ours = load_model(tmp_path)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_dtypes(stored: torch.dtype, tmp_path: Path) -> None:
    random_theirs(CASES["llama"]()).to(stored).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(load_model(tmp_path), theirs)
    half = load_model(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the memory map of this process")
def test_weights_stay_in_the_file(tmp_path: Path) -> None:
    """Loading allocates nothing for weights in the right dtype, and writing to them does not change the file."""
    random_theirs(CASES["llama"]()).save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    ours = load_model(tmp_path)
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [tuple(int(end, 16) for end in m[0].split("-")) for m in maps if m[-1].endswith("model.safetensors")]
    assert all(any(start <= p.data_ptr() < end for start, end in spans) for p in ours.parameters())
    with torch.no_grad():
        ours.model.norm.weight.fill_(3.0)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_generates_like_transformers(tmp_path: Path) -> None:
    theirs = random_theirs(CASES["gemma3_text"]())
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    ids = torch.tensor([[5, 17, 3]])
    arguments = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **arguments), theirs.generate(ids, **arguments))


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


REFUSED = [
    ({"model_type": "gpt2"}, "model_type 'gpt2': supported are llama, "),
    ({"model_type": None}, "model_type None: supported are llama, "),
    ({"hidden_act": "gelu"}, "sets hidden_act to 'gelu', which is not supported"),
    ({"quantization_config": {"quant_method": "gptq"}}, "weights quantized with 'gptq'"),
    ({"quantization_config": "gptq"}, "weights quantized with 'gptq'"),
    ({"model_type": ["llama"]}, "model_type ['llama']"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type to 'dynamic'"),
    (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 8,
            }
        },
        "rope_type to 'longrope'",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor to 0.5",
    ),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: it must lie between 1 and 2048"),
    ({"n_shared_experts": -1}, "n_shared_experts = -1: it must lie between 0 and"),
    ({"num_attention_heads": 0}, "num_attention_heads = 0: it must lie between 1 and"),
    ({"hidden_size": "big"}, "config.json is not a usable llama configuration"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refused_configs(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    CASES["llama"]().save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError) as raised:
        load_config(tmp_path)
    assert message in str(raised.value)
    assert str(tmp_path / "config.json") in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("option", ["final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"])
def test_refused_gemma_options(option: str, tmp_path: Path) -> None:
    CASES["gemma3_text"]().save_pretrained(tmp_path)
    edit_config(tmp_path, **{option: True if "use" in option else 30.0})
    with pytest.raises(CheckpointError, match=f"sets {option} to"):
        load_config(tmp_path)
