"""Runs the model in compiled CPU kernels, with keys and values in pages: the same interface as `runner_torch`.

A result has the same bits whatever else is in the batch, however a prompt is cut and wherever its pages lie: every
product and every sum of the kernels has a fixed order (see `openk3.kernels`), with any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from torch import Tensor

from openk3.engine.config import WeightFormat
from openk3.engine.pages import pages_for
from openk3.engine.program import Program
from openk3.engine.scheduler import Chunk
from openk3.kernels.attention import TILE, scratch_size
from openk3.kernels.linear import BLOCK_ROWS, COLUMNS, ROWS, linear
from openk3.kernels.rows import rms_norm
from openk3.kernels.step import forward
from openk3.model.rotary import rotations

if TYPE_CHECKING:
    from openk3.model import K3ForCausalLM


class _Nobody:
    """A request as far as a runner looks at it; its one page is free again before any request comes."""

    tokens = (0,)
    pages = (0,)


class CpuRunner:
    """The model over a paged cache, in Numba kernels. Not thread-safe."""

    def __init__(
        self, model: K3ForCausalLM, num_pages: int, page_size: int, *, weights: WeightFormat, num_threads: int
    ) -> None:
        self._config = config = model.config
        self._program = Program(model, weights)
        self._page_size = page_size
        self._num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)
        # Never cleared: what lies beyond a request's last token is not read, and untouched memory costs nothing.
        shape = (config.num_hidden_layers, num_pages, config.num_key_value_heads, page_size, config.head_dim)
        self._keys, self._values = (np.empty(shape, np.float32) for _ in range(2))
        widest = max(int(self._program.ops[..., COLUMNS].max()), config.hidden_size)
        self._scratch = np.empty((self._num_threads, BLOCK_ROWS * widest), np.float32)
        self._attention_scratch = np.empty((self._num_threads, scratch_size(config.head_dim)), np.float32)

        self._warm_up()

    def _warm_up(self) -> None:
        """Compute one token of nobody's: compiling (once per machine) and loading what was compiled happen now."""
        self.run([Chunk(_Nobody(), 0, 1, True)])  # type: ignore[arg-type]

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks, and the logits after the last token of each that samples.

        Returns:
            `[number of sampling chunks, V]` in float32.
        """
        numba.set_num_threads(self._num_threads)
        program, size = self._program, self._page_size
        tokens = np.array([t for c in chunks for t in c.request.tokens[c.start : c.start + c.count]], np.int64)
        positions = np.array([p for c in chunks for p in range(c.start, c.start + c.count)], np.int64)
        tables = self._tables(chunks)
        owner = np.repeat(np.arange(len(chunks)), [c.count for c in chunks])
        x = program.embedding[tokens] * program.embedding_multiplier
        cos, sin = self._rotations(positions)
        forward(
            program.ops,
            program.norms,
            program.kinds,
            program.biases,
            program.ints,
            program.floats,
            x,
            cos,
            sin,
            tables[owner, positions // size],
            positions % size,
            _tiles(chunks),
            tables,
            self._keys,
            self._values,
            self._scratch,
            self._attention_scratch,
        )
        ends = np.cumsum([c.count for c in chunks])
        last = x[ends[[c.samples for c in chunks]] - 1]
        rms_norm(last, program.final_norm, self._config.rms_norm_eps, last)
        logits = np.empty((len(last), int(program.head[0, ROWS])), np.float32)
        if len(last):
            linear(program.head, last, logits, self._scratch)
        return torch.from_numpy(logits)

    def _tables(self, chunks: Sequence[Chunk]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """The block tables of the chunks' requests, padded to the longest."""
        lengths = [pages_for(c.start + c.count, self._page_size) for c in chunks]
        tables = np.zeros((len(chunks), max(lengths)), np.int64)
        for table, chunk, length in zip(tables, chunks, lengths, strict=True):
            table[:length] = chunk.request.pages[:length]
        return tables

    def _rotations(self, positions: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[np.ndarray, np.ndarray]:
        config = self._config
        assert config.head_dim is not None
        turns = [
            rotations(rope, config.head_dim, config.max_position_embeddings, torch.from_numpy(positions), torch.float32)
            for rope in self._program.rotations
        ]
        empty = np.empty((0, len(positions), config.head_dim // 2), np.float32)
        if not turns:
            return empty, empty
        return np.stack([cos.numpy() for cos, _ in turns]), np.stack([sin.numpy() for _, sin in turns])


def _tiles(chunks: Sequence[Chunk]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Runs of TILE consecutive queries of a chunk, then single ones: first row, rows, first position, block table."""
    tiles = []
    row = 0
    for number, chunk in enumerate(chunks):
        done = 0
        while done < chunk.count:
            queries = TILE if chunk.count - done >= TILE else 1
            tiles.append((row + done, queries, chunk.start + done, number))
            done += queries
        row += chunk.count
    return np.array(tiles, np.int64)
