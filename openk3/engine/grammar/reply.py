"""The form of a whole reply: reasoning, then an answer, calls of tools, or both.

What is free stays free: reasoning, and the text of an answer that no form was asked for. From where a call begins, by
its mark or, in an answer without one, by the name of a tool in the JSON that small models write instead, everything is
kept to it. The whole is one grammar, so it holds across the end of the reasoning, and nothing has to be switched on or
off while the reply is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Self

from openk3.engine.grammar.spec import Grammar, to_json
from openk3.engine.grammar.tools import MOST_CALLS, ToolCalls

_ANY = "/(?s:.*)/"
_WHITE = r"[ \t\r\n]"
_SPACE = rf"{_WHITE}{{0,12}}"  # bounded, or a small model may write spaces until its tokens are used up


@dataclass(frozen=True)
class Reasoning:
    """Where a reply may reason before it answers.

    Attributes:
        begin, end: the marks around it, special tokens or texts.
        begun: whether the prompt has begun it.
        closed: whether it always has its end; else calls may follow it directly.
    """

    begin: str
    end: str
    begun: bool = False
    closed: bool = True


@dataclass(frozen=True)
class ReplyForm:
    """What a whole reply is to look like. `grammar` is what `SamplingParams` takes.

    Attributes:
        calls: the calls it may hold, or must.
        reasoning: where it may reason first.
        answer: the form of an answer. With calls that are not required, the reply is an answer of this form or calls.
        shown: special tokens that free text may hold.

    Raises:
        ValueError: neither calls nor the form of an answer, or both where calls have no mark.
    """

    calls: ToolCalls | None = None
    reasoning: Reasoning | None = None
    answer: Grammar | None = None
    shown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.calls is None and self.answer is None:
            raise ValueError("a reply without calls needs the form of an answer, or no grammar at all")
        if self.answer is not None and self.answer.kind == "reply":
            raise ValueError("the form of an answer is that of a whole reply with calls: give one of them")
        if self.calls is not None and self.answer is not None and not self.calls.required and not self.calls.form.mark:
            raise ValueError("an answer of a certain form beside calls that have no mark: require calls, or allow none")

    @property
    def grammar(self) -> Grammar:
        """
        Raises:
            ValueError: the schemas of the tools are too large, or hold what is not JSON.
        """
        value = {
            "calls": self.calls and self.calls.as_json(),
            "reasoning": self.reasoning and asdict(self.reasoning),
            "answer": self.answer and [self.answer.kind, self.answer.source],
            "shown": self.shown,
        }
        return Grammar("reply", to_json("the tools", value))

    @classmethod
    def from_source(cls, source: str) -> Self:
        """What `grammar` was made of.

        Raises:
            ValueError: the source is of another making.
        """
        try:
            value = json.loads(source)
            return cls(
                value["calls"] and ToolCalls.from_json(value["calls"]),
                value["reasoning"] and Reasoning(**value["reasoning"]),
                value["answer"] and Grammar(*value["answer"]),
                tuple(value["shown"]),
            )
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"the source of a reply's grammar is not of ReplyForm.grammar: {error}") from None

    @property
    def is_plain(self) -> bool:
        """Whether a reply may begin with a call without marks."""
        return self.calls is not None and self.calls.plain and (self.calls.required or self.answer is None)

    @property
    def plain_heads(self) -> tuple[re.Pattern[str], re.Pattern[str]] | None:
        """What an answer begins with where it is a call without marks, and what begins another one after it; None where
        there are none. What follows is valid.
        """
        if self.calls is None or not (self.is_plain or (self.calls.required and not self.calls.form.mark)):
            return None
        names = self.calls.tools
        return re.compile(f"{_plain_head(names)}|{_fenced_head(names)}"), re.compile(_next_head(names))

    def to_lark(self, special: Mapping[str, int]) -> str:
        """The reply in llguidance's Lark.

        `@arguments_<i>` stands for the arguments of the i-th tool, `@plain_<i>` for those in a call without marks,
        and `@answer` for an answer.

        Args:
            special: the special tokens of the vocabulary, which cannot be written by their characters.
        """
        rules = [*self._reasoning_rules(special), *self._rest_rules(special)]
        if self.calls is not None:
            rules += _call_rules(self.calls, special)
            rules += _plain_rules(self.calls, self._no_mark(special)) if self.is_plain else []
        return "\n".join(["%llguidance {}", *rules])

    def _reasoning_rules(self, special: Mapping[str, int]) -> list[str]:
        """`start`, and what comes before `rest`."""
        if self.reasoning is None:
            return ["start: rest"]
        begin, end = self.reasoning.begin, self.reasoning.end
        calls = self.calls if self.calls is not None and not self.reasoning.closed else None
        opened = "" if self.reasoning.begun else f"{_literal(begin, special)} "
        rules = []
        if end in special:
            rules += [f"thought: {opened}{_text('THOUGHT', self.shown, special)}"]
            rules += [f"THOUGHT: /(?s:.+)/{self._no_mark(special)}"]
            ended = f"thought {_literal(end, special)}"
        else:
            # Spaces before a mark that is a text, as the parser takes it there too.
            opened = "" if self.reasoning.begun else rf"/\s*/ {_quoted(begin)} "
            rules += [f"ended[lazy]: {opened}THOUGHT {_quoted(end)}", f"THOUGHT: {_ANY}{self._no_mark(special)}"]
            ended = "ended"
        if not self._is_free:
            rules.append(r"GAP: /\n{1,2}/")
            ended += " GAP?"
        if self.reasoning.begun:
            ways = [f"{ended} rest"]
        else:
            ways = [f"({ended})? rest" if self.reasoning.closed else f"({ended} | {_literal(end, special)})? rest"]
        ways += ["thought calls"] if calls is not None and end in special else []
        return [f"start: {' | '.join(ways)}", *rules]

    def _rest_rules(self, special: Mapping[str, int]) -> list[str]:
        """What comes after reasoning."""
        calls, marked = self.calls, self.calls.form.mark if self.calls is not None else ""
        if calls is not None and calls.required:
            return ["rest: " + " | ".join(["calls"] * (bool(marked) or not self.is_plain) + ["plain"] * self.is_plain)]
        if self.answer is not None:
            return ["rest: @answer" + (" | calls" if calls is not None else "")]
        ways, rules = (
            ["text"],
            [f"text: {_text('TEXT', self.shown, special)}", f"TEXT: /(?s:.+)/{self._not_text(special)}"],
        )
        if marked in special:
            ways.append("text calls")
        elif marked:
            ways.append("opening marked")
            rules += [
                f"opening[lazy]: BEFORE {_quoted(marked)}",
                f"BEFORE: {_ANY}{self._not_text(special, mark=False)}",
            ]
        ways += ["plain"] if self.is_plain else []
        return [f"rest: {' | '.join(ways)}", *rules]

    @property
    def _is_free(self) -> bool:
        return self.answer is None and not (self.calls is not None and self.calls.required)

    def _no_mark(self, special: Mapping[str, int]) -> str:
        """Leaves texts out that hold the mark of calls, where it is a text."""
        mark = self.calls.form.mark if self.calls is not None else ""
        return f" & ~({_ANY} {_quoted(mark)} {_ANY})" if mark and mark not in special else ""

    def _not_text(self, special: Mapping[str, int], mark: bool = True) -> str:
        """Leaves out of free text what begins something else."""
        without = self._no_mark(special) if mark else ""
        if self.is_plain and self.calls is not None:
            names = self.calls.tools
            without += f" & ~(/{_plain_head(names)}(?s:.*)/) & ~(/{_fenced_head(names)}(?s:.*)/)"
        if self.reasoning is not None and not self.reasoning.begun and self.reasoning.begin not in special:
            without += rf" & ~(/\s*/ {_quoted(self.reasoning.begin)} {_ANY})"
        return without


def _call_rules(calls: ToolCalls, special: Mapping[str, int]) -> list[str]:
    """`calls`, and `marked` for what follows their mark."""
    form = calls.form
    heads = (f"{_literal(form.head(name), special)} @arguments_{i}" for i, name in enumerate(calls.tools))
    more = f" ({_literal(form.separator, special)} call){{0,{MOST_CALLS - 1}}}" if calls.parallel else ""
    return [
        f"calls: {_literal(form.mark, special)} marked",
        f"marked: {_literal(form.opening, special)} call{more} {_literal(form.closing, special)}",
        f"call: ({' | '.join(heads)}) {_literal(form.suffix, special)}",
    ]


def _plain_rules(calls: ToolCalls, no_mark: str) -> list[str]:
    """`plain`: calls without marks, at the beginning of an answer. Spaces are free, as models write them.

    Text may follow unless calls are required: a model that wants to say something and may only call or end, calls.
    """
    rules = [rf"CLOSE: /{_SPACE}\}}/"]
    heads = {"bare": _plain_head, "fenced": _fenced_head}
    if not calls.parallel:
        rules.append("plain: bare | fenced")
    else:
        heads["again"] = _next_head
        more = f"again{{0,{MOST_CALLS - 1}}}"
        if calls.required:
            rules += [
                f"plain: bare {more} END? | fenced {more} FENCE_END?",
                rf"END: /{_WHITE}{{1,4}}/ | /{_SPACE}\]{_WHITE}{{0,4}}/",
                rf"FENCE_END: END | /{_SPACE}(\]{_SPACE})?```{_WHITE}{{0,4}}/",
            ]
        else:
            rules += [
                f"plain: (bare | fenced) {more} AFTER?",
                f"AFTER: /(?s:.+)/{no_mark} & ~(/{_next_head(calls.tools)}(?s:.*)/)",
            ]
    for rule, head in heads.items():
        numbered = [f"{rule.upper()}_{i}" for i in range(len(calls.tools))]
        rules.append(f"{rule}: ({' | '.join(f'{one} @plain_{i}' for i, one in enumerate(numbered))}) CLOSE")
        rules += [f"{one}: /{head([name])}/" for one, name in zip(numbered, calls.tools, strict=True)]
    return rules


def _plain_head(names: Iterable[str], before: str = rf"{_SPACE}(\[{_SPACE})?") -> str:
    """A regular expression for the beginning of a call without marks up to its arguments."""
    written = "|".join(_escaped(json.dumps(name, ensure_ascii=False)) for name in names)
    s = _SPACE
    return rf'{before}\{{{s}"name"{s}:{s}({written}){s},{s}"(arguments|parameters)"{s}:{s}'


def _fenced_head(names: Iterable[str]) -> str:
    return _plain_head(names, rf"{_SPACE}```[a-z]{{0,10}}\n{_SPACE}(\[{_SPACE})?")


def _next_head(names: Iterable[str]) -> str:
    return _plain_head(names, r"[ \t\r\n,]{0,12}")


def _escaped(text: str) -> str:
    """`text` as a regular expression, of Rust as of Python."""
    return "".join(f"\\{c}" if c.isascii() and not c.isalnum() and c not in '_" ' else c for c in text)


def _text(terminal: str, shown: Iterable[str], special: Mapping[str, int]) -> str:
    """Free text, which may be empty, with special tokens in it that are shown."""
    tokens = [f"<[{special[token]}]>" for token in shown if token in special]
    return f"({' | '.join([terminal, *tokens])})*" if tokens else f"{terminal}?"


def _literal(text: str, special: Mapping[str, int]) -> str:
    """`text` as a rule of the grammar."""
    pieces = _split(text, special)
    return " ".join(f"<[{special[piece]}]>" if piece in special else _quoted(piece) for piece in pieces)


def _split(text: str, special: Mapping[str, int]) -> list[str]:
    """`text` in pieces, so that every special token in it is one; of two that begin together, the longer."""
    pieces = [""]
    while text:
        token = max((token for token in special if text.startswith(token)), key=len, default=None)
        if token is not None:
            pieces += [token, ""]
        else:
            pieces[-1] += text[0]
        text = text[len(token or text[0]) :]
    return [piece for piece in pieces if piece]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
