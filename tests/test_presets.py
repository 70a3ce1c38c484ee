"""Every preset, built on the meta device and held against counts made by hand."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch.utils.flop_counter import FlopCounterMode

from openk3.config import PRESETS, ModelConfig, dial, preset
from openk3.model import K3Config, K3ForCausalLM
from openk3.model.cost import (
    active_parameters,
    flops_per_token,
    kv_bytes,
    kv_bytes_per_token,
    total_parameters,
)
from openk3.model.moe import Experts
from openk3.parameters import parameter_shapes


def by_hand(name: str) -> tuple[int, int, int, int]:
    """Total and active parameters, KV bytes per token at 2 bytes, FLOPs of a token that sees 32 positions.

    Written out number by number from the description of the design: embedding, head, then layers of attention
    (query, output, key, value), norms (two of the width, two of the head), router, shared and routed experts.
    """
    if name == "debug":  # 2 sparse layers, 4 query and 2 key/value heads of 16, 32 experts of 64 x 32, 2 chosen, tied
        attention, norms, expert = 64 * 64 * 2 + 64 * 32 * 2, 2 * 64 + 2 * 16, 3 * 64 * 32
        layers = 2 * (attention + norms + 64 * 32 + expert)
        total = 256 * 64 + layers + 2 * 32 * expert + 64
        active = 256 * 64 + layers + 2 * 2 * expert + 64
        flops = 2 * (256 * 64 + 2 * (attention + 64 * 32 + 3 * expert)) + 4 * 64 * 2 * 32
        return total, active, 2 * 2 * 2 * 16 * 2, flops
    if name == "nano":  # 6 layers of 576, 8 heads and 1 of 64, first dense 1536, 96 experts of 128, 2 chosen, tied
        attention, norms, expert = 576 * 512 * 2 + 576 * 64 * 2, 2 * 576 + 2 * 64, 3 * 576 * 128
        fixed = 6 * attention + 3 * 576 * 1536 + 5 * (576 * 96 + expert)
        total = 16384 * 576 + fixed + 6 * norms + 5 * 96 * expert + 576
        active = 16384 * 576 + fixed + 6 * norms + 5 * 2 * expert + 576
        return total, active, 2 * 6 * 64 * 2, 2 * (16384 * 576 + fixed + 5 * 2 * expert) + 4 * 512 * 6 * 32
    if name == "mini":  # 16 layers of 1536, 24 heads and 3 of 64, dense 4096, 256 experts of 256, 3 chosen, tied
        attention, norms, expert = 1536 * 1536 * 2 + 1536 * 192 * 2, 2 * 1536 + 2 * 64, 3 * 1536 * 256
        fixed = 16 * attention + 3 * 1536 * 4096 + 15 * (1536 * 256 + expert)
        total = 65536 * 1536 + fixed + 16 * norms + 15 * 256 * expert + 1536
        active = 65536 * 1536 + fixed + 16 * norms + 15 * 3 * expert + 1536
        return total, active, 2 * 16 * 192 * 2, 2 * (65536 * 1536 + fixed + 15 * 3 * expert) + 4 * 1536 * 16 * 32
    if name == "pro-256k":  # 60 layers of 5760, 48 heads and 6 of 128, dense 15360, 960 experts of 960, 12 chosen
        attention, norms, expert = 5760 * 6144 * 2 + 5760 * 768 * 2, 2 * 5760 + 2 * 128, 3 * 5760 * 960
        fixed = 60 * attention + 3 * 5760 * 15360 + 59 * (5760 * 960 + expert)
        total = 2 * 163840 * 5760 + fixed + 60 * norms + 59 * 960 * expert + 5760
        active = 2 * 163840 * 5760 + fixed + 60 * norms + 59 * 12 * expert + 5760
        return total, active, 2 * 60 * 768 * 2, 2 * (163840 * 5760 + fixed + 59 * 12 * expert) + 4 * 6144 * 60 * 32
    # pro-1m: 80 layers of 7680, 64 heads and 8 of 128, first dense 20480, 1280 experts of 1280, 16 chosen
    attention, norms, expert = 7680 * 8192 * 2 + 7680 * 1024 * 2, 2 * 7680 + 2 * 128, 3 * 7680 * 1280
    fixed = 80 * attention + 3 * 7680 * 20480 + 79 * (7680 * 1280 + expert)
    total = 2 * 163840 * 7680 + fixed + 80 * norms + 79 * 1280 * expert + 7680
    active = 2 * 163840 * 7680 + fixed + 80 * norms + 79 * 16 * expert + 7680
    return total, active, 2 * 80 * 1024 * 2, 2 * (163840 * 7680 + fixed + 79 * 16 * expert) + 4 * 8192 * 80 * 32


@pytest.mark.parametrize("name", PRESETS)
def test_preset_on_the_meta_device(name: str) -> None:
    config = preset(name)
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    total = sum(p.numel() for p in model.parameters())
    routed = sum(p.numel() for m in model.modules() if isinstance(m, Experts) for p in m.parameters())
    active = total - routed + routed * config.num_experts_per_tok // config.num_experts
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    assert parameter_shapes(config) == shapes
    print(
        f"{name}: {total:,} parameters, {active:,} active ({active / total:.1%}), "
        f"{kv_bytes_per_token(config):,.0f} KV bytes per token, {flops_per_token(config, 32):,} FLOPs per token"
    )
    assert (total, active) == (total_parameters(config), active_parameters(config))
    assert active / total <= 0.20
    assert (total, active, kv_bytes_per_token(config), flops_per_token(config, 32)) == by_hand(name)


def test_pro_1m_is_about_three_trillion_parameters() -> None:
    config = preset("pro-1m")
    assert 2.9e12 <= total_parameters(config) <= 3.1e12
    assert config.max_position_embeddings == 1_048_576
    assert kv_bytes(config, 1_048_576) < 0.3 * kv_bytes_per_token(config) * 1_048_576


def test_flops_equal_those_of_a_real_decode_step(debug_model: K3ForCausalLM) -> None:
    debug_model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            cache = debug_model(torch.arange(31)[None], use_cache=True).cache
            with FlopCounterMode(display=False) as counter:
                debug_model(torch.tensor([[7]]), cache=cache)
    finally:
        debug_model.set_attn_implementation("sdpa")
    assert counter.get_total_flops() == flops_per_token(debug_model.config, 32)


def test_windows_shrink_with_depth_and_global_layers_recur() -> None:
    config = preset("pro-1m")
    assert config.layer_windows is not None
    windows = [w for w in config.layer_windows if w is not None]
    assert windows == sorted(windows, reverse=True) and windows[0] >= 7 * windows[-1]
    assert [i for i, w in enumerate(config.layer_windows) if w is None] == list(range(3, 80, 4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: it must divide num_attention_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries: it needs one for each"),
        ({"layer_types": ["mamba"] * 6}, r"layer_types\[0\] is 'mamba'"),
        ({"layer_types": ["sliding_attention"] * 6}, r"layer_windows\[0\] is None: a sliding layer needs a window"),
        (
            {"num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok is 5: it must lie between 1 and num_experts",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type is 'dynamic': supported are"),
        ({"head_dim": 7}, "head_dim is 7: it must be even"),
        ({"vocab_size": 0}, "vocab_size is 0: it must be at least 1"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0: it must be a finite number above 0"),
        ({"embedding_multiplier": float("inf")}, "embedding_multiplier is inf: it must be a finite number above 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0: it must be a number above 0"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "factor is None: it must be a number above 0",
        ),
    ],
)
def test_contradictory_configs_are_refused(fields: dict[str, object], message: str) -> None:
    for kind in (ModelConfig, K3Config):
        with pytest.raises(ValueError, match=message):
            kind(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rms_norm_eps", "x"), ("hidden_act", "relu"), ("scoring_func", "x"), ("max_position_embeddings", "x")],
)
def test_values_of_the_wrong_type_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value!r}: it must be "):
        ModelConfig(**{field: value})
    with pytest.raises(StrictDataclassFieldValidationError, match=field):
        K3Config(**{field: value})


def test_unknown_preset_and_depth_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown preset 'huge': choose one of debug, nano"):
        preset("huge")
    with pytest.raises(ValueError, match="depth is 1: a model needs at least 2 layers"):
        dial(1)


def test_config_survives_json(debug_config: ModelConfig) -> None:
    theirs = K3Config.of(debug_config)
    assert K3Config.from_dict(theirs.to_dict()).to_dict() == theirs.to_dict()
    assert {f.name: getattr(theirs, f.name) for f in fields(ModelConfig)} == asdict(debug_config)
    assert K3Config.of(theirs) is theirs
