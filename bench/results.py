"""What the smaller benchmarks share: their options, the head of their JSON, and where that is kept."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import describe, now, versions

import openk3

RESULTS = Path(__file__).parent / "results"
DEFAULT_MODEL = "smollm2-135m"


def add_options(parser: argparse.ArgumentParser, parts: Sequence[str] = ()) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--allow-busy", action="store_true", help="go on although the machine is not idle")
    parser.add_argument("--out", type=Path, help="where the JSON goes; parts that are there stay")
    if parts:
        parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))


def result_head(benchmark: str, model: str, busy: float) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "model": model,
        "at": now(),
        "machine": describe() | {"busy_at_start": round(busy, 3)},
        "versions": {"openk3": openk3.__version__, **versions("torch", "numba", "numpy", "transformers")},
    }


def keep(result: dict[str, Any], out: Path | None) -> Path:
    """Write the result over what the file had of the same parts."""
    path = out or RESULTS / f"{result['benchmark']}-{Path(result['model']).name}.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, old | result)
    return path


def write_json(path: Path, value: dict[str, Any]) -> None:
    """The whole file or the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_suffix(".making")
    making.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    making.replace(path)
