"""One turn of the model: what it reads, what the engine must keep to, and how its reply is read.

Everything that stands between a request with tools and the engine comes together here, for the SDK and the server
alike: the prompt, and a grammar for the whole reply, from its reasoning over its text to the last brace of its calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from openk3.chat.dialect import Prompt, ReasoningEffort
from openk3.chat.history import check_tool_history, used_call_ids
from openk3.chat.marks import Mark, Marks
from openk3.chat.messages import Message, kind, offered_tools
from openk3.chat.parser import ReplyParser
from openk3.chat.reply import Reply
from openk3.chat.tokenizer import Tokenizer
from openk3.engine.grammar.reply import Reasoning, ReplyForm
from openk3.engine.grammar.schema import without_annotations
from openk3.engine.grammar.spec import Grammar
from openk3.engine.grammar.tools import ToolCalls
from openk3.engine.request import SamplingParams

if TYPE_CHECKING:
    from openk3.engine.engine import Engine
    from openk3.engine.handle import Handle
    from openk3.engine.loop import EngineLoop
    from openk3.engine.request import Delta

ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Mapping[str, Any]

# What a function without parameters takes.
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Turn:
    """A reply to be generated.

    Attributes:
        prompt_ids: what the model reads.
        grammar: what the whole reply is kept to, if anything.
    """

    prompt_ids: list[int]
    grammar: Grammar | None
    _tokenizer: Tokenizer
    _calls: ToolCalls | None
    _answer: Grammar | None
    _options: Mapping[str, Any]

    def check(self, engine: Engine) -> None:
        """Compile the grammar, which may take a while. For any thread.

        Raises:
            ValueError: it cannot be kept; the text begins with the argument's name.
        """
        self._kept(engine)

    def submit(self, loop: EngineLoop, params: SamplingParams, **options: Any) -> Handle:
        """Have the reply generated.

        Where a schema has keywords that no grammar keeps, the reply is checked when it is there, and if need be another
        one is generated: it comes as one piece.

        Args:
            params: of the request; the turn's grammar takes the place of theirs.
            options: those of `EngineLoop.submit`.

        Raises:
            ValueError: as `check`, and as `EngineLoop.submit`.
            RuntimeError: the engine is closed.
        """
        grammar, unkept = self._kept(loop.engine)
        accept = (lambda whole: self._problem(whole, params, unkept)) if unkept else None
        return loop.submit(self.prompt_ids, replace(params, grammar=grammar), accept=accept, **options)

    def parser(self, stop: Sequence[str] = ()) -> ReplyParser:
        """A reader for one reply to this turn. `stop`: as the engine is told."""
        dialect = self._tokenizer.dialect
        return ReplyParser(self._tokenizer, dialect.marks, dialect.control.ids, stop=stop, **self._options)

    def _kept(self, engine: Engine) -> tuple[Grammar | None, str]:
        """What the engine keeps the reply to, and what of the schemas that leaves out."""
        if self.grammar is None:
            return None, ""
        try:
            grammar, unkept = engine.keepable(self.grammar)
            if unkept:  # what cannot be checked either is refused now
                self._checks  # noqa: B018
        except ValueError as error:
            about = "tools" if self._calls is not None and " tool " in str(error) else "grammar"
            raise ValueError(f"{about}: {error}") from None
        return grammar, unkept

    @cached_property
    def _checks(self) -> dict[str | None, Any]:
        """What says what is wrong with the arguments of each tool, and (None) with an answer."""
        from openk3.engine.grammar.verify import check_of

        tools = self._calls.tools if self._calls is not None else {}
        schemas: dict[str | None, str] = {name: json.dumps(schema) for name, schema in tools.items()}
        if self._answer is not None and self._answer.kind == "json_schema":
            schemas[None] = self._answer.source
        return {name: check_of(schema) for name, schema in schemas.items()}

    def _problem(self, whole: Delta, params: SamplingParams, unkept: str) -> str:
        """What is wrong with a reply that was not kept to all of the schemas; empty if it is valid all the same."""
        reply = Reply()
        reply.add(self.parser(params.stop).read(whole))
        problems = [f"{call.name}: {self._checks[call.name](call.parsed)}" for call in reply.calls]
        problems = [problem for problem in problems if not problem.endswith(": ")]
        if None in self._checks and not reply.calls:
            problem = self._checks[None](json.loads(reply.content))
            problems += [problem] if problem else []
        return f"{problems[0]} ({unkept})" if problems else ""


def prepare_turn(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: ToolChoice = "auto",
    parallel_tool_calls: bool = True,
    *,
    reasoning_effort: ReasoningEffort | None = None,
    grammar: Grammar | None = None,
) -> Turn:
    """Write a chat down for the model and make ready to read its reply.

    Args:
        messages: a chat that passed `validate_messages`. If the last is ``partial``, the reply is what follows it.
        tools: tools that passed `validate_tools`; the chat's system messages may add more.
        tool_choice: whether the reply may hold calls ("auto"), must hold none ("none") or at least one ("required"), or
            one of a certain function (``{"type": "function", "function": {"name": ...}}``); or which of the tools may
            be called (``{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}``).
        parallel_tool_calls: whether it may hold more than one.
        reasoning_effort: how much the model is to think before it answers, for templates that have words for that;
            "none" is not at all, for all that can think. None leaves it to the checkpoint.
        grammar: the form of the answer. With tools that may be called, the reply is an answer of this form, or calls.

    Raises:
        ValueError: calls and results that do not fit each other, a tool choice that is none or that no tool answers, a
            checkpoint that cannot chat, a template that refused the chat. The text begins with the argument's name.
    """
    if not isinstance(parallel_tool_calls, bool):
        raise ValueError(f"parallel_tool_calls: expected true or false, got {kind(parallel_tool_calls)}")
    if reasoning_effort is not None and reasoning_effort not in get_args(ReasoningEffort):
        efforts = ", ".join(get_args(ReasoningEffort))
        raise ValueError(f"reasoning_effort: {reasoning_effort!r} is not one of {efforts}")
    check_tool_history(messages)
    offered = offered_tools(messages, tools)
    mode, allowed = check_tool_choice(tool_choice, [tool["function"]["name"] for tool in offered])
    if mode == "none":
        messages, tools, offered = [message for message in messages if "tools" not in message], None, []
    marks = tokenizer.dialect.marks
    prompt = tokenizer.dialect.prompt(messages, tools, reasoning_effort, calls_only=mode == "required")
    if prompt.continued and grammar is not None:
        raise ValueError("grammar: the form of an answer cannot be kept where a message is continued (partial)")
    # A function that was named is called once, and parallel calls have to be wanted.
    named = isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function"
    single = named or not parallel_tool_calls
    schemas = {
        tool["function"]["name"]: without_annotations(
            _NOTHING if (p := tool["function"].get("parameters")) is None else p
        )
        for tool in offered
        if tool["function"]["name"] in allowed
    }
    form = _reply_form(marks, prompt, schemas, mode == "required", not single, grammar)
    options = {
        "tools": list(schemas),
        "thinking": prompt.thinks == "begun",
        "fresh": not prompt.continued,
        "max_calls": 1 if single else None,
        "valid": form is not None,
        "plain": form is None or form.plain_heads or (),
        "used_ids": used_call_ids(messages),
    }
    calls = form.calls if form is not None else None
    return Turn(prompt.ids, form.grammar if form is not None else grammar, tokenizer, calls, grammar, options)


def _reply_form(
    marks: Marks, prompt: Prompt, tools: Mapping[str, Any], required: bool, parallel: bool, answer: Grammar | None
) -> ReplyForm | None:
    """What the whole reply is kept to; None where `answer` is all that is asked for, if that."""
    calls = None
    if tools:
        # Small models often know how to end a list of calls only in JSON, or in a fence of Markdown; one call the
        # grammar ends for them, and all but the values are forced if it has the dialect's own form.
        plain = marks.plain_calls and not prompt.continued and not (required and not parallel)
        if not (marks.calls.mark or required or plain):
            return None
        try:
            calls = ToolCalls(tools, required, parallel, marks.calls, plain)
        except ValueError as error:
            raise ValueError(f"tools: {error}") from None
    reasoning = None
    if prompt.thinks != "no":
        begin, end = marks.spelling(Mark.THINK), marks.spelling(Mark.RESPONSE)
        reasoning = Reasoning(begin, end, prompt.thinks == "begun", marks.thoughts_end)
    if calls is None and (reasoning is None or answer is None or answer.kind == "reply"):
        return None
    try:
        return ReplyForm(calls, reasoning, answer, tuple(marks.shown))
    except ValueError as error:
        raise ValueError(f"grammar: {error}") from None


def check_tool_choice(
    choice: object, names: Sequence[str]
) -> tuple[Literal["auto", "none", "required"], Sequence[str]]:
    """The mode of a tool choice, and which of the tools may be called.

    Raises:
        ValueError: it is not one of the forms, or asks for a call where no tool can be called.
    """
    if choice == "none":
        return "none", ()
    if choice == "auto":
        return "auto", names
    if choice == "required":
        if not names:
            raise ValueError("tool_choice: 'required' needs tools; give at least one")
        return "required", names
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _check_allowed(choice.get("allowed_tools"), names)
    name = _named(choice)
    if name is None:
        raise ValueError(
            "tool_choice: expected 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": "..."}}, got ' + repr(choice)[:80]
        )
    _check_known(name, names, "tool_choice")
    return "required", [name]


def _check_allowed(allowed: object, names: Sequence[str]) -> tuple[Literal["auto", "required"], Sequence[str]]:
    where = "tool_choice.allowed_tools"
    if not isinstance(allowed, Mapping):
        raise ValueError(f"{where}: expected an object with mode and tools, got {kind(allowed)}")
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise ValueError(f"{where}.mode: {mode!r} is not one of auto, required")
    if not isinstance(tools, (list, tuple)) or not tools:
        raise ValueError(f"{where}.tools: expected a list of at least one tool, got {kind(tools)}")
    found = []
    for i, tool in enumerate(tools):
        name = _named(tool)
        if name is None:
            raise ValueError(
                f'{where}.tools[{i}]: expected {{"type": "function", "function": {{"name": "..."}}}}, '
                f"got {repr(tool)[:80]}"
            )
        _check_known(name, names, f"{where}.tools[{i}]")
        found.append(name)
    return mode, found


def _named(choice: object) -> str | None:
    """The name of ``{"type": "function", "function": {"name": ...}}``."""
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _check_known(name: str, names: Sequence[str], where: str) -> None:
    if name not in names:
        known = f"the tools are {', '.join(names)}" if names else "there are no tools"
        raise ValueError(f"{where}: there is no tool {name!r}; {known}")
