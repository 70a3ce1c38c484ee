"""What sparsity costs in decode: an OpenK3 design with eight times as many experts as it uses, and its dense twin.

The twin has the same layers, but one feed-forward network as wide as the experts that a token uses. Weights are random,
so that the router spreads tokens over all experts, and both models share kernels, threads and process. They run in
turns:

    python bench/moe.py --depth 12 --weights int8 --rounds 5

Prints the ratio of decode speeds (bar: at most 1.3) and keeps everything in bench/results/moe-depth-<depth>.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from machine import require_idle
from results import add_options, keep, positive, result_head, run

from openk3.config import ModelConfig, dial
from openk3.engine import Engine, EngineConfig, EngineLoop, SamplingParams
from openk3.model.cost import active_parameters, total_parameters
from openk3.parameters import parameter_shapes
from openk3.weights.loaded import Format, LoadedModel

_VOCABULARY = 32768
_PROMPT = 64


class NoText:
    """A tokenizer for ids that mean nothing."""

    eos_token_ids: tuple[int, ...] = ()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def text_of(self, token_id: int) -> str | None:
        return ""


def sparse(depth: int, experts: int) -> ModelConfig:
    """The design at `depth` with `experts` experts for each that a token uses, in every layer."""
    return dial(
        depth,
        vocab_size=_VOCABULARY,
        tie_word_embeddings=True,
        num_experts=experts * dial(depth).num_experts_per_tok,
        mlp_layer_types=["sparse"] * depth,
    )


def dense(config: ModelConfig) -> ModelConfig:
    """The twin of the same active size: every sparse layer's network as wide as what a token uses of it."""
    width = config.moe_intermediate_size * (config.num_experts_per_tok + config.n_shared_experts)
    return dial(
        config.num_hidden_layers,
        vocab_size=_VOCABULARY,
        tie_word_embeddings=True,
        intermediate_size=width,
        mlp_layer_types=["dense"] * config.num_hidden_layers,
        num_experts=0,
        num_experts_per_tok=0,
        n_shared_experts=0,
        use_expert_bias=False,
    )


def random_model(config: ModelConfig, weights: str) -> LoadedModel:
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = np.full(shape, "norm" in name, np.float32)
        else:
            tensors[name] = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
    return LoadedModel(config, tensors).quantized(weights)  # type: ignore[arg-type]


def decode_speed(loop: EngineLoop, new_tokens: int, rng: np.random.Generator) -> float:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    done = loop.submit(rng.integers(0, _VOCABULARY, _PROMPT).tolist(), params).result()
    if done.timings is None or done.error:
        raise RuntimeError(done.error or "the engine gave no timings")
    return done.timings.tokens_per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, model=False, weights=get_args(Format))
    parser.add_argument("--depth", type=positive, default=12)
    parser.add_argument("--experts", type=positive, default=8, help="for each that a token uses")
    parser.add_argument("--new-tokens", type=positive, default=128)
    run(parser, benchmark)


def benchmark(options: argparse.Namespace) -> None:
    busy = require_idle(options.allow_busy)
    moe = sparse(options.depth, options.experts)
    configs = {"sparse": moe, "dense": dense(moe)}
    loops = {
        name: EngineLoop(Engine(random_model(config, options.weights), NoText(), EngineConfig(kv_cache_bytes=2**28)))
        for name, config in configs.items()
    }
    rng = np.random.default_rng()
    speeds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(options.rounds + 1):  # the first warms up
        for name, loop in loops.items():
            speed = decode_speed(loop, options.new_tokens, rng)
            if number:
                speeds[name].append(speed)
    for loop in loops.values():
        loop.close()

    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = medians["dense"] / medians["sparse"]
    sizes = {
        name: {"total": total_parameters(config), "active": active_parameters(config)}
        for name, config in configs.items()
    }
    result = result_head("moe", f"depth-{options.depth}", busy) | {
        "weights": options.weights,
        "experts": moe.num_experts,
        "experts_used": moe.num_experts_per_tok,
        "parameters": sizes,
        "tokens_per_second": speeds,
        "medians": medians,
        "dense_over_sparse": ratio,
        "bar": 1.3,
    }
    for name, size in sizes.items():
        print(f"{name:<7} {size['active'] / 1e6:6.1f} of {size['total'] / 1e6:7.1f} M: {medians[name]:7.1f} tokens/s")
    print(f"the dense twin is {ratio:.2f} times as fast (bar: at most 1.3); written to {keep(result, options.out)}")


if __name__ == "__main__":
    main()
