"""One whole step of the model in compiled code: from embedded tokens to logits, over the paged cache.

The model comes as tables of numbers (`openk3.engine.program` fills them in): per layer its matrices as ops, its norms
as addresses, its kind. A step comes as another table (`openk3.kernels.job`). So one compiled function runs every
family, and all threads of the team run it together; `meet` ends a phase. Where a step has one row, each thread computes
by itself, in memory of its own, what happens to that row alone: waiting for another thread takes longer.

Shapes: M rows (tokens of the step), S rows whose logits are wanted, D hidden_size, H query heads, G key/value heads, K
head_dim, R = K / 2, F intermediate_size, L layers, E experts, C chosen experts of a row.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from openk3.kernels.attention import HEAD_DIM, KV_HEADS, PART_EXTRA, TILE_SIZE, attention, join_parts
from openk3.kernels.job import (
    ATTENDED,
    BLOCK_TABLES,
    BRANCH,
    CHOICE_WEIGHTS,
    CHOSEN,
    COS,
    GATED,
    GATHERED,
    GROUPS,
    INTEGERS,
    LAST,
    LOGITS,
    LOGITS_STRIDE,
    NORMED,
    NUM_LAST,
    NUM_PARTS,
    NUM_ROWS,
    NUM_TABLES,
    NUM_TILES,
    PAGES,
    PARTS,
    PLACES,
    QKV,
    ROUTED,
    SHARED_OUT,
    SIN,
    SLOTS,
    SPLITS,
    STARTS,
    STATS,
    TABLE_WIDTH,
    TILES,
    WIDE,
    X,
)
from openk3.kernels.linear import COLUMNS, ROWS, integers_of, linear, linear_of_experts, quantize_rows
from openk3.kernels.memory import f32_cube_at, f32_rows_at, i64_rows_at
from openk3.kernels.rows import choose_experts, rms_norm, shape_heads
from openk3.kernels.team import SERIAL, call_members, entry, meet, wait_for_job
from openk3.kernels.vectors import gelu_times, silu_times

# A layer's matrices, in this order in the table of ops. QUERY to VALUE, GATE and UP, SHARED_GATE and SHARED_UP are
# computed together. Of experts the first one's matrix stands for all.
QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, ROUTER, EXPERT_GATE_UP, EXPERT_DOWN, SHARED_GATE, SHARED_UP, SHARED_DOWN = (
    range(13)
)
NUM_OPS = 13
# A layer's norms, as addresses; 0 where there is none.
NORM_INPUT, NORM_POST_ATTENTION, NORM_PRE_FEEDFORWARD, NORM_POST_FEEDFORWARD, NORM_QUERY, NORM_KEY = range(6)
NUM_NORMS = 6
# What a layer is: its window (0 for none), which rotations it uses (-1 for none), whether it is sparse, whether it has
# a shared expert, which block tables it reads, and which part of their pages is its own.
WINDOW, ROTATION, SPARSE, SHARED, TABLES, PAGE_PART = range(6)
NUM_KINDS = 6
# Integers of the whole model.
HEADS, SANDWICH, GELU, EXPERTS_PER_TOKEN, SOFTMAX, RENORMALISE, QUANTIZED, FINAL_NORM, WIDEST = range(9)
# Floats of the whole model.
EPS, SCALE, ROUTED_SCALE = range(3)


@njit(**SERIAL)
def _meet_for_rows(team, threads, rows):
    """The end of a phase that works on rows by themselves."""
    if rows > 1:
        meet(team, threads)


@njit(**SERIAL)
def _part(t, threads, count):
    """The first and the end of this thread's part of `count` things."""
    return count * t // threads, count * (t + 1) // threads


@njit(**SERIAL)
def _share(t, threads, rows):
    """The rows that this thread works on in such a phase."""
    return (0, rows) if rows == 1 else _part(t, threads, rows)


