"""The machine that measures: whether it is idle, what it is, and who used its cores meanwhile. Linux only."""

from __future__ import annotations

import datetime
import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8")


@dataclass(frozen=True)
class CpuTime:
    """Seconds of CPU time since the machine started: all cores, those taken by other guests of the host included."""

    at: float
    busy_s: float
    stolen_s: float


def cpu_time() -> CpuTime:
    fields = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return CpuTime(time.perf_counter(), (user + nice + system + irq + softirq) * _TICK_S, steal * _TICK_S)


def process_cpu_s(pid: int) -> float:
    """CPU seconds that the process and its threads have used.

    Raises:
        OSError: there is no such process.
    """
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def cores() -> int:
    return len(os.sched_getaffinity(0))


def busy_share(seconds: float = 2.0) -> float:
    """The share of all cores that is in use, while this process sleeps."""
    before = cpu_time()
    time.sleep(seconds)
    after = cpu_time()
    return (after.busy_s + after.stolen_s - before.busy_s - before.stolen_s) / ((after.at - before.at) * cores())


def require_idle(allow_busy: bool, limit: float = 0.05) -> float:
    """The share of the cores in use now.

    Raises:
        ValueError: it is above `limit`, and `allow_busy` is off.
    """
    share = busy_share()
    if share > limit:
        message = f"other processes use {share:.0%} of this machine: figures taken now mean nothing"
        if not allow_busy:
            raise ValueError(f"{message}; wait until it is idle, or pass --allow-busy to try the script out")
        print(f"WARNING: {message}", flush=True)
    return share


def describe() -> dict[str, Any]:
    """Processor, flags, cores, memory and load, as JSON."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    flags = set(found.get("flags", found.get("Features", "")).split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": found.get("model name", platform.processor()),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "last_level_cache": found.get("cache size", ""),
        "cores": cores(),
        "memory_bytes": memory,
        "load_average": os.getloadavg(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
