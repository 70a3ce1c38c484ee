"""The network by itself: Transformers' interfaces, fast paths against their oracles, windows and positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import random_model
from openk3.config import FULL, SLIDING, ModelConfig, dial, preset
from openk3.model import K3Config, K3ForCausalLM
from openk3.model.moe import run_experts_grouped, run_experts_loop


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_save_and_load_through_the_auto_classes(debug_model: K3ForCausalLM, tmp_path: Path) -> None:
    debug_model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), K3Config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, K3ForCausalLM)
    with torch.no_grad():
        assert torch.equal(loaded(tokens(2, 70)).logits, debug_model(tokens(2, 70)).logits)


def test_generate_with_a_cache_equals_recomputing_everything(debug_model: K3ForCausalLM) -> None:
    """60 + 20 tokens cross the window of 48, so Transformers' sliding caches are cropped on the way."""
    prompt = tokens(2, 60)
    with torch.no_grad():
        generated = debug_model.generate(prompt, max_new_tokens=20, do_sample=False)
        expected = prompt
        for _ in range(20):
            best = debug_model(expected).logits[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, best], dim=1)
    assert torch.equal(generated, expected)


def test_left_padding_changes_nothing(debug_model: K3ForCausalLM) -> None:
    short, padded = tokens(1, 50), torch.cat([torch.zeros(1, 13, dtype=torch.long), tokens(1, 50)], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :13] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = debug_model(short).logits
        found = debug_model(padded, attention_mask=mask, position_ids=positions).logits[:, 13:]
    assert (found - expected).abs().max() < 1e-4


def test_sdpa_equals_the_eager_oracle(debug_model: K3ForCausalLM) -> None:
    with torch.no_grad():
        fast = debug_model(tokens(2, 90)).logits
        debug_model.set_attn_implementation("eager")
        try:
            slow = debug_model(tokens(2, 90)).logits
        finally:
            debug_model.set_attn_implementation("sdpa")
    assert (fast - slow).abs().max() < 1e-4


def test_a_window_hides_exactly_what_is_outside() -> None:
    """One sliding layer of 8: changing a token moves its own output and the 7 after it, no others."""
    one_layer = {"num_hidden_layers": 1, "layer_types": [SLIDING], "layer_windows": [8], "mlp_layer_types": ["dense"]}
    model = random_model(replace(preset("debug"), **one_layer))
    before = tokens(1, 40)
    after = before.clone()
    after[0, 10] = (after[0, 10] + 1) % 256
    with torch.no_grad():
        moved = (model(before).logits != model(after).logits).any(-1)[0].nonzero().flatten().tolist()
    assert moved == list(range(10, 18))


def test_layers_without_positions_see_a_set() -> None:
    """Without rotary positions and windows the last token's output ignores the order of those before it."""
    one_layer = {"num_hidden_layers": 1, "layer_types": [FULL], "layer_windows": [None], "mlp_layer_types": ["sparse"]}
    model = random_model(replace(preset("debug"), **one_layer))
    prompt = tokens(1, 20)
    shuffled = torch.cat([prompt[:, :-1].flip(1), prompt[:, -1:]], dim=1)
    with torch.no_grad():
        difference = (model(prompt).logits[0, -1] - model(shuffled).logits[0, -1]).abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize("hidden_act", ["silu", "gelu_pytorch_tanh"])
def test_grouped_experts_equal_the_loop_in_value_and_gradient(hidden_act: str) -> None:
    generator = torch.Generator().manual_seed(1)
    E, D, width, N, C = 12, 32, 16, 50, 3
    x = torch.randn(N, D, generator=generator)
    gate_up = torch.randn(E, 2 * width, D, generator=generator) * D**-0.5
    down = torch.randn(E, D, width, generator=generator) * width**-0.5
    weights = torch.rand(N, C, generator=generator)
    # Experts 10 and 11 are chosen by nobody: an empty group must neither fail nor shift the others.
    chosen = torch.stack([torch.randperm(10, generator=generator)[:C] for _ in range(N)])
    results = []
    for run in (run_experts_loop, run_experts_grouped):
        leaves = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
        out = run(leaves[0], leaves[1], chosen, leaves[2], leaves[3], hidden_act)
        out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for loop, grouped in zip(*results, strict=True):
        assert loop is not None and grouped is not None
        assert torch.allclose(loop, grouped, rtol=1e-4, atol=1e-4)


def test_gradients_reach_every_parameter_and_a_step_lowers_the_loss() -> None:
    model = random_model(dial(3, vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_experts=8)).train()
    batch = tokens(4, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = model(batch, labels=batch).loss
        loss.backward()
        if not losses:
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_the_selection_bias_moves_the_choice_and_not_the_weights(debug_config: ModelConfig) -> None:
    router = random_model(debug_config).model.layers[0].mlp.gate
    x = torch.randn(20, debug_config.hidden_size)
    router.e_score_correction_bias.zero_()
    router.e_score_correction_bias[5] = 10.0
    logits, weights, chosen = router(x)
    assert (chosen == 5).any(-1).all()
    scores = logits.sigmoid().gather(-1, chosen)
    assert torch.allclose(weights, scores / scores.sum(-1, keepdim=True))


def test_router_logits_and_hidden_states_can_be_asked_for(debug_model: K3ForCausalLM) -> None:
    with torch.no_grad():
        out = debug_model.model(tokens(1, 9), output_hidden_states=True, output_router_logits=True)
    assert len(out.hidden_states) == 3
    assert [tuple(logits.shape) for logits in out.router_logits] == [(9, 32), (9, 32)]
