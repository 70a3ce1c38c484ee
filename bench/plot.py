"""The chart of docs/speed.md: decode, prefill and batched speed of OpenK3 and its peers, from bench/results/cpu-*.json.

    python bench/plot.py --models smollm2-135m qwen2.5-coder-0.5b

Writes docs/speed.svg: bars in one colour per program, a row of panels per model, on no background, in colours that can
be read on white and on black.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from contenders import LLAMA_4BIT, LLAMA_8BIT, TRANSFORMERS, VLLM
from report import Figures
from results import RESULTS, result_file

TARGET = Path(__file__).parent.parent / "docs" / "speed.svg"
_PANELS = {
    "decode": "decode, 1 sequence",
    "deep": "decode after 4,096 tokens",
    "prefill 512": "prefill, 512 tokens",
    "batch": "16 sequences together",
}
_INK, _OPENK3, _LLAMA, _OTHER = "#7c848d", "#e8590c", "#3b82c4", "#8f7bb8"
_PANEL_WIDTH, _LABEL_WIDTH, _MARGIN = 230, 150, 16
_BAR, _STEP, _HEAD = 15, 21, 52


@dataclass(frozen=True)
class Row:
    """A bar: of several contenders it shows the fastest."""

    label: str
    names: tuple[str, ...]
    colour: str


_ROWS = (
    Row("OpenK3 INT4", ("openk3 int4",), _OPENK3),
    Row("OpenK3 INT8", ("openk3 int8",), _OPENK3),
    Row("llama.cpp 4 bits", LLAMA_4BIT, _LLAMA),
    Row("llama.cpp Q8_0", LLAMA_8BIT, _LLAMA),
    Row("Transformers float32", (TRANSFORMERS,), _OTHER),
    Row("vLLM (CPU)", VLLM, _OTHER),
)


def svg(results: list[dict[str, Any]]) -> str:
    """
    Args:
        results: what `cpu.py` kept, one per model.
    """
    width = _LABEL_WIDTH + len(_PANELS) * _PANEL_WIDTH + _MARGIN
    height_of_one = _HEAD + len(_ROWS) * _STEP + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height_of_one * len(results)}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{_INK}" role="img">',
        "<title>Tokens per second of OpenK3, llama.cpp, Transformers and vLLM</title>",
    ]
    for number, result in enumerate(results):
        parts += _model(result, number * height_of_one)
    return "\n".join([*parts, "</svg>", ""])


def _model(result: dict[str, Any], top: float) -> list[str]:
    figures, machine = Figures(result), result["machine"]
    caption = f"{machine['processor']}, {machine['cores']} cores, tokens per second"
    name = f'<tspan font-size="14" font-weight="600">{escape(result["model"])}</tspan>'
    parts = [f'<text x="{_MARGIN}" y="{top + 18}">{name} <tspan dx="8">{escape(caption)}</tspan></text>']
    for i, row in enumerate(_ROWS):
        y = top + _HEAD + i * _STEP + _BAR - 3
        parts.append(f'<text x="{_LABEL_WIDTH - 8}" y="{y:g}" text-anchor="end">{row.label}</text>')
    for column, (metric, title) in enumerate(_PANELS.items()):
        left = _LABEL_WIDTH + column * _PANEL_WIDTH
        parts.append(f'<text x="{left}" y="{top + 40}" font-weight="600">{title}</text>')
        parts += _bars(figures, metric, left, top + _HEAD)
    return parts


def _bars(figures: Figures, metric: str, left: float, top: float) -> list[str]:
    fastest = [figures.best(metric, row.names) for row in _ROWS]
    speeds = [None if name is None else figures.median(metric, name) for name in fastest]
    longest = max((speed for speed in speeds if speed is not None), default=1.0)
    parts = []
    for i, (row, speed) in enumerate(zip(_ROWS, speeds, strict=True)):
        if speed is None:
            continue
        length = speed / longest * (_PANEL_WIDTH - 70)
        y = top + i * _STEP
        parts.append(
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="2" fill="{row.colour}"/>'
            f'<text x="{left + length + 5:.1f}" y="{y + _BAR - 3}">{speed:,.{0 if speed >= 100 else 1}f}</text>'
        )
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "qwen2.5-coder-0.5b"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    paths = [options.results / result_file("cpu", model) for model in options.models]
    if missing := [str(path) for path in paths if not path.exists()]:
        parser.error(f"{', '.join(missing)}: run bench/cpu.py first")
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    options.out.write_text(svg(results), encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
