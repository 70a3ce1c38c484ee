"""`k3 chat`: a conversation in the terminal.

Replies stream; Ctrl-C stops the reply and keeps what was said, Ctrl-D leaves. Lines that begin with a slash are
commands. Input and output are handed in, so the same loop serves a terminal, a pipe and a test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from openk3.chat.messages import Message
from openk3.chat.saved import load_chat, save_chat
from openk3.terminal import ctrl_c_stops, harmless

with suppress(ImportError):
    import readline  # noqa: F401  (gives `input` editing and history; not on every platform)

if TYPE_CHECKING:
    from openk3.agents.tools.tool import Tool
    from openk3.chat.reply import ToolCall
    from openk3.llm import LLM
    from openk3.responses import Piece

HELP = '''\
/help          this list
/system TEXT   set what the model is told before the chat; without TEXT show it
/clear         forget the chat, keep the system text
/save FILE     write the chat to FILE
/load FILE     go on with a saved chat
/stats         speed and memory of the last reply, size of the chat
/exit          leave (so does Ctrl-D)

Ctrl-C stops a reply. For several lines, begin and end with """ or end each line but the last with a backslash.
A text that begins with a slash goes between """ too.
'''

_FENCE = '"""'
_REMARKS = {"length": "\n(cut off: the token limit or the context is used up)\n", "cancelled": "\n(stopped)\n"}


class Repl:
    """One conversation.

    Args:
        llm: the model.
        messages: the chat so far.
        system: system text, or None for that of `messages` or the checkpoint's own.
        sampling: sampling arguments of `LLM.chat_stream`.
        tools: what the model may call. Those that are not built in are asked for, each time.
        read: returns one line for a prompt; raises EOFError at the end of the input and KeyboardInterrupt on Ctrl-C.
        write: takes text for the screen and shows it at once.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        messages: Sequence[Message] = (),
        system: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        read: Callable[[str], str] | None = None,
        write: Callable[[str], None] | None = None,
    ) -> None:
        self.llm = llm
        self.messages = list(messages)
        self.sampling = dict(sampling or {})
        self.tools = list(tools)
        self._read = read or _read_line
        self._write = write or _write_out
        self._last: Piece | None = None
        if system:
            self._system(system)

    def run(self) -> None:
        """Talk until /exit or the end of the input."""
        while True:
            try:
                text, verbatim = self.read_entry()
            except KeyboardInterrupt:
                self._write("\n(Ctrl-D or /exit leaves)\n")
                continue
            except EOFError:
                self._write("\n")
                return
            try:
                if text.startswith("/") and not verbatim:
                    if not self._command(text):
                        return
                elif text:
                    (self._say_with_tools if self.tools else self._say)(text)
            except KeyboardInterrupt:  # pressed twice, or just after a reply had ended
                self._write("\n(stopped)\n")
            except (ValueError, OSError, RuntimeError) as error:
                self._write(f"error: {error}\n")

    def read_entry(self) -> tuple[str, bool]:
        """Read one entry, over several lines where the first says so; True with it if quoted, so never a command."""
        line = self._read(">>> ")
        stripped = line.strip()
        if not stripped.startswith(_FENCE):
            lines = [line]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self._read("... "))
            return "\n".join(lines).strip(), False
        text = stripped.removeprefix(_FENCE)
        while not text.rstrip().endswith(_FENCE):
            text += "\n" + self._read("... ")
        return text.rstrip().removesuffix(_FENCE).strip("\n"), True

    def _command(self, text: str) -> bool:
        """Carry out a command; False means leave."""
        command, _, argument = text.partition(" ")
        argument = argument.strip()
        if command in ("/exit", "/quit", "/bye"):
            return False
        if command == "/help":
            self._write(HELP)
        elif command == "/system":
            self._system(argument)
        elif command == "/clear":
            self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
            self._write("cleared\n")
        elif command == "/stats":
            self._stats()
        elif command in ("/save", "/load"):
            if not argument:
                raise ValueError(f"{command} needs a file name")
            if command == "/load":
                saved = load_chat(argument)
                self.messages = saved.messages
                self._write(f"loaded {argument}: {len(self.messages)} messages, written with {saved.model}\n")
            else:
                save_chat(argument, self.messages, self.llm.name)
                self._write(f"saved {argument}: {len(self.messages)} messages\n")
        else:
            raise ValueError(f"no command {command}; /help lists them")
        return True

    def _say(self, text: str) -> None:
        """Send `text` and show the reply; a reply that was stopped or failed leaves what it had said in the chat."""
        asked: Message = {"role": "user", "content": text}
        reply, end, thought = "", "", False
        try:
            with self.llm.chat_stream([*self.messages, asked], **self.sampling) as stream, ctrl_c_stops(stream):
                for piece in stream:
                    if piece.reasoning:
                        self._write(harmless(f"{'' if thought else '(thinking) '}{piece.reasoning}"))
                        thought = True
                    if piece.text and thought and not reply:
                        self._write("\n\n")
                    reply += piece.text
                    self._write(harmless(piece.text))
                    if piece.finish_reason is not None:
                        self._last, end = piece, piece.finish_reason
        finally:
            if reply:
                self.messages += [asked, {"role": "assistant", "content": reply}]
        self._write(_REMARKS.get(end, "\n"))

    def _say_with_tools(self, text: str) -> None:
        """`_say` for a model that may call tools: calls and results are shown, and kept in the chat at its end."""
        from openk3.agents.loop import CallFinished, Finished, TextPiece, run

        asked: Message = {"role": "user", "content": text}
        for event in run(self.llm, [*self.messages, asked], tools=self.tools, approve=self._allowed, **self.sampling):
            if isinstance(event, TextPiece):
                self._write(harmless(event.text))
            elif isinstance(event, CallFinished):
                call, result = event.done.call, event.done.result.text
                self._write(harmless(f"[{call.name} {call.arguments} → {_short(result)}]\n"))
            elif isinstance(event, Finished):
                self.messages += [asked, *event.messages]  # type: ignore[list-item]  # checked when they are sent
                self._write(_REMARKS.get(event.finish_reason, "\n"))

    def _allowed(self, call: ToolCall) -> bool:
        """Built-in tools only compute and read what the user gave; others may do anything."""
        if call.name in ("calculator", "datetime", "search_documents"):
            return True
        answer = self._read(harmless(f"run {call.name} {_short(call.arguments, 300)}? [y/N] "))
        return answer.strip().lower() in ("y", "yes")

    def _system(self, text: str) -> None:
        has_one = bool(self.messages) and self.messages[0]["role"] == "system"
        if text:
            self.messages[: int(has_one)] = [{"role": "system", "content": text}]
        else:
            self._write(f"{self.messages[0]['content']}\n" if has_one else "no system text; /system TEXT sets one\n")

    def _stats(self) -> None:
        if self._last is None or self._last.usage is None or self._last.timings is None:
            self._write("no reply yet\n")
            return
        usage, timings = self._last.usage, self._last.timings
        self._write(
            f"last reply: {usage.completion_tokens} tokens ({self._last.finish_reason}), first after "
            f"{timings.ttft_s:.2f} s, then {timings.tokens_per_second:.1f} tokens/s, {timings.total_s:.2f} s in all\n"
            f"prompt:     {usage.prompt_tokens} tokens, {usage.cached_tokens} of them from the cache\n"
            f"chat:       {len(self.messages)} messages, "
            f"{usage.total_tokens:,} of {self.llm.max_model_len:,} tokens of context\n"
        )


def _short(text: str, length: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def _read_line(prompt: str) -> str:
    if sys.stdin.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
