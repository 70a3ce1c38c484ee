"""What the kernels are told of a step, against the same in NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_support import random_tokens, small_model
from numba import njit
from numpy.typing import NDArray

from openk3.engine import runner_cpu
from openk3.engine.groups import GIVEN_BACK, LayerGroup, readable
from openk3.engine.program import matrix_op
from openk3.engine.runner_cpu import CpuRunner
from openk3.engine.scheduler import Chunk
from openk3.kernels import job
from openk3.kernels.attention import CHUNK, TILE_SIZE
from openk3.kernels.plan import ITEMS_WANTED, MOST_SPLITS, embed
from openk3.rotary import inverse_frequencies, turns
from openk3.weights.formats import dequantize, pack_int8, quantize_int4, quantize_int8
from openk3.weights.loaded import LoadedModel

RNG = np.random.default_rng(0)
PAGE = 4


@njit
def compiled_embed(op, tokens, multiplier, out):
    for m in range(tokens.size):
        embed(op, tokens[m], multiplier, out[m])


def weights(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("multiplier", [1, 7.5])
@pytest.mark.parametrize(
    "matrix",
    [
        weights(35, 64),
        quantize_int8(weights(35, 64)),
        pack_int8(RNG.integers(-128, 128, (35, 64)).astype(np.int8), RNG.random((35, 2)).astype(np.float16)),
        quantize_int4(weights(35, 128), 32),
        quantize_int4(weights(35, 128), 64),
    ],
    ids=["float32", "int8", "int8 groups", "int4 of 32", "int4 of 64"],
)
def test_embeddings_are_rows_of_the_dequantized_matrix(matrix: Any, multiplier: float) -> None:
    tokens = np.array([34, 0, 17, 17])
    found = np.empty((4, matrix.shape[1]), np.float32)
    compiled_embed(np.array(matrix_op(matrix, None)), tokens, np.float32(multiplier), found)
    assert np.array_equal(found, dequantize(matrix)[tokens] * np.float32(multiplier))


@dataclass
class Sequence:
    """A request as far as a runner looks at it."""

    tokens: list[int]
    pages: list[list[int]]


def sequence(num_tokens: int, given_back: int = 0) -> Any:
    pages = -(-num_tokens // PAGE)
    tables = [RNG.permutation(1000)[:pages].tolist() for _ in range(2)]
    tables[1][:given_back] = [GIVEN_BACK] * given_back
    return Sequence(random_tokens(num_tokens), tables)


STEPS = {
    "one token": [(100, 1, 0, True)],
    "long history": [(3 * CHUNK + 5, 1, 20, True)],
    "two replies": [(40, 1, 3, True), (2 * CHUNK, 1, 0, True)],
    "reply and prompt": [(CHUNK + 1, 1, 2, True), (8, 30, 0, False)],
    "two prompts": [(0, 33, 0, True), (CHUNK, 7, 5, True)],
    "replies and the end of a prompt": [(7, 1, 0, True), (9, 1, 0, True), (15 * CHUNK, 6, 1, True)],
    "many replies": [(17 * i + CHUNK, 1, i % 3, True) for i in range(20)],
    "nobody samples": [(5, 1, 0, False)],
}


@pytest.mark.parametrize("most_parts", [10**9, 20, 0])
@pytest.mark.parametrize("name", STEPS)
def test_plan(name: str, most_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [Chunk(sequence(s + n, back), s, n, samples) for s, n, back, samples in STEPS[name]]
    model = LoadedModel.from_torch(small_model())
    layers = [LayerGroup((0,), None), LayerGroup((1,), 8)]
    runner = CpuRunner(model.config, model.tensors, layers, 1000, PAGE, kv_format="float32", num_threads=2)
    numbers, shape = runner._numbers(chunks)
    config, tile, threads = model.config, runner._queries_per_tile, 2
    runner._make_room(shape[0], 0)
    monkeypatch.setattr(runner_cpu, "_MOST_PART_BYTES", most_parts * runner._part_bytes)
    program, table = runner._program, runner._job
    num_parts = runner._plan(numbers, shape)

    M, S, W = shape[0], sum(c.samples for c in chunks), shape[3]
    positions = np.concatenate([np.arange(c.start, c.start + c.count) for c in chunks])
    owner = np.repeat(np.arange(len(chunks)), [c.count for c in chunks])
    tables = np.zeros((2, len(chunks), W), np.int64)
    for group in range(2):
        for c, chunk in enumerate(chunks):
            pages = readable(chunk.request.pages[group][: -(-(chunk.start + chunk.count) // PAGE)])
            tables[group, c, : len(pages)] = pages
    tokens = np.array([t for c in chunks for t in c.request.tokens[c.start : c.start + c.count]])

    def room(name: int, kind: Any, *size: int) -> NDArray[Any]:
        return runner._room[name].view(kind)[: math.prod(size)].reshape(size)

    assert (table[job.NUM_ROWS], table[job.NUM_LAST], table[job.NUM_TABLES]) == (M, S, len(chunks))
    found = room(job.X, np.float32, M, config.hidden_size)
    assert np.array_equal(found, dequantize(model.tensors["model.embed_tokens.weight"])[tokens])
    assert np.array_equal(room(job.PAGES, np.int64, 2, M), tables[:, owner, positions // PAGE])
    assert np.array_equal(room(job.SLOTS, np.int64, M), positions % PAGE)
    ends = np.cumsum([c.count for c in chunks])
    assert np.array_equal(room(job.LAST, np.int64, S), ends[[c.samples for c in chunks]] - 1)
    assert table[job.TABLE_WIDTH] == W
    at = (table[job.BLOCK_TABLES] - numbers.ctypes.data) // 8
    assert np.array_equal(numbers[at:].reshape(tables.shape), tables)
    for i, rope in enumerate(program.rotations):
        wanted = turns(*inverse_frequencies(rope, config.head_dim or 0, config.max_position_embeddings), positions)
        for address, expected in zip((job.COS, job.SIN), wanted, strict=True):
            found = room(address, np.float32, len(program.rotations), *expected.shape)[i]
            assert np.allclose(found, expected, atol=2e-7, rtol=0)
    tiles, splits, expected_parts = naive_tiles(chunks, tile, config.num_key_value_heads, threads, most_parts)
    assert np.array_equal(room(job.TILES, np.int64, table[job.NUM_TILES], TILE_SIZE), tiles)
    assert (table[job.SPLITS], table[job.NUM_PARTS], num_parts) == (splits, expected_parts, expected_parts)


def naive_tiles(
    chunks: list[Chunk], tile: int, kv_heads: int, threads: int, most_parts: int
) -> tuple[list[Any], int, int]:
    """The tiles of attention, the items that large ones are divided into, and their partial results."""
    rows = np.cumsum([0, *[c.count for c in chunks]])
    places = [
        (n, c.start + done, done, min(tile, c.count - done))
        for n, c in enumerate(chunks)
        for done in range(0, c.count, tile)
    ]
    pieces = [(start + queries - 1) // CHUNK + 1 for _, start, _, queries in places]
    tiles, splits, parts = [], 1, 0
    for (number, start, done, queries), count in zip(places, pieces, strict=True):
        split = count > 1 and count / (kv_heads * sum(pieces)) > 1 / (ITEMS_WANTED * threads)
        split = split and parts + count * queries <= most_parts
        tiles.append([rows[number] + done, queries, start, number, parts if split else -1])
        if split:
            parts, splits = parts + count * queries, max(splits, min(count, MOST_SPLITS))
    return tiles, splits, parts


def test_rotations_stay_exact_at_a_million_positions() -> None:
    model = LoadedModel.from_torch(small_model())
    group = [LayerGroup(tuple(range(model.config.num_hidden_layers)), None)]
    runner = CpuRunner(model.config, model.tensors, group, 8, PAGE, kv_format="float32", num_threads=1)
    position = 1_000_003
    request = SimpleNamespace(tokens=[0] * (position + 1), pages=[[0] * (position // PAGE + 1)])
    numbers, shape = runner._numbers([Chunk(request, position, 1, True)])  # type: ignore[arg-type]
    runner._make_room(1, 0)
    runner._plan(numbers, shape)
    rope = runner._program.rotations[0]
    frequencies, factor = inverse_frequencies(rope, model.config.head_dim or 0, model.config.max_position_embeddings)
    cos, _ = turns(frequencies, factor, np.array([position]))
    assert np.allclose(runner._room[job.COS][: cos.size], cos[0], atol=2e-7, rtol=0)
