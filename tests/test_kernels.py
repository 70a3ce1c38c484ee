"""The CPU kernels against their definitions, and their promise: a row has the same bits whatever stands beside it."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import ByteTokenizer, random_tokens, small_model
from numba import njit
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray

import openk3.kernels
from conftest import random_model
from openk3.engine import Engine, EngineConfig
from openk3.engine.groups import LayerGroup
from openk3.engine.pages import pages_for
from openk3.engine.program import matrix_op
from openk3.engine.runner_cpu import CpuRunner
from openk3.engine.runner_torch import TorchRunner
from openk3.engine.scheduler import Chunk
from openk3.kernels import source_digest
from openk3.kernels.amx import tile_configs
from openk3.kernels.attention import (
    CACHE_SIZE,
    CHUNK,
    PART_EXTRA,
    TILE_SIZE,
    attention,
    attention_oracle,
    join_parts,
    queries_per_tile,
    scratch_size,
)
from openk3.kernels.integers import LARGEST, stats_size
from openk3.kernels.linear import linear, linear_oracle, quantize_rows, scratch_bytes
from openk3.kernels.step import take_part
from openk3.kernels.team import meet, new_team, take
from openk3.kernels.vectors import exponentiate, gelu_times, silu_times
from openk3.model import K3Config, K3ForCausalLM
from openk3.weights.formats import (
    Int8Matrix,
    Matrix,
    aligned,
    dequantize,
    pack_int8,
    quantize_int4,
    quantize_int8,
)
from openk3.weights.loaded import LoadedModel

Floats = NDArray[np.float32]
THREADS = 2
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Floats:
    return RNG.standard_normal(shape).astype(np.float32)


def by_threads(work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(t, ...)` in every thread of a team at once."""
    threads = [threading.Thread(target=work, args=(t, *arguments)) for t in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@njit
def compiled_exponentiate(x, begin, end, results):
    exponentiate(x.ctypes.data, np.int64(x.size), begin, end, results.ctypes.data, results.ctypes.data + 4)


@njit
def compiled_gate(x, up, gelu, out):
    if gelu:
        gelu_times(x.ctypes.data, up.ctypes.data, out.ctypes.data, np.int64(x.size))
    else:
        silu_times(x.ctypes.data, up.ctypes.data, out.ctypes.data, np.int64(x.size))


@njit(nogil=True)
def compiled_quantize(x, q, stats):
    quantize_rows(x, x.shape[1], 0, x.shape[0], q.ctypes.data, stats.ctypes.data)


@njit(nogil=True)
def compiled_linear(t, threads, team, ops, x, q, stats, out, scratches, config):
    linear(team, threads, ops, x, q.ctypes.data, stats.ctypes.data, out, scratches[t], config)


@njit(nogil=True)
def compiled_attention(
    t, threads, team, qkv, heads, cache, tiles, tables, window, scale, splits, out, parts, scratches
):
    attention(team, threads, qkv, heads, 0, cache, tiles, tables, window, scale, splits, out, parts, scratches[t])
    meet(team, threads)
    join_parts(team, threads, tiles, heads, window, cache[5], parts, out)


@njit(nogil=True)
def count_together(t, threads, team, phases, counts):
    """Every thread takes items of each phase and counts them; a phase must not begin before the last one is done."""
    for phase in range(phases):
        item = take(team, threads, 3)
        while item < 50:
            for i in range(item, min(50, item + 3)):
                counts[phase, i] += 1 if phase == 0 or counts[phase - 1, 49 - i] == 1 else 100
            item = take(team, threads, 3)
        meet(team, threads)


def test_a_team_shares_every_item_once_and_in_phases() -> None:
    counts = np.zeros((300, 50), np.int64)
    by_threads(count_together, THREADS, new_team(), len(counts), counts)
    assert (counts == 1).all()


def test_exponentials() -> None:
    x = np.concatenate([[-1000, -np.inf], np.linspace(-87, 0, 4096) + 3, [np.nan] * 14]).astype(np.float32)
    results = np.zeros(2, np.float32)
    compiled_exponentiate(found := x.copy(), 0, 4098, results)
    expected = np.exp((x[2:4098] - np.float32(3)).astype(np.float64))
    assert np.allclose(found[2:4098], expected, rtol=2e-7, atol=0)
    assert not found[:2].any()
    assert not found[4098:].any()
    assert results[0] == 3
    assert results[1] == pytest.approx(expected.sum(), rel=1e-6)


@pytest.mark.parametrize("gelu", [False, True])
def test_gates(gelu: bool) -> None:
    x, up = np.linspace(-100, 100, 4096).astype(np.float32), normal(4096)
    wide = torch.from_numpy(x).double()
    active = torch.nn.functional.gelu(wide, approximate="tanh") if gelu else torch.nn.functional.silu(wide)
    compiled_gate(x, up, gelu, found := np.empty_like(x))
    assert np.allclose(found, active.numpy() * up, rtol=2e-6, atol=2e-6)


def quantized(x: Floats) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
    """As the kernels quantize activations, with room for a whole tile of them."""
    rows, columns = len(x) + 16, x.shape[1]
    q, stats = aligned((rows * 2 * columns,), np.int8), aligned((rows * stats_size(columns),), np.int32)
    compiled_quantize(x, q, stats)
    return q, stats


def product(ops: NDArray[np.int64], x: Floats, widths: int, threads: int = 1) -> Floats:
    columns = x.shape[1]
    q, stats = quantized(x)
    scratches = aligned((threads, max(64, scratch_bytes(columns))), np.int8)
    out, team = np.full((len(x), widths), np.nan, np.float32), new_team()
    if threads == 1:
        compiled_linear(0, 1, team, ops, x, q, stats, out, scratches, tile_configs())
    else:
        by_threads(compiled_linear, threads, team, ops, x, q, stats, out, scratches, tile_configs())
    return out


def matrices(columns: int) -> list[Matrix]:
    """One of every form, some with rows that leave tails in every tile."""
    scale = (0.01 + RNG.random((48, columns // 32)) / 100).astype(np.float16)
    fine = pack_int8(RNG.integers(-127, 128, (48, columns)).astype(np.int8), scale) if columns % 32 == 0 else None
    groups = [quantize_int4(normal(80, columns), size) for size in (32, 64, 128) if columns % size == 0]
    return [normal(112, columns), quantize_int8(normal(176, columns)), *([fine] if fine else []), *groups]


@pytest.mark.parametrize("columns", [16, 64, 96, 576, 1536, 4096])
def test_products_equal_the_definition_and_rows_keep_their_bits(columns: int) -> None:
    """Up to 40 activations cross every kind of tile; 4096 columns cross the segments of 16-bit products."""
    kinds = matrices(columns)
    biases = [normal(m.shape[0]) if i % 2 else None for i, m in enumerate(kinds)]
    ops = np.array([matrix_op(m, b) for m, b in zip(kinds, biases, strict=True)], np.int64)
    x, width = normal(40, columns), sum(m.shape[0] for m in kinds)
    x[3, 5] = 30  # an outlier makes the steps of its row coarser, and nothing else
    whole = product(ops, x, width, THREADS)
    weights = [dequantize(m) for m in kinds]
    expected = linear_oracle(weights, biases, x.astype(np.float64))
    # Rounding an activation errs by a uniform part of a step; six standard deviations of what they add up to.
    step = np.abs(x).max(1, keepdims=True) / LARGEST
    sizes = np.concatenate([np.linalg.norm(w, axis=1) for w in weights])
    assert (np.abs(whole - expected) < 6 * step / 12**0.5 * sizes + 1e-4).all()
    for count in range(1, 40):
        assert np.array_equal(product(ops, x[:count].copy(), width), whole[:count])


def test_activations_are_quantized_to_15_bits() -> None:
    x = normal(7, 96)
    x[1] = 0
    x[2, 4] = np.nan
    x[3, 4] = np.inf
    x[4] *= 1e-20
    x[5] *= 1e20
    _, stats = quantized(x)
    stats = stats[: 7 * stats_size(96)].reshape(7, -1)
    scale = stats[:, 0].view(np.float32) if stats[:, 0].flags.c_contiguous else stats[:, 0].copy().view(np.float32)
    assert np.isnan(scale[[2, 3]]).all()
    assert scale[1] == 0
    for row in (0, 4, 5, 6):
        assert scale[row] == pytest.approx(np.abs(x[row]).max() / LARGEST, rel=1e-6)
        q = np.rint(x[row].astype(np.float64) / scale[row])
        assert np.abs(stats[row, 4:7] - q.reshape(3, 32).sum(1)).max() <= 2
    identity = quantize_int8(np.eye(96, dtype=np.float32))
    ops = np.array([matrix_op(identity, None)], np.int64)
    found = product(ops, x, 96)
    assert np.isnan(found[[2, 3]]).all()
    assert not found[1].any()
    for row in (0, 4, 5, 6):
        assert np.abs(found[row] - x[row]).max() <= np.abs(x[row]).max() / LARGEST


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page_size"), [(9, 3, 64, 16), (4, 2, 16, 4), (7, 1, 80, 1)])
@pytest.mark.parametrize("window", [0, 50, 200])
@pytest.mark.parametrize("half", [False, True])
def test_attention_equals_the_definition_however_it_is_tiled(
    heads: int, kv_heads: int, head_dim: int, page_size: int, window: int, half: bool
) -> None:
    """In tiles of a prompt and in single queries, whole and divided into parts."""
    length, kind = 300, np.float16 if half else np.float32
    count = pages_for(length, page_size)
    pages = RNG.permutation(count + 5)[:count].astype(np.int64)
    key, value = (normal(kv_heads, length, head_dim).astype(kind) for _ in range(2))
    keys = np.full((count + 21, kv_heads, head_dim, page_size), np.nan, kind)
    values = np.full((count + 5, kv_heads, page_size, head_dim), np.nan, kind)
    for position in range(length):
        keys[pages[position // page_size], :, :, position % page_size] = key[:, position]
        values[pages[position // page_size], :, position % page_size] = value[:, position]
    cache = [keys.ctypes.data, values.ctypes.data, count + 5, kv_heads, page_size, head_dim, half]
    assert len(cache) == CACHE_SIZE
    qkv, scale = normal(length, (heads + 2 * kv_heads) * head_dim), np.float32(head_dim**-0.5)
    results = []
    whole = queries_per_tile(heads, kv_heads)
    for queries, splits in ((whole, 1), (whole, 3), (1, 1), (1, 3)):
        rows = range(0, length, queries)
        tiles = np.zeros((len(rows), TILE_SIZE), np.int64)
        for tile, row in zip(tiles, rows, strict=True):
            tile[:] = row, min(queries, length - row), row, 0, -1 if splits == 1 else row * (length // CHUNK + 1)
        parts = np.empty((length * (length // CHUNK + 1), heads, head_dim + PART_EXTRA), np.float32)
        out = np.empty((length, heads * head_dim), np.float32)
        scratches = np.zeros((THREADS, scratch_size(head_dim)), np.float32)
        by_threads(
            compiled_attention, THREADS, new_team(), qkv, heads, np.array(cache, np.int64), tiles, pages[None], window,
            scale, splits, out, parts, scratches,
        )  # fmt: skip
        results.append(out)
    for result in results[1:]:
        assert np.array_equal(result, results[0])
    for i in range(0, length, 23):
        query = qkv[i, : heads * head_dim].reshape(heads, head_dim).astype(np.float64)
        wide_key, wide_value = key[:, : i + 1].astype(np.float64), value[:, : i + 1].astype(np.float64)
        expected = attention_oracle(query, wide_key, wide_value, window, float(scale))
        assert np.allclose(results[0][i], expected.ravel(), rtol=1e-4, atol=1e-5)


class Known:
    """A request as far as a runner looks at it."""

    def __init__(self, tokens: list[int], pages: list[int]) -> None:
        self.tokens, self.pages = tokens, [pages]


def runner(model: LoadedModel, kv_format: Any = "float32", threads: int = THREADS) -> CpuRunner:
    groups = [LayerGroup(tuple(range(model.config.num_hidden_layers)), None)]
    return CpuRunner(model.config, model.tensors, groups, 60, 4, kv_format=kv_format, num_threads=threads)


KINDS = [(), ("window",), ("nope",), ("moe",), ("gemma",), ("window", "moe", "nope")]
TOLERANCES = {("float32", "float32"): 1e-5, ("int8", "float32"): 1e-3, ("int4", "float16"): 4e-3}


@pytest.mark.parametrize(("weights", "kv_format"), TOLERANCES, ids="-".join)
@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_the_step_equals_the_model_in_any_batch_and_any_cut(
    kinds: tuple[str, ...], weights: Any, kv_format: str
) -> None:
    """The model is float32 arithmetic on the dequantized weights; a row's bits do not depend on what is beside it."""
    loaded = LoadedModel.from_torch(small_model(*kinds)).quantized(weights)
    request = Known(random_tokens(90), list(range(30, 5, -1)))
    other = Known(random_tokens(50, seed=1), list(range(40, 55)))
    whole = runner(loaded, kv_format).run([Chunk(request, 0, 90, True)])  # type: ignore[arg-type]
    with torch.no_grad():
        expected = loaded.to_torch()(torch.tensor([request.tokens])).logits[0, -1].numpy()
    assert np.abs(whole[0] - expected).max() < TOLERANCES[weights, kv_format]
    alone = runner(loaded, kv_format, threads=1)
    alone._keys.fill(np.nan)
    alone._values.fill(np.nan)
    cuts = [(0, 7), (7, 8), (8, 48), (48, 89), (89, 90)]
    for i, (start, end) in enumerate(cuts):
        mine = Chunk(request, start, end - start, end == 90)  # type: ignore[arg-type]
        found = alone.run([Chunk(other, 10 * i, 10, False), mine])  # type: ignore[arg-type]
    assert np.array_equal(found, whole)


def test_a_vocabulary_need_not_fill_whole_blocks() -> None:
    settings = small_model().config.to_dict() | {"vocab_size": 261, "tie_word_embeddings": False}
    model = random_model(K3Config(**settings))
    loaded = LoadedModel.from_torch(model).quantized("int8")
    assert isinstance(loaded.tensors["lm_head.weight"], Int8Matrix)
    request = Known([1, 2, 3], [0])
    found = runner(loaded).run([Chunk(request, 0, 3, True)])  # type: ignore[arg-type]
    with torch.no_grad():
        expected = loaded.to_torch()(torch.tensor([request.tokens])).logits[0, -1].numpy()
    assert found.shape == (1, 261)
    assert np.abs(found[0] - expected).max() < 1e-3


def test_threads_end_with_their_runner() -> None:
    before = threading.active_count()
    made = runner(LoadedModel.from_torch(small_model()), threads=3)
    assert threading.active_count() == before + 2
    members = [thread for thread in threading.enumerate() if thread.name.startswith("kernels-")][-2:]
    del made
    for member in members:
        member.join(10)
        assert not member.is_alive()


OTHER_CPUS = {
    "AVX2": ("znver3", "+avx2,+fma,+f16c,+bmi2,+sse4.2"),
    "AVX-512": ("skylake-avx512", "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx2,+fma,+f16c,+bmi2,+sse4.2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_CPUS)
def test_code_for_other_cpus_passes_the_same_tests(kind: str) -> None:
    """Compile for a lesser CPU than this one; half a minute each."""
    cpu, features = OTHER_CPUS[kind]
    if kind not in ("AVX2", openk3.kernels.describe()) and "AVX-512" not in openk3.kernels.describe():
        pytest.skip(f"this CPU cannot run {kind} code")
    settings = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    chosen = ["-k", "products or activations or step or attention", "-n0", "-q", __file__]
    done = subprocess.run([sys.executable, "-m", "pytest", *chosen], env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


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
    with pytest.raises(ValueError, match="weights is 'int3': it must be one of auto, float32, int8, int4"):
        EngineConfig(weights="int3")  # type: ignore[arg-type]


def test_compiled_code_belongs_to_the_state_of_all_sources(tmp_path: Path) -> None:
    """A kernel contains those it calls from other files, so a change in any file must lead to another directory."""
    sources = list(Path(openk3.kernels.__file__).parent.glob("*.py"))
    assert source_digest(sources) in take_part._cache.cache_path
    copies = [Path(shutil.copy(source, tmp_path)) for source in sources]
    assert source_digest(copies) == source_digest(sources)
    for copied in copies:
        content = copied.read_text()
        copied.write_text(content + "\n")
        assert source_digest(copies) != source_digest(sources)
        copied.write_text(content)


def test_no_two_compiled_functions_share_a_name() -> None:
    """Code from the disk and code compiled now would else call each other's."""
    modules = [module for name, module in sys.modules.items() if name.startswith("openk3.kernels.")]
    found = {
        id(thing): thing.py_func
        for module in modules
        for thing in vars(module).values()
        if isinstance(thing, Dispatcher)
    }
    names = [(function.__module__, function.__qualname__) for function in found.values()]
    assert len(names) > 40
    assert len(set(names)) == len(names)
