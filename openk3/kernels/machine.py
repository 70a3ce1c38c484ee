"""What this CPU can do, and the tile sizes that follow from it.

Four ways of multiplying integers are known, from the fastest down: AMX tiles, the AVX-512 VNNI instruction, pairs of
16-bit products (AVX2 and later), and plain vector code for any other CPU. Floating-point tiles depend only on the width
and the number of the registers. Numba's own settings (`NUMBA_CPU_NAME`, `NUMBA_CPU_FEATURES`) are obeyed, so code for
another machine can be compiled and tested here.
"""

from __future__ import annotations

import ctypes
import platform
import sys

from llvmlite import binding
from numba import config


def _features() -> set[str]:
    """The instruction sets compiled code may use, by LLVM's names."""
    if config.CPU_FEATURES is not None:
        return {name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+")}
    return {name for name, there in binding.get_host_cpu_features().items() if there}


def _may_use_amx() -> bool:
    """Whether the system lets this process use AMX; Linux wants to be asked once per process."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


_FOUND = _features()
AVX512 = {"avx512f", "avx512bw", "avx512vl"} <= _FOUND
VNNI = AVX512 and "avx512vnni" in _FOUND
AVX2 = "avx2" in _FOUND
AMX = VNNI and {"amx-tile", "amx-int8"} <= _FOUND and _may_use_amx()
X86 = platform.machine() in ("x86_64", "AMD64")

# What the kernels cannot do without: on x86 there is no other way to read float16, and threads are POSIX threads.
MISSING = "the CPU has no F16C instructions" if X86 and "f16c" not in _FOUND else None
if sys.platform == "win32":
    MISSING = "Windows has no POSIX threads"
if config.DISABLE_JIT:
    MISSING = "NUMBA_DISABLE_JIT is set"

# Tokens that share the loads of a weight in one integer tile: as many as their sums fit into the registers.
TOKEN_TILES = (1, 2, 4, 8) if AVX512 else (1, 2, 3)
# Rows of an attention tile and 16-float vectors beside each of them.
UPDATE_ROWS, UPDATE_VECTORS = (12, 2) if AVX512 else (6, 1)


def describe() -> str:
    """The kind of code the kernels consist of on this machine, for people."""
    if AMX:
        return "AMX and AVX-512 VNNI"
    if VNNI:
        return "AVX-512 VNNI"
    if AVX512:
        return "AVX-512"
    return "AVX2" if AVX2 else f"portable vector code for {platform.machine()}"
