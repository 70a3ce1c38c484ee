"""Texts to vectors: `load_embedder()` a BERT sentence encoder, then `embed` with it.

embedder = openk3.load_embedder()
vectors = embedder.embed(["a text", "another"])  # unit vectors: their dot product is their similarity
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from openk3.weights.embedders import DEFAULT_EMBEDDER, embedder_directory
from openk3.weights.errors import CheckpointError
from openk3.weights.safetensors_reader import read_arrays, to_float32

if TYPE_CHECKING:
    from torch import Tensor

    from openk3.model.bert import BertConfig

# Tokens, with padding, that are computed at a time.
_GROUP_TOKENS = 4096


class Embedder:
    """A loaded encoder. `dimensions` is the length of its vectors, `max_tokens` of its longest text."""

    def __init__(self, config: BertConfig, weights: dict[str, Tensor], tokenizer: Tokenizer) -> None:
        self.dimensions = config.hidden_size
        self.max_tokens = config.max_position_embeddings
        self._config = config
        self._weights = weights
        self._tokenizer = tokenizer

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text.

        Raises:
            ValueError: a text is empty or too long; the message names its index.
        """
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        for i, (text, ids) in enumerate(zip(texts, tokens, strict=True)):
            if not text:
                raise ValueError(f"texts[{i}]: the text is empty")
            if len(ids) > self.max_tokens:
                raise ValueError(f"texts[{i}]: {len(ids):,} tokens, where at most {self.max_tokens} fit; shorten it")
        return tokens

    def groups(self, tokens: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], NDArray[np.float32]]]:
        """Yield (indices, their vectors) until all are done, texts of like length together."""
        import torch

        from openk3.model.bert import inference

        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        while order:
            count = max(1, min(len(order), _GROUP_TOKENS // len(tokens[order[-1]])))
            group, order = order[-count:], order[:-count]
            longest = len(tokens[group[-1]])
            ids = torch.tensor([[*tokens[i], *[0] * (longest - len(tokens[i]))] for i in group])
            lengths = torch.tensor([len(tokens[i]) for i in group])
            mask = torch.arange(longest)[None, :] < lengths[:, None]
            yield group, inference(self._weights, self._config, ids, mask).numpy()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """One unit vector per text, as rows.

        Raises:
            ValueError: not a list of texts, or one of them is empty or too long.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise ValueError("texts: expected a list of strings")
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        for group, part in self.groups(self.tokenize(texts)):
            vectors[group] = part
        return vectors


def load_embedder(name_or_path: str = DEFAULT_EMBEDDER, *, progress: bool = True) -> Embedder:
    """Make an encoder ready: the default one, fetched at its first use, or a directory with a BERT checkpoint.

    Raises:
        ValueError: no such model, or not a BERT checkpoint.
    """
    import torch

    from openk3.model.bert import BertConfig

    directory = Path(embedder_directory(name_or_path, progress=progress))
    try:
        given = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if given.get("model_type") != "bert" or given.get("hidden_act") != "gelu":
            raise CheckpointError(f"{directory} is no BERT checkpoint that can be run: its config.json says otherwise")
        config = BertConfig(**{name: given[name] for name in BertConfig.__dataclass_fields__})
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except (OSError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{directory} is no whole BERT checkpoint: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    arrays = read_arrays(directory / "model.safetensors")
    weights = {
        name.removeprefix("bert."): torch.from_numpy(to_float32(array))
        for name, array in arrays.items()
        if array.dtype.kind == "f"
    }
    return Embedder(config, weights, tokenizer)
