"""How many threads the CPU's arithmetic gets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_MOST = 256  # each has memory of its own, and nobody gains from more
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: str | None = None) -> int:
    """CPU cores that this process may use: its affinity, and a container's quota.

    Args:
        quota: contents of the control group's `cpu.max`; None reads it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota is None:
        try:
            quota = _QUOTA.read_text(encoding="utf-8")
        except OSError:
            quota = ""
    limit, _, period = quota.partition(" ")
    if limit.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(limit) // int(period)))
    return cores


def default_threads(environ: Mapping[str, str] = os.environ) -> int:
    """One thread per usable core, or what `OMP_NUM_THREADS` says."""
    asked = environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and asked.isascii() and (number := asked.lstrip("0")):
        return min(int(number[:9]), _MOST)
    return usable_cores()
