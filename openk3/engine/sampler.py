"""From logits to a token: grammar, penalties, bias, temperature, truncation, and one random number.

Sampling has no state. The random number of a position comes from a counter-based generator (Philox, Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3") keyed by the request's seed with the position as its counter, so
batching, chunking, preemption and restarts cannot change a reply.

The order is Hugging Face's: bias and penalties, temperature, top_k, top_p, min_p. A grammar comes before temperature,
so that truncation keeps the best of the tokens that are allowed. Arithmetic on probabilities is in float64.

Shapes: V vocab_size.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from openk3.engine.request import SamplingParams

if TYPE_CHECKING:
    from openk3.engine.grammar.matcher import Matcher

Floats = NDArray[np.float64]


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(64)


def sample_token(
    logits_V: NDArray[np.float32],
    params: SamplingParams,
    seed: int,
    tokens: Sequence[int],
    num_prompt: int,
    matcher: Matcher | None = None,
) -> int:
    """The token that follows `tokens`, of which the first `num_prompt` are the prompt.

    Args:
        matcher: where the reply stands in its grammar.

    Raises:
        FloatingPointError: the best logit is not a finite number.
        RuntimeError: the grammar cannot be followed any further.
    """
    if matcher is not None and matcher.forced is not None:
        return matcher.forced
    scores_V = adjust(logits_V, params, tokens, num_prompt)
    token = _best(scores_V)
    # The best of all tokens, where it is allowed, is the best of those that are.
    if matcher is not None and (needs_mask(params) or not matcher.allows(token)):
        scores_V = np.where(matcher.allowed_V, scores_V, -np.inf)
        token = _best(scores_V)
    if params.temperature == 0:
        return token
    return draw(distribution(scores_V, params), uniform(seed, len(tokens)))


def needs_mask(params: SamplingParams) -> bool:
    """Whether it always takes all the tokens that a grammar allows to choose one."""
    return params.temperature > 0


def _best(scores_V: NDArray[np.floating]) -> int:
    token = int(scores_V.argmax())  # the first NaN if there is any
    if not math.isfinite(scores_V[token]):
        raise FloatingPointError(
            f"the model returned a logit of {scores_V[token]}: the weights or the input are broken"
        )
    return token


def adjust(
    logits_V: NDArray[np.float32], params: SamplingParams, tokens: Sequence[int], num_prompt: int
) -> NDArray[np.floating]:
    """Logits with bias and penalties applied; the same array where there are none."""
    frequency, presence, repetition = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
    if not params.logit_bias and frequency == 0 and presence == 0 and repetition == 1:
        return logits_V
    scores_V = logits_V.astype(np.float64)
    for token_id, bias in params.logit_bias.items():
        scores_V[token_id] += bias
    if repetition != 1:
        seen = np.unique(np.asarray(tokens, dtype=np.int64))
        values = scores_V[seen]
        scores_V[seen] = np.where(values > 0, values / repetition, values * repetition)
    if frequency != 0 or presence != 0:
        replied, counts = np.unique(np.asarray(tokens[num_prompt:], dtype=np.int64), return_counts=True)
        scores_V[replied] -= frequency * counts + presence
    return scores_V


def distribution(scores_V: NDArray[np.floating], params: SamplingParams) -> Floats:
    """Unnormalised probabilities, the best token's being 1, with 0 for every token that was cut off.

    Tokens as likely as the last one kept by top_k are kept too. Ties at the border of top_p go to the lower token id.
    """
    scaled_V = (scores_V.astype(np.float64) - scores_V.max()) / params.temperature
    weights_V: Floats = np.exp(scaled_V)
    size = len(weights_V)
    if 0 < params.top_k < size:
        weights_V[scaled_V < np.partition(scaled_V, size - params.top_k)[size - params.top_k]] = 0
    if params.top_p < 1:
        _keep_nucleus(weights_V, params.top_p)
    if params.min_p > 0:
        weights_V[weights_V < params.min_p] = 0
    return weights_V


def _keep_nucleus(weights_V: Floats, top_p: float) -> None:
    """Set to 0 what lies outside the smallest set of best tokens that has at least `top_p` of the mass."""
    total = weights_V.sum()
    # Tokens below this floor cannot add up to 1 - top_p, so none is in the nucleus and few are left to sort.
    floor = min((1 - top_p) * total / len(weights_V), 1.0)
    candidates = np.flatnonzero(weights_V >= floor)
    ordered = candidates[np.argsort(-weights_V[candidates], kind="stable")]
    count = int(np.searchsorted(weights_V[ordered].cumsum(), top_p * total)) + 1
    kept = ordered[:count]
    kept_weights = weights_V[kept]
    weights_V[:] = 0
    weights_V[kept] = kept_weights


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that belongs to this seed and position."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position)).random())


def draw(weights_V: Floats, number: float) -> int:
    """The token on which `number` in [0, 1) falls when tokens share that interval by weight, in order of their ids."""
    cumulative_V = weights_V.cumsum()
    token = int(np.searchsorted(cumulative_V, number * cumulative_V[-1], side="right"))
    # Rounding may carry the product up to the total itself, which lies behind the last token.
    return token if token < len(weights_V) else int(np.flatnonzero(weights_V)[-1])


def log_probabilities(logits_V: NDArray[np.float32], token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of `token` and the `count` most likely tokens with theirs, best first."""
    wide_V = logits_V.astype(np.float64)
    best = wide_V.max()
    wide_V -= best + np.log(np.exp(wide_V - best).sum())
    count = min(count, len(wide_V))
    if count == 0:
        return float(wide_V[token]), []
    top = np.argpartition(-wide_V, count - 1)[:count]
    top = top[np.lexsort((top, -wide_V[top]))]
    return float(wide_V[token]), [(int(i), float(wide_V[i])) for i in top]
