"""What happens to each row of activations by itself: normalisation, rotation, gating, and the choice of experts.

Every function treats a row the same way whatever rows stand beside it.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from openk3.kernels.linear import PARALLEL, SERIAL
from openk3.kernels.memory import f32_at
from openk3.kernels.vectors import gelu_times, silu_times

FAST = SERIAL | {"fastmath": True}
# Below this many rows a parallel region costs more than it saves.
MANY_ROWS = 16


@njit(**FAST)
def _norm(row, weight, eps, out):
    total = np.float32(0)
    for i in range(row.size):
        total += row[i] * row[i]
    scale = np.float32(1) / np.float32(math.sqrt(total / np.float32(row.size) + np.float32(eps)))
    for i in range(row.size):
        out[i] = row[i] * scale * weight[i]


@njit(**PARALLEL)
def _norm_parallel(x, weight, eps, out):
    for m in prange(x.shape[0]):
        _norm(x[m], weight, eps, out[m])


@njit(**SERIAL)
def rms_norm(x, weight, eps, out):
    """RMSNorm of each row of `x` `[M, D]` into `out`, with the D weights at address `weight`."""
    weights = f32_at(weight, x.shape[1])
    if x.shape[0] >= MANY_ROWS:
        _norm_parallel(x, weights, eps, out)
    else:
        for m in range(x.shape[0]):
            _norm(x[m], weights, eps, out[m])


@njit(**FAST)
def _rotate(head, cos, sin):
    half = cos.size
    for i in range(half):
        first, second = head[i], head[half + i]
        head[i] = first * cos[i] - second * sin[i]
        head[half + i] = second * cos[i] + first * sin[i]


@njit(**PARALLEL)
def shape_queries_and_keys(qkv, heads, kv_heads, q_norm, k_norm, eps, cos, sin, scratch):
    """Normalise and turn the query and key heads of each row of `qkv`, in place.

    Args:
        qkv: `[M, (heads + 2 * kv_heads) * K]`.
        q_norm, k_norm: addresses of K weights, 0 for no norm.
        cos, sin: `[M, K / 2]`, or `[0, K / 2]` in a layer without positions.
        scratch: `[threads, ...]`, for its number of threads.
    """
    threads, half = scratch.shape[0], cos.shape[1]
    head_dim = 2 * half
    for t in prange(threads):
        for m in range(qkv.shape[0] * t // threads, qkv.shape[0] * (t + 1) // threads):
            for h in range(heads + kv_heads):
                head = qkv[m, h * head_dim : (h + 1) * head_dim]
                norm = q_norm if h < heads else k_norm
                if norm != 0:
                    _norm(head, f32_at(norm, head_dim), eps, head)
                if cos.shape[0] > 0:
                    _rotate(head, cos[m], sin[m])


@njit(**PARALLEL)
def gate(gate_up, gelu, scratch):
    """Replace the first half of each row `[gate | up]` by act(gate) * up; F is a multiple of 16."""
    threads, width = scratch.shape[0], gate_up.shape[1] // 2
    for t in prange(threads):
        for m in range(gate_up.shape[0] * t // threads, gate_up.shape[0] * (t + 1) // threads):
            at = gate_up[m].ctypes.data
            if gelu:
                gelu_times(at, at + 4 * width, width)
            else:
                silu_times(at, at + 4 * width, width)


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
