"""Runs the model on the tokens of one step, with keys and values in pages.

The tokens of all chunks stand one after the other as one row of input, so everything but attention is computed for
all of them at once and knows nothing of requests. Attention is this file's own function in Transformers' registry: it
writes the new keys and values to their pages, then goes through the chunks, each with its own block table.

A result has the same bits whatever else is in the batch, however a prompt is cut into chunks and wherever its pages
lie. On a CPU with MKL (see `openk3/__init__.py`), a row of a two-dimensional product does not depend on the number of
rows or columns, but it does depend on the length of the sum, and batched products promise nothing. So scores are
two-dimensional products, and the weighted sum over the keys is made of products of exactly `KEYS_PER_PRODUCT` keys,
added in order of position; keys beyond a query's reach take part with weight zero, which changes no bit. Other devices
and builds compute the same to within rounding, without that promise. So does PyTorch with an uneven number of threads:
it splits element-wise functions such as SiLU between threads at any element, and rounds differently at the seams.

Shapes: N tokens of the step, H query heads, G key/value heads, M = H / G query heads per key/value head, K head_dim,
T queries of one tile, S keys in their reach, P page_size, V vocab_size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from openk3.engine.config import KEYS_PER_PRODUCT
from openk3.engine.groups import LayerGroup, readable
from openk3.engine.pages import pages_for
from openk3.engine.scheduler import Chunk

if TYPE_CHECKING:
    from openk3.model import K3ForCausalLM

ATTENTION_NAME = "openk3_paged"
MAX_SCORES = 2**24  # elements of the score matrix of one tile, which bounds the memory attention takes
_LARGEST_HALF = torch.finfo(torch.float16).max
MAX_QUERIES = 128  # more per tile would compute more scores that the causal mask throws away


class TorchRunner:
    """The model over a paged cache, on whatever device the model is.

    It works on a copy of the model's structure that shares its weights, so the caller's model stays as it was. Not
    thread-safe.

    Args:
        groups, num_pages: as `openk3.engine.runner.make_runner` takes them.
        kv_format: dtype in which keys and values are held, by name. Numbers beyond float16 become its largest.
    """

    def __init__(
        self, model: K3ForCausalLM, groups: Sequence[LayerGroup], num_pages: int, page_size: int, *, kv_format: str
    ) -> None:
        tensors = (*model.parameters(), *model.buffers())
        self._model: K3ForCausalLM = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
        self._model.config._attn_implementation = ATTENTION_NAME
        config = self._model.config
        self._page_size = page_size
        self._kv_heads = config.num_key_value_heads
        self._places = {layer: (group, part) for group, g in enumerate(groups) for part, layer in enumerate(g.layers)}
        # Never cleared: what a page held before is masked (keys) or overwritten with zeros (values) when it is read,
        # and untouched memory costs nothing.
        shape = (len(groups[0].layers), num_pages * self._kv_heads, page_size * config.head_dim)
        dtype = getattr(torch, kv_format)
        self._keys, self._values = (torch.empty(shape, dtype=dtype, device=model.device) for _ in range(2))

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Compute the chunks, and the logits after the last token of each that samples.

        Returns:
            `[number of sampling chunks, V]`.
        """
        device = self._keys.device
        tokens = [token for c in chunks for token in c.request.tokens[c.start : c.start + c.count]]
        positions = [position for c in chunks for position in range(c.start, c.start + c.count)]
        ends = torch.tensor([c.count for c in chunks]).cumsum(0)
        last = ends[torch.tensor([c.samples for c in chunks])] - 1
        output = self._model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=last.to(device),
            paged=_PagedStep(self._keys, self._values, self._places, self._page_size, self._kv_heads, chunks),
        )
        logits: NDArray[np.float32] = output.logits[0].float().cpu().numpy()
        return logits


