"""What the server's tests share: a real tiny model that reads bytes, and an app behind a real socket."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from engine_support import byte_level
from fastapi import FastAPI
from openai import OpenAI

from conftest import random_model
from openk3.config import preset
from openk3.serve.app import create_app

if TYPE_CHECKING:
    from openk3.llm import LLM

MODEL = "debug"
CONTEXT = 512
END, START = 255, 254  # bytes that no UTF-8 text holds stand for the special tokens

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@functools.cache
def debug_llm() -> LLM:
    """The random debug model with a tokenizer of one token per byte, loaded from disk like any other. Never closed."""
    from openk3.llm import load

    directory = Path(tempfile.mkdtemp(prefix="openk3-debug-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    random_model(preset("debug")).save_pretrained(directory)
    byte_tokenizer(directory)
    return load(directory)


def byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer of one token per byte, with a chat template."""
    byte_level({END: "<|end|>", START: "<|start|>"}).save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def debug_app(**options: Any) -> FastAPI:
    return create_app(debug_llm, **({"model_name": MODEL, "web": False, "owns_model": False} | options))


@contextmanager
def live(app: FastAPI, *, wait: bool = True, grace_s: int = 30) -> Iterator[str]:
    """Serve `app` on a free port in a thread, wait until its model is ready, and give the base URL."""
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=grace_s)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    try:
        if wait:
            until(lambda: httpx.get(f"{url}/health").status_code == 200)
        yield url
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for `condition`; the limit is for what hangs, not for what is slow."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def idle(llm: LLM) -> bool:
    stats = llm.stats()
    return stats.running == 0 and stats.waiting == 0


def sse(text: str) -> list[Any]:
    """The events of a whole stream; the mark of the end stays text."""
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    data = [event.removeprefix("data: ") for event in events]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def raw_http(url: str, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes as they are and return status, headers and body of the answer, read to the end of the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body
