"""What the benchmarks share: options, how a mistake ends, the head of their JSON, and where that is kept."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from machine import describe, now, versions

import openk3
from openk3.engine.config import WeightFormat

RESULTS = Path(__file__).parent / "results"
DEFAULT_MODEL = "smollm2-135m"


def positive(text: str) -> int:
    """An option that counts something there must be one of.

    Raises:
        argparse.ArgumentTypeError: no integer, or one below 1.
    """
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)


def add_options(
    parser: argparse.ArgumentParser,
    *,
    model: bool = True,
    weights: Sequence[str] = get_args(WeightFormat),
    parts: Sequence[str] = (),
) -> None:
    """
    Args:
        model: whether there is one to be named.
        weights: what may be said about how its matrices are held.
        parts: of the benchmark, where some may be left out.
    """
    if model:
        parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--weights", choices=weights, default="int8")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--allow-busy", action="store_true", help="go on although the machine is not idle")
    parser.add_argument("--out", type=Path, help="where the JSON goes; parts that are there stay")
    if parts:
        parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))


def run(parser: argparse.ArgumentParser, benchmark: Callable[[argparse.Namespace], None]) -> None:
    """Do what the options say. What the user got wrong ends as one line and exit code 2, as with `k3`."""
    options = parser.parse_args()
    try:
        benchmark(options)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {' '.join(str(error).split())}\n")


def result_head(benchmark: str, model: str, busy: float) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "model": model,
        "at": now(),
        "machine": describe() | {"busy_at_start": round(busy, 3)},
        "versions": {"openk3": openk3.__version__, **versions("torch", "numba", "numpy", "transformers")},
    }


def result_file(benchmark: str, model: str) -> str:
    """The name of the JSON of a model; where a path names it, of its last part."""
    return f"{benchmark}-{Path(model).expanduser().absolute().name}.json"


def keep(result: dict[str, Any], out: Path | None) -> Path:
    """Write the result over what the file had of the same parts."""
    path = out or RESULTS / result_file(result["benchmark"], result["model"])
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, old | result)
    return path


def write_json(path: Path, value: dict[str, Any]) -> None:
    """The whole file or the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_suffix(".making")
    making.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    making.replace(path)
