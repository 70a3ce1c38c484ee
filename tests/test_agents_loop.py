"""The loop of a model and its tools, with replies that a model is made to give."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from agents import calculator_here, call_parts, calls_parts, has_model_reply
from chat_support import chat_llm, tokenizer
from serving import idle, until

from openk3 import agents
from openk3.agents import CallFinished, CallStarted, Finished, TextPiece, Tool
from openk3.responses import GenerationError

pytestmark = pytest.mark.usefixtures(calculator_here.__name__)
USER = {"role": "user", "content": "How much?"}
SUM = call_parts("calculator", expression="2 + 3")


def happens(tools: Any, **options: Any) -> tuple[list[Any], Finished]:
    *events, last = agents.run(chat_llm("qwen"), [USER], tools=tools, **options)
    assert isinstance(last, Finished)
    return events, last


def texts(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextPiece))


def results(events: list[Any]) -> list[str]:
    return [event.done.result.text for event in events if isinstance(event, CallFinished)]


def slow(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "waited"


def test_a_call_and_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = has_model_reply(monkeypatch, ("I compute.\n", *SUM), ("It is 5.",))
    events, last = happens(["calculator"])
    assert [type(event) for event in events if not isinstance(event, TextPiece)] == [CallStarted, CallFinished]
    assert results(events) == ["5"]
    assert (texts(events), last.text, last.finish_reason) == ("I compute.It is 5.", "It is 5.", "stop")
    assert (last.rounds, len(last.calls), last.failures, last.retries) == (2, 1, 0, 0)
    assert [message["role"] for message in last.messages] == ["assistant", "tool", "assistant"]
    assert last.messages[1]["tool_call_id"] == last.messages[0]["tool_calls"][0]["id"]
    assert "<tool_response>\n5\n</tool_response>" in prompts[1]
    # The messages are a chat that goes on, and usage is that of both rounds.
    again = [USER, *last.messages, {"role": "user", "content": "Sure?"}]
    has_model_reply(monkeypatch, ("Yes.",))
    follow = chat_llm("qwen").chat(again, tools=[tool.definition for tool in [agents.builtin("calculator")]])
    assert follow.text == "Yes."
    assert last.usage.prompt_tokens == sum(len(tokenizer("qwen").dialect.control.encode(text)) for text in prompts)


def test_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_reply(monkeypatch, ("Hello.",))
    events, last = happens(["calculator"])
    assert (texts(events), last.text, last.rounds, last.calls) == ("Hello.", "Hello.", 1, [])


def test_errors_go_back_and_retries_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, worse = call_parts("calculator", expression="1/0"), call_parts("calculator", expression="1 +")
    prompts = has_model_reply(monkeypatch, bad, worse, SUM, ("5",))
    events, last = happens(["calculator"])
    assert results(events) == [
        "Error: division by zero",
        "Error: a number or a name is missing before 'the end'",
        "5",
    ]
    assert (last.failures, last.retries, last.rounds) == (2, 2, 4)
    assert "Error: division by zero" in prompts[1]


def test_a_tool_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = has_model_reply(monkeypatch, ('{"name": "animals", "arguments": {"a": 1}}',), SUM, ("5.",))
    events, last = happens(["calculator"])
    assert results(events) == ["Error: there is no tool 'animals'; there are calculator", "5"]
    assert (last.text, last.failures, last.rounds) == ("5.", 1, 3)
    assert "there is no tool 'animals'" in prompts[1]
    for text in ('{"name": "animals"}', '{"name": "a", "arguments": {}} is JSON', '{"name": 1, "arguments": {}}', "{}"):
        has_model_reply(monkeypatch, (text,))
        assert happens(["calculator"])[1].text == text


def test_parallel_calls_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threading.Barrier(3, timeout=30)

    def meet(who: str) -> str:
        """Waits for the others."""
        meeting.wait()
        return f"{who} met"

    three = [call_parts("meet", who=who) for who in "abc"]
    has_model_reply(monkeypatch, calls_parts(*three), ("All met.",))
    events, last = happens([meet])
    assert sorted(results(events)) == ["a met", "b met", "c met"]
    assert [message["content"] for message in last.messages[1:4]] == ["a met", "b met", "c met"]  # in the calls' order


def test_a_call_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Tool.of(slow, timeout_s=0.05)
    has_model_reply(monkeypatch, call_parts("slow", seconds=5), ("Never mind.",))
    events, last = happens([tool])
    assert results(events) == ["Error: slow took longer than 0.05 seconds"]
    assert last.text == "Never mind."


def test_denied_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def act(number: int) -> str:
        """Does it."""
        ran.append(number)
        return "done"

    has_model_reply(
        monkeypatch, calls_parts(call_parts("act", number=1), call_parts("act", number=2)), ("Half of it.",)
    )
    events, last = happens([act], approve=lambda call: call.parsed["number"] == 2)
    assert ran == [2]
    assert [(done.approved, done.result.is_error) for done in last.calls] == [(False, True), (True, False)]
    assert results(events)[0].startswith("The user did not allow this call")


def test_in_the_last_round_it_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call_parts("calculator", expression=f"1 + {i}") for i in range(2)]
    prompts = has_model_reply(monkeypatch, *calls, ("It is 2.",))
    _, last = happens(["calculator"], max_rounds=3)
    assert (last.rounds, len(last.calls), last.finish_reason, last.text) == (3, 2, "stop", "It is 2.")
    assert "<tools>" in prompts[1] and "<tools>" not in prompts[2]
    # That it cannot write a call as text is the grammar's doing, which refuses the token.
    has_model_reply(monkeypatch, *calls, ('{"name": "calculator"}',))
    with pytest.raises(GenerationError, match="the grammar does not allow token"):
        happens(["calculator"], max_rounds=3)


def test_repeating_itself_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def count() -> int:
        """Counts."""
        ran.append(1)
        return len(ran)

    prompts = has_model_reply(monkeypatch, call_parts("count"), call_parts("count"), ("One.",))
    _, last = happens([count])
    assert (len(ran), last.rounds, last.text) == (1, 3, "One.")
    assert "Answer my question now" in prompts[2] and "<tools>" not in prompts[2]
    assert not any("Answer my question now" in str(message) for message in last.messages)


def test_saying_nothing_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = has_model_reply(monkeypatch, SUM, (), ("Five.",))
    _, last = happens(["calculator"])
    assert (last.rounds, last.text, last.finish_reason) == (3, "Five.", "stop")
    assert "Answer my question now" in prompts[2]
    assert [message["role"] for message in last.messages] == ["assistant", "tool", "assistant"]
    has_model_reply(monkeypatch, ())  # without a call before there is nothing to answer from
    assert happens(["calculator"])[1].rounds == 1


def test_going_in_circles_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (call_parts("calculator", expression=f"1 + {i}") for i in range(2))
    has_model_reply(monkeypatch, one, two, one, ("Enough.",))
    _, last = happens(["calculator"])
    assert (last.rounds, len(last.calls), last.text) == (4, 3, "Enough.")


def test_what_changes_may_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(("waiting", "waiting", "done"))

    def status() -> str:
        """How it stands."""
        return next(states)

    def wait() -> str:
        """Waits."""
        return "waited"

    has_model_reply(monkeypatch, *[call_parts(name) for name in ("status", "wait", "status")], ("Not yet.",))
    _, last = happens([status, wait])
    assert last.text == "Not yet."
    has_model_reply(monkeypatch, *[call_parts(name) for name in ("wait", "status", "wait")], ("Done.",))
    _, last = happens([status, wait])
    assert [done.result.text for done in last.calls] == ["waited", "done", "waited"]


def test_limits_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_reply(monkeypatch, ("x" * 50,))
    _, last = happens(["calculator"], max_total_tokens=20)
    assert (last.text, last.finish_reason, last.usage.completion_tokens) == ("x" * 20, "length", 20)
    has_model_reply(monkeypatch, SUM, ("y" * 50,))
    size = len(SUM[1]) + 2 + 1
    _, last = happens(["calculator"], max_total_tokens=size + 7)
    assert (last.text, last.finish_reason, last.rounds) == ("y" * 7, "length", 2)
    has_model_reply(monkeypatch, SUM)
    _, last = happens(["calculator"], max_total_tokens=size)
    assert (last.text, last.finish_reason, last.rounds) == ("", "length", 1)
    assert last.messages[-1]["role"] == "tool"


def test_a_result_that_leaves_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def book() -> str:
        """A book."""
        return "x" * 10_000

    has_model_reply(monkeypatch, call_parts("book"))
    _, last = happens([book])
    assert (last.finish_reason, last.rounds, len(last.calls)) == ("length", 1, 1)


def test_tool_choice_is_for_the_first_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_reply(monkeypatch, SUM, ("Five.",))
    _, last = happens(["calculator"], tool_choice="required")
    assert (last.text, last.rounds) == ("Five.", 2)


def test_what_is_refused_is_refused_at_once() -> None:
    llm = chat_llm("qwen")
    for options, words in (
        ({"tools": ["nothing"]}, "there is no built-in tool 'nothing'"),
        ({"tools": [], "max_rounds": 0}, "max_rounds: 0 is not a positive number"),
        ({"tools": [], "max_total_tokens": -1}, "max_total_tokens: -1 is not"),
        ({"tools": [], "temperature": -1}, "temperature"),
    ):
        with pytest.raises(ValueError, match=words):
            agents.run(llm, [USER], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="messages: the list is empty"):
        agents.run(llm, [], tools=[])


def test_leaving_early_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    has_model_reply(monkeypatch, ("x" * 3000,))
    for _ in agents.run(chat_llm("qwen"), [USER], tools=["calculator"]):
        break
    until(lambda: idle(chat_llm("qwen")))


async def test_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def approve(call: Any) -> bool:
        await asyncio.sleep(0)
        asked.append(call.name)
        return True

    has_model_reply(monkeypatch, calls_parts(SUM, call_parts("slow", seconds=0)), ("It is 5.",))
    events = [e async for e in agents.arun(chat_llm("qwen"), [USER], tools=["calculator", slow], approve=approve)]
    assert sorted(results(events)) == ["5", "waited"]
    assert asked == ["calculator", "slow"]
    assert events[-1].text == "It is 5."


async def test_run_inside_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where plain code runs inside of a loop."""
    has_model_reply(monkeypatch, SUM, ("It is 5.",))
    _, last = happens(["calculator"])
    assert last.text == "It is 5."
