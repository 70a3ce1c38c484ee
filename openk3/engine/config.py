"""The engine's settings, checked once so that nothing behind them needs to ask again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RunnerName = Literal["auto", "cpu", "torch"]
WeightFormat = Literal["auto", "float32", "int8", "int4"]
KvFormat = Literal["auto", "float32", "float16"]

KEYS_PER_PRODUCT = 128  # attention multiplies by this many keys at a time (`runner_torch`); whole pages must fill it


@dataclass(frozen=True)
class EngineConfig:
    """How much the engine holds and how much it does in one step.

    Attributes:
        page_size: tokens per page of the key/value cache; a power of two up to 128. Prefixes are shared in whole pages.
        num_pages: pages in the cache; None takes as many as `kv_cache_bytes` pays for. Where some layers have a window
            they hold more tokens than `page_size` each, as nothing behind a window is kept.
        kv_format: numbers in which keys and values are held. "float16" takes half the memory of "float32", and reading
            long contexts half the time; it holds them to three digits, up to 65504. "auto": float16 where the kernels
            compute with integer weights, float32 where they compute with float32, and with PyTorch the model's own.
        kv_cache_bytes: memory for keys and values when `num_pages` is None. The system commits it as pages are used.
        max_num_seqs: requests that are computed at the same time; the others wait.
        max_num_batched_tokens: tokens that one step computes. Longer prompts are computed in several steps.
        prefill_beside_decode: tokens of prompts that a step computes while replies are being generated, which wait for
            it. "auto": as many as let a step take about twice as long as one that only generates, learned from measured
            times; a long prompt's first token then comes about twice as late as on an idle engine (many times later
            beside a few replies of a sparse model, whose experts small chunks cannot share). A number fixes it;
            `max_num_batched_tokens` serves prompts as fast as possible and stalls the replies.
        enable_prefix_caching: keep the pages of finished requests for later requests that begin with the same tokens.
        runner: what computes. "cpu": the compiled kernels; "torch": PyTorch, on any device and in any dtype; "auto":
            the kernels where they can run the model (on a CPU, in float32, widths that are multiples of 16), else
            PyTorch.
        weights: how the matrices are held. "auto": as the checkpoint stores them; "int8" and "int4": rounded to that
            when the engine starts, for more speed in less memory; "float32": a quantized checkpoint is dequantized.
            PyTorch computes with the same numbers, dequantized.
        max_model_len: longest request, prompt and reply together, in tokens. None: as long as the model allows and
            three quarters of the cache hold, so that a quarter is left for pinned prefixes.

    Raises:
        ValueError: a field out of range.
    """

    page_size: int = 16
    num_pages: int | None = None
    kv_format: KvFormat = "auto"
    kv_cache_bytes: int = 2 * 1024**3
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    prefill_beside_decode: int | Literal["auto"] = "auto"
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    runner: RunnerName = "auto"
    weights: WeightFormat = "auto"

    def __post_init__(self) -> None:
        for name in ("page_size", "kv_cache_bytes", "max_num_seqs", "max_num_batched_tokens"):
            _check_positive(name, getattr(self, name))
        for name in ("num_pages", "max_model_len"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.prefill_beside_decode != "auto":
            _check_positive("prefill_beside_decode", self.prefill_beside_decode, "'auto' or ")
        choices = {"runner": RunnerName, "weights": WeightFormat, "kv_format": KvFormat}
        for name, allowed in ((name, get_args(choice)) for name, choice in choices.items()):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(allowed)}")
        if KEYS_PER_PRODUCT % self.page_size:
            raise ValueError(
                f"page_size is {self.page_size}: it must be a power of two up to {KEYS_PER_PRODUCT}, for instance 16"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}: a prompt and a reply need at least 2 tokens")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: every one of max_num_seqs "
                f"({self.max_num_seqs}) requests needs a token per step, raise the first or lower the second"
            )


def _check_positive(name: str, value: object, otherwise: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}: it must be {otherwise}an integer of at least 1")
