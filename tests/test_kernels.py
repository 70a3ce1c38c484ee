"""The CPU kernels against their definitions, and their promise: a row has the same bits whatever stands beside it."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import ByteTokenizer, random_tokens, small_model
from numba import njit
from numpy.typing import NDArray

import openk3.kernels
from conftest import random_model
from openk3.config import K3Config
from openk3.engine import Engine, EngineConfig
from openk3.engine.pages import pages_for
from openk3.engine.runner_cpu import CpuRunner
from openk3.engine.runner_torch import TorchRunner
from openk3.engine.scheduler import Chunk
from openk3.kernels import source_digest
from openk3.kernels.attention import TILE, attention, attention_oracle, scratch_size
from openk3.kernels.linear import BLOCK_ROWS, F32, INT8, linear, linear_oracle
from openk3.kernels.step import forward
from openk3.kernels.vectors import exp_and_sum, gelu_times, silu_times
from openk3.model import K3ForCausalLM
from openk3.weights.quantize import dequantize_int8, quantize_int8

Floats = NDArray[np.float32]
THREADS = 2
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Floats:
    return RNG.standard_normal(shape).astype(np.float32)


@njit
def compiled_exp(x, shift):
    return exp_and_sum(x.ctypes.data, np.int64(x.size), np.float32(shift))


@njit
def compiled_gate(x, up, gelu):
    if gelu:
        gelu_times(x.ctypes.data, up.ctypes.data, np.int64(x.size))
    else:
        silu_times(x.ctypes.data, up.ctypes.data, np.int64(x.size))


def test_exponential() -> None:
    x = np.concatenate([np.linspace(-87, 0, 4096), [-88, -1000, -np.inf] + [0.0] * 13]).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    total = compiled_exp(found := x.copy(), 0.0)
    assert np.allclose(found[:4096], expected[:4096], rtol=2e-7, atol=0)
    assert not found[4096:4099].any()
    assert total == pytest.approx(expected.sum(), rel=1e-6)


@pytest.mark.parametrize("gelu", [False, True])
def test_gates(gelu: bool) -> None:
    x, up = np.linspace(-100, 100, 4096).astype(np.float32), normal(4096)
    wide = torch.from_numpy(x).double()
    active = torch.nn.functional.gelu(wide, approximate="tanh") if gelu else torch.nn.functional.silu(wide)
    compiled_gate(found := x.copy(), up, gelu)
    assert np.allclose(found, active.numpy() * up, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("columns", [16, 64, 576, 1536])
def test_products_equal_the_definition_and_rows_keep_their_bits(columns: int) -> None:
    """99 and 130 rows leave tails in every tile; up to 40 activations cross every tile and the unpacked path."""
    plain, bias = normal(99, columns), normal(99)
    packed, scale = quantize_int8(normal(130, columns))
    ops = np.array(
        [
            [F32, plain.ctypes.data, 0, bias.ctypes.data, 99, columns],
            [INT8, packed.ctypes.data, scale.ctypes.data, 0, 130, columns],
        ],
        np.int64,
    )
    x, scratch = normal(40, columns), np.empty((THREADS, BLOCK_ROWS * columns), np.float32)
    linear(ops, x, whole := np.empty((40, 229), np.float32), scratch)
    expected = linear_oracle([plain, dequantize_int8(packed, scale)], [bias, None], x.astype(np.float64))
    assert np.allclose(whole, expected, rtol=1e-4, atol=1e-4)
    for count in range(1, 40):
        linear(ops, x[:count].copy(), part := np.empty((count, 229), np.float32), scratch[: 1 + count % 2])
        assert np.array_equal(part, whole[:count])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page_size"), [(9, 3, 64, 16), (4, 2, 16, 4), (4, 1, 80, 1)])
@pytest.mark.parametrize("window", [0, 50, 200])
def test_attention_equals_the_definition_however_it_is_tiled(
    heads: int, kv_heads: int, head_dim: int, page_size: int, window: int
) -> None:
    length = 300
    pages = RNG.permutation(pages_for(length, page_size) + 5)[: pages_for(length, page_size)]
    key, value = normal(kv_heads, length, head_dim), normal(kv_heads, length, head_dim)
    shape = (len(pages) + 5, kv_heads, page_size, head_dim)
    keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    for position in range(length):
        keys[pages[position // page_size], :, position % page_size] = key[:, position]
        values[pages[position // page_size], :, position % page_size] = value[:, position]
    qkv = normal(length, (heads + 2 * kv_heads) * head_dim)
    scratch = np.empty((THREADS, scratch_size(head_dim)), np.float32)
    scale = np.float32(head_dim**-0.5)
    results = []
    assert length % TILE == 0
    for tile in (1, TILE):
        tiles = np.array([(row, tile, row, 0) for row in range(0, length, tile)], np.int64)
        out = np.empty((length, heads * head_dim), np.float32)
        attention(qkv, heads, keys, values, tiles, pages[None], window, scale, out, scratch)
        results.append(out)
    assert np.array_equal(*results)
    for i in range(0, length, 23):
        query = qkv[i, : heads * head_dim].reshape(heads, head_dim).astype(np.float64)
        expected = attention_oracle(query, key[:, : i + 1], value[:, : i + 1], window, float(scale))
        assert np.allclose(results[0][i], expected.ravel(), rtol=1e-4, atol=1e-5)


class Known:
    """A request as far as a runner looks at it."""

    def __init__(self, tokens: list[int], pages: list[int]) -> None:
        self.tokens, self.pages = tokens, pages


KINDS = [(), ("window",), ("nope",), ("moe",), ("gemma",), ("window", "moe", "nope")]


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_the_step_equals_the_model(kinds: tuple[str, ...]) -> None:
    model = small_model(*kinds)
    runner = CpuRunner(model, 60, 4, weights="float32", num_threads=THREADS)
    request = Known(random_tokens(90), list(range(30, 5, -1)))
    found = runner.run([Chunk(request, 0, 90, True)])  # type: ignore[arg-type]
    with torch.no_grad():
        expected = model(torch.tensor([request.tokens])).logits[0, -1]
    assert (found[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_the_step_keeps_its_bits_in_any_batch_and_any_cut(kinds: tuple[str, ...], weights: str) -> None:
    model = small_model(*kinds)
    request = Known(random_tokens(90), list(range(30, 5, -1)))
    other = Known(random_tokens(50, seed=1), list(range(40, 55)))
    whole = CpuRunner(model, 60, 4, weights=weights, num_threads=2).run([Chunk(request, 0, 90, True)])  # type: ignore[arg-type]
    runner = CpuRunner(model, 60, 4, weights=weights, num_threads=1)  # type: ignore[arg-type]
    runner._keys.fill(np.nan)
    runner._values.fill(np.nan)
    cuts = [(0, 7), (7, 8), (8, 48), (48, 89), (89, 90)]
    for i, (start, end) in enumerate(cuts):
        mine = Chunk(request, start, end - start, end == 90)  # type: ignore[arg-type]
        found = runner.run([Chunk(other, 10 * i, 10, False), mine])  # type: ignore[arg-type]
    assert torch.equal(found, whole)


def test_int8_computes_with_the_rounded_weights() -> None:
    """INT8 kernels equal the float32 model whose matrices were rounded to INT8 and back."""
    model: K3ForCausalLM = copy.deepcopy(small_model())
    request = Known(random_tokens(40), list(range(10)))
    found = CpuRunner(model, 20, 4, weights="int8", num_threads=1).run([Chunk(request, 0, 40, True)])  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.copy_(torch.from_numpy(dequantize_int8(*quantize_int8(parameter.numpy()))))
        expected = model(torch.tensor([request.tokens])).logits[0, -1]
    assert (found[0] - expected).abs().max() < 1e-4


def test_int8_rounding_is_to_the_nearest_step_and_survives_zero_rows() -> None:
    weight = normal(5, 64)
    weight[2] = 0
    packed, scale = quantize_int8(weight)
    assert np.abs(dequantize_int8(packed, scale) - weight).max() <= np.abs(weight).max() / 254 * 1.0001
    assert not dequantize_int8(packed, scale)[2].any()


def engine(model: K3ForCausalLM, **settings: Any) -> Engine:
    return Engine(model, ByteTokenizer(), EngineConfig(page_size=4, num_pages=60, **settings))


def test_the_kernels_are_chosen_where_they_can_run() -> None:
    odd = random_model(K3Config(**(small_model().config.to_dict() | {"intermediate_size": 72})))
    assert isinstance(engine(small_model())._runner, CpuRunner)
    assert isinstance(engine(small_model(), runner="torch")._runner, TorchRunner)
    assert isinstance(engine(odd)._runner, TorchRunner)
    assert isinstance(engine(copy.deepcopy(small_model()).to(torch.bfloat16))._runner, TorchRunner)
    with pytest.raises(ValueError, match="runner is 'cpu', but intermediate_size is 72, not a multiple of 16: use"):
        engine(odd, runner="cpu")
    with pytest.raises(ValueError, match="weights is 'int8': only the CPU kernels have that format, but interm"):
        engine(odd, weights="int8")
    with pytest.raises(ValueError, match="weights is 'int8': only the CPU kernels have that format, but runner is 't"):
        engine(small_model(), weights="int8", runner="torch")
    with pytest.raises(ValueError, match="weights is 'int3': it must be one of float32, int8"):
        EngineConfig(weights="int3")  # type: ignore[arg-type]


def test_compiled_code_belongs_to_the_state_of_all_sources(tmp_path: Path) -> None:
    """A kernel contains those it calls from other files, so a change in any file must lead to another directory."""
    sources = list(Path(openk3.kernels.__file__).parent.glob("*.py"))
    for kernel in (forward, linear, attention):
        assert source_digest(sources) in kernel._cache.cache_path
    copies = [Path(shutil.copy(source, tmp_path)) for source in sources]
    assert source_digest(copies) == source_digest(sources)
    for copied in copies:
        content = copied.read_text()
        copied.write_text(content + "\n")
        assert source_digest(copies) != source_digest(sources)
        copied.write_text(content)
