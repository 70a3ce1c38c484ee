"""Every example of the README is run as it stands there: Python, shell, and HTTP against a real `k3 serve`."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ADDRESS = "127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


PYTHON = [block for block in blocks("python") if ADDRESS not in block]
COMMANDS = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines() if ADDRESS not in line]
HTTP = [(lang, block) for lang in ("python", "sh") for block in blocks(lang) if ADDRESS in block]


@pytest.fixture(scope="module")
def environment(smollm2_dir: Path) -> dict[str, str]:
    """The shell of somebody who has activated the virtual environment and pulled the default model."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`k3 serve` on a free port; yields its host:port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as out:
        command = ["k3", "serve", "--port", address.split(":")[1]]
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent)
        try:
            deadline = time.monotonic() + 120
            while not healthy(address):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.3)
            yield address
        finally:
            process.terminate()
            process.wait(timeout=30)


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_python_examples(
    smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in PYTHON:
        exec(compile(block, "README.md", "exec"), namespace)
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_shell_examples(command: str, environment: dict[str, str]) -> None:
    done = subprocess.run(command, shell=True, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or done.stderr.strip()


@pytest.mark.parametrize(("language", "block"), HTTP, ids=[f"{language} {i}" for i, (language, _) in enumerate(HTTP)])
def test_http_examples(language: str, block: str, server: str, environment: dict[str, str]) -> None:
    block = block.replace(ADDRESS, server)
    if language == "sh":
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        command = ["sh", "-c", block]
    else:
        command = [sys.executable, "-c", block]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ('"usage"' if language == "sh" else "tokens") in done.stdout


def test_files_named_in_the_readme_exist() -> None:
    named = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"^\| `([a-z0-9_./]+)`", README, re.MULTILINE)
    presets = {"debug", "nano", "mini"}
    missing = [name for name in named if name not in presets and not (ROOT / name).exists()]
    assert not missing
