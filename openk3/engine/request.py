"""What a client asks for, what it gets back, and what the engine remembers in between.

`SamplingParams` is the request's side of the contract and refuses what it cannot keep; `Delta` is the reply's side, one
piece of a stream; `Request` is the engine's own bookkeeping and never leaves the engine's thread while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from openk3.engine.grammar.spec import Grammar

if TYPE_CHECKING:
    from openk3.engine.detokenizer import TextStream
    from openk3.engine.grammar.matcher import Matcher
    from openk3.engine.pins import PinnedPrefix

FinishReason = Literal["stop", "length", "cancelled", "error"]

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when a reply ends.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token (greedy), at most 100.
        top_p: keep the fewest most likely tokens whose probabilities add up to it, in [0, 1].
        top_k: keep this many most likely tokens; 0 keeps all.
        min_p: keep tokens at least this likely relative to the most likely one, in [0, 1] (arXiv:2407.01082).
        repetition_penalty: divides positive and multiplies negative logits of tokens that occur in the prompt or the
            reply (CTRL, arXiv:1909.05858); 1 is off, in (0, 10].
        frequency_penalty: taken off a token's logit once per occurrence in the reply, in [-2, 2].
        presence_penalty: taken off the logits of tokens that occur in the reply, in [-2, 2].
        seed: the same seed, prompt and parameters give the same reply, alone or in any batch; None draws a fresh one.
        max_tokens: longest reply in tokens; None goes on to the end of the context.
        stop: texts that end the reply; they are not part of it.
        stop_token_ids: tokens that end the reply; they count as generated but give no text.
        logprobs: None for none; k reports each token's log-probability and those of the k most likely (0 to 20). They
            are the model's own, before penalties, bias and temperature.
        logit_bias: added to the logits of these token ids, each in [-100, 100].
        ignore_eos: go on when the model says it is done.
        grammar: the form that the whole reply is to have. Only tokens that keep to it are considered, and the reply
            ends where it can only end. A reply with the finish reason "stop" has the form; one that was cut, by
            `max_tokens`, the context, or a stop text or token in the midst of it, has "length" and may be incomplete.

    Raises:
        ValueError: a field of the wrong type or out of range; the message names field, value and what is allowed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, 100)
        _check_number("top_p", self.top_p, 0, 1)
        _check_integer("top_k", self.top_k, 0)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0, 10)
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty is 0: it must be above 0, 1 switches it off")
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {self.ignore_eos!r}: it must be true or false")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ValueError(
                f"grammar is a {type(self.grammar).__name__}: it must be a Grammar, for instance "
                "Grammar.json_schema({...})"
            )
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))


def _check_number(name: str, value: object, low: float, high: float) -> None:
    # Not math.isfinite, which fails on integers that are too large for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == math.inf:
        raise ValueError(f"{name} is {value!r}: it must be a number from {low} to {high}")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}: it must lie between {low} and {high}")


def _check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} is {value!r}: it must be an integer {allowed}")


def _checked_stop(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, (tuple, list)) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop is {stop!r}: it must be a list of texts, none of them empty")
    return tuple(texts)


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, (tuple, list)):
        raise ValueError(f"{name} is {ids!r}: it must be a list of token ids")
    for i in ids:
        _check_integer(f"an entry of {name}", i, 0)
    return tuple(ids)


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias is {bias!r}: it must map token ids to numbers")
    for token_id, value in bias.items():
        _check_integer("a token id in logit_bias", token_id, 0)
        _check_number(f"logit_bias[{token_id}]", value, -100, 100)
    return dict(bias)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability, and the most likely alternatives at its place, best first.

    `token` is the token decoded by itself, special tokens included; a token that holds part of a character shows
    U+FFFD.
    """

    token_id: int
    token: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a request took, in seconds from its submission.

    Attributes:
        queue_s: until it was first computed.
        ttft_s: until its first token; `total_s` where there was none.
        total_s: until its end.
        tokens_per_second: speed after the first token; 0 for replies of fewer than two tokens.
    """

    queue_s: float
    ttft_s: float
    total_s: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply; all pieces together, or the one that `Handle.result` returns, are the whole.

    Attributes:
        text: what can be shown by now. Incomplete characters and possible beginnings of stop texts are held back, so it
            may lag behind `token_ids` and never needs to be taken back.
        token_ids: tokens of this piece, the one that ended the reply included.
        logprobs: one entry per token where they were asked for.
        finish_reason: None until the last piece; "length" covers `max_tokens`, the end of the context, and with a
            grammar a stop text or token before the reply was complete.
        stop_match: the stop text or stop token that ended the reply; None where the model's own end of text did.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that did not have to be computed.
        completion_tokens: tokens generated so far.
        error: what went wrong, when `finish_reason` is "error".
        timings: on the last piece.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    timings: Timings | None = None


@dataclass(eq=False, slots=True)
class Request:
    """One request's state. Compared by identity; owned by the engine from `Engine.add` to its last delta.

    Attributes:
        seed: what randomness comes from, drawn when the parameters leave it open.
        max_new_tokens: tokens it may generate, `max_tokens` cut to the context.
        pin_ttl_s: not None in a request that computes a prefix to be pinned and generates nothing.
        matcher: where the reply stands in its grammar, if it has one. Like `tokens`, it outlasts a preemption.
        order: position in the order of arrival, set by the scheduler.
        tokens: prompt and reply.
        num_new: tokens at the end of `tokens` that came together: one, and those that a grammar forces after it.
        num_computed: leading tokens whose keys and values are in `pages`, or were and are not needed any more.
        pages: while it runs, a block table per group of layers: the page of each `page_size` tokens, in order
            (`openk3.engine.groups`).
        page_hashes: chained hashes of the leading full pages, as far as they were needed.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    seed: int
    max_new_tokens: int
    text: TextStream
    arrived_at: float
    pin_ttl_s: float | None = None
    matcher: Matcher | None = None

    order: int = -1
    tokens: list[int] = field(default_factory=list)
    num_new: int = 1
    num_computed: int = 0
    pages: list[list[int]] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    pinned: PinnedPrefix | None = None
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def is_replying(self) -> bool:
        """Whether all that is left to compute came with the last step (or is a prompt's last token, which is alike)."""
        return len(self.tokens) - self.num_computed <= self.num_new

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts requests from the first to be served to the first to give way."""
        return (-self.priority, self.order)

    def timings(self, now: float) -> Timings:
        first, last = self.first_token_at, self.last_token_at
        total = now - self.arrived_at
        decoding = 0.0 if first is None or last is None else last - first
        return Timings(
            queue_s=total if self.scheduled_at is None else self.scheduled_at - self.arrived_at,
            ttft_s=total if first is None else first - self.arrived_at,
            total_s=total,
            tokens_per_second=(self.num_generated - 1) / decoding if decoding > 0 else 0.0,
        )
