"""The SDK: `load()` a checkpoint, then generate, stream, chat and batch with it, from threads or from asyncio.

    import openk3

    model = openk3.load("smollm2-135m")
    response = model.generate(prompt="The capital of France is", temperature=0.2, max_tokens=20, stop_sequences=["\\n"])
    for piece in model.stream(prompt="Once upon a time"):
        print(piece.text, end="", flush=True)
    cache = model.prefix_cache(system_prompt)  # prefill once, reuse until it expires
    response = model.generate(prompt=question, cache=cache)
    reply = model.chat([{"role": "user", "content": "What is 2 + 2?"}])

Everything runs on one engine that batches whatever is under way, so every method may be called from many threads and
tasks at once. What the user gets wrong is a ValueError that names the argument.
"""

from __future__ import annotations

import difflib
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from openk3.chat.dialect import ReasoningEffort
from openk3.chat.messages import check_text, validate_messages, validate_tools
from openk3.chat.parser import ReplyParser
from openk3.chat.tokenizer import Tokenizer
from openk3.chat.turn import ToolChoice, prepare_turn
from openk3.config import ModelConfig
from openk3.engine.config import EngineConfig
from openk3.engine.engine import Engine, EngineStats
from openk3.engine.handle import Handle
from openk3.engine.loop import EngineLoop
from openk3.engine.request import SamplingParams
from openk3.prefix import PrefixCache, chat_prefix_ids
from openk3.responses import AsyncStream, Response, Stream, response_of
from openk3.weights import resolve
from openk3.weights.loaded import load_weights

DEFAULT_MODEL = "smollm2-135m"
_MAX_THREADS = 1024  # OpenMP crashes the process when the system refuses it a thread

Prompt: TypeAlias = str | Sequence[int]
Messages: TypeAlias = Sequence[Mapping[str, Any]]


def load(
    name_or_path: str | Path = DEFAULT_MODEL,
    *,
    num_threads: int | None = None,
    engine: EngineConfig | None = None,
    progress: bool = True,
) -> LLM:
    """Make a model ready to generate; the first use of a known name downloads and converts it.

    Args:
        name_or_path: a known name (`k3 models` lists them), a checkpoint directory, a .gguf file, or a Hugging Face id.
        num_threads: CPU threads for the arithmetic; None takes one per core.
        engine: cache size and batch limits.
        progress: show download progress on stderr.

    Raises:
        ValueError: no such model, or a checkpoint that cannot be used; one sentence says why.
    """
    threads = 1 if num_threads is None else num_threads
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MAX_THREADS:
        raise ValueError(f"num_threads: {num_threads!r} is not a number of threads from 1 to {_MAX_THREADS}")
    if engine is not None and not isinstance(engine, EngineConfig):
        raise ValueError(f"engine: expected an EngineConfig, got {type(engine).__name__}")
    directory = resolve(str(name_or_path), progress=progress)
    tokenizer = Tokenizer.from_directory(directory)
    model = load_weights(directory)
    loop = EngineLoop(Engine(model, tokenizer, engine, num_threads=num_threads))
    return LLM(str(name_or_path), model.config, tokenizer, directory, loop)


