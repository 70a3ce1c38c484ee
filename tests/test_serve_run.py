"""`run` as its users meet it: it serves until Ctrl-C, and lets running replies finish."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import debug_llm, sse, until

from openk3.serve.app import run
from openk3.serve.logs import not_a_websocket

ENDLESS: dict[str, Any] = {
    "model": "debug",
    "prompt": "hunter2",
    "max_tokens": 80,
    "stream": True,
    "logit_bias": {"255": -100},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_ctrl_c_ends_the_server_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """The test's own process serves in its main thread, where signals arrive; a client in another one sends it."""
    caplog.set_level(logging.INFO)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    text: list[str] = []
    serving = threading.Event()

    def interrupt_while_reading() -> None:
        while True:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.ConnectError:
                time.sleep(0.05)
        serving.set()
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=60) as response:
            for piece in response.iter_text():
                if not text:
                    os.kill(os.getpid(), signal.SIGINT)
                text.append(piece)

    client = threading.Thread(target=interrupt_while_reading, daemon=True)
    client.start()
    run(str(debug_llm().model_dir), port=port, model_name="debug", web=False)
    assert serving.is_set()
    client.join(30)
    events = sse("".join(text))
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert f"Uvicorn running on {url}" in caplog.text
    assert "model debug is ready" in caplog.text
    assert "POST /v1/completions 200" in caplog.text
    assert "hunter2" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_sigterm_lets_a_stream_finish(tmp_path: Path) -> None:
    """As a service manager stops it: the stream under way ends properly, the process by the signal."""
    port = free_port()
    program = (
        "import sys; from openk3.serve.app import run; "
        "run(sys.argv[1], port=int(sys.argv[2]), model_name='debug', web=False)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(debug_llm().model_dir), str(port)],
        env=os.environ | {"OPENK3_STATE": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    until(ready)
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=60) as response:
        for piece in response.iter_text():
            if not text:
                process.send_signal(signal.SIGTERM)
            text += piece
    events = sse(text)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert process.wait(30) == -signal.SIGTERM


def test_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit) as caught:
            run(str(debug_llm().model_dir), port=taken.getsockname()[1], web=False)
    assert caught.value.code not in (None, 0)


@pytest.mark.parametrize(
    ("message", "arguments", "kept"),
    [
        ('%s - "WebSocket %s" [accepted]', (("127.0.0.1", 9), "/_nicegui_ws/?client_id=secret"), False),
        ("connection open", (), False),
        ("Uvicorn running on %s", ("http://127.0.0.1:8000",), True),
    ],
)
def test_websockets_leave_no_line_in_the_log(message: str, arguments: tuple[Any, ...], kept: bool) -> None:
    record = logging.LogRecord("uvicorn.error", logging.INFO, "", 0, message, arguments, None)
    assert not_a_websocket(record) is kept