@njit(**SERIAL)
def _add(x, branch, norm, eps, h, first, end):
    """Add a branch, normalised where there is a norm, to the residual stream; `h` is overwritten."""
    if norm != 0:
        rms_norm(branch, norm, eps, h, first, end)
    for m in range(first, end):
        added = h[m] if norm != 0 else branch[m]
        for i in range(x.shape[1]):
            x[m, i] += added[i]


@njit(**SERIAL)
def _gate(wide, gelu, out, first, end):
    """act(gate) * up of rows `[gate | up]`; F is a multiple of 16."""
    width = wide.shape[1] // 2
    for m in range(first, end):
        at = wide[m].ctypes.data
        if gelu:
            gelu_times(at, at + 4 * width, out[m].ctypes.data, width)
        else:
            silu_times(at, at + 4 * width, out[m].ctypes.data, width)


@njit(**SERIAL)
def _mlp(t, threads, team, ops, gate, h, q, stats, out, ints, job, scratch, config):
    """The dense network (or shared expert) whose three ops begin at `gate`, on rows that are quantized already."""
    M, F = h.shape[0], ops[gate, ROWS]
    first, end = _share(t, threads, M)
    wide = f32_rows_at(job[WIDE], M, 2 * F)
    gated = f32_rows_at(job[GATED] + (4 * ints[WIDEST] * t if M == 1 else 0), M, F)
    linear(team, threads, ops[gate : gate + 2], h, q, stats, wide, scratch, config)
    meet(team, threads)
    _gate(wide, ints[GELU] != 0, gated, first, end)
    if ints[QUANTIZED]:
        quantize_rows(gated, F, first, end, q, stats)
    _meet_for_rows(team, threads, M)
    linear(team, threads, ops[gate + 2 : gate + 3], gated, q, stats, out, scratch, config)
    meet(team, threads)


@njit(**SERIAL)
def _group_by_expert(chosen, places, groups, starts):
    """Sort the choices `[M, C]` by expert: where each goes (`places`, `[M, C]`), and which rows each expert gets.

    Args:
        starts: `[E]` int64 to work in.
        groups: `[1 + M * C, 3]`: the number of groups, then for each its expert, first row and end row.
    """
    M, C = chosen.shape
    for e in range(starts.size):
        starts[e] = 0
    for m in range(M):
        for c in range(C):
            starts[chosen[m, c]] += 1
    begin = count = 0
    for e in range(starts.size):
        size, starts[e] = starts[e], begin
        begin += size
        if size > 0:
            count += 1
            groups[count, 0], groups[count, 1], groups[count, 2] = e, begin - size, begin
    for m in range(M):
        for c in range(C):
            places[m, c] = starts[chosen[m, c]]
            starts[chosen[m, c]] += 1
    groups[0, 0] = count


