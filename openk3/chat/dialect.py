"""The dialect of a checkpoint: how chats are written for it, and how its replies are read.

Two writers stand behind one face: the Jinja template that came with the checkpoint (`openk3.chat.template`), and
OpenK3's own control tokens (`openk3.chat.native`). Both write text in which only they can place control tokens
(`openk3.chat.control`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from tokenizers import Tokenizer as Backend

from openk3.chat.control import ControlTokens, control_spellings
from openk3.chat.marks import BARE, LISTED, TAGGED, THINKING, Mark, Marks
from openk3.chat.messages import Message, offered_tools
from openk3.chat.native import NATIVE, NATIVE_TOKENS, write_native
from openk3.chat.template import ChatTemplate
from openk3.chat.tool_text import TAGS, write_tools

Writer: TypeAlias = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None, bool, str | None], str]
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


@dataclass(frozen=True)
class Prompt:
    """What the model reads before its reply.

    Attributes:
        ids: the tokens.
        thinks: whether they end within reasoning ("begun"), the reply may begin with it ("may"), or has none ("no").
        continued: whether they end within the text of a message, which the reply goes on with.
    """

    ids: list[int]
    thinks: Literal["begun", "may", "no"]
    continued: bool = False


class Dialect:
    """How one checkpoint writes and reads chats.

    Attributes:
        marks: what divides its replies.
        control: the tokens that no message can write.
    """

    def __init__(self, backend: Backend, marks: Marks, control: ControlTokens, writer: Writer) -> None:
        self.marks = marks
        self.control = control
        self._backend = backend
        self._writer = writer

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """A checked chat as text, in which control tokens cannot be told from messages that spell them.

        Raises:
            ValueError: the template refused the chat, or two tools have the same name.
        """
        return self._writer(self._prepared(messages), tools, add_generation_prompt, None)

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The token ids of `render`'s text, with control tokens only where the dialect itself writes them.

        Raises:
            ValueError: as `render`.
        """
        return self.control.encode(self._guarded(messages, tools, add_generation_prompt, None))

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        effort: ReasoningEffort | None = None,
        calls_only: bool = False,
    ) -> Prompt:
        """What the model reads for a reply, which is a new message, or the rest of a last one that is partial.

        Args:
            effort: of reasoning; "none" ends it before it begins. None leaves it to the checkpoint.
            calls_only: the reply has calls and no text.

        Raises:
            ValueError: as `render`, or the template has no place for the message to be continued.
        """
        if messages[-1].get("partial"):
            return self._continued(messages, tools, effort)
        ids = self.control.encode(self._guarded(messages, tools, True, effort))
        if not self.marks.thinks:
            return Prompt(ids, "no")
        begin, end = self.marks.spelling(Mark.THINK), self.marks.spelling(Mark.RESPONSE)
        if effort != "none":
            return Prompt(ids, "begun" if self._ends_with(ids, begin) else "may")
        if self.marks.thoughts_end and not self._ends_with(ids, end):
            # As the templates of Qwen 3 do it themselves.
            opened = "" if self._ends_with(ids, begin) else f"{begin}\n"
            ids += self.control.encode(f"{opened}\n{end}\n\n")
        elif not self.marks.thoughts_end and not calls_only:
            ids += self.control.encode(end)
        return Prompt(ids, "no")

    def _continued(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, effort: str | None
    ) -> Prompt:
        *before, last = messages
        thinks = not last["content"] and "reasoning_content" in last
        field = "reasoning_content" if thinks else "content"
        place = "".join(str(secrets.randbelow(10)) for _ in range(40))  # as in `ControlTokens`
        marked: Any = {**last, field: f"{last.get(field, '')}{place}"}
        written, found, _ = self._guarded([*before, marked], tools, False, effort).rpartition(place)
        if not found:
            raise ValueError(
                f"messages[{len(before)}].{field}: the chat template leaves it out, so it cannot be continued"
            )
        return Prompt(self.control.encode(written), "begun" if thinks else "no", continued=True)

    def _guarded(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        effort: str | None,
    ) -> str:
        """The chat as text for `ControlTokens.encode`."""
        messages = self.control.guard(self._prepared(messages))
        tools = self.control.guard(list(tools)) if tools else None
        return self._writer(messages, tools, add_generation_prompt, effort)

    def _prepared(self, messages: Sequence[Message]) -> list[Message]:
        tagged = THINKING.keys() <= self.marks.meaning.keys()
        turns: list[Any] = [{k: v for k, v in message.items() if k != "partial"} for message in messages]
        return [_with_reasoning_apart(turn) if tagged else turn for turn in turns]

    def _ends_with(self, ids: Sequence[int], mark: str) -> bool:
        """Whether a prompt ends with a mark, as those of some templates do, and with nothing but spaces after it."""
        tail: str = self._backend.decode(ids[-16:], skip_special_tokens=False)
        return tail.rstrip().endswith(mark)


