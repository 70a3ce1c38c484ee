"""The command line: what each command prints, what scripts get from it, and one line for every mistake."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from serving import debug_llm
from typer.testing import CliRunner, Result

import openk3
from openk3 import cli, llm, terminal
from openk3.chat.saved import save_chat
from openk3.doctor import Check
from openk3.engine.config import EngineConfig
from openk3.weights import default_model

if TYPE_CHECKING:
    from openk3.llm import LLM

COMMANDS = (
    *("pull", "models", "quantize", "generate", "chat", "render", "search", "serve", "mcp", "keys", "usage"),
    "doctor",
)
SHORT = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return debug_llm()


def k3(*arguments: str, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=text)


def generate(*arguments: str, text: str | bytes | None = None) -> Result:
    return k3("generate", "-m", str(debug_llm().model_dir), "-t", "0", "-n", "6", *arguments, text=text)


def assert_mistake(result: Result, words: str) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that holds `words`."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("k3: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


# Help


def test_help_teaches() -> None:
    shown = k3("--help")
    assert shown.exit_code == 0
    assert all(command in shown.stdout for command in COMMANDS)
    assert 'k3 generate "Explain tides"' in shown.stdout
    assert k3().stdout.strip() == shown.stdout.strip()  # a bare k3 shows it too
    assert k3().stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    shown = k3(command, "-h")
    assert shown.exit_code == 0
    assert command == "doctor" or f"k3 {command} " in shown.stdout.split("Options")[0].split("Usage")[1]


def test_version() -> None:
    assert k3("--version").stdout == f"k3 {openk3.__version__}\n"


def test_help_does_not_load_the_model_stack() -> None:
    code = "import sys, openk3.cli; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'fastapi')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_one_default_model() -> None:
    assert cli.DEFAULT_MODEL == llm.DEFAULT_MODEL == default_model().alias


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["genrate"], "No such command 'genrate'. Did you mean 'generate'?"),
        (["generate", "--heat", "1", "x"], "No such option: --heat"),
        (["generate", "-t", "hot", "x"], "Invalid value for '--temperature' / '-t'"),
        (["generate", "-t", "-1", "x"], "temperature is -1.0: it must lie between 0 and 100"),
        (["generate", "-n", "0", "x"], "max_tokens is 0: it must be an integer of at least 1"),
        (["generate", "--top-p", "2", "x"], "top_p is 2.0"),
        (["generate", ""], "the prompt is empty"),
        (["generate"], "the prompt is empty"),
        (["generate", "-", "-f", "-"], "stdin can be read only once"),
        (["generate", "x", "-f", "/nowhere/x"], "/nowhere/x: No such file or directory"),
        (["generate", "x", "--raw", "--system", "y"], "--system belongs to a chat: leave out --raw"),
        (["generate", "x", "-m", "smollm"], "unknown model 'smollm': did you mean smollm2-135m"),
        (["chat", "--load", "/nowhere/x"], "/nowhere/x: No such file or directory"),
        (["chat", "-m", "smollm"], "unknown model 'smollm'"),
        (["pull", "smollm"], "unknown model 'smollm'"),
        (["pull"], "Missing argument"),
        (["quantize", "smollm"], "unknown model 'smollm'"),
        (["quantize", "smollm", "--format", "int3"], "Invalid value for '--format'"),
        (["quantize", "smollm", "--format", "int8", "--group-size", "32"], "the group size belongs to the format int4"),
        (["models", "--preset", "huge"], "unknown preset 'huge': choose one of debug, nano, mini, pro-256k, pro-1m"),
        (["serve", "--port", "x"], "Invalid value for '--port' / '-p'"),
        (["serve", "--port", "99999"], "Invalid value for '--port' / '-p'"),
        (["serve", "--threads", "0"], "Invalid value for '--threads'"),
        (["serve", "-m", "smollm"], "unknown model 'smollm'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str) -> None:
    assert_mistake(k3(*arguments), words)


def test_broken_utf8(tmp_path: Path) -> None:
    assert_mistake(generate("-", text=b"ab\xffcd"), "stdin: not UTF-8 text (byte 2 is 0xff)")
    file = tmp_path / "latin1.txt"
    file.write_bytes("Grüße".encode("latin-1"))
    assert_mistake(generate("Summarise", "-f", str(file)), "latin1.txt: not UTF-8 text (byte 2 is 0xfc)")
    assert_mistake(generate("x\udcff"), "broken text: character 1 is a lone surrogate (U+DCFF)")


def test_a_prompt_longer_than_the_context() -> None:
    assert_mistake(generate(text="x" * 600), "the prompt has 618 tokens but the context holds 512")


@pytest.mark.parametrize(
    ("command", "code", "stderr"),
    [
        ("generate <&-", 2, "k3: the prompt is empty\n"),
        ("generate - <&-", 2, "k3: the prompt is empty\n"),
        ("models >&-", 0, ""),
        ("models --preset x 2>&-", 2, ""),
    ],
)
def test_a_closed_stream_is_an_empty_one(command: str, code: int, stderr: str) -> None:
    script = f"exec '{sys.executable}' -c 'from openk3 import cli; cli.main()' {command}"
    result = subprocess.run(script, shell=True, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", stderr)


def test_failures_are_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("the engine\nstopped")

    monkeypatch.setattr(llm.LLM, "chat_stream", broken)
    result = generate("hello")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "k3: the engine stopped\n")


# generate


def test_generate_answers_as_a_chat(tiny: LLM) -> None:
    expected = tiny.chat([{"role": "user", "content": "hello"}], **SHORT).text
    for result in (
        generate("hello"),
        generate("-", text="hello"),
        generate(text="hello"),
        generate("-f", "-", text="hello"),
    ):
        assert (result.exit_code, result.stdout, result.stderr) == (0, expected + "\n", "")
    told = tiny.chat([{"role": "system", "content": "S"}, {"role": "user", "content": "hello"}], **SHORT).text
    assert generate("hello", "--system", "S").stdout == told + "\n"


def test_generate_raw(tiny: LLM) -> None:
    assert generate("hello", "--raw").stdout == tiny.generate("hello", **SHORT).text + "\n"


def test_generate_from_a_file(tiny: LLM, tmp_path: Path) -> None:
    file = tmp_path / "note.txt"
    file.write_bytes("\ufeffÄ note, 你好\n".encode())
    assert generate("--raw", "-f", str(file)).stdout == tiny.generate("Ä note, 你好\n", **SHORT).text + "\n"
    both = tiny.generate("Read:\n\nÄ note, 你好\n", **SHORT).text
    assert generate("Read:", "--raw", "-f", str(file)).stdout == both + "\n"
    assert generate("Read:", "--raw", "-f", "-", text=file.read_bytes()).stdout == both + "\n"


def test_generate_json(tiny: LLM) -> None:
    answer = json.loads(generate("hello", "--json").stdout)
    expected = tiny.chat([{"role": "user", "content": "hello"}], **SHORT)
    assert answer["model"] == str(tiny.model_dir)
    assert (answer["text"], answer["finish_reason"]) == (expected.text, "length")
    assert answer["usage"] == {
        "prompt_tokens": 23,
        "cached_tokens": 0,
        "completion_tokens": 6,
        "reasoning_tokens": 0,
    }
    assert set(answer["timings"]) == {"queue_s", "ttft_s", "total_s", "tokens_per_second"}


def test_sampling_options_reach_the_model(tiny: LLM) -> None:
    options = ["--seed", "3", "-t", "1.2", "--top-k", "50", "--min-p", "0.01", "--top-p", "0.9", "--threads", "1"]
    penalties = ["--repetition-penalty", "1.1", "--frequency-penalty", "0.2", "--presence-penalty", "0.1"]
    expected = tiny.generate(
        "x", seed=3, temperature=1.2, top_k=50, min_p=0.01, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.2,
        presence_penalty=0.1, max_tokens=6, stop=["zzzz"],
    )  # fmt: skip
    assert generate("x", "--raw", *options, *penalties, "--stop", "zzzz").stdout == expected.text + "\n"


def test_a_checkpoint_that_cannot_chat(tiny: LLM, tmp_path: Path) -> None:
    directory = tmp_path / "base"
    shutil.copytree(tiny.model_dir, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    result = k3("generate", "hello", "-m", str(directory), "-t", "0", "-n", "6")
    assert result.stdout == tiny.generate("hello", **SHORT).text + "\n"
    assert_mistake(k3("chat", "-m", str(directory)), "this checkpoint has no chat template")
    assert_mistake(
        k3("generate", "hello", "--system", "S", "-m", str(directory)), "this checkpoint has no chat template"
    )


# chat


def test_chat_through_a_pipe(tiny: LLM, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    save_chat(file, [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}], "m")
    result = k3(
        "chat", "-m", str(tiny.model_dir), "--load", str(file), "--system", "S", "-t", "0", "-n", "6",
        text="one\\\ntwo\n/stats\n/exit\n",
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert "chat:       5 messages" in result.stdout
    assert ">>>" not in result.stdout
    file.write_text("{}")
    assert_mistake(k3("chat", "--load", str(file)), "old.json is not a chat saved by k3")


# models, pull


def test_models_lists_licence_size_and_place() -> None:
    shown = k3("models")
    assert shown.exit_code == 0
    header, first, *_ = shown.stdout.splitlines()
    assert header.split() == ["NAME", "MODEL", "LICENCE", "DOWNLOAD", "CONTEXT", "HERE", "WHAT", "FOR"]
    assert first.startswith("smollm2-135m")
    assert "Apache-2.0" in first
    assert "98.4 MB" in first
    rows = json.loads(k3("models", "--json").stdout)["models"]
    assert [row["name"] for row in rows] == ["smollm2-135m", "qwen2.5-coder-0.5b"]
    assert rows[0]["path"] is None or Path(rows[0]["path"]).is_dir()


def test_the_card_of_the_largest_preset() -> None:
    card = json.loads(k3("models", "--preset", "pro-1m", "--json").stdout)
    assert 2.9e12 < card["total_parameters"] < 3.1e12
    assert card["active_parameters"] / card["total_parameters"] == card["active_share"] < 0.2
    assert card["context"] == 2**20
    assert card["layers"] == card["full_attention_layers"] + card["sliding_attention_layers"]
    heads, layers = card["key_value_heads"] * card["head_dim"], card["layers"]
    assert card["kv_bytes_per_token"] == 2 * 2 * heads * layers
    flops = card["flops_per_token"]
    assert list(flops) == ["4096", "131072", "1048576"]
    assert 2 * card["active_parameters"] * 0.9 < flops["4096"] < flops["131072"] < flops["1048576"]
    text = k3("models", "--preset", "pro-1m").stdout
    for words in ("3.00 T", "(1.8%)", "1,048,576 tokens", "windows 8,192 down to 1,056", "per token", "FLOPs at 4,096"):
        assert words in text


@pytest.mark.parametrize("preset", ["debug", "nano", "mini", "pro-256k"])
def test_every_preset_has_a_card(preset: str) -> None:
    assert k3("models", "--preset", preset).stdout.startswith(preset + "\n")


def test_pull_prints_the_directory(tiny: LLM) -> None:
    assert k3("pull", str(tiny.model_dir)).stdout == f"{tiny.model_dir}\n"
    answer = json.loads(k3("pull", str(tiny.model_dir), "--json").stdout)
    assert answer == {"name": str(tiny.model_dir), "path": str(tiny.model_dir)}


def test_quantize_makes_a_checkpoint(tiny: LLM, tmp_path: Path) -> None:
    text, made = tmp_path / "letters.txt", tmp_path / "small"
    text.write_text("Dear Sir or Madam, " * 50)
    options = ("--format", "int4", "--calibration", str(text), "--output", str(made))
    shown = k3("quantize", str(tiny.model_dir), *options)
    assert shown.stdout.startswith(f"{made}\n") and "LARGEST ERRORS" in shown.stdout
    assert_mistake(k3("quantize", str(tiny.model_dir), *options), f"{made} is there already: choose another --output")
    shutil.rmtree(made)
    answer = json.loads(k3("quantize", str(tiny.model_dir), *options, "--json").stdout)
    assert answer["path"] == str(made) and answer["format"] == "int4"
    assert 5 < answer["times_smaller_than_float32"] < 8
    assert k3("generate", "-m", str(made), "-n", "3", "Hello").exit_code == 0


# serve, doctor


def test_serve_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr("openk3.weights.resolve", lambda name, progress: Path(name))
    monkeypatch.setattr("openk3.serve.app.run", lambda model, **options: calls.append((model, options)))
    assert k3("serve").exit_code == 0
    k3(
        "serve", "-m", "x", "--host", "0.0.0.0", "-p", "9", "--name", "n", "--no-web", "--threads", "2",
        "--allowed-host", "a", "--allowed-host", "b", "--weights", "int8", "--max-queue", "7", "--log", "json",
        "--mcp", "m.json", "--mcp-endpoint", "--kv-cache-mb", "64",
    )  # fmt: skip
    defaults = {"host": "127.0.0.1", "port": 8000, "model_name": None, "web": True, "num_threads": None}
    defaults |= {"max_queue": 256, "log_format": "auto", "mcp_config": None, "mcp_endpoint": False}
    assert calls[0] == ("smollm2-135m", {**defaults, "allowed_hosts": (), "engine": EngineConfig()})
    given = {"host": "0.0.0.0", "port": 9, "model_name": "n", "web": False, "num_threads": 2}
    given |= {"max_queue": 7, "log_format": "json", "mcp_config": Path("m.json"), "mcp_endpoint": True}
    engine = EngineConfig(weights="int8", kv_cache_bytes=64 << 20)
    assert calls[1] == ("x", {**given, "allowed_hosts": ["a", "b"], "engine": engine})


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = [Check("python", "ok", "3.12"), Check("memory", "warning", "little")]
    monkeypatch.setattr("openk3.doctor.diagnose", lambda: fine)
    assert k3("doctor").exit_code == 0
    monkeypatch.setattr(
        "openk3.doctor.diagnose", lambda: [*fine, Check("torch", "missing", "gone", "pip install torch")]
    )
    result = k3("doctor")
    assert result.exit_code == 1
    assert "MISSING  torch" in result.stdout
    assert "-> pip install torch" in result.stdout
    result = k3("doctor", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["checks"][2] == {
        "name": "torch",
        "status": "missing",
        "found": "gone",
        "fix": "pip install torch",
    }


# The terminal


def test_the_spinner_waits_and_needs_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_SPINNER_AFTER_S", 0.01)
    with terminal.spinner("loading x"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with terminal.spinner("loading x"):
        time.sleep(0.3)
    captured = capsys.readouterr()
    assert "loading x ..." in captured.err
    assert captured.out == ""
    monkeypatch.setattr(terminal, "_SPINNER_AFTER_S", 60)
    with terminal.spinner("loading x"):
        pass
    assert capsys.readouterr().err == ""
