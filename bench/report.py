"""What the figures of `cpu.py` say: speeds, ratios to the peers, shares of the roofline, and which bars are met."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from contenders import LLAMA, LLAMA_4BIT, LLAMA_8BIT, OPENK3, TRANSFORMERS, VLLM, group
from rich.console import Console
from rich.table import Table
from work import decode_bytes, prefill_flops

from openk3.config import ModelConfig

Result = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """A speed in tokens per second.

    Attributes:
        workload: whose runs it comes from.
        speed: of (the workload, seconds to the first token, seconds in all).
    """

    title: str
    workload: str
    speed: Callable[[Result, float, float], float]


def _decoding(workload: Result, first: float, total: float) -> float:
    return (workload["new_tokens"] - 1) / (total - first)


def _prefilling(workload: Result, first: float, total: float) -> float:
    return workload["prompt_tokens"] / first


def _together(workload: Result, first: float, total: float) -> float:
    return workload["prompts"] * workload["new_tokens"] / total


METRICS = {
    "decode": Metric("decode, batch 1, 256 tokens after 64", "decode", _decoding),
    "deep": Metric("decode, batch 1, after 4,096 tokens", "long", _decoding),
    "prefill 512": Metric("prefill, 512 tokens", "prefill", _prefilling),
    "prefill 4096": Metric("prefill, 4,096 tokens", "long", _prefilling),
    "batch": Metric("16 sequences, 64 + 128 tokens", "batch", _together),
}


@dataclass(frozen=True)
class Finding:
    """One bar.

    Attributes:
        reached: the figure; `least` is the bar.
        between: the smallest and the largest of the rounds.
    """

    what: str
    reached: float
    least: float
    between: tuple[float, float]
    unit: str

    @property
    def met(self) -> bool:
        return self.reached >= self.least


class Figures:
    """Speeds of every metric, contender and round."""

    def __init__(self, result: Result) -> None:
        self.speeds: dict[str, dict[str, list[float]]] = {}
        for key, metric in METRICS.items():
            if workload := result["workloads"].get(metric.workload):
                self.speeds[key] = {
                    name: [
                        metric.speed(workload, *times) for times in zip(runs["first_s"], runs["total_s"], strict=True)
                    ]
                    for name, runs in workload["runs"].items()
                }

    def best(self, metric: str, names: Sequence[str]) -> str | None:
        """The contender of the highest median."""
        there = [name for name in names if name in self.speeds.get(metric, ())]
        return max(there, key=lambda name: self.median(metric, name), default=None)

    def median(self, metric: str, name: str) -> float:
        return statistics.median(self.speeds[metric][name])

    def ratio(
        self, title: str, ours: tuple[str, Sequence[str]], theirs: tuple[str, Sequence[str]], least: float
    ) -> Iterator[Finding]:
        """The best of ours over the best of theirs, each a metric and contenders; nothing if one was not measured."""
        one, other = self.best(*ours), self.best(*theirs)
        if one is None or other is None:
            return
        rounds = [a / b for a, b in zip(self.speeds[ours[0]][one], self.speeds[theirs[0]][other], strict=False)]
        reached = self.median(ours[0], one) / self.median(theirs[0], other)
        yield Finding(f"{title}: {one} / {other}", reached, least, (min(rounds), max(rounds)), "x")

    def share(self, title: str, metric: str, name: str, cost: float, limit: float, least: float) -> Iterator[Finding]:
        """Of a limit per second, given what a token costs."""
        if name in self.speeds.get(metric, ()):
            shares = [speed * cost / limit for speed in self.speeds[metric][name]]
            between = (min(shares), max(shares))
            yield Finding(f"{title}: {name}", statistics.median(shares), least, between, "%")


def findings(result: Result, config: ModelConfig) -> list[Finding]:
    """Every bar for which there are figures."""
    figures = Figures(result)
    found: list[Finding] = []
    for metric, title, ours, theirs, least in (
        ("decode", "decode, INT8 to INT8", OPENK3[:1], LLAMA_8BIT, 1.6),
        ("decode", "decode, INT4 to 4 bits", OPENK3[1:2], LLAMA_4BIT, 1.4),
        ("decode", "decode", OPENK3, (TRANSFORMERS,), 8.0),
        ("deep", "decode after 4,096", OPENK3, LLAMA, 1.3),
        ("prefill 512", "prefill 512", OPENK3, LLAMA, 1.4),
        ("prefill 512", "prefill 512", OPENK3, (TRANSFORMERS,), 1.7),
        ("prefill 4096", "prefill 4,096", OPENK3, LLAMA, 1.4),
        ("prefill 4096", "prefill 4,096", OPENK3, (TRANSFORMERS,), 1.7),
        ("batch", "16 sequences", OPENK3, LLAMA, 1.25),
        ("batch", "16 sequences", OPENK3, VLLM[:1], 3.0),
        ("batch", "16 sequences", OPENK3, VLLM[1:], 3.0),
    ):
        found += figures.ratio(title, (metric, ours), (metric, theirs), least)
    if batched := figures.best("batch", OPENK3):
        found += figures.ratio("16 sequences to own one", ("batch", [batched]), ("decode", [batched]), 3.0)
    if roofline := result.get("roofline"):
        work = result["work"]
        bandwidth, flops = roofline["read_bytes_per_s"], roofline["float32_flops"]
        name = OPENK3[0]
        moved = work["decode_bytes"].get(name)
        if moved:
            found += figures.share("decode, of read bandwidth", "decode", name, moved, bandwidth, 0.8)
        if fastest := figures.best("prefill 512", OPENK3):
            cost = work["prefill_512_flops"] / 512
            found += figures.share("prefill 512, of float32 GEMM", "prefill 512", fastest, cost, flops, 0.75)
    return found


def work_of(config: ModelConfig, weight_bytes: dict[str, int]) -> Result:
    """What the workloads cost, for the roofline.

    Args:
        weight_bytes: of contenders that run a quantized checkpoint.
    """
    context = 64 + 256 // 2  # on average, over the tokens that are decoded
    names = [*OPENK3, *{group(name): None for name in LLAMA}, TRANSFORMERS, *VLLM]
    return {
        "decode_bytes": {name: decode_bytes(config, name, context, weight_bytes.get(name)) for name in names},
        "prefill_512_flops": prefill_flops(config, 512),
        "prefill_4096_flops": prefill_flops(config, 4096),
    }


def show(result: Result, config: ModelConfig) -> None:
    console = Console(width=140)
    figures = Figures(result)
    speeds = Table("tokens/s, medians", *figures.speeds, title=f"{result['model']}: every contender")
    names = dict.fromkeys(name for by_name in figures.speeds.values() for name in by_name)
    for name in names:
        row = [
            f"{figures.median(metric, name):,.1f}" if name in by_name else ""
            for metric, by_name in figures.speeds.items()
        ]
        speeds.add_row(name, *row)
    console.print(speeds)
    bars = Table("bar", "at least", "reached", "rounds", "met", title="bars")
    for finding in findings(result, config):
        scale, unit = (100, "%") if finding.unit == "%" else (1, "x")
        low, high = finding.between
        bars.add_row(
            finding.what,
            f"{finding.least * scale:g}{unit}",
            f"{finding.reached * scale:.3g}{unit}",
            f"{low * scale:.3g} to {high * scale:.3g}",
            "yes" if finding.met else "NO",
        )
    console.print(bars)
    _show_roofline(console, result, figures)
    for key, workload in result["workloads"].items():
        if len({runs["at"] for runs in workload["runs"].values()}) > 1:
            console.print(f"NOTE: not all contenders of {key!r} ran in the same alternation")
        for name, runs in workload["runs"].items():
            if max(runs["others_share"]) > 0.05 or max(runs["stolen_share"]) > 0.05:
                others, stolen = max(runs["others_share"]), max(runs["stolen_share"])
                console.print(f"NOTE: beside {name} in {key!r}, others used {others:.0%} and the host {stolen:.0%}")
    for name, why in result.get("absent", {}).items():
        console.print(f"left out: {name}: {why}")


def _show_roofline(console: Console, result: Result, figures: Figures) -> None:
    """Every contender's share of the bandwidth while decoding, and of the GEMM peaks in prefill."""
    if not (roofline := result.get("roofline")):
        return
    work, int8 = result["work"], roofline["int8_ops"]
    bandwidth, cached, gemm = (
        roofline["read_bytes_per_s"], roofline["cached_read_bytes_per_s"], roofline["float32_flops"]
    )  # fmt: skip
    title = (
        f"read {bandwidth / 1e9:.1f} GB/s (as much as the weights: {cached / 1e9:.1f}), float32 GEMM {gemm / 1e9:.0f}"
    )
    title += f" GFLOP/s, int8 GEMM {int8 / 1e9:.0f} Gop/s" if int8 else " GFLOP/s"
    columns = ["roofline", "decode GB/s", "of read", "prefill 512 GFLOP/s", "of float32 GEMM", "of int8 GEMM"]
    table = Table(*columns, title=title)
    for name in dict.fromkeys([*figures.speeds.get("decode", ()), *figures.speeds.get("prefill 512", ())]):
        cells = ["", "", "", "", ""]
        if name in figures.speeds.get("decode", ()) and group(name) in work["decode_bytes"]:
            moved = figures.median("decode", name) * work["decode_bytes"][group(name)]
            cells[:2] = f"{moved / 1e9:.1f}", f"{moved / bandwidth:.0%}"
        if name in figures.speeds.get("prefill 512", ()):
            done = figures.median("prefill 512", name) * work["prefill_512_flops"] / 512
            cells[2:] = f"{done / 1e9:.0f}", f"{done / gemm:.0%}", f"{done / int8:.0%}" if int8 else ""
        table.add_row(name, *cells)
    console.print(table)
