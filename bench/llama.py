"""llama.cpp through its batch interface, as fast as it can be driven from Python. Run as a script, it is its worker.

Every step is one `llama_decode` of one `llama_batch`, sequences of a batch side by side under their own ids; the
likeliest token is found in llama.cpp's own memory. Prompts go in as much at a time as a batch takes (2,048 tokens, 512
computed at once, its defaults). Contexts are made before the clock starts and kept.

On a CPU with AMX llama.cpp keeps its matrices for that; `--no-amx` makes it use its other kernels, which may be faster.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from pathlib import Path

import llama_cpp as ll
import numpy as np
from worker import Contender, Request, Run, serve

_BATCH = 2048
_PHYSICAL_BATCH = 512
_ERROR = 4  # GGML_LOG_LEVEL_ERROR


class _Batch:
    """A `llama_batch` whose arrays are seen through NumPy."""

    def __init__(self, capacity: int) -> None:
        self._batch = ll.llama_batch_init(capacity, 0, 1)
        shape = (capacity,)
        self._tokens = np.ctypeslib.as_array(self._batch.token, shape)
        self._positions = np.ctypeslib.as_array(self._batch.pos, shape)
        self._wanted = np.ctypeslib.as_array(self._batch.logits, shape)
        for i in range(capacity):
            self._batch.n_seq_id[i] = 1

    def set_sequence(self, i: int, sequence: int) -> None:
        self._batch.seq_id[i][0] = sequence

    def decode(self, context: object, tokens: np.ndarray, positions: np.ndarray, wanted: np.ndarray) -> None:
        """
        Raises:
            RuntimeError: llama.cpp refused the batch.
        """
        count = self._batch.n_tokens = len(tokens)
        self._tokens[:count], self._positions[:count], self._wanted[:count] = tokens, positions, wanted
        if code := ll.llama_decode(context, self._batch):
            raise RuntimeError(f"llama_decode returned {code}")


class _SignalStack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]  # stack_t


def refuse_amx() -> ctypes.Array[ctypes.c_char]:
    """Have the kernel refuse this process AMX, as it does where a signal stack has no room for the tiles.

    Returns:
        The stack, to be kept alive.
    """
    stack = ctypes.create_string_buffer(2048)
    ctypes.CDLL(None).sigaltstack(ctypes.byref(_SignalStack(ctypes.addressof(stack), 0, len(stack))), None)
    return stack


@ll.llama_log_callback
def _errors_only(level: int, text: bytes, _: object) -> None:
    if level == _ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


def of_llama_cpp(gguf: Path, threads: int) -> Contender:
    ll.llama_log_set(_errors_only, None)
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(str(gguf).encode(), ll.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {gguf}")
    vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    contexts: dict[tuple[int, int, bool], object] = {}

    def context_for(sequences: int, length: int, flash: bool) -> object:
        key = (sequences, -(-length // 256) * 256, flash)
        if key not in contexts:
            params = ll.llama_context_default_params()
            params.n_seq_max, params.n_ctx = sequences, sequences * key[1]
            params.n_batch, params.n_ubatch = _BATCH, _PHYSICAL_BATCH
            params.n_threads = params.n_threads_batch = threads
            params.flash_attn_type = ll.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else ll.LLAMA_FLASH_ATTN_TYPE_DISABLED
            contexts[key] = ll.llama_init_from_model(model, params)
            if not contexts[key]:
                raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        return contexts[key]

    batch = _Batch(_BATCH)

    def run(request: Request) -> Run:
        count, length = len(request.prompts), len(request.prompts[0])
        if count > 1 and count * length > _BATCH:
            raise ValueError(f"{count} prompts of {length} tokens: llama.cpp takes {_BATCH} tokens in a batch")
        context = context_for(count, length + request.new_tokens, request.flash_attention)
        ll.llama_memory_clear(ll.llama_get_memory(context), True)

        def likeliest() -> np.ndarray:
            address = ctypes.cast(ll.llama_get_logits(context), ctypes.c_void_p).value
            logits = (ctypes.c_float * (count * vocabulary)).from_address(address)
            return np.frombuffer(logits, np.float32).reshape(count, vocabulary).argmax(1)

        begin = time.perf_counter()
        tokens = np.array(request.prompts, np.int32).ravel()
        positions = np.tile(np.arange(length, dtype=np.int32), count)
        owners = np.repeat(np.arange(count), length)
        wanted = positions == length - 1
        last = []
        for start in range(0, len(tokens), _BATCH):
            part = slice(start, start + _BATCH)
            for i, owner in enumerate(owners[part].tolist()):
                batch.set_sequence(i, owner)
            batch.decode(context, tokens[part], positions[part], wanted[part])
        token = likeliest()
        last.append(token)
        first = time.perf_counter() - begin
        for i in range(count):
            batch.set_sequence(i, i)
        for step in range(request.new_tokens - 1):
            batch.decode(context, token, np.full(count, length + step), np.ones(count))
            token = likeliest()
            last.append(token)
        return Run(first, time.perf_counter() - begin, np.stack(last, 1).tolist())

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--no-amx", action="store_true", help="kernels without AMX")
    options = parser.parse_args()
    stack = refuse_amx() if options.no_amx else None
    serve(lambda: of_llama_cpp(options.gguf, options.threads))
    del stack  # alive until here


if __name__ == "__main__":
    main()
