"""What this machine can do at best: bytes read per second, and products of matrices per second.

Run as a script, it reads the shapes of a model's matrices from stdin and prints the figures as JSON. That is a process
of its own, with no settings but the libraries' defaults (OpenK3 tells MKL to keep its bits, which costs speed).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from processes import plain_environment

_STREAM_BYTES = 2**30


@dataclass(frozen=True)
class Roofline:
    """Best figures of several tries, all cores.

    Attributes:
        read_bytes_per_s: reading 1 GiB.
        cached_read_bytes_per_s: reading as many bytes as the model has weights again and again, which a large
            last-level cache makes faster.
        float32_flops: of products of 512 rows with the model's matrices, per second.
        int8_ops: the same with 8-bit integers; None where PyTorch has no such product here.
    """

    read_bytes_per_s: float
    cached_read_bytes_per_s: float
    float32_flops: float
    int8_ops: float | None


def measure(matrices: dict[tuple[int, int], int], weights: int) -> Roofline:
    """
    Args:
        matrices: shapes `(rows, columns)` and how often each occurs.
        weights: bytes of the smaller working set.
    """
    given = {"matrices": [[*shape, count] for shape, count in matrices.items()], "weights": weights}
    command = [sys.executable, __file__]
    done = subprocess.run(
        command, input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True, env=plain_environment()
    )
    return Roofline(**json.loads(done.stdout))


def best(call: Callable[[], object], tries: int = 10) -> float:
    """Seconds of the fastest of several calls, after one that does not count."""
    call()
    times = []
    for _ in range(tries):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def read_bandwidth(size: int) -> float:
    """Bytes per second at which all cores read an array of `size` bytes, by the faster of two sums."""
    import numba
    import numpy as np
    import torch

    threads = torch.get_num_threads()

    @numba.njit(parallel=True, fastmath=True)
    def total(x: Any) -> Any:
        sums = np.zeros(threads, np.int64)
        part = x.size // threads
        for t in numba.prange(threads):
            sums[t] = x[t * part : (t + 1) * part].sum()
        return sums

    numba.set_num_threads(threads)
    words = np.ones(size // 8, np.int64)
    tensor = torch.from_numpy(words.view(np.float32))
    return words.nbytes / min(best(lambda: total(words)), best(lambda: tensor.sum()))


def float32_flops(matrices: list[list[int]], rows: int = 512) -> float:
    import torch

    flops = seconds = 0.0
    for n, k, count in matrices:
        a, b = torch.randn(rows, k), torch.randn(n, k)
        out = torch.empty(rows, n)
        seconds += count * best(lambda a=a, b=b, out=out: torch.mm(a, b.T, out=out))  # type: ignore[misc]
        flops += count * 2 * rows * n * k
    return flops / seconds


def int8_ops(matrices: list[list[int]], rows: int = 512) -> float | None:
    import torch

    ops = seconds = 0.0
    for n, k, count in matrices:
        a, b = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((rows, k), (n, k)))
        try:
            seconds += count * best(lambda a=a, b=b: torch._int_mm(a, b.T))  # type: ignore[misc]
        except RuntimeError:
            return None
        ops += count * 2 * rows * n * k
    return ops / seconds


def main() -> None:
    given = json.load(sys.stdin)
    figures = Roofline(
        read_bytes_per_s=read_bandwidth(_STREAM_BYTES),
        cached_read_bytes_per_s=read_bandwidth(given["weights"]),
        float32_flops=float32_flops(given["matrices"]),
        int8_ops=int8_ops(given["matrices"]),
    )
    print(json.dumps(asdict(figures)))


if __name__ == "__main__":
    main()
