"""The real Qwen2.5-Coder-0.5B with the built-in tools: a dozen questions that it cannot answer by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from openk3 import EngineConfig, agents
from openk3.documents.search import SearchIndex
from openk3.documents.text import Document

if TYPE_CHECKING:
    from openk3.llm import LLM

pytestmark = pytest.mark.slow

LEASE = """# Lease

## Parties

This lease is between Marta Olsen, the landlord, and Jun Sato, the tenant.

## Rent

The monthly rent is 900 euros. It is due on the third day of each month. A late payment costs 25 euros.

## Deposit

The tenant pays a deposit of 1,750 euros, which is returned within six weeks after the lease has ended.

## Pets

Dogs are allowed; snakes are not.

## End

Either side may end the lease with a notice of four months.
"""

# Question, and what the answer must hold: one of the texts, commas in numbers left out.
CALCULATIONS = [
    ("What is 17% of 2340?", ("397.8",)),
    ("What is 4831 * 7727?", ("37329137",)),
    ("What is the square root of 7921?", ("89",)),
    ("Solve x^2 - 11x + 28 = 0 for x.", ("4", "7")),
    ("What is 2 to the power of 40?", ("1099511627776",)),
    ("What is the derivative of x^5 + 3x?", ("5*x^4", "5x^4", "5x⁴", "5*x**4")),
]
SEARCHES = [
    ("How much is the monthly rent in the lease?", ("900",)),
    ("Who is the landlord in the lease?", ("Marta Olsen", "Olsen")),
    ("How high is the deposit in the lease?", ("1750",)),
    ("Which animals are not allowed by the lease?", ("nake",)),
    ("How long is the notice to end the lease?", ("four", "4 month")),
    ("What does a late payment cost according to the lease?", ("25",)),
]
TOLD = {"role": "system", "content": "Use the tools for every question, then answer in one sentence from their result."}


@pytest.fixture(scope="module")
def model() -> Iterator[LLM]:
    from openk3.llm import load

    with load("qwen2.5-coder-0.5b", engine=EngineConfig(weights="int8")) as llm:
        yield llm


def lease_search() -> agents.Tool:
    index = SearchIndex()
    index.add("lease", Document("lease.md", "markdown", LEASE))
    return agents.search_tool(index)


def ask(model: LLM, questions: list[Any], tools: list[Any], tool_choice: str) -> int:
    """How many of the questions are answered rightly; what happened is printed."""
    right = called = retries = 0
    for question, answers in questions:
        chat = [TOLD, {"role": "user", "content": question}]
        *_, last = agents.run(
            model,
            chat,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=False,
            temperature=0.0,
            max_total_tokens=400,
        )
        assert isinstance(last, agents.Finished)
        good = any(answer in last.text.replace(",", "") for answer in answers)
        right, called, retries = right + good, called + bool(last.calls), retries + last.retries
        calls = [(done.call.name, done.call.arguments, done.result.text[:60]) for done in last.calls]
        print(f"{'right' if good else 'WRONG'} {question} {calls} -> {last.text!r} ({last.finish_reason})", flush=True)
    print(f"right {right} of {len(questions)}, with a call {called}, retries {retries}")
    return right


def test_calculations(model: LLM) -> None:
    assert ask(model, CALCULATIONS, ["calculator", "datetime"], "auto") >= 5


def test_searches(model: LLM) -> None:
    assert ask(model, SEARCHES, [lease_search()], "required") >= 4