class LLM:
    """A loaded model. Close it, or use it in `with`, to stop its engine; it also stops with the process.

    Sampling arguments of every method are the fields of `SamplingParams` by name (temperature, top_p, top_k, min_p,
    repetition_penalty, frequency_penalty, presence_penalty, seed, max_tokens, stop_token_ids, logprobs, logit_bias,
    ignore_eos, grammar), and `stop_sequences` (or `stop`) for its `stop`.

    Attributes:
        name: what `load` was asked for.
        config: the model's configuration.
        tokenizer: text and chats to token ids and back.
        model_dir: the checkpoint directory.
        loop: the engine that runs everything.
        max_model_len: the longest prompt plus answer, in tokens.
    """

    def __init__(self, name: str, config: ModelConfig, tokenizer: Tokenizer, model_dir: Path, loop: EngineLoop) -> None:
        self.name = name
        self.config = config
        self.tokenizer = tokenizer
        self.model_dir = model_dir
        self.loop = loop
        self.max_model_len: int = loop.max_model_len

    # Plain text

    def generate(self, prompt: Prompt, *, cache: PrefixCache | None = None, **sampling: Any) -> Response:
        """Continue `prompt` and return the whole answer.

        Args:
            prompt: text, or token ids. After a `cache`, it continues the cached text.
            cache: what `prefix_cache` returned.

        Raises:
            ValueError: an empty or too long prompt, a bad sampling argument, an expired cache.
            GenerationError: the engine failed.
        """
        return _wait(self.submit(self._prompt_ids(prompt, cache), **sampling))

    def stream(self, prompt: Prompt, *, cache: PrefixCache | None = None, **sampling: Any) -> Stream:
        """Like `generate`, but return the pieces as they come. Arguments are checked before this returns."""
        return Stream(self.submit(self._prompt_ids(prompt, cache), **sampling))

    async def agenerate(self, prompt: Prompt, *, cache: PrefixCache | None = None, **sampling: Any) -> Response:
        """`generate` for asyncio. Cancelling the task cancels the request."""
        return await _await(self.submit(self._prompt_ids(prompt, cache), **sampling))

    def astream(self, prompt: Prompt, *, cache: PrefixCache | None = None, **sampling: Any) -> AsyncStream:
        """`stream` for asyncio: ``async for piece in model.astream(...)``."""
        return AsyncStream(self.submit(self._prompt_ids(prompt, cache), **sampling))

    def batch_generate(self, prompts: Sequence[Prompt], *, batch_size: int = 8, **sampling: Any) -> list[Response]:
        """Answer many prompts, at most `batch_size` at a time, and return the answers in the order of the prompts.

        Raises:
            ValueError: as `generate`, for any of the prompts, before any of them runs; the text gives its index.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise ValueError(f"prompts: expected a list of prompts, got {type(prompts).__name__}")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size: {batch_size!r} is not a positive number of prompts")
        params = sampling_params(sampling)
        batch = [self._prompt_ids(prompt, None, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
        handles: list[Handle] = []
        given_up = threading.Event()

        def run(ids: list[int]) -> Response:
            handles.append(handle := self.loop.submit(ids, params))
            if given_up.is_set():
                handle.cancel()
            return response_of(handle.result())

        # One waiting thread per request under way: each takes the next prompt as soon as its answer is complete.
        with ThreadPoolExecutor(batch_size, thread_name_prefix="batch_generate") as pool:
            futures = [pool.submit(run, ids) for ids in batch]
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
                return [future.result() for future in futures]
            except BaseException:  # a failure or Ctrl-C: let everything else go before the threads are joined
                given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for handle in handles:
                    handle.cancel()
                raise

    # Chats

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: ReasoningEffort | None = None,
        cache: PrefixCache | None = None,
        **sampling: Any,
    ) -> Response:
        """Answer a chat and return the whole reply.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``; roles are system, user, assistant and tool.
            tools: functions the model may call, in OpenAI's form.
            tool_choice: "auto", "none", "required" (at least one call), or one function that is to be called,
                ``{"type": "function", "function": {"name": ...}}``, or OpenAI's ``allowed_tools``.
            parallel_tool_calls: whether a reply may hold more than one call.
            reasoning_effort: "none", "minimal", "low", "medium", "high" or "xhigh", for models that think before they
                answer; most know only whether or not. None leaves it to the model.
            cache: a cache made from messages, which come before these (and whose tools hold where none are given).

        Raises:
            ValueError: bad messages or tools (the text names index and field), calls without results, a checkpoint
                that cannot chat, a bad sampling argument, an expired cache.
            GenerationError: the engine failed.
        """
        choices = _choices(tool_choice, parallel_tool_calls, reasoning_effort)
        return _wait(*self._start_chat(messages, tools, choices, cache, sampling))

    def chat_stream(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: ReasoningEffort | None = None,
        cache: PrefixCache | None = None,
        **sampling: Any,
    ) -> Stream:
        """Like `chat`, but return the pieces as they come. Arguments are checked before this returns."""
        choices = _choices(tool_choice, parallel_tool_calls, reasoning_effort)
        return Stream(*self._start_chat(messages, tools, choices, cache, sampling))

    async def achat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: ReasoningEffort | None = None,
        cache: PrefixCache | None = None,
        **sampling: Any,
    ) -> Response:
        """`chat` for asyncio. Cancelling the task cancels the request."""
        choices = _choices(tool_choice, parallel_tool_calls, reasoning_effort)
        return await _await(*self._start_chat(messages, tools, choices, cache, sampling))

    def achat_stream(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: ReasoningEffort | None = None,
        cache: PrefixCache | None = None,
        **sampling: Any,
    ) -> AsyncStream:
        """`chat_stream` for asyncio: ``async for piece in model.achat_stream(...)``."""
        choices = _choices(tool_choice, parallel_tool_calls, reasoning_effort)
        return AsyncStream(*self._start_chat(messages, tools, choices, cache, sampling))

    # Underneath

    def prefix_cache(
        self,
        system_prompt: str | Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        ttl: float = 3600,
    ) -> PrefixCache:
        """Prefill a prefix once and keep its pages until it expires, so that each use starts after it.

        Args:
            system_prompt: text, for `generate` and `stream`; or messages, for `chat` and its kin.
            tools: functions that belong to the messages; templates write them into the prefix.
            ttl: seconds until it expires.

        Raises:
            ValueError: an empty prefix, one that leaves no room in the context, a bad ttl, bad messages.
        """
        if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl <= sys.float_info.max:
            raise ValueError(f"ttl: {ttl!r} is not a positive number of seconds")
        if isinstance(system_prompt, str):
            if tools is not None:
                raise ValueError("tools: belong to a chat; give system_prompt as a list of messages")
            messages, ids = None, self._prompt_ids(system_prompt, None, "system_prompt")
        else:
            messages = validate_messages(system_prompt)
            ids = self._check_ids(chat_prefix_ids(self.tokenizer, messages, tools), "system_prompt")
        return PrefixCache(self.loop, self.loop.pin(ids, ttl), messages, validate_tools(tools))

    def submit(
        self, prompt_ids: Sequence[int], *, priority: int = 0, request_id: str | None = None, **sampling: Any
    ) -> Handle:
        """Hand token ids to the engine and return at once; the handle gives the deltas. For servers and schedulers."""
        return self.loop.submit(prompt_ids, sampling_params(sampling), priority=priority, request_id=request_id)

    def submit_chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        cache: PrefixCache | None = None,
        **options: Any,
    ) -> Handle:
        """`submit` for a chat; `options` are those of `submit`. The deltas hold the reply as the model writes it."""
        handle, _ = self._start_chat(messages, tools, {}, cache, options)
        return handle

    def stats(self) -> EngineStats:
        """What the engine is doing and has done: running and waiting requests, pages, cache hits, tokens."""
        return self.loop.stats()

    def close(self) -> None:
        """Stop the engine; what is still running ends as cancelled. May be called twice."""
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        choices: Mapping[str, Any],
        cache: PrefixCache | None,
        options: Mapping[str, Any],
    ) -> tuple[Handle, ReplyParser]:
        """Submit a chat, and make ready to read its reply. `choices` are those of `prepare_turn`."""
        turns, checked_tools = validate_messages(messages), validate_tools(tools)
        if cache is not None:
            _check_cache(cache)
            turns, checked_tools = cache.before_chat(self.loop, turns, checked_tools)
        sampling = dict(options)
        handle_options = {name: sampling.pop(name) for name in ("priority", "request_id") if name in sampling}
        params = sampling_params(sampling)
        turn = prepare_turn(self.tokenizer, turns, checked_tools, grammar=params.grammar, **choices)
        return turn.submit(self.loop, params, **handle_options), turn.parser(params.stop)

    def _prompt_ids(self, prompt: Prompt, cache: PrefixCache | None, where: str = "prompt") -> list[int]:
        if cache is not None:
            _check_cache(cache)
        if isinstance(prompt, str):
            # A cached prefix already has the checkpoint's opening tokens.
            ids = self.tokenizer.encode(check_text(prompt, where), add_special_tokens=cache is None) if prompt else []
        else:
            ids = self._check_ids(prompt, where)
        if not ids:
            raise ValueError(f"{where}: empty; give text or token ids")
        return self._check_ids(ids if cache is None else [*cache.before_prompt(self.loop), *ids], where)

    def _check_ids(self, ids: object, where: str) -> list[int]:
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
            raise ValueError(f"{where}: expected text or a list of token ids, got {type(ids).__name__}")
        if not ids:
            raise ValueError(f"{where}: empty; give text or token ids")
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.config.vocab_size:
                raise ValueError(f"{where}[{i}]: {token!r} is not a token id from 0 to {self.config.vocab_size - 1}")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"{where}: {len(ids):,} tokens leave no room for an answer in the context of {self.max_model_len:,}; "
                "shorten it"
            )
        return list(ids)


_SAMPLING_NAMES = (*(field.name for field in fields(SamplingParams)), "stop_sequences")


def sampling_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """Turn the SDK's sampling arguments into the engine's.

    Raises:
        ValueError: an unknown name (the closest known one is given), or a value that `SamplingParams` refuses.
    """
    given = dict(sampling)
    for name in given:
        if name not in _SAMPLING_NAMES:
            close = difflib.get_close_matches(name, _SAMPLING_NAMES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(_SAMPLING_NAMES)}"
            raise ValueError(f"{name}: not a sampling argument; {hint}")
    if "stop_sequences" in given:
        if "stop" in given:
            raise ValueError("stop and stop_sequences are the same argument; give one of them")
        given["stop"] = given.pop("stop_sequences")
    # None means "not given" for every argument, as in OpenAI's API.
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _choices(tool_choice: ToolChoice, parallel: bool, effort: ReasoningEffort | None) -> dict[str, Any]:
    return {"tool_choice": tool_choice, "parallel_tool_calls": parallel, "reasoning_effort": effort}


def _check_cache(cache: object) -> None:
    if not isinstance(cache, PrefixCache):
        raise ValueError(f"cache: expected what prefix_cache() returned, got {type(cache).__name__}")


def _wait(handle: Handle, parser: ReplyParser | None = None) -> Response:
    try:
        return response_of(handle.result(), parser)
    except BaseException:  # Ctrl-C must not leave the request running
        handle.cancel()
        raise


async def _await(handle: Handle, parser: ReplyParser | None = None) -> Response:
    try:
        return response_of(await handle.aresult(), parser)
    except BaseException:  # nor must a cancelled task
        handle.cancel()
        raise
