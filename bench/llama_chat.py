"""Chats with tools under llama.cpp, as its OpenAI-compatible server answers them. Run as a script, it is a worker.

    python bench/llama_chat.py model.gguf --threads 2 < requests.jsonl > replies.jsonl

Each line in is a request's `messages`, `tools` and `max_tokens`; each line out the message that llama-cpp-python's
`create_chat_completion` gives, which is what its server sends. That server calls tools with its own prompt, the chat
format "chatml-function-calling"; with the checkpoint's own template, tools are written into the prompt, but calls come
back as text.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from llama_cpp import Llama


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    model = Llama(
        str(options.gguf),
        n_ctx=4096,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        chat_format="chatml-function-calling",
        verbose=False,
    )
    for line in sys.stdin:
        try:
            reply = model.create_chat_completion(**json.loads(line), tool_choice="auto", temperature=0)
            message = reply["choices"][0]["message"]
        except Exception as error:
            message = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
