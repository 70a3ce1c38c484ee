"""The chat in the terminal: entries, commands, saved chats, and a real terminal in which Ctrl-C stops a reply."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chat_support import chat_llm, has_model_say
from serving import debug_llm, until

from openk3.chat.saved import load_chat
from openk3.repl import Repl
from openk3.responses import Stream
from openk3.terminal import harmless

if TYPE_CHECKING:
    from openk3.llm import LLM

K3 = [sys.executable, "-c", "from openk3.cli import main; main()"]
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return debug_llm()


class Talk(Repl):
    """A chat whose input is a list of lines, or exceptions to raise instead, and whose output is kept."""

    def __init__(self, llm: LLM, *lines: str | type[BaseException], **options: Any) -> None:
        self.shown: list[str] = []
        self.prompts: list[str] = []
        self._lines: Iterator[str | type[BaseException]] = iter(lines)
        super().__init__(llm, read=self._next, write=self.shown.append, **{"sampling": SHORT} | options)

    def _next(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    def transcript(self) -> str:
        self.run()
        return "".join(self.shown)


def test_a_conversation(llm: LLM) -> None:
    talk = Talk(llm, "hello", "", "   ", "again")
    shown = talk.transcript()
    first = llm.chat([{"role": "user", "content": "hello"}], **SHORT).text
    chat: list[dict[str, Any]] = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": first}]
    second = llm.chat([*chat, {"role": "user", "content": "again"}], **SHORT).text
    assert talk.messages == [*chat, {"role": "user", "content": "again"}, {"role": "assistant", "content": second}]
    assert harmless(first) in shown
    assert "(cut off: the token limit or the context is used up)" in shown


def test_reasoning_is_shown_and_is_no_part_of_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_say(monkeypatch, "qwen", "<think>", "\nHm.\n", "</think>", "\n\n", "42")
    talk = Talk(chat_llm("qwen"), "why?", sampling={})
    assert talk.transcript() == "(thinking) Hm.\n\n42\n\n"
    assert talk.messages[-1] == {"role": "assistant", "content": "42"}


@pytest.mark.parametrize(
    ("lines", "entry"),
    [
        (["one"], ("one", False)),
        (["  one  "], ("one", False)),
        (["one\\", "two\\", "three"], ("one\ntwo\nthree", False)),
        (['"""one', "  two", 'three"""'], ("one\n  two\nthree", True)),
        (['"""', "/exit", "", 'x\\"""'], ("/exit\n\nx\\", True)),
        (['"""one line"""'], ("one line", True)),
        (['"""', '"""'], ("", True)),
        (["/help"], ("/help", False)),
    ],
)
def test_entries(llm: LLM, lines: list[str], entry: tuple[str, bool]) -> None:
    talk = Talk(llm, *lines)
    assert talk.read_entry() == entry
    assert talk.prompts == [">>> "] + ["... "] * (len(lines) - 1)


def test_a_quoted_slash_is_a_message(llm: LLM) -> None:
    talk = Talk(llm, '"""/exit"""', "/exit", "never read")
    talk.run()
    assert talk.messages[0]["content"] == "/exit"
    assert len(talk.messages) == 2


def test_help_lists_every_command(llm: LLM) -> None:
    shown = Talk(llm, "/help").transcript()
    assert all(f"/{name}" in shown for name in ("help", "system", "clear", "save", "load", "stats", "exit"))


def test_system_and_clear(llm: LLM) -> None:
    talk = Talk(llm, "/system", "/system Be kind.", "/system", "hello", "/system Be brief.", "/clear", "/stats")
    shown = talk.transcript()
    assert shown.startswith("no system text; /system TEXT sets one\nBe kind.\n")
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    assert Talk(llm, system="From the start.").messages == [{"role": "system", "content": "From the start."}]
    replaced = Talk(llm, messages=[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], system="c")
    assert [m["content"] for m in replaced.messages] == ["c", "b"]


def test_stats(llm: LLM) -> None:
    assert Talk(llm, "/stats").transcript().startswith("no reply yet\n")
    shown = Talk(llm, "hello", "/stats").transcript()
    assert "last reply: 6 tokens (length), first after " in shown
    assert " of them from the cache\n" in shown
    assert "chat:       2 messages, 29 of 512 tokens of context\n" in shown


def test_save_and_load(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "my chat.json"
    first = Talk(llm, "hello", f"/save {file}")
    assert f"saved {file}: 2 messages\n" in first.transcript()
    saved = load_chat(file)
    assert (saved.messages, saved.model) == (first.messages, llm.name)
    second = Talk(llm, "something else", f"/load {file}")
    assert f"loaded {file}: 2 messages, written with {llm.name}\n" in second.transcript()
    assert second.messages == first.messages


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("/sing", "error: no command /sing; /help lists them\n"),
        ("/save", "error: /save needs a file name\n"),
        ("/load", "error: /load needs a file name\n"),
        ("/save /tmp/x", "error: messages: the list is empty; give at least one message\n"),
        ("/load /nowhere/x", "error: [Errno 2] No such file or directory: '/nowhere/x'\n"),
        ("x" * 600, "error: the prompt has 618 tokens but the context holds 512"),
        ("x\ud800", "error: messages[0].content: broken text: character 1 is a lone surrogate"),
    ],
)
def test_mistakes_do_not_end_the_chat(llm: LLM, command: str, error: str) -> None:
    talk = Talk(llm, command, "hello")
    assert talk.transcript().startswith(error)
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    assert talk.messages[0]["content"] == "hello"


def test_loading_a_broken_file_keeps_the_chat(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text(json.dumps({"format": "openk3-chat", "version": 1, "messages": [{"role": "robot"}]}))
    talk = Talk(llm, "hello", f"/load {file}")
    assert "messages[0].role: 'robot' is not one of" in talk.transcript()
    assert len(talk.messages) == 2


def test_interrupts_at_the_prompt(llm: LLM) -> None:
    talk = Talk(llm, KeyboardInterrupt, "one\\", KeyboardInterrupt, "hello")
    assert talk.transcript().startswith("\n(Ctrl-D or /exit leaves)\n" * 2)
    assert talk.messages[0] == {"role": "user", "content": "hello"}


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupts_in_a_reply(llm: LLM, monkeypatch: pytest.MonkeyPatch, presses: int) -> None:
    read, pieces = Stream.__next__, 0

    def interrupted(stream: Stream) -> Any:
        nonlocal pieces
        pieces += 1
        if pieces == 5:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        return read(stream)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    talk = Talk(llm, "hello", sampling={"temperature": 0})
    assert talk.transcript().endswith("\n(stopped)\n\n")
    until(lambda: not llm.stats().running)
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    assert 0 < len(str(talk.messages[1]["content"])) < 200  # what was said until then
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_the_first_word_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(stream: Stream) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "__next__", interrupted)
    talk = Talk(llm, "hello", sampling={"temperature": 0})
    assert "(stopped)" in talk.transcript()
    assert talk.messages == []
    until(lambda: not llm.stats().running)


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert harmless("a\x1b[31mb\x07\x9b\x7f\tc\nd é 你") == "a[31mb\tc\nd é 你"


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *command: str) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, os.environ | {"TERM": "dumb", "OMP_NUM_THREADS": "1"})
        self.output, self._seen = "", 0

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, text: str, pressing: str = "") -> None:
        """Read on until `text` comes after what was last waited for, pressing a key every second until it does.

        Once is not enough for Ctrl-C at a prompt: Python sees one that comes just before it waits only with the next.
        """
        start = pressed = time.monotonic()
        self.type(pressing)
        while (found := self.output.find(text, self._seen)) < 0:
            now = time.monotonic()
            assert now < start + 60, self.output
            if now > pressed + 1:
                self.type(pressing)
                pressed = now
            if select.select([self.descriptor], [], [], 0.1)[0]:
                self.output += os.read(self.descriptor, 65536).decode(errors="replace")
        self._seen = found + len(text)

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture(scope="module")
def talkative(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for a reply that takes minutes."""
    directory = tmp_path_factory.mktemp("models") / "talkative"
    shutil.copytree(llm.model_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100_000}))
    return directory


def test_ctrl_c_stops_the_reply_and_ctrl_d_leaves(talkative: Path) -> None:
    terminal = Terminal(*K3, "chat", "-m", str(talkative), "-t", "0")
    try:
        terminal.wait_for("100,000 tokens of context. /help lists the commands.")
        terminal.wait_for(">>> ")
        terminal.type("hello\r")
        terminal.wait_for("IIII")
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        terminal.wait_for(">>> ")
        terminal.wait_for("(Ctrl-D or /exit leaves)", pressing="\x03")
        terminal.wait_for(">>> ")
        terminal.type("/system\r")
        terminal.wait_for("no system text")
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
        assert "Traceback" not in terminal.output
    finally:
        os.close(terminal.descriptor)


def test_ctrl_c_ends_generate_quietly(talkative: Path) -> None:
    process = subprocess.Popen(
        [*K3, "generate", "hello", "-m", str(talkative), "-t", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")


def test_a_closed_pipe_is_quiet(talkative: Path) -> None:
    process = subprocess.Popen(
        [*K3, "generate", "hello", "-m", str(talkative), "-t", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) != 0
    assert process.stderr.read() == b""
    process.stderr.close()
