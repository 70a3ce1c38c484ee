"""A step as a table of int64: sizes, then addresses of its inputs and of the room it works in.

TILES are as of `openk3.kernels.attention`; PAGES and SLOTS tell where each row's key and value go, per set of block
tables; LAST names the rows whose logits are wanted. `openk3.kernels.plan` fills in sizes and inputs.

A step of one row lets every thread compute by itself what happens to that row alone, such as norms, instead of waiting
for one that does. So X, NORMED, GATED, INTEGERS and STATS have room for a row of each thread.
"""

from __future__ import annotations

(
    NUM_ROWS,
    NUM_LAST,
    NUM_TILES,
    NUM_TABLES,
    TABLE_WIDTH,
    SPLITS,
    NUM_PARTS,
    X,
    COS,
    SIN,
    PAGES,
    SLOTS,
    TILES,
    BLOCK_TABLES,
    LAST,
    LOGITS,
    LOGITS_STRIDE,
    NORMED,
    BRANCH,
    QKV,
    ATTENDED,
    WIDE,
    GATED,
    INTEGERS,
    STATS,
    PARTS,
    SHARED_OUT,
    ROUTED,
    CHOSEN,
    CHOICE_WEIGHTS,
    PLACES,
    GROUPS,
    GATHERED,
    STARTS,
) = range(34)
JOB_SIZE = 34
