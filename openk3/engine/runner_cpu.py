"""Runs the model in compiled CPU kernels, with keys and values in pages: the same interface as `runner_torch`.

A result has the same bits whatever else is in the batch, however a prompt is cut and wherever its pages lie: every
product and every sum of the kernels has a fixed order (see `openk3.kernels`), with any number of threads.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from openk3.config import ModelConfig
from openk3.engine.crew import Crew
from openk3.engine.groups import LayerGroup
from openk3.engine.pages import pages_for
from openk3.engine.program import Program
from openk3.engine.scheduler import Chunk
from openk3.kernels import are_compiled, job, step
from openk3.kernels.amx import tile_configs
from openk3.kernels.attention import PART_EXTRA, TILE_SIZE, queries_per_tile
from openk3.kernels.attention import scratch_size as attention_scratch_size
from openk3.kernels.integers import stats_size
from openk3.kernels.linear import BLOCK, ROWS, scratch_bytes
from openk3.kernels.plan import plan
from openk3.kernels.team import LINE, SLEEPS, dismiss, new_team
from openk3.rotary import inverse_frequencies
from openk3.weights.formats import Matrix, aligned

logger = logging.getLogger(__name__)

# Activations of so many rows are computed together by a tile; buffers are read up to a whole tile's end.
_TILE_ROWS = 16

# Of partial results of attention: tiles that would need more are computed by a thread each.
_MOST_PART_BYTES = 256 << 20


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
        self._part_bytes = 4 * heads * (config.head_dim + PART_EXTRA)
        # Never cleared: what lies beyond a request's last token is not read, and untouched memory costs nothing.
        kind = np.float16 if kv_format == "float16" else np.float32
        size = len(groups[0].layers) * num_pages * kv_heads * page_size * config.head_dim
        self._keys, self._values = np.empty(size + BLOCK, kind), np.empty(size, kind)
        places = [self._keys.ctypes.data, self._values.ctypes.data]
        self._cache = np.array([*places, num_pages, kv_heads, page_size, config.head_dim, kind == np.float16], np.int64)
        scratch = max(scratch_bytes(self._program.widest), 4 * attention_scratch_size(config.head_dim))
        self._scratches = aligned((self._num_threads, -(-scratch // 128) * 128), np.int8)
        self._amx = tile_configs()
        rotations = [
            inverse_frequencies(rope, config.head_dim, config.max_position_embeddings)
            for rope in self._program.rotations
        ]
        self._frequencies = np.array([f for f, _ in rotations], np.float32).reshape(-1, config.head_dim // 2)
        self._factors = np.array([factor for _, factor in rotations], np.float32)
        self._job = np.zeros(job.JOB_SIZE, np.int64)
        self._room_for = (0, 0)  # rows and partial results that there is working memory for
        self._room: dict[int, NDArray[Any]] = {}
        self._team = new_team()
        program = self._program
        tables = (program.ops, program.head, program.norms, program.kinds, program.biases, program.ints, program.floats)
        self._arguments = (self._team, *tables, self._cache, self._job, self._scratches, self._amx)
        self._crew = Crew(self._num_threads)
        self._warm_up()
        self._start_members()

    def _start_members(self) -> None:
        """Start the other threads; they end when this runner is no longer used."""
        arguments, threads = self._arguments, self._num_threads
        weakref.finalize(self, dismiss, self._team)
        for t in range(1, threads):
            member = threading.Thread(
                target=step.take_part, args=(t, threads, *arguments), daemon=True, name=f"kernels-{t}"
            )
            member.start()

    def _warm_up(self) -> None:
        """Compute one token of nobody's: compiling (once per machine) and loading what was compiled happen now, and
        in the caller's thread, which can fail where others would leave it waiting."""
        if not are_compiled():
            logger.warning("compiling the CPU kernels for this machine, once: up to a minute")
        self._compute([Chunk(_Nobody(self._num_groups), 0, 1, True)], Crew(1))  # type: ignore[arg-type]

    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Compute the chunks, and the logits after the last token of each that samples.

        Returns:
            `[number of sampling chunks, V]` in float32.
        """
        return self._compute(chunks, self._crew)

    def _compute(self, chunks: Sequence[Chunk], crew: Crew) -> NDArray[np.float32]:
        program, table = self._program, self._job
        numbers, shape = self._numbers(chunks)
        rows = shape[0]
        self._make_room(rows, 0)
        while (num_parts := self._plan(numbers, shape)) > self._room_for[1]:
            self._make_room(rows, num_parts)
        width = int(program.head[0, ROWS])
        logits = np.empty((int(table[job.NUM_LAST]), -(-width // BLOCK) * BLOCK), np.float32)
        table[job.LOGITS], table[job.LOGITS_STRIDE] = logits.ctypes.data, logits.shape[1]
        threads = crew.threads(rows, time.monotonic())
        sleeps_before = self._sleeps()
        step.take_part(0, threads, *self._arguments)
        crew.observe(rows, threads, self._sleeps() - sleeps_before, time.monotonic())
        return logits[:, :width]

    def _plan(self, numbers: NDArray[np.int64], shape: tuple[int, int, int, int]) -> int:
        program = self._program
        num_parts: int = plan(
            numbers, shape, program.embedding, program.embedding_multiplier, self._frequencies, self._factors,
            self._cache, self._queries_per_tile, self._num_threads, _MOST_PART_BYTES // self._part_bytes, self._job,
        )  # fmt: skip
        return num_parts

    def _numbers(self, chunks: Sequence[Chunk]) -> tuple[NDArray[np.int64], tuple[int, int, int, int]]:
        """The chunks as `plan` takes them."""
        lengths = [pages_for(c.start + c.count, self._page_size) for c in chunks]
        longest = max(lengths)
        numbers: list[int] = []
        for c in chunks:
            numbers += c.request.tokens[c.start : c.start + c.count]
        rows = len(numbers)
        for c in chunks:
            numbers += (c.start, c.count, c.samples)
        for group in range(self._num_groups):
            for c, length in zip(chunks, lengths, strict=True):
                numbers += c.request.pages[group][:length]
                numbers += [0] * (longest - length)
        return np.array(numbers, np.int64), (rows, len(chunks), self._num_groups, longest)

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
        own = max(rows, self._num_threads)  # a step of one row takes a row of each thread
        tile = -(-own // _TILE_ROWS) * _TILE_ROWS
        quantized = (tile * max(1, choices)) + _TILE_ROWS
        widest = self._program.widest
        wide = rows * 2 * int(max(ops[:, step.GATE, ROWS].max(), ops[:, step.SHARED_GATE, ROWS].max()))
        wide = max(wide, rows * choices * int(ops[:, step.EXPERT_GATE_UP, ROWS].max()))
        turns = rows * self._frequencies.size
        sizes: dict[int, tuple[int, type[np.generic]]] = {
            job.X: (own * config.hidden_size, np.float32),
            job.COS: (turns, np.float32),
            job.SIN: (turns, np.float32),
            job.PAGES: (self._num_groups * rows, np.int64),
            job.SLOTS: (rows, np.int64),
            job.TILES: (rows * TILE_SIZE, np.int64),
            job.LAST: (rows, np.int64),
            job.NORMED: (own * config.hidden_size, np.float32),
            job.BRANCH: (rows * config.hidden_size, np.float32),
            job.SHARED_OUT: (rows * config.hidden_size, np.float32),
            job.QKV: (rows * (heads + 2 * kv_heads) * head_dim, np.float32),
            job.ATTENDED: (rows * heads * head_dim, np.float32),
            job.WIDE: (wide, np.float32),
            job.GATED: (max(own * widest, wide // 2), np.float32),
            job.INTEGERS: (quantized * 2 * widest, np.int8),
            job.STATS: (quantized * stats_size(widest), np.int32),
            job.PARTS: (num_parts * self._part_bytes // 4, np.float32),
            job.ROUTED: (rows * max(1, config.num_experts) + BLOCK, np.float32),
            job.CHOSEN: (rows * choices, np.int64),
            job.CHOICE_WEIGHTS: (rows * choices, np.float32),
            job.PLACES: (rows * choices, np.int64),
            job.GROUPS: (3 * (1 + rows * choices), np.int64),
            job.STARTS: (max(1, config.num_experts), np.int64),
            job.GATHERED: (rows * choices * config.hidden_size, np.float32),
        }
        for name, (size, kind) in sizes.items():
            self._room[name] = aligned((max(size, 1),), kind)
            self._job[name] = self._room[name].ctypes.data
