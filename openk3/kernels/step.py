"""One whole step of the model in compiled code: from embedded tokens to logits, over the paged cache.

The model comes as tables of numbers (`openk3.engine.program` fills them in): per layer its matrices as ops, its norms
as addresses, its kind. So one compiled function runs every family.

Shapes: M rows (tokens of the step), D hidden_size, H query heads, G key/value heads, K head_dim, R = K / 2, L layers.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from openk3.kernels.attention import attention
from openk3.kernels.linear import COLUMNS, FORMAT, INT8, ROWS, SERIAL, linear, linear_of_experts
from openk3.kernels.rows import choose_experts, gate, rms_norm, shape_queries_and_keys

# A layer's matrices, in this order in the table of ops. QUERY to VALUE, GATE and UP, SHARED_GATE and SHARED_UP are
# computed together. Of experts the first one's matrix stands for all.
QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, ROUTER, EXPERT_GATE_UP, EXPERT_DOWN, SHARED_GATE, SHARED_UP, SHARED_DOWN = (
    range(13)
)
NUM_OPS = 13
# A layer's norms, as addresses; 0 where there is none.
NORM_INPUT, NORM_POST_ATTENTION, NORM_PRE_FEEDFORWARD, NORM_POST_FEEDFORWARD, NORM_QUERY, NORM_KEY = range(6)
NUM_NORMS = 6
# What a layer is: its window (0 for none), which rotations it uses (-1 for none), whether it is sparse, and whether it
# has a shared expert.
WINDOW, ROTATION, SPARSE, SHARED = range(4)
NUM_KINDS = 4
# Integers of the whole model.
HEADS, KV_HEADS, SANDWICH, GELU, EXPERTS_PER_TOKEN, SOFTMAX, RENORMALISE = range(7)
# Floats of the whole model.
EPS, SCALE, ROUTED_SCALE = range(3)


@njit(**SERIAL)
def _store(qkv, first, pages, slots, heads_by_page):
    """Write one kind of head of each row, beginning at column `first`, to its page and slot."""
    G, K = heads_by_page.shape[1], heads_by_page.shape[3]
    for m in range(qkv.shape[0]):
        for g in range(G):
            heads_by_page[pages[m], g, slots[m]] = qkv[m, first + g * K : first + (g + 1) * K]


@njit(**SERIAL)
def _add(x, branch):
    for m in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[m, i] += branch[m, i]


@njit(**SERIAL)
def _experts(ops, h, routed, bias, ints, floats, scratch):
    """The routed experts' weighted sum of each row of `h` `[M, D]`, into `routed`."""
    M, E, C = h.shape[0], ops[ROUTER, ROWS], ints[EXPERTS_PER_TOKEN]
    logits = np.empty((M, E), np.float32)
    linear(ops[ROUTER : ROUTER + 1], h, logits, scratch)
    chosen, weights = np.empty((M, C), np.int64), np.empty((M, C), np.float32)
    softmax, renormalise = ints[SOFTMAX] != 0, ints[RENORMALISE] != 0
    choose_experts(logits, bias, C, softmax, renormalise, np.float32(floats[ROUTED_SCALE]), chosen, weights)
    order = np.argsort(chosen.ravel(), kind="mergesort")
    experts = chosen.ravel()[order]
    groups, count = np.empty((M * C, 3), np.int64), 0
    gathered = np.empty((M * C, h.shape[1]), np.float32)
    for i in range(M * C):
        gathered[i] = h[order[i] // C]
        if i == 0 or experts[i] != experts[i - 1]:
            groups[count, 0], groups[count, 1] = experts[i], i
            count += 1
        groups[count - 1, 2] = i + 1
    wide = np.empty((M * C, ops[EXPERT_GATE_UP, ROWS]), np.float32)
    _of_experts(ops[EXPERT_GATE_UP], groups[:count], gathered, wide, scratch)
    gate(wide, ints[GELU] != 0, scratch)
    _of_experts(ops[EXPERT_DOWN], groups[:count], wide, gathered, scratch)
    routed[:] = 0
    for i in range(M * C):
        token, weight = order[i] // C, weights.ravel()[order[i]]
        for d in range(h.shape[1]):
            routed[token, d] += gathered[i, d] * weight


@njit(**SERIAL)
def _of_experts(op, groups, x, out, scratch):
    element = 1 if op[FORMAT] == INT8 else 4
    linear_of_experts(op, op[ROWS] * op[COLUMNS] * element, op[ROWS] * 4, groups, x, out, scratch)


@njit(**SERIAL)
def _mlp(ops, first, h, out, ints, scratch):
    """The dense network (or shared expert) whose three ops begin at `first`."""
    wide = np.empty((h.shape[0], 2 * ops[first, ROWS]), np.float32)
    linear(ops[first : first + 2], h, wide, scratch)
    gate(wide, ints[GELU] != 0, scratch)
    linear(ops[first + 2 : first + 3], wide, out, scratch)


@njit(nogil=True, cache=True, error_model="numpy")
def forward(
    ops,
    norms,
    kinds,
    biases,
    ints,
    floats,
    x,
    cos,
    sin,
    pages,
    slots,
    tiles,
    tables,
    keys,
    values,
    scratch,
    attention_scratch,
):
    """Run all layers on `x` `[M, D]` in place.

    Args:
        ops: `[L, NUM_OPS, OP_SIZE]` int64; norms: `[L, NUM_NORMS]` int64; kinds: `[L, NUM_KINDS]` int64.
        biases: `[L, E]` float32, the routers' selection biases; `[L, 0]` for none.
        ints, floats: numbers of the whole model.
        cos, sin: `[rotations, M, R]`.
        pages, slots: `[M]` int64, where each row's key and value go.
        tiles, tables: as for `attention`.
        keys, values: `[L, pages, G, page_size, K]` float32.
        scratch, attention_scratch: one row per thread.
    """
    M, D = x.shape
    H, G, K, R = ints[HEADS], ints[KV_HEADS], keys.shape[4], cos.shape[2]
    h, branch = np.empty((M, D), np.float32), np.empty((M, D), np.float32)
    qkv, attended = np.empty((M, (H + 2 * G) * K), np.float32), np.empty((M, H * K), np.float32)
    eps = floats[EPS]
    none = np.empty((0, R), np.float32)
    for layer in range(ops.shape[0]):
        op, norm, kind = ops[layer], norms[layer], kinds[layer]
        rms_norm(x, norm[NORM_INPUT], eps, h)
        linear(op[QUERY : VALUE + 1], h, qkv, scratch)
        turn = kind[ROTATION]
        layer_cos, layer_sin = (none, none) if turn < 0 else (cos[turn], sin[turn])
        shape_queries_and_keys(qkv, H, G, norm[NORM_QUERY], norm[NORM_KEY], eps, layer_cos, layer_sin, scratch)
        _store(qkv, H * K, pages, slots, keys[layer])
        _store(qkv, (H + G) * K, pages, slots, values[layer])
        scale = np.float32(floats[SCALE])
        attention(qkv, H, keys[layer], values[layer], tiles, tables, kind[WINDOW], scale, attended, attention_scratch)
        linear(op[OUTPUT : OUTPUT + 1], attended, branch, scratch)
        if ints[SANDWICH]:
            rms_norm(branch, norm[NORM_POST_ATTENTION], eps, branch)
        _add(x, branch)
        rms_norm(x, norm[NORM_PRE_FEEDFORWARD] if ints[SANDWICH] else norm[NORM_POST_ATTENTION], eps, h)
        if kind[SPARSE]:
            _experts(op, h, branch, biases[layer], ints, floats, scratch)
            if kind[SHARED]:
                shared = np.empty((M, D), np.float32)
                _mlp(op, SHARED_GATE, h, shared, ints, scratch)
                _add(branch, shared)
        else:
            _mlp(op, GATE, h, branch, ints, scratch)
        if ints[SANDWICH]:
            rms_norm(branch, norm[NORM_POST_FEEDFORWARD], eps, branch)
        _add(x, branch)
