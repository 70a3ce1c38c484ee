"""How replies of a dialect are divided: which token, or text, begins a reasoning, an answer, a call.

The marks are data, so that one parser reads all dialects, and so that a grammar for calls can be written from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from openk3.engine.grammar.tools import TAGGED_CALLS, CallForm


class Mark(Enum):
    """What a mark begins or ends."""

    THINK = auto()  # reasoning follows
    RESPONSE = auto()  # the answer follows
    CALL = auto()  # a call follows, as a JSON object with name and arguments, or an array of them
    END_CALL = auto()
    CALL_NAME = auto()  # the bare name of a function follows
    CALL_ARGUMENTS = auto()  # its arguments follow, as a JSON object
    SILENCE = auto()  # nothing that is shown follows


@dataclass(frozen=True)
class Marks:
    """The marks of one dialect by their spelling, which counts as a token only where the vocabulary has that token.

    Attributes:
        meaning: spelling to what it means.
        shown: what marks inside an answer look like to its reader, such as a bracket for the mark of a citation.
        plain_calls: whether a bare or fenced JSON object that names a tool is a call too.
        calls: how calls are written.
        thoughts_end: whether reasoning always has its end, and calls do not follow it directly.
    """

    meaning: Mapping[str, Mark] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    plain_calls: bool = True
    calls: CallForm = TAGGED_CALLS
    thoughts_end: bool = True

    @property
    def thinks(self) -> bool:
        return Mark.THINK in self.meaning.values()

    def spelling(self, mark: Mark) -> str:
        """The spelling that has this meaning."""
        return next(text for text, meaning in self.meaning.items() if meaning is mark)


THINKING = {"<think>": Mark.THINK, "</think>": Mark.RESPONSE}

# Qwen 2.5 and 3, Hermes, SmolLM3 and many more.
TAGGED = Marks({"<tool_call>": Mark.CALL, "</tool_call>": Mark.END_CALL})
# Mistral: a list of calls to the end of the reply.
LISTED = Marks({"[TOOL_CALLS]": Mark.CALL}, calls=CallForm("[TOOL_CALLS]", " [", separator=", ", closing="]"))
# Llama 3.1 and later: nothing but the object.
BARE = Marks(calls=CallForm(middle='", "parameters": '))
