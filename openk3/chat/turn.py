"""One turn of the model: what it reads, what the engine must keep to, and how its reply is read.

Everything that stands between a request with tools and the engine comes together here, for the SDK and the server
alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from openk3.chat.history import check_tool_history, used_call_ids
from openk3.chat.marks import Mark
from openk3.chat.messages import Message, kind, offered_tools
from openk3.chat.parser import ReplyParser
from openk3.chat.tokenizer import Tokenizer
from openk3.engine.request import SamplingParams

ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """A reply to be generated.

    Attributes:
        prompt_ids: what the model reads. Where a call is required they end with its beginning.
    """

    prompt_ids: list[int]
    _stop_token_ids: tuple[int, ...]
    _tokenizer: Tokenizer
    _beginning: list[int]
    _options: dict[str, Any] = field(default_factory=dict)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters of a request, with what this turn needs besides."""
        # The seam of constrained calls: a grammar for the tools in the dialect's marks, to begin after `_beginning`,
        # goes into these parameters; the parser is then told `valid=True` and hands calls on as they are written.
        return replace(params, stop_token_ids=(*params.stop_token_ids, *self._stop_token_ids))

    def parser(self, stop: Sequence[str] = ()) -> ReplyParser:
        """A reader for one reply to this turn. `stop`: as the engine is told."""
        dialect = self._tokenizer.dialect
        parser = ReplyParser(self._tokenizer, dialect.marks, dialect.control.ids, stop=stop, **self._options)
        parser.feed(self._beginning)
        return parser


def prepare_turn(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: ToolChoice = "auto",
    parallel_tool_calls: bool = True,
) -> Turn:
    """Write a chat down for the model and make ready to read its reply.

    Args:
        messages: a chat that passed `validate_messages`.
        tools: tools that passed `validate_tools`; the chat's system messages may add more.
        tool_choice: whether the reply may hold calls ("auto"), must hold none ("none") or at least one ("required"), or
            one of a certain function (``{"type": "function", "function": {"name": ...}}``).
        parallel_tool_calls: whether it may hold more than one.

    Raises:
        ValueError: calls and results that do not fit each other, a tool choice that is none or that no tool answers, a
            checkpoint that cannot chat, a template that refused the chat. The text begins with the argument's name.
    """
    if not isinstance(parallel_tool_calls, bool):
        raise ValueError(f"parallel_tool_calls: expected true or false, got {kind(parallel_tool_calls)}")
    check_tool_history(messages)
    dialect = tokenizer.dialect
    mode, name = check_tool_choice(tool_choice, [tool["function"]["name"] for tool in offered_tools(messages, tools)])
    if mode == "none":
        messages, tools = [message for message in messages if "tools" not in message], None
    names = [name] if name else [tool["function"]["name"] for tool in offered_tools(messages, tools)]
    prompt_ids = dialect.encode(messages, tools)
    thinking = dialect.begins_thinking(prompt_ids)
    beginning = dialect.call_beginning(name, thinking) if mode == "required" else []
    # A function that was named is called once, and parallel calls have to be wanted.
    single = bool(names) and (name is not None or not parallel_tool_calls)
    ends = [text for text, mark in dialect.marks.meaning.items() if single and mark is Mark.END_CALL]
    stops = tuple(dialect.control.ids[text] for text in ends if text in dialect.control.ids)
    options = {
        "tools": names,
        "thinking": thinking,
        "max_calls": 1 if single else None,
        "used_ids": used_call_ids(messages),
    }
    return Turn(prompt_ids + beginning, stops, tokenizer, beginning, options)


def check_tool_choice(choice: object, names: Sequence[str]) -> tuple[Literal["auto", "none", "required"], str | None]:
    """The mode of a tool choice, and the function that it names.

    Raises:
        ValueError: it is not one of the forms, or asks for a call where no tool can be called.
    """
    if choice in ("auto", "none"):
        return choice, None
    if choice == "required":
        if not names:
            raise ValueError("tool_choice: 'required' needs tools; give at least one")
        return "required", None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            "tool_choice: expected 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": "..."}}, got ' + repr(choice)[:80]
        )
    if name not in names:
        known = f"the tools are {', '.join(names)}" if names else "there are no tools"
        raise ValueError(f"tool_choice: there is no tool {name!r}; {known}")
    return "required", name
