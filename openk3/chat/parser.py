"""From the tokens of a reply to what it says: reasoning, answer and calls, piece by piece as they arrive.

Where a reply is divided is read from token ids, so an answer that only spells a mark, with other tokens, divides
nothing. Vocabularies without the tokens of their dialect have the marks as texts. However the tokens are cut into
pieces, the deltas together are the same: what is not yet certain, such as half a character, a part of a mark, or spaces
before a call, is held back until it is.

Models that were told to write ``<tool_call>`` often write the bare object, or one in a fence. So in a chat with tools
an answer that begins like that is held back until it has become a call of one of the tools, or cannot any more
(`openk3.chat.plain_calls`). A call is handed on when all of it is there and valid; what turns out not to be one is
shown as text. Calls that a grammar keeps to their schemas are handed on as they are written, and beside them nothing is
taken for a call that it does not see.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from openk3.chat.call_body import CallObject, NamedCall
from openk3.chat.marks import Mark, Marks
from openk3.chat.plain_calls import Lead, find_lead
from openk3.engine.detokenizer import StopFinder, TextDecoder, overlap

if TYPE_CHECKING:
    from openk3.chat.tokenizer import Tokenizer
    from openk3.engine.request import Delta, FinishReason

_BETWEEN_CALLS = " \t\r\n,[]"


@dataclass(frozen=True)
class CallDelta:
    """A piece of a call: `id` and `name` in its first piece only, `arguments` to be joined."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ReplyDelta:
    """A piece of a reply; false if there is nothing in it."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def random_call_id() -> str:
    """Nine letters and digits, as Mistral's templates insist; others take anything."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ReplyParser:
    """Reads one reply.

    Args:
        tokenizer: the vocabulary.
        marks: those of the dialect.
        control_ids: control tokens by spelling; those that are no marks are left out.
        tools: names of the functions that may be called; without any, nothing is read as a call.
        stop: texts that end the reply, as the engine was told. They are left out, and so is what follows.
        thinking: the prompt has begun the reasoning already.
        fresh: the reply is the beginning of an answer, where a call may stand without a mark.
        max_calls: what comes after so many calls is left out; None for no limit.
        valid: the reply is kept to a grammar, so that what begins as a call with a mark is one.
        plain: whether calls without marks are read; or what the first one begins with in a grammar, and the following
            ones, so that what begins like that is a call, and nothing else is one; or nothing.
        used_ids: ids of earlier calls in the conversation.
        new_id: draws an id for a call.

    Attributes:
        num_calls: how many calls are complete.
        reasoning_tokens: how many tokens of the reply were reasoning, the mark of its end included.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        marks: Marks,
        control_ids: Mapping[str, int],
        *,
        tools: Collection[str] = (),
        stop: Sequence[str] = (),
        thinking: bool = False,
        fresh: bool = True,
        max_calls: int | None = None,
        valid: bool = False,
        plain: bool | Sequence[re.Pattern[str]] = True,
        used_ids: Collection[str] = (),
        new_id: Callable[[], str] = random_call_id,
    ) -> None:
        self.num_calls = 0
        self.reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._marks = marks
        self._tools = frozenset(tools)
        self._stop = stop
        self._max_calls = max_calls
        self._valid = valid
        self._reads_plain = bool(plain) and bool(tools) and marks.plain_calls
        self._heads = () if isinstance(plain, bool) else tuple(plain)
        self._used_ids = set(used_ids)
        self._new_id = new_id
        self._control_ids = frozenset(control_ids.values())
        spellings = [*marks.meaning, *marks.shown]
        self._marks_by_id = {control_ids[text]: text for text in spellings if text in control_ids}
        self._tags = [text for text in marks.meaning if text not in control_ids]
        self._tag = re.compile("|".join(map(re.escape, self._tags))) if self._tags else None

        self._decoder = TextDecoder(tokenizer)
        self._finder = StopFinder(stop)
        self._buffer = ""  # text that is not assigned yet
        self._ended = False
        self._channel = Mark.THINK if thinking else Mark.RESPONSE
        self._trim = thinking  # line ends are left out until something else comes
        self._spaces = ""  # white space that may turn out to be no part of the text
        self._fresh = fresh  # nothing of the answer was seen yet, or nothing since the last call
        self._lead: Lead | None = None  # what stood before the object that may be a call; None if it was a mark
        self._draft: CallObject | NamedCall | None = None
        self._num_begun = 0
        self._sent: int | None = None  # characters of the draft's arguments that were handed on
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Read more tokens of the reply; not the one that ended it, unless that is a mark."""
        for token in ids:
            if self._ended:
                break
            self.reasoning_tokens += self._channel is Mark.THINK
            if token in self._marks_by_id:
                self._flush()
                self._read(last=True)
                self._take_mark(self._marks_by_id[token])
            elif token not in self._control_ids:
                self._take_text(self._decoder.push(token))
        return self._delta()

    def finish(self, cut: bool = False) -> ReplyDelta:
        """What is left when no token follows. `cut`: the reply did not end by itself, so a call may be incomplete."""
        self._flush()
        self._end(cut)
        return self._delta()

    def read(self, delta: Delta) -> ReplyDelta:
        """Read a piece of the reply as the engine gives it, the last one to its end."""
        if delta.finish_reason is None:
            return self.feed(delta.token_ids)
        ids = delta.token_ids
        ended = delta.finish_reason == "stop" and not isinstance(delta.stop_match, str)
        if ended and ids and (ids[-1] in self._tokenizer.eos_token_ids or delta.stop_match is not None):
            ids = ids[:-1]
        first, rest = self.feed(ids), self.finish(cut=not ended)
        return ReplyDelta(first.content + rest.content, first.reasoning + rest.reasoning, (*first.calls, *rest.calls))

    def finish_reason(self, reason: FinishReason) -> FinishReason | Literal["tool_calls"]:
        """Why the reply ended, given the engine's reason: "tool_calls" if it did so by itself and calls tools."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    # From tokens to text and marks

    def _take_text(self, piece: str) -> None:
        text, stop = self._finder.push(piece)
        self._buffer += text
        self._read()
        if stop is not None:
            self._end(cut=True)

    def _flush(self) -> None:
        """Take what the decoder and the finder of stop texts hold back: what follows cannot go on with it."""
        if not self._ended:
            self._take_text(self._decoder.flush())
        if not self._ended:
            self._buffer += self._finder.flush()
            self._decoder, self._finder = TextDecoder(self._tokenizer), StopFinder(self._stop)

    def _read(self, last: bool = False) -> None:
        """Assign the buffer as far as that is certain; all of it if it is the last before a mark or the end."""
        while self._buffer and not self._ended:
            if isinstance(self._draft, CallObject):
                self._buffer = self._draft.push(self._buffer)
                self._look_at(self._draft)
            elif self._channel is Mark.CALL and self._buffer[0] in _BETWEEN_CALLS:
                self._buffer = self._buffer.lstrip(_BETWEEN_CALLS)
            elif self._channel is Mark.CALL and self._buffer[0] == "{":
                self._draft = CallObject()
            elif self._fresh and self._reads_plain and self._channel is Mark.RESPONSE:
                if not self._read_lead(find_lead(self._buffer, self._lead), last):
                    return
            elif not self._read_to_tag(last):
                return

    def _read_lead(self, lead: Lead, last: bool) -> bool:
        """Begin the object that may be a call, if there is one; whether there may be more to read."""
        if lead.is_object is None and not last:
            return False
        # Nothing but spaces and the end of a fence after a call is of no use to anybody.
        length = len(self._buffer) if lead.is_object is None and self._lead is not None else lead.length
        self._buffer = self._buffer[length:]
        self._fresh = False
        self._lead, self._draft = (lead, CallObject()) if lead.is_object else (None, None)
        return True

    def _read_to_tag(self, last: bool) -> bool:
        """Assign the text before the next mark that is a text, and take the mark; whether there may be more to read."""
        found = self._tag.search(self._buffer) if self._tag else None
        if found is not None:
            before, self._buffer = self._buffer[: found.start()], self._buffer[found.end() :]
            self._say(before)
            self._take_mark(found.group())
            return True
        held = 0 if last else max((overlap(self._buffer, tag) for tag in self._tags), default=0)
        sure = len(self._buffer) - held
        text, self._buffer = self._buffer[:sure], self._buffer[sure:]
        self._say(text)
        return False

    def _take_mark(self, spelling: str) -> None:
        if spelling in self._marks.shown:
            self._say(self._marks.shown[spelling])
            return
        mark = self._marks.meaning[spelling]
        if mark is Mark.CALL_ARGUMENTS and isinstance(self._draft, NamedCall):
            self._channel = mark
            return
        if self._draft is not None:
            self._settle(cut=False)
            self._read(last=True)
        if self._ended:
            return
        if mark in (Mark.END_CALL, Mark.CALL_ARGUMENTS) or (not self._tools and mark in (Mark.CALL, Mark.CALL_NAME)):
            mark = Mark.RESPONSE
        if self._channel is Mark.RESPONSE and mark in (Mark.RESPONSE, Mark.THINK):
            self._content.append(self._spaces)
        self._spaces = ""
        self._trim = mark is Mark.THINK or self._channel is not Mark.RESPONSE
        self._channel, self._fresh, self._lead = mark, True, None
        if mark is Mark.CALL_NAME:
            self._draft = NamedCall()

    def _say(self, text: str) -> None:
        """Take text of the channel we are in."""
        if isinstance(self._draft, NamedCall):
            if self._channel is Mark.CALL_NAME:
                self._draft.name += text
            else:
                self._draft.arguments_so_far += text
                self._announce(self._draft)
        elif self._channel is not Mark.SILENCE and text:
            if self._channel is Mark.CALL:  # no object where one was to come: it is shown as the text that it is
                self._channel = Mark.RESPONSE
            self._show(text)

    def _show(self, text: str) -> None:
        thinking = self._channel is Mark.THINK
        text, self._spaces = self._spaces + text, ""
        if self._trim:
            text = text.lstrip("\r\n")
            self._trim = not text
        if thinking or self._tools:  # white space before a call, or at the end of reasoning, is no part of the text
            shown = text.rstrip()
            text, self._spaces = shown, text[len(shown) :]
        (self._reasoning if thinking else self._content).append(text)

    # Calls

    def _look_at(self, draft: CallObject) -> None:
        """See what has become of the object that is being read."""
        if self._lead is not None and not draft.may_be_call(self._tools):
            self._draft = None
            self._give_back(draft)
        elif draft.ended:
            self._settle(cut=False)
        else:
            self._announce(draft)

    def _announce(self, draft: CallObject | NamedCall) -> None:
        """Hand on what is written of a call that is valid by construction."""
        if self._valid and draft.name in self._tools and draft.arguments_so_far and self._is_kept(draft):
            self._hand_on(draft.name, draft.arguments_so_far)

    def _is_kept(self, draft: CallObject | NamedCall) -> bool:
        """Whether a grammar has kept the draft to a call, if there is one."""
        if self._lead is None or not self._heads:
            return True
        written = self._lead.skipped + self._lead.text + draft.text
        return self._heads[min(self.num_calls, 1)].match(written) is not None

    def _settle(self, cut: bool) -> None:
        """End the draft: it is a call, a part of one if the reply was cut, or else text."""
        draft, self._draft = self._draft, None
        assert draft is not None
        bare_name = isinstance(draft, NamedCall) and not draft.arguments_so_far.strip()
        call = None if (cut and bare_name) or not self._is_kept(draft) else draft.call(self._tools)
        if call is not None:
            self._hand_on(*call)
            self.num_calls += 1
            self._sent, self._spaces, self._fresh, self._trim = None, "", True, True
            self._ended = self.num_calls == self._max_calls
        elif (
            cut
            and draft.name in self._tools
            and (self._lead is None or (draft.arguments_so_far and self._is_kept(draft)))
        ):
            self._hand_on(draft.name, draft.arguments_so_far)
        else:
            self._give_back(draft)

    def _give_back(self, draft: CallObject | NamedCall) -> None:
        """Show as text what was no call."""
        if self._lead is not None:
            self._buffer = self._lead.text + draft.text + self._buffer
            self._lead, self._fresh = None, False
        else:
            channel, self._channel = self._channel, Mark.RESPONSE
            self._show(self._tag.sub("", draft.text) if self._tag else draft.text)
            self._channel = channel

    def _hand_on(self, name: str, arguments: str) -> None:
        if self._sent is None:
            call_id = self._new_id()
            while call_id in self._used_ids:
                call_id = self._new_id()
            self._used_ids.add(call_id)
            self._calls.append(CallDelta(self._num_begun, arguments, call_id, name))
            self._num_begun += 1
        elif arguments[self._sent :]:
            self._calls.append(CallDelta(self._num_begun - 1, arguments[self._sent :]))
        self._sent = len(arguments)

    # The end

    def _end(self, cut: bool) -> None:
        if self._ended:
            return
        self._read(last=True)
        while self._draft is not None:
            self._settle(cut)
            self._read(last=True)
        if self._channel is Mark.RESPONSE and not self._num_begun:
            self._content.append(self._spaces)
        self._ended = True

    def _delta(self) -> ReplyDelta:
        delta = ReplyDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return delta