def native_dialect(backend: Backend) -> Dialect | None:
    """OpenK3's own dialect, for vocabularies that have its tokens; else None."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    if not added.issuperset(NATIVE_TOKENS):
        return None
    control = ControlTokens(backend, control_spellings(backend, "".join(NATIVE_TOKENS)))
    return Dialect(backend, NATIVE, control, write_native)


def template_dialect(backend: Backend, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> Dialect:
    """The dialect of a checkpoint with chat templates.

    Args:
        sources: Jinja sources by name: "default", and "tool_use" where there is one for chats with tools.
        special_tokens: as for `ChatTemplate`.

    Raises:
        ValueError: a source is not valid Jinja.
    """
    text = "".join(sources.values())
    writer = _TemplateWriter(sources, special_tokens, thinks=all(tag in text for tag in THINKING))
    marks = _marks_of(text) if writer.takes_tools else TAGGED
    if writer.thinks:
        marks = replace(marks, meaning={**marks.meaning, **THINKING})
    control = ControlTokens(backend, control_spellings(backend, text + TAGS))
    return Dialect(backend, marks, control, writer)


def _marks_of(template: str) -> Marks:
    """How a template that knows tools writes calls down."""
    if "<tool_call>" in template:
        return TAGGED
    return LISTED if "[TOOL_CALLS]" in template else BARE


class _TemplateWriter:
    """Writes chats with a checkpoint's templates, and around what they have no place for."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], thinks: bool) -> None:
        self.thinks = thinks
        self._plain = ChatTemplate(sources["default"], special_tokens)
        self._with_tools = ChatTemplate(sources["tool_use"], special_tokens) if "tool_use" in sources else self._plain
        self.takes_tools = "tool_use" in sources or self._takes_tools()

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        effort: str | None,
    ) -> str:
        offered = offered_tools(messages, tools)
        turns = [message for message in messages if "tools" not in message]
        if not turns:
            raise ValueError("messages: nothing but tools; give at least one message with content")
        if not self.takes_tools and (offered or any("tool_calls" in m or m["role"] == "tool" for m in turns)):
            return self._plain.render(write_tools(turns, offered), None, add_generation_prompt, effort)
        template = self._with_tools if offered else self._plain
        return template.render(turns, offered or None, add_generation_prompt, effort)

    def _takes_tools(self) -> bool:
        """Whether the template writes tools down; found out by trying."""
        name = "k3_probe"
        tool = {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
        try:
            return name in self._with_tools.render([{"role": "user", "content": ""}], [tool])
        except ValueError:
            return False


def _with_reasoning_apart(message: Message) -> Message:
    """A message that holds its reasoning in tags, with the reasoning in a field of its own.

    As Qwen's templates do it, which do not find the tags in a guarded text.
    """
    begin, end = THINKING
    content = str(message.get("content", ""))
    if message["role"] != "assistant" or "reasoning_content" in message or end not in content:
        return message
    reasoning, *_, answer = content.split(end)
    reasoning = reasoning.rstrip("\n").split(begin)[-1].lstrip("\n")
    return {**message, "content": answer.lstrip("\n"), "reasoning_content": reasoning}
