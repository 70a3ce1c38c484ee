"""The rules of a conversation with tools: after each reply, which calls to run and whether the model has to answer now.

It knows neither how replies are generated nor how calls are run, so the SDK's loop and the server's are the same one.

- A round is one reply of the model. In the last one it may not call: it answers with what it has.
- Calls that somebody else runs (a client of the server) end the conversation for now; ours of that reply are run first.
- Calls that repeat those of the round before, which small models make, are not run again: the model is told the same
  once more. After a round that brought nothing new, or a reply that says nothing at all, it has to answer.
- Where it has to answer it is told so, in a message that is not kept, and its answer begins like one (`ANSWER`): small
  models otherwise write, as text, the call that they may not make.
- Results and errors alike go back to the model. How often it called a tool again that had failed is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from openk3.agents.calls import FinishedCall
from openk3.chat.reply import Reply, ToolCall
from openk3.engine.grammar.spec import Grammar

MAX_ROUNDS = 10
ANSWER = Grammar.regex(r"[\p{L}\p{N}*#(\"'$€£¥+-][\s\S]*")
_NOW = "Answer my question now, in its language and in words, from the results above. Call no tool."


@dataclass
class Rounds:
    """How far a conversation has come.

    Args:
        max_rounds: how many replies there may be at most.
        others: names of the tools that are run by somebody else.

    Attributes:
        rounds: replies so far.
        messages: what came after the chat it began with: replies with calls, and their results.
        finished: the calls that were run, in order.
        failures: calls that came to an error.
        retries: calls of a tool whose last call had come to an error.
        goes_on: whether the model replies again when the results of its last reply are there.
    """

    max_rounds: int = MAX_ROUNDS
    others: Collection[str] = ()
    rounds: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    finished: list[FinishedCall] = field(default_factory=list)
    failures: int = 0
    retries: int = 0
    goes_on: bool = False
    _asked: list[ToolCall] = field(default_factory=list)
    _stuck: bool = False
    _learnt: set[tuple[tuple[str, str], str]] = field(default_factory=set)
    _results: dict[tuple[str, str], FinishedCall] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if isinstance(self.max_rounds, bool) or not isinstance(self.max_rounds, int) or self.max_rounds < 1:
            raise ValueError(f"max_rounds: {self.max_rounds!r} is not a positive number of replies")

    @property
    def must_answer(self) -> bool:
        """Whether the next reply may hold no calls."""
        return self._stuck or self.rounds >= self.max_rounds - 1

    @property
    def reminder(self) -> list[dict[str, Any]]:
        """What the next request has after `messages`, for itself alone."""
        return [{"role": "user", "content": _NOW}] if self.must_answer and self.messages else []

    def add_reply(self, reply: Reply, finish_reason: str) -> list[ToolCall]:
        """Take a reply, and return the calls of it that are to be run; `add_results` is next.

        Empty where it ends the conversation, or where all of its calls were run in the round before; `goes_on` tells.
        """
        answering = self.must_answer
        self.rounds += 1
        ours = [] if finish_reason != "tool_calls" else [call for call in reply.calls if call.name not in self.others]
        self._asked = ours
        self.goes_on = bool(ours) and len(ours) == len(reply.calls)
        if not ours:
            if (
                self.messages
                and not answering
                and finish_reason == "stop"
                and not (reply.calls or reply.content.strip())
            ):
                self._stuck = self.goes_on = True
            return []
        self.messages.append(Reply("" if not self.goes_on else reply.content, reply.reasoning, ours).message())
        return [call for call in ours if self._key(call) not in self._results]

    def add_results(self, finished: Sequence[FinishedCall]) -> None:
        """Take the results of the calls that `add_reply` returned."""
        for done in finished:
            self.finished.append(done)
            self.retries += done.call.name in self._failed
            self.failures += done.result.is_error
            (self._failed.add if done.result.is_error else self._failed.discard)(done.call.name)
        by_id = {done.call.id: done for done in finished}
        results = {}
        for call in self._asked:
            done = by_id.get(call.id) or self._results[self._key(call)]
            results[self._key(call)] = done
            self.messages.append(FinishedCall(call, done.result).message())
        self._results = results
        learnt = {(key, done.result.text) for key, done in results.items()}
        self._stuck = learnt <= self._learnt
        self._learnt |= learnt

    @staticmethod
    def _key(call: ToolCall) -> tuple[str, str]:
        return call.name, call.arguments