@njit(**SERIAL)
def _experts(t, threads, team, ops, h, h_q, h_stats, out, bias, ints, floats, job, scratch, config):
    """The routed experts' weighted sum of each row of `h`, which `h_q` and `h_stats` hold quantized, into `out`."""
    M, D, E, C = h.shape[0], h.shape[1], ops[ROUTER, ROWS], ints[EXPERTS_PER_TOKEN]
    first, end = _part(t, threads, M)
    q, stats = job[INTEGERS], job[STATS]
    logits = f32_rows_at(job[ROUTED], M, E)
    chosen, places = i64_rows_at(job[CHOSEN], M, C), i64_rows_at(job[PLACES], M, C)
    weights, groups = f32_rows_at(job[CHOICE_WEIGHTS], M, C), i64_rows_at(job[GROUPS], 1 + M * C, 3)
    linear(team, threads, ops[ROUTER : ROUTER + 1], h, h_q, h_stats, logits, scratch, config)
    meet(team, threads)
    softmax, renormalise, scale = ints[SOFTMAX] != 0, ints[RENORMALISE] != 0, np.float32(floats[ROUTED_SCALE])
    mine = slice(first, end)
    choose_experts(logits[mine], bias, C, softmax, renormalise, scale, chosen[mine], weights[mine])
    meet(team, threads)
    if t == 0:
        _group_by_expert(chosen, places, groups, i64_rows_at(job[STARTS], 1, E)[0])
    meet(team, threads)
    F = ops[EXPERT_DOWN, COLUMNS]
    gathered = f32_rows_at(job[GATHERED], M * C, D)
    wide, gated = f32_rows_at(job[WIDE], M * C, 2 * F), f32_rows_at(job[GATED], M * C, F)
    for m in range(first, end):
        for c in range(C):
            place = places[m, c]
            gathered[place] = h[m]
            if ints[QUANTIZED]:
                quantize_rows(gathered, D, place, place + 1, q, stats)
    meet(team, threads)
    groups = groups[1 : 1 + groups[0, 0]]
    linear_of_experts(team, threads, ops[EXPERT_GATE_UP], groups, gathered, q, stats, wide, scratch, config)
    meet(team, threads)
    first_choice, end_choice = _part(t, threads, M * C)
    _gate(wide, ints[GELU] != 0, gated, first_choice, end_choice)
    if ints[QUANTIZED]:
        quantize_rows(gated, F, first_choice, end_choice, q, stats)
    meet(team, threads)
    linear_of_experts(team, threads, ops[EXPERT_DOWN], groups, gated, q, stats, gathered, scratch, config)
    meet(team, threads)
    for m in range(first, end):
        out[m] = 0
        for c in range(C):
            row, weight = gathered[places[m, c]], weights[m, c]
            for i in range(D):
                out[m, i] += row[i] * weight
    meet(team, threads)


