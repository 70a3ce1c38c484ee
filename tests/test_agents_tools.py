"""The built-in tools, and what is told to a model whose call is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from openk3.agents.tools import BUILTIN, builtin
from openk3.agents.tools.calculator import calculate, evaluate
from openk3.agents.tools.dates import difference, moment_of, time_zone
from openk3.agents.tools.dates import run as datetime_tool
from openk3.agents.tools.search_documents import search_tool
from openk3.agents.tools.tool import MAX_RESULT, Tool, toolbox
from openk3.documents.search import SearchIndex
from openk3.documents.text import Document


def value(expression: str) -> str:
    return evaluate(expression.encode("utf-8", "replace")).decode()


# The calculator


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("2 + 3 * 4 - 10 / 4", "11.5"),
        ("-2^2", "-4"),
        ("2^3^2", "512"),
        ("2**-1", "0.5"),
        ("(1 + 2)(3 + 4)", "21"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "1/3 ≈ 0.333333333333333"),
        ("1,234.5 * 2 =", "2469"),
        ("12 × 3 ÷ 4 − 1", "8"),
        ("1e3 + 1_000", "2000"),
        ("15% of 240", "36"),
        ("200 + 10%", "220"),
        ("7 % 3", "1"),
        ("7 // 2", "3"),
        ("5! / 3!", "20"),
        ("|3 - 5|", "2"),
        ("√16 + sqrt(9)", "7"),
        ("sqrt(8)", "2*sqrt(2) ≈ 2.82842712474619"),
        ("sin(pi/6)", "0.5"),
        ("e^(i*pi)", "-1"),
        ("log(1000, 10) + log10(10) + ln(e)", "5"),
        ("gcd(12, 18) + lcm(4, 6)", "18"),
        ("mean(3, 5, 10) + median([1, 2, 9])", "8"),
        ("round(2.5) + round(-2.5) + round(3.14159, 2)", "3.14"),
        ("sum(k^2, k, 1, 10)", "385"),
        ("isprime(97)", "true"),
        ("factor(360)", "2^3*3^2*5 ≈ 360"),
        ("binomial(5, 2)", "10"),
        ("x^2 = 4", "x = -2 or x = 2"),
        ("solve(x^2 - 5x + 6 = 0, x)", "x = 2 or x = 3"),
        ("solve([x + y = 3, x - y = 1], [x, y])", "x = 2, y = 1"),
        ("solve(cos(x) = x, x)", "x = 0.739085133215161"),
        ("solve(x = x + 1)", "no solution"),
        ("solve(x^2 < 4)", "(-2 < x) & (x < 2)"),
        ("diff(x^3, x)", "3*x^2"),
        ("diff(x^4, x, 2)", "12*x^2"),
        ("integrate(2x)", "x^2"),
        ("integrate(sin(x), x, 0, pi)", "2"),
        ("integrate(sin(x), [x, 0, pi])", "2"),
        ("simplify((x^2 - 1)/(x - 1))", "x + 1"),
        ("expand((x + 1)^2)", "x^2 + 2*x + 1"),
        ("limit(sin(x)/x, x, 0)", "1"),
    ],
)
def test_values(expression: str, expected: str) -> None:
    assert value(expression) == expected


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("__import__('os').system('true')", "cannot be read"),
        ("x.__class__", "cannot be read at '.__class__'"),
        ("(1).__class__", "cannot be read at '.__class__'"),
        ("lambda: 1", "cannot be read"),
        ("open(1)", "there is no function 'open'; there are abs, "),
        ("exec(1)", "there is no function 'exec'"),
        ("sympify(1)", "there is no function"),
        ("", "empty"),
        ("1 +", "missing before 'the end'"),
        ("(1", "')' is missing before 'the end'"),
        ("1)", "cannot be read at ')'"),
        ("sin", "sin is a function"),
        ("sqrt(1, 2)", "sqrt takes 1 arguments, got 2"),
        ("1/0", "division by zero"),
        ("0^-1", "division by zero"),
        ("1 / (2 - 2)", "division by zero"),
        ("oo - oo", "no value"),
        ("9^9^9", "more than 4000 digits"),
        ("pow(9, 999999)", "more than 4000 digits"),
        ("99999!", "more than 4000 digits"),
        ("(-1)!", "whole number"),
        ("gcd(0.5, 2)", "whole numbers"),
        ("integrate(x^x, x)", "no closed form"),
        ("solve(a*x + b*y)", "say for which variable; there are a, b, x, y"),
        ("(1 = 2) + 3", "an equation or a list stands where a number is needed"),
        ("[1, 2] * 2", "an equation or a list"),
        ("(" * 60 + "1" + ")" * 60, "nested more than"),
        ("1+" * 600 + "1", "at most 1000"),
        ("mean()", "at least one number"),
    ],
)
def test_what_cannot_be_computed(expression: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        value(expression)
    assert words in str(caught.value)


_PIECES = ["1", "2.5", "x", "y", "+", "-", "*", "/", "^", "(", ")", "[", "]", ",", "=", "<", "%", "!", "|", " ", "sqrt",
           "sin(", "round(", "max(", "of", ".", "e", "i", "oo", "é", "\n"]  # fmt: skip


@settings(deadline=None, derandomize=True)  # the same in every run: some equations take SymPy long
@given(st.lists(st.sampled_from(_PIECES), max_size=9))
def test_any_expression_has_a_value_or_an_error(pieces: list[str]) -> None:
    try:
        assert isinstance(value("".join(pieces)), str)
    except ValueError as error:
        assert str(error)


def test_it_runs_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calculate("2 + 2") == "4"
    with pytest.raises(ValueError, match="more than 4000 digits"):
        calculate("9^9^9")
    monkeypatch.setattr("openk3.agents.tools.calculator.SECONDS", 0.01)
    with pytest.raises(
        ValueError, match=r"^the expression is too hard: it took longer than 0.01 seconds; simplify it$"
    ):
        calculate("2 + 2")


# Dates


def at(**arguments: Any) -> str:
    return datetime_tool(**arguments)


def test_now() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    for zone, name in (
        ("UTC", "UTC"),
        ("tokyo", "tokyo"),
        ("America/New_York", "America/New_York"),
        ("+05:30", "+05:30"),
    ):
        said = at(operation="now", timezone=zone)
        moment = datetime.fromisoformat(said.split()[0])
        assert before <= moment <= datetime.now(UTC)
        assert moment.utcoffset() == datetime.now(time_zone(zone)).utcoffset()
        assert said.endswith(f"({moment:%A}, {name})")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"operation": "difference", "start": "2026-01-01", "end": "2026-12-25"}, "358 days (11 months, 24 days)"),
        ({"operation": "difference", "start": "2024-02-29", "end": "2025-03-01"}, "366 days (1 year, 1 day)"),
        ({"operation": "difference", "start": "2026-01-02", "end": "2026-01-01"}, "-1 day"),
        (
            {"operation": "difference", "start": "2026-03-28T12:00", "end": "2026-03-29T12:00", "timezone": "Berlin"},
            "23 hours (82800 seconds in all)",
        ),
        ({"operation": "add", "start": "2026-01-31", "amount": 1, "unit": "months"}, "2026-02-28 (Saturday)"),
        ({"operation": "add", "start": "2024-02-29", "amount": -1, "unit": "years"}, "2023-02-28 (Tuesday)"),
        ({"operation": "add", "start": "2026-01-01", "amount": 90, "unit": "days"}, "2026-04-01 (Wednesday)"),
        (
            {
                "operation": "add",
                "start": "2026-03-28T12:00",
                "amount": 24,
                "unit": "hours",
                "timezone": "Europe/Berlin",
            },
            "2026-03-29T13:00:00+02:00 (Sunday, Europe/Berlin)",
        ),
        (
            {"operation": "convert", "start": "2026-03-28T12:00Z", "timezone": "Asia/Tokyo"},
            "2026-03-28T21:00:00+09:00 (Saturday, Asia/Tokyo)",
        ),
    ],
)
def test_dates(arguments: dict[str, Any], expected: str) -> None:
    assert at(**arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"operation": "now", "timezone": "Europe/Berln"}, "did you mean Europe/Berlin?"),
        ({"operation": "now", "timezone": "../../etc/passwd"}, "there is no zone"),
        ({"operation": "now", "timezone": "/etc/localtime"}, "there is no zone"),
        ({"operation": "now", "timezone": ""}, "there is no zone"),
        ({"operation": "add", "amount": 1, "unit": "days"}, "start: missing"),
        ({"operation": "add", "start": "2026-02-30", "amount": 1, "unit": "days"}, "start: '2026-02-30' is no date"),
        ({"operation": "add", "start": "2026-02-01"}, "amount and unit"),
        ({"operation": "add", "start": "2026-02-01", "amount": 10**12, "unit": "years"}, "beyond the years"),
        ({"operation": "add", "start": "2026-02-01", "amount": 10**30, "unit": "hours"}, "beyond the years"),
        ({"operation": "difference", "start": "today", "end": "soon"}, "end: 'soon' is no date"),
    ],
)
def test_what_is_no_date(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        at(**arguments)
    assert words in str(caught.value)


@given(st.dates(), st.dates())
def test_a_difference_adds_up(start: Any, end: Any) -> None:
    moments = [moment_of(day.isoformat(), UTC, "d")[0] for day in (start, end)]
    assert difference(*moments, dates_only=True).startswith(f"{(end - start).days} day")


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_zone_and_date(zone: str, day: str) -> None:
    result = builtin("datetime").call(
        json.dumps({"operation": "add", "timezone": zone, "start": day, "amount": 1, "unit": "days"})
    )
    assert not result.is_error or result.text.startswith("Error: ")
    assert "failed" not in result.text


# Documents


def test_search() -> None:
    index = SearchIndex()
    index.add("1", Document("a.pdf", "pdf", "Nothing here\fThe rent is 900 euros."))
    index.add("2", Document("b.txt", "text", "The rent of somebody else is 5."))
    tool = search_tool(index, ["1"])
    assert tool.call('{"query": "rent"}').text == "[1] a.pdf, page 2:\nThe rent is 900 euros."
    assert tool.call('{"query": "unicorn"}').text.endswith("such as a document would use.")
    index.add("1", Document("a.md", "markdown", "# Pets\n\nDogs.\n\n# Rent\n\nHigh."))
    assert tool.call('{"query": "unicorn"}').text.endswith("The documents have the headings: Pets; Rent.")
    assert tool.call('{"query": "rent", "limit": 99}').text == (
        "Error: the arguments of search_documents are wrong: limit: 99 is greater than the maximum of 10"
    )


# What a tool is


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """The weather in a city."""
    if city == "Atlantis":
        raise ValueError("there is no such city")
    if city == "bug":
        raise KeyError(city)
    return {"city": city, "days": days, "unit": unit}


def test_a_function_becomes_a_tool() -> None:
    tool = Tool.of(weather)
    function = tool.definition["function"]
    assert (function["name"], function["description"]) == ("weather", "The weather in a city.")
    assert function["parameters"]["required"] == ["city"]
    assert function["parameters"]["properties"]["unit"]["enum"] == ["C", "F"]
    assert json.loads(tool.call('{"city": "Zürich", "unit": "F"}').text) == {"city": "Zürich", "days": 1, "unit": "F"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{", "Error: the arguments of weather are not valid JSON: "),
        ("[]", "Error: the arguments of weather are not a JSON object"),
        ("", "Error: the arguments of weather are wrong: 'city' is a required property"),
        ('{"city": 1}', "Error: the arguments of weather are wrong: city: 1 is not of type 'string'"),
        (
            '{"city": "x", "town": 1}',
            "Error: the arguments of weather are wrong: Additional properties are not allowed",
        ),
        ('{"city": "Atlantis"}', "Error: there is no such city"),
        ('{"city": "bug"}', "Error: the tool failed: KeyError: 'bug'"),
        ("[" * 100_000, "Error: the arguments of weather are not valid JSON: "),
    ],
)
def test_errors_are_results(arguments: str, text: str) -> None:
    result = Tool.of(weather).call(arguments)
    assert result.is_error
    assert result.text.startswith(text)


def test_long_results_are_cut() -> None:
    result = Tool("long", "d", {"type": "object"}, lambda: "x" * 10**6).call("{}")
    assert len(result.text) < MAX_RESULT + 20
    assert result.text.endswith("(cut)")


def undocumented(a: int) -> None: ...


def untyped(a) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """D."""


def star(*a: int) -> None:
    """D."""


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([undocumented], "undocumented: give the function a docstring"),
        ([untyped], "untyped: give the parameter 'a' a type"),
        ([star], "star: the parameter 'a' cannot be given by its name"),
        (["calculator", "$calculator"], "two tools of the name 'calculator'"),
        (["nothing"], "there is no built-in tool 'nothing'; there are calculator, datetime"),
        ([3], "expected a Tool, a function or a built-in tool's name, got 3"),
    ],
)
def test_what_is_no_tool(tools: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        toolbox(tools)
    assert words in str(caught.value)


def test_schemas_are_schemas_that_a_grammar_keeps() -> None:
    from openk3.engine.grammar.schema import check_schema

    for tool in (*BUILTIN.values(), search_tool(SearchIndex())):
        Draft202012Validator.check_schema(tool.definition["function"]["parameters"])
        check_schema(json.dumps(tool.definition["function"]["parameters"]))


def test_importing_tools_is_light() -> None:
    code = "import sys, openk3.agents.tools; print(sys.modules.keys() & {'sympy', 'torch', 'pydantic', 'jsonschema'})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
