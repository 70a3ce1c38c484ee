"""Generation the plain way: one request, the whole model, no engine. The oracle the engine is tested against.

It shares the sampler and the grammars with the engine, which have their own tests, and nothing else: no pages, no
scheduler, no incremental text. After every token the whole sequence is computed again (or, with `use_cache`,
Transformers' own cache is used), and the whole reply is decoded, searched for stop texts and matched with its grammar
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from openk3.engine.detokenizer import TokenizerLike
from openk3.engine.grammar.compiler import GrammarCompiler
from openk3.engine.grammar.matcher import Matcher
from openk3.engine.request import Delta, FinishReason, SamplingParams, TokenLogprob
from openk3.engine.sampler import fresh_seed, log_probabilities, sample_token

if TYPE_CHECKING:
    from openk3.model import K3ForCausalLM


@torch.inference_mode()
def generate(
    model: K3ForCausalLM,
    tokenizer: TokenizerLike,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    max_model_len: int | None = None,
    use_cache: bool = False,
    half_cache: bool = False,
) -> Delta:
    """The reply to one prompt as a single delta: what `Handle.result` would give, without timings.

    Args:
        half_cache: round keys and values to float16, as an engine with `kv_format="float16"` does.
    """
    context = model.config.max_position_embeddings if max_model_len is None else max_model_len
    limit = min(params.max_tokens or context, context - len(prompt_ids))
    seed = fresh_seed() if params.seed is None else params.seed
    grammars = GrammarCompiler(tokenizer, model.config.vocab_size)
    kind = _HalfCache if half_cache else DynamicCache
    cache = kind(config=model.config) if use_cache or half_cache else None
    tokens = list(prompt_ids)
    reply: list[int] = []
    logprobs = []
    text, reason, match = "", None, None
    while reason is None:
        logits_V = _next_logits(model, tokens, cache).numpy()
        if not use_cache and half_cache:
            cache = _HalfCache(config=model.config)  # the whole sequence is computed again
        token = sample_token(logits_V, params, seed, tokens, len(prompt_ids), _matcher_after(grammars, params, reply))
        tokens.append(token)
        reply.append(token)
        if params.logprobs is not None:
            logprobs.append(_logprob(tokenizer, *log_probabilities(logits_V, token, params.logprobs), token))
        text, reason, match = _ending(tokenizer, reply, params, limit)
        if (after := _matcher_after(grammars, params, reply[:-1])) is not None:
            reason = _ending_in_grammar(after, reply[-1], (text, reason, match))
    return Delta(
        request_id="naive",
        text=text,
        token_ids=tuple(reply),
        logprobs=None if params.logprobs is None else tuple(logprobs),
        finish_reason=reason,
        stop_match=match,
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(reply),
    )


class _HalfCache(DynamicCache):
    """Holds what float16 keeps of keys and values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(_halved(key_states), _halved(value_states), *args, **kwargs)


def _halved(x: Tensor) -> Tensor:
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest).half().to(x.dtype)


def _next_logits(model: K3ForCausalLM, tokens: list[int], cache: DynamicCache | None) -> Tensor:
    known = 0 if cache is None else cache.get_seq_length()
    kwargs: dict[str, Any] = {"use_cache": False} if cache is None else {"use_cache": True, "cache": cache}
    output = model(input_ids=torch.tensor([tokens[known:]], device=model.device), logits_to_keep=1, **kwargs)
    logits_V: Tensor = output.logits[0, -1].float().cpu()
    return logits_V


def _ending(
    tokenizer: TokenizerLike, reply: list[int], params: SamplingParams, limit: int
) -> tuple[str, FinishReason | None, str | int | None]:
    """The text of the reply so far and, if it ends here, why."""
    if reply[-1] in params.stop_token_ids:
        return tokenizer.decode(reply[:-1]), "stop", reply[-1]
    if reply[-1] in tokenizer.eos_token_ids and not params.ignore_eos:
        return tokenizer.decode(reply[:-1]), "stop", None
    text = tokenizer.decode(reply)
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in params.stop if stop in text]
    if ends:
        _, start, stop = min(ends)
        return text[:start], "stop", stop
    return text, "length" if len(reply) == limit else None, None


def _matcher_after(grammars: GrammarCompiler, params: SamplingParams, reply: list[int]) -> Matcher | None:
    if params.grammar is None:
        return None
    matcher = grammars.matcher(params.grammar, ignore_eos=params.ignore_eos)
    for token in reply:
        matcher.consume(token)
    return matcher


def _ending_in_grammar(
    before: Matcher, token: int, ending: tuple[str, FinishReason | None, str | int | None]
) -> FinishReason | None:
    """Why the reply ends with `token`, given where it stood before, and what `_ending` says without its grammar."""
    text, reason, match = ending
    if match is not None:
        return "stop" if before.accepts(text) else "length"
    if reason == "stop":  # the model's own end of text
        return reason
    before.consume(token)
    return "stop" if before.ended else reason


def _logprob(tokenizer: TokenizerLike, logprob: float, top: list[tuple[int, float]], token: int) -> TokenLogprob:
    alternatives = tuple(TokenLogprob(i, tokenizer.decode([i], skip_special_tokens=False), value) for i, value in top)
    return TokenLogprob(token, tokenizer.decode([token], skip_special_tokens=False), logprob, alternatives)