@dataclass(frozen=True)
class _Tile:
    """Consecutive queries of one chunk and the keys they can reach.

    Attributes:
        queries: their rows among the tokens of the step.
        first_key, end_key: positions `[first_key, end_key)`, both multiples of `KEYS_PER_PRODUCT`.
        hidden: `[T, S]`, True where a query does not see a key.
    """

    queries: slice
    first_key: int
    end_key: int
    hidden: Tensor


@dataclass(frozen=True)
class _Reach:
    """What one chunk's queries see under one window.

    Attributes:
        first_key: position of the first key gathered.
        num_keys: known keys from there on; those gathered after them only fill the last product.
        page_rows: rows of the page tables that hold them, key/value head after key/value head.
        tiles: the chunk's queries.
    """

    first_key: int
    num_keys: int
    page_rows: Tensor
    tiles: list[_Tile]


class _PagedStep:
    """Where the keys and values of one step are written and read, worked out once and used by every layer."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        places: Mapping[int, tuple[int, int]],
        page_size: int,
        kv_heads: int,
        chunks: Sequence[Chunk],
    ) -> None:
        self._keys, self._values = keys, values
        self._places = places
        self._page_size = page_size
        self._heads_G = torch.arange(kv_heads, device=keys.device)
        self._chunks = chunks
        self._slots: dict[int, Tensor] = {}
        self._reaches: dict[tuple[int, int | None], list[_Reach]] = {}

    def slots(self, group: int) -> Tensor:
        """Where the step's vectors go within the part of any layer of a group, key/value head after head."""
        if group not in self._slots:
            size = self._page_size
            slots = [
                (c.request.pages[group][position // size], position % size)
                for c in self._chunks
                for position in range(c.start, c.start + c.count)
            ]
            pages_N, offsets_N = torch.tensor(slots, device=self._keys.device).T
            # A page's rows: one per key/value head, each `page_size` vectors long.
            rows_GN = pages_N * len(self._heads_G) + self._heads_G[:, None]
            self._slots[group] = (rows_GN * size + offsets_N).flatten()
        return self._slots[group]

    def write(self, layer: int, key_GNK: Tensor, value_GNK: Tensor) -> None:
        """Put the step's keys and values where their requests' block tables say."""
        group, part = self._places[layer]
        size = key_GNK.shape[-1]
        for pages, heads_GNK in ((self._keys, key_GNK), (self._values, value_GNK)):
            rows_NK = heads_GNK.reshape(-1, size)
            if pages.dtype == torch.float16:
                rows_NK = rows_NK.clamp(-_LARGEST_HALF, _LARGEST_HALF)
            pages[part].view(-1, size).index_copy_(0, self.slots(group), rows_NK.to(pages.dtype))

    def read(self, layer: int, reach: _Reach, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`key_GSK` and `value_GSK` in order of position, as `dtype`; values behind the last known key are zero."""
        shape, (_, part) = (len(self._heads_G), -1, head_dim), self._places[layer]
        key_GSK = self._keys[part].index_select(0, reach.page_rows).view(shape).to(dtype)
        value_GSK = self._values[part].index_select(0, reach.page_rows).view(shape).to(dtype)
        value_GSK[:, reach.num_keys :] = 0
        return key_GSK, value_GSK

    def reaches(self, layer: int, window: int | None, heads: int) -> list[_Reach]:
        """One entry per chunk."""
        group, _ = self._places[layer]
        if (group, window) not in self._reaches:
            ends = torch.tensor([c.count for c in self._chunks]).cumsum(0).tolist()
            self._reaches[group, window] = [
                self._reach(c, group, end - c.count, window, heads) for c, end in zip(self._chunks, ends, strict=True)
            ]
        return self._reaches[group, window]

    def _reach(self, chunk: Chunk, group: int, first_row: int, window: int | None, heads: int) -> _Reach:
        device, size = self._keys.device, self._page_size
        end = chunk.start + chunk.count
        first_key, end_key = _keys_seen(chunk.start, end, window)
        pages = readable(chunk.request.pages[group][first_key // size : pages_for(end, size)])
        pages = pages + [0] * ((end_key - first_key) // size - len(pages))  # any page will do, see `num_keys`
        page_rows_GS = torch.tensor(pages, device=device) * len(self._heads_G) + self._heads_G[:, None]
        tiles = []
        step = max(1, min(MAX_QUERIES, MAX_SCORES // (heads * (end_key - first_key))))
        for start in range(chunk.start, end, step):
            stop = min(start + step, end)
            first, last = _keys_seen(start, stop, window)
            query_T1 = torch.arange(start, stop, device=device)[:, None]
            key_S = torch.arange(first, last, device=device)
            hidden_TS = key_S > query_T1
            if window is not None:
                hidden_TS |= key_S <= query_T1 - window
            rows = slice(first_row + start - chunk.start, first_row + stop - chunk.start)
            tiles.append(_Tile(rows, first, last, hidden_TS))
        return _Reach(first_key, end - first_key, page_rows_GS.flatten(), tiles)


def _keys_seen(start: int, end: int, window: int | None) -> tuple[int, int]:
    """Positions `[first, last)`, in whole products, that the queries `[start, end)` see between them."""
    first = 0 if window is None else max(0, start - window + 1)
    return first // KEYS_PER_PRODUCT * KEYS_PER_PRODUCT, -(-end // KEYS_PER_PRODUCT) * KEYS_PER_PRODUCT


def paged_attention(
    module: nn.Module,
    query_1HNK: Tensor,
    key_1GNK: Tensor,
    value_1GNK: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: _PagedStep,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each chunk over its own pages, for Transformers' registry of attention functions.

    Args:
        paged: the step that `TorchRunner.run` passed to the model.
        sliding_window: a query sees itself and the `sliding_window - 1` keys before it; None for all keys before it.

    Returns:
        `out_1NHK` and, in place of the weights, None.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    query_HNK, key_GNK = query_1HNK[0] * scaling, key_1GNK[0]
    H, N, K = query_HNK.shape
    paged.write(layer, key_GNK, value_1GNK[0])
    out_HNK = query_HNK.new_empty(H, N, K)
    for reach in paged.reaches(layer, sliding_window, H):
        key_GSK, value_GSK = paged.read(layer, reach, K, query_HNK.dtype)
        for tile in reach.tiles:
            keys = slice(tile.first_key - reach.first_key, tile.end_key - reach.first_key)
            attended = _attend(query_HNK[:, tile.queries], key_GSK[:, keys], value_GSK[:, keys], tile.hidden)
            out_HNK[:, tile.queries] = attended
    return out_HNK.transpose(0, 1)[None], None


def _attend(query_HTK: Tensor, key_GSK: Tensor, value_GSK: Tensor, hidden_TS: Tensor) -> Tensor:
    """`softmax(query key^T) value` with the order of every sum fixed (see the top of the file); `out_HTK`."""
    (H, T, K), (G, S, _) = query_HTK.shape, key_GSK.shape
    rows_GRK = query_HTK.reshape(G, H // G * T, K)
    scores_GRS = query_HTK.new_empty(G, H // G * T, S)
    for rows_RK, key_SK, scores_RS in zip(rows_GRK, key_GSK, scores_GRS, strict=True):
        torch.mm(rows_RK, key_SK.T, out=scores_RS)
    scores_GRS.view(H, T, S).masked_fill_(hidden_TS, float("-inf"))
    weights_GRS = scores_GRS.softmax(-1, dtype=torch.float32).to(value_GSK.dtype)
    out_GRK = torch.empty_like(rows_GRK)
    for weights_RS, value_SK, out_RK in zip(weights_GRS, value_GSK, out_GRK, strict=True):
        products = zip(weights_RS.split(KEYS_PER_PRODUCT, 1), value_SK.split(KEYS_PER_PRODUCT), strict=True)
        for i, (weights, values) in enumerate(products):
            torch.addmm(out_RK, weights, values, beta=int(i > 0), out=out_RK)
    return out_GRK.view(H, T, K)


# No mask function is registered beside it, so the model builds no mask.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