@entry
def take_part(t, threads, team, ops, head, norms, kinds, biases, ints, floats, cache, job, scratches, config):
    """Run a step as thread 0 of the team, or every step from now on as another one, until it is dismissed.

    One function for both: each entry into compiled code costs its own compilation of all of it.

    Args:
        t, threads: which thread of how many this is. Thread 0 returns when all are done with the step.
        team: what the threads share (`openk3.kernels.team`).
        ops: `[L, NUM_OPS, OP_SIZE]` int64; head: `[1, OP_SIZE]`, the language-model head.
        norms: `[L, NUM_NORMS]` int64; kinds: `[L, NUM_KINDS]` int64.
        biases: `[L, E]` float32, the routers' selection biases; `[L, 0]` for none.
        ints, floats: numbers of the whole model.
        cache: as for `attention`.
        job: `[JOB_SIZE]` int64.
        scratches: `[threads, bytes]` int8, 64-byte aligned; config: of AMX.
    """
    number = 0
    if t == 0 and threads > 1:
        call_members(team)
    while True:
        if t > 0:
            number = wait_for_job(team, number)
            if number < 0:
                return
        M, H, G, K, D = job[NUM_ROWS], ints[HEADS], cache[KV_HEADS], cache[HEAD_DIM], ops[0, QUERY, COLUMNS]
        own = t if M == 1 else 0
        x, h = f32_rows_at(job[X] + 4 * D * own, M, D), f32_rows_at(job[NORMED] + 4 * D * own, M, D)
        q, stats = integers_of(job[INTEGERS], job[STATS], ints[WIDEST], own)
        branch, shared = f32_rows_at(job[BRANCH], M, D), f32_rows_at(job[SHARED_OUT], M, D)
        qkv, attended = f32_rows_at(job[QKV], M, (H + 2 * G) * K), f32_rows_at(job[ATTENDED], M, H * K)
        tiles = i64_rows_at(job[TILES], job[NUM_TILES], TILE_SIZE)
        parts = f32_cube_at(job[PARTS], job[NUM_PARTS], H, K + PART_EXTRA)
        scratch, floats_scratch = scratches[t], scratches[t].view(np.float32)
        eps, quantized = floats[EPS], ints[QUANTIZED] != 0
        first, end = _share(t, threads, M)
        first_head, end_head = _part(t, threads, M * (H + 2 * G))
        scale = np.float32(floats[SCALE])
        if own > 0:
            x[0] = f32_rows_at(job[X], 1, D)[0]
        for layer in range(ops.shape[0]):
            op, norm, kind = ops[layer], norms[layer], kinds[layer]
            rms_norm(x, norm[NORM_INPUT], eps, h, first, end)
            if quantized:
                quantize_rows(h, D, first, end, q, stats)
            _meet_for_rows(team, threads, M)
            linear(team, threads, op[QUERY : VALUE + 1], h, q, stats, qkv, scratch, config)
            meet(team, threads)
            turn, tables = max(kind[ROTATION], 0), kind[TABLES]
            turned = M if kind[ROTATION] >= 0 else 0
            cos = f32_rows_at(job[COS] + 4 * turn * M * (K // 2), turned, K // 2)
            sin = f32_rows_at(job[SIN] + 4 * turn * M * (K // 2), turned, K // 2)
            pages = i64_rows_at(job[PAGES] + 8 * tables * M, 1, M)[0]
            slots = i64_rows_at(job[SLOTS], 1, M)[0]
            shape_heads(
                qkv, H, norm[NORM_QUERY], norm[NORM_KEY], eps, cos, sin, kind[PAGE_PART], cache, pages, slots,
                first_head, end_head,
            )  # fmt: skip
            meet(team, threads)
            size = job[NUM_TABLES] * job[TABLE_WIDTH]
            block_tables = i64_rows_at(job[BLOCK_TABLES] + 8 * tables * size, job[NUM_TABLES], job[TABLE_WIDTH])
            attention(
                team, threads, qkv, H, kind[PAGE_PART], cache, tiles, block_tables, kind[WINDOW], scale, job[SPLITS],
                attended, parts, floats_scratch,
            )  # fmt: skip
            meet(team, threads)
            if job[SPLITS] > 1:
                join_parts(team, threads, tiles, H, kind[WINDOW], K, parts, attended)
                meet(team, threads)
            if quantized:
                quantize_rows(attended, H * K, first, end, q, stats)
                _meet_for_rows(team, threads, M)
            linear(team, threads, op[OUTPUT : OUTPUT + 1], attended, q, stats, branch, scratch, config)
            meet(team, threads)
            _add(x, branch, norm[NORM_POST_ATTENTION] if ints[SANDWICH] else 0, eps, h, first, end)
            before = norm[NORM_PRE_FEEDFORWARD] if ints[SANDWICH] else norm[NORM_POST_ATTENTION]
            rms_norm(x, before, eps, h, first, end)
            if quantized:
                quantize_rows(h, D, first, end, q, stats)
            _meet_for_rows(team, threads, M)
            if not kind[SPARSE]:
                _mlp(t, threads, team, op, np.int64(GATE), h, q, stats, branch, ints, job, scratch, config)
            else:
                if kind[SHARED]:
                    _mlp(t, threads, team, op, np.int64(SHARED_GATE), h, q, stats, shared, ints, job, scratch, config)
                _experts(
                    t, threads, team, op, h, q, stats, branch, biases[layer], ints, floats, job, scratch, config
                )  # fmt: skip
                if kind[SHARED]:
                    first_own, end_own = _part(t, threads, M)
                    branch[first_own:end_own] += shared[first_own:end_own]
                    meet(team, threads)
            _add(x, branch, norm[NORM_POST_FEEDFORWARD], eps, h, first, end)
        S = job[NUM_LAST]
        last = i64_rows_at(job[LAST], 1, S)[0]
        _meet_for_rows(team, threads, M)
        if t == 0 or M == 1:
            for s in range(S):
                rms_norm(x[last[s] : last[s] + 1], ints[FINAL_NORM], eps, h[s : s + 1], 0, 1)
            if quantized:
                quantize_rows(h, D, 0, S, q, stats)
        _meet_for_rows(team, threads, M)
        if S > 0:
            logits = f32_rows_at(job[LOGITS], S, job[LOGITS_STRIDE])
            linear(team, threads, head, h[:S], q, stats, logits, scratch, config)
        meet(team, threads)
        if t == 0:
            return
