"""What happens to each row of activations by itself: normalisation, rotation, gating, and the choice of experts.

Every function treats a row the same way whatever rows stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from openk3.kernels.attention import HALF, HEAD_DIM, KEYS, KV_HEADS, PAGE_SIZE, VALUES, page_at
from openk3.kernels.code import F16, store
from openk3.kernels.memory import f32_at
from openk3.kernels.team import SERIAL

FAST = SERIAL | {"fastmath": True}
LARGEST_HALF = np.float32(65504)


@intrinsic
def _store_half(typingctx: Any, value: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """Round a float32 to float16 and store it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, builder.fptrunc(args[0], F16), args[1], 2)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), codegen


@intrinsic
def _store_float(typingctx: Any, value: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store(builder, args[0], args[1], 4)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), codegen


@njit(**FAST)
def _norm(row, weight, eps, out):
    total = np.float32(0)
    for i in range(row.size):
        total += row[i] * row[i]
    scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(row.size) + np.float32(eps)))
    for i in range(row.size):
        out[i] = row[i] * scale * weight[i]


@njit(**SERIAL)
def rms_norm(x, weight, eps, out, first, end):
    """RMSNorm of rows `[first, end)` of `x` `[M, D]` into `out`, with the D weights at address `weight`."""
    weights = f32_at(weight, x.shape[1])
    for m in range(first, end):
        _norm(x[m], weights, eps, out[m])


@njit(**FAST)
def _rotate(head, cos, sin):
    half = cos.size
    for i in range(half):
        first, second = head[i], head[half + i]
        head[i] = first * cos[i] - second * sin[i]
        head[half + i] = second * cos[i] + first * sin[i]


@njit(**SERIAL)
def _keep(numbers, address, stride, half):
    """Store a head's numbers, `stride` elements apart."""
    for i in range(numbers.size):
        value = numbers[i]
        if not half:
            _store_float(value, address + 4 * stride * i)
            continue
        if value > LARGEST_HALF:
            value = LARGEST_HALF
        elif value < -LARGEST_HALF:
            value = -LARGEST_HALF
        _store_half(value, address + 2 * stride * i)


@njit(**SERIAL)
def shape_heads(qkv, heads, q_norm, k_norm, eps, cos, sin, layer, cache, pages, slots, first, end):
    """Normalise and turn query and key heads in place, and write keys and values to the cache.

    Args:
        qkv: `[M, (H + 2 G) K]`.
        q_norm, k_norm: addresses of K weights, 0 for no norm.
        cos, sin: `[M, K / 2]`, or `[0, K / 2]` in a layer without positions.
        cache: as for `attention`; pages, slots: `[M]` int64, where each row's key and value go.
        first, end: which of the `M * (H + 2 G)` heads to do, row after row.
    """
    G, head_dim, page_size, half = cache[KV_HEADS], cache[HEAD_DIM], cache[PAGE_SIZE], cache[HALF] != 0
    size = 2 if half else 4
    number = heads + 2 * G
    for item in range(first, end):
        m, h = item // number, item % number
        head = qkv[m, h * head_dim : (h + 1) * head_dim]
        if h < heads + G:
            norm = q_norm if h < heads else k_norm
            if norm != 0:
                _norm(head, f32_at(norm, head_dim), eps, head)
            if cos.shape[0] > 0:
                _rotate(head, cos[m], sin[m])
        if h >= heads + G:
            at = cache[VALUES] + page_at(cache, layer, pages[m], h - heads - G)
            _keep(head, at + size * slots[m] * head_dim, 1, half)
        elif h >= heads:
            at = cache[KEYS] + page_at(cache, layer, pages[m], h - heads)
            _keep(head, at + size * slots[m], page_size, half)


@njit(**SERIAL)
def choose_experts(logits, bias, chosen_count, softmax, renormalise, scale, chosen, weights):
    """The best experts of each row and their weights, as `openk3.model.moe.Router` chooses them.

    Args:
        logits: `[M, E]`; changed to scores.
        bias: `[E]`, moves the choice only; `[0]` for none.
        chosen, weights: `[M, C]`, filled.
    """
    M, E = logits.shape
    ranked = np.empty(E, np.float32)
    for m in range(M):
        scores = logits[m]
        if softmax:
            top = scores.max()
            total = np.float32(0)
            for e in range(E):
                scores[e] = np.float32(math.exp(scores[e] - top))
                total += scores[e]
            for e in range(E):
                scores[e] /= total
        else:
            for e in range(E):
                scores[e] = np.float32(1) / (np.float32(1) + np.float32(math.exp(-scores[e])))
        for e in range(E):
            ranked[e] = scores[e] + bias[e] if bias.size else scores[e]
        total = np.float32(0)
        for c in range(chosen_count):
            best = ranked.argmax()
            chosen[m, c] = best
            weights[m, c] = scores[best]
            total += scores[best]
            ranked[best] = -np.inf
        for c in range(chosen_count):
            if renormalise:
                weights[m, c] /= max(total, np.float32(1e-20))
            weights[m, c] *= scale
