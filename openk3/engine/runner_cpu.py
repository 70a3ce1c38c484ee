"""Runs the model in compiled CPU kernels, with keys and values in pages: the same interface as `runner_torch`.

A result has the same bits whatever else is in the batch, however a prompt is cut and wherever its pages lie: every
product and every sum of the kernels has a fixed order (see `openk3.kernels`), with any number of threads.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from openk3.config import ModelConfig
from openk3.engine.crew import Crew
from openk3.engine.groups import LayerGroup, readable
from openk3.engine.pages import pages_for
from openk3.engine.program import Program
from openk3.engine.scheduler import Chunk
from openk3.kernels import step
from openk3.kernels.amx import tile_configs
from openk3.kernels.attention import CHUNK, HEAD_DIM, PART_EXTRA, TILE_SIZE, queries_per_tile
from openk3.kernels.attention import scratch_size as attention_scratch_size
from openk3.kernels.integers import stats_size
from openk3.kernels.linear import BLOCK, COLUMNS, ROWS, scratch_bytes
from openk3.kernels.team import LINE, SLEEPS, dismiss, new_team
from openk3.rotary import inverse_frequencies, turns
from openk3.weights.formats import Matrix, aligned

# A decode step of few sequences divides each one's history into up to so many items of attention.
_MOST_SPLITS = 8
# Activations of so many rows are computed together by a tile; buffers are read up to a whole tile's end.
_TILE_ROWS = 16


class _Nobody:
    """A request as far as a runner looks at it; its one page is free again before any request comes."""

    tokens = (0,)

    def __init__(self, groups: int) -> None:
        self.pages = [[0]] * groups


class CpuRunner:
    """The model over a paged cache, in Numba kernels. Not thread-safe.

    Args:
        config, tensors: the model (`openk3.weights.loaded.LoadedModel`).
        groups, num_pages: as `openk3.engine.runner.make_runner` takes them.
        kv_format: how keys and values are kept.
        num_threads: the caller's thread and `num_threads - 1` of our own.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Matrix],
        groups: Sequence[LayerGroup],
        num_pages: int,
        page_size: int,
        *,
        kv_format: Literal["float32", "float16"],
        num_threads: int,
    ) -> None:
        assert config.head_dim is not None
        self._config = config
        self._program = Program(config, tensors)
        self._num_groups = len(groups)
        for number, group in enumerate(groups):
            for part, layer in enumerate(group.layers):
                self._program.kinds[layer, [step.TABLES, step.PAGE_PART]] = number, part
        self._page_size = page_size
        self._num_threads = num_threads
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._queries_per_tile = queries_per_tile(heads, kv_heads)
        # Never cleared: what lies beyond a request's last token is not read, and untouched memory costs nothing.
        kind = np.float16 if kv_format == "float16" else np.float32
        size = len(groups[0].layers) * num_pages * kv_heads * page_size * config.head_dim
        self._keys, self._values = np.empty(size + BLOCK, kind), np.empty(size, kind)
        places = [self._keys.ctypes.data, self._values.ctypes.data]
        self._cache = np.array([*places, num_pages, kv_heads, page_size, config.head_dim, kind == np.float16], np.int64)
        widest = max(int(self._program.ops[..., COLUMNS].max()), config.hidden_size)
        scratch = max(scratch_bytes(widest), 4 * attention_scratch_size(config.head_dim))
        self._scratches = aligned((self._num_threads, -(-scratch // 128) * 128), np.int8)
        self._amx = tile_configs()
        self._frequencies = [
            inverse_frequencies(rope, config.head_dim, config.max_position_embeddings)
            for rope in self._program.rotations
        ]
        self._job = np.zeros(step.JOB_SIZE, np.int64)
        self._room_for = (0, 0)  # rows and partial results that there is working memory for
        self._room: dict[int, NDArray[Any]] = {}
        self._team = new_team()
        self._crew = Crew(self._num_threads)
        self._start_members()
        self._warm_up()

    def _arguments(self) -> tuple[NDArray[Any], ...]:
        program = self._program
        tables = (program.ops, program.head, program.norms, program.kinds, program.biases, program.ints, program.floats)
        return (self._team, *tables, self._cache, self._job, self._scratches, self._amx)

    def _start_members(self) -> None:
        """Start the other threads; they end when this runner is no longer used."""
        arguments, threads = self._arguments(), self._num_threads
        for t in range(1, threads):
            member = threading.Thread(
                target=step.take_part, args=(t, threads, *arguments), daemon=True, name=f"kernels-{t}"
            )
            member.start()
        weakref.finalize(self, dismiss, self._team)

    def _warm_up(self) -> None:
        """Compute one token of nobody's: compiling (once per machine) and loading what was compiled happen now."""
        self.run([Chunk(_Nobody(self._num_groups), 0, 1, True)])  # type: ignore[arg-type]

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Compute the chunks, and the logits after the last token of each that samples.

        Returns:
            `[number of sampling chunks, V]` in float32.
        """
        program, size = self._program, self._page_size
        tokens = np.array([t for c in chunks for t in c.request.tokens[c.start : c.start + c.count]], np.int64)
        positions = np.concatenate([np.arange(c.start, c.start + c.count) for c in chunks])
        ends = np.cumsum([c.count for c in chunks])
        last = ends[[c.samples for c in chunks]] - 1
        tables = self._tables(chunks)
        owner = np.repeat(np.arange(len(chunks)), [c.count for c in chunks])
        tiles, splits, num_parts = self._tiles(chunks)
        cos, sin = self._rotations(positions)
        rows = int(program.head[0, ROWS])
        logits = np.empty((len(last), -(-rows // BLOCK) * BLOCK), np.float32)
        inputs: dict[int, NDArray[Any]] = {
            step.X: program.embed(tokens),
            step.COS: cos,
            step.SIN: sin,
            step.PAGES: np.ascontiguousarray(tables[:, owner, positions // size]),
            step.SLOTS: positions % size,
            step.TILES: tiles,
            step.BLOCK_TABLES: tables,
            step.LAST: last,
            step.LOGITS: logits,
        }
        self._make_room(len(tokens), num_parts)
        job = self._job
        for name, array in inputs.items():
            assert array.flags.c_contiguous
            job[name] = array.ctypes.data
        job[step.NUM_ROWS], job[step.NUM_LAST], job[step.LOGITS_STRIDE] = len(tokens), len(last), logits.shape[1]
        job[step.NUM_TILES], job[step.SPLITS], job[step.NUM_PARTS] = len(tiles), splits, num_parts
        _, job[step.NUM_TABLES], job[step.TABLE_WIDTH] = tables.shape
        threads = self._crew.threads(len(tokens), time.monotonic())
        sleeps_before = self._sleeps()
        step.take_part(0, threads, *self._arguments())
        self._crew.observe(len(tokens), threads, self._sleeps() - sleeps_before, time.monotonic())
        return logits[:, :rows]

    def _sleeps(self) -> int:
        return int(self._team[LINE * SLEEPS])

    def _make_room(self, rows: int, num_parts: int) -> None:
        """Have working memory for a step of `rows` rows, and tell the job where it is."""
        if rows <= self._room_for[0] and num_parts <= self._room_for[1]:
            return
        self._room_for = rows, num_parts = max(rows, self._room_for[0]), max(num_parts, self._room_for[1])
        config, ops = self._config, self._program.ops
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        assert head_dim is not None
        choices = max(1, config.num_experts_per_tok) if (ops[:, step.ROUTER, ROWS] > 0).any() else 0
        tile = -(-rows // _TILE_ROWS) * _TILE_ROWS
        quantized = (tile * max(1, choices)) + _TILE_ROWS
        widest = max(int(ops[..., COLUMNS].max()), config.hidden_size)
        wide = rows * 2 * int(max(ops[:, step.GATE, ROWS].max(), ops[:, step.SHARED_GATE, ROWS].max()))
        wide = max(wide, rows * choices * int(ops[:, step.EXPERT_GATE_UP, ROWS].max()))
        sizes: dict[int, tuple[int, type[np.generic]]] = {
            step.NORMED: (rows * config.hidden_size, np.float32),
            step.BRANCH: (rows * config.hidden_size, np.float32),
            step.SHARED_OUT: (rows * config.hidden_size, np.float32),
            step.QKV: (rows * (heads + 2 * kv_heads) * head_dim, np.float32),
            step.ATTENDED: (rows * heads * head_dim, np.float32),
            step.WIDE: (wide, np.float32),
            step.INTEGERS: (quantized * 2 * widest, np.int8),
            step.STATS: (quantized * stats_size(widest), np.int32),
            step.PARTS: (num_parts * heads * (head_dim + PART_EXTRA), np.float32),
            step.ROUTED: (rows * max(1, config.num_experts) + BLOCK, np.float32),
            step.CHOSEN: (rows * choices, np.int64),
            step.CHOICE_WEIGHTS: (rows * choices, np.float32),
            step.PLACES: (rows * choices, np.int64),
            step.GROUPS: (3 * (1 + rows * choices), np.int64),
            step.STARTS: (max(1, config.num_experts), np.int64),
            step.GATHERED: (rows * choices * config.hidden_size, np.float32),
        }
        for name, (size, kind) in sizes.items():
            self._room[name] = aligned((max(size, 1),), kind)
            self._job[name] = self._room[name].ctypes.data

    def _tables(self, chunks: Sequence[Chunk]) -> NDArray[np.int64]:
        """The block tables of the chunks' requests, padded to the longest: `[groups, chunks, pages]`."""
        lengths = [pages_for(c.start + c.count, self._page_size) for c in chunks]
        tables = np.zeros((self._num_groups, len(chunks), max(lengths)), np.int64)
        for group, group_tables in enumerate(tables):
            for table, chunk, length in zip(group_tables, chunks, lengths, strict=True):
                table[:length] = readable(chunk.request.pages[group][:length])
        return tables

    def _rotations(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines, `[rotations, M, K / 2]`."""
        shape = (len(self._frequencies), len(positions), int(self._cache[HEAD_DIM]) // 2)
        cos, sin = np.empty(shape, np.float32), np.empty(shape, np.float32)
        for i, (frequencies, factor) in enumerate(self._frequencies):
            cos[i], sin[i] = turns(frequencies, factor, positions)
        return cos, sin

    def _tiles(self, chunks: Sequence[Chunk]) -> tuple[NDArray[np.int64], int, int]:
        """The tiles of attention, the items that single queries are divided into, and their partial results."""
        tiles = np.empty((sum(-(-c.count // self._queries_per_tile) for c in chunks), TILE_SIZE), np.int64)
        few = len(tiles) * self._config.num_key_value_heads < 8 * self._num_threads
        row = number = num_parts = splits = 0
        for table, chunk in enumerate(chunks):
            for done in range(0, chunk.count, self._queries_per_tile):
                queries, part = min(self._queries_per_tile, chunk.count - done), -1
                pieces = (chunk.start + done) // CHUNK + 1
                if chunk.count == 1 and few and pieces > 1:
                    part, num_parts, splits = num_parts, num_parts + pieces, max(splits, min(pieces, _MOST_SPLITS))
                tiles[number] = (row + done, queries, chunk.start + done, table, part)
                number += 1
            row += chunk.count
        return tiles, max(splits, 1), num_parts
