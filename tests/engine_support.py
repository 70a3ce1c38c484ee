"""What the engine's tests share: a byte tokenizer, small models of each kind, and a driver for the bare engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from conftest import random_model
from openk3.config import FULL, SLIDING, ModelConfig
from openk3.engine import Delta, Engine, EngineConfig, SamplingParams
from openk3.engine.handle import merge
from openk3.engine.request import Request
from openk3.model import K3ForCausalLM
from openk3.serve.logprobs import _byte_alphabet
from openk3.weights import LoadedModel

EOS = 0
RUNNERS = ("cpu", "torch")
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def byte_level(specials: dict[int, str], words: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of one token per byte, of which those in `specials` are special, and one per beginning of `words`."""
    letters = _byte_alphabet()
    vocabulary = {specials.get(byte, char): byte for char, byte in letters.items()}
    chars = {byte: char for char, byte in letters.items()}
    merges: list[tuple[str, str]] = []
    for word in words:
        token, *rest = (chars[byte] for byte in word.encode())
        for char in rest:
            if (token, char) not in merges:
                merges.append((token, char))
                vocabulary.setdefault(token + char, len(vocabulary))
            token += char
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials.values()])
    return tokenizer


class ByteTokenizer:
    """Token i is byte i; token 0 ends a text and shows as nothing."""

    eos_token_ids: tuple[int, ...] = (EOS,)

    @cached_property
    def backend(self) -> Tokenizer:
        return byte_level({EOS: "<|end|>"})

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i != EOS or not skip_special_tokens).decode("utf-8", errors="replace")

    def text_of(self, token_id: int) -> str | None:
        return None


@cache
def small_model(*kinds: str) -> K3ForCausalLM:
    """A tiny random model: dense, rotary and global, or with any of "window", "moe", "nope", "gemma"."""
    fields: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
    if "window" in kinds:
        fields |= {"layer_types": [SLIDING, FULL], "layer_windows": [7, None]}
    if "nope" in kinds:
        fields |= {"rope_parameters": {FULL: None, SLIDING: {"rope_theta": 10000.0}}}
        fields |= {"layer_types": [SLIDING, FULL], "layer_windows": [fields.get("layer_windows", [1000])[0], None]}
    if "moe" in kinds:
        fields |= {"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    if "gemma" in kinds:
        fields |= {"use_sandwich_norm": True, "use_qk_norm": True, "hidden_act": "gelu_pytorch_tanh"}
        fields |= {"embedding_multiplier": 8.0, "num_key_value_heads": 4, "attention_bias": True}
    return random_model(ModelConfig(**fields))


def random_tokens(length: int, seed: int = 0) -> list[int]:
    """Token ids without the end of text."""
    return [int(i) for i in np.random.default_rng(seed).integers(1, 256, length)]


def small_engine(model: LoadedModel | K3ForCausalLM | None = None, **settings: Any) -> Engine:
    """Leaves the choice of the runner to the engine, as everything above it does."""
    settings = {"page_size": 4, "num_pages": 300, "max_num_seqs": 8, "max_num_batched_tokens": 64} | settings
    return Engine(model or small_model(), ByteTokenizer(), EngineConfig(**settings))


def add(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams = GREEDY, **options: Any) -> Request:
    request = engine.make_request(prompt_ids, params, **options)
    engine.add(request)
    return request


def finish(engine: Engine, between_steps: Callable[[int], Iterable[Delta]] = lambda _: ()) -> dict[str, Delta]:
    """Step until nothing is left, checking the books each time; the whole reply of every request that ended.

    `between_steps(n)` is called after step n and may return deltas of its own.
    """
    deltas: dict[str, list[Delta]] = {}
    step = 0
    while engine.has_requests:
        new = engine.step()
        for delta in [*new, *between_steps(step)]:
            deltas.setdefault(delta.request_id, []).append(delta)
        engine.check_integrity()
        step += 1
        assert step < 5000, "the engine makes no progress"
    return {request_id: merge(pieces) for request_id, pieces in deltas.items() if pieces[-1].finish_reason}


def generate(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams = GREEDY, **options: Any) -> Delta:
    """One request, alone."""
    request = add(engine, prompt_ids, params, **options)
    return finish(engine)[request.request_id]
