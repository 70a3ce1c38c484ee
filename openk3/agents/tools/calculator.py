"""The calculator: exact arithmetic and algebra by SymPy, in a process of its own with little time and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openk3.agents.tools.tool import Tool
from openk3.confined import ConfinedError, run_confined

if TYPE_CHECKING:
    import sympy

SECONDS = 10.0
MEGABYTES = 768
DIGITS = 15
LONGEST = 2000


def calculate(expression: str) -> str:
    """Return what an expression comes to.

    Raises:
        ValueError: it cannot be read, has no value, or takes too long.
    """
    data = expression.encode("utf-8", "replace")
    try:
        result = run_confined("openk3.agents.tools.calculator:evaluate", data, seconds=SECONDS, megabytes=MEGABYTES)
    except ConfinedError as error:
        raise ValueError(f"the expression is too hard: {error}; simplify it") from None
    return result.decode()


def evaluate(expression: bytes) -> bytes:
    """What `calculate` runs confined: text of a formula to text of its value.

    Raises:
        ValueError: as `calculate`.
    """
    import sympy

    from openk3.agents.tools.formula import parse
    from openk3.agents.tools.formula_functions import scalar, solve

    try:
        value = parse(expression.decode())
        if isinstance(value, sympy.Rel):  # an equation with a variable is there to be solved
            value = solve(value)
        elif not isinstance(value, (list, sympy.Basic)):
            value = scalar(value)
        return shown(value).encode()
    except (ArithmeticError, NotImplementedError, TypeError, AttributeError) as error:
        raise ValueError(f"it cannot be computed: {error}") from None


def shown(value: Any) -> str:
    """A value as people write it: exact, and where that is no decimal number, approximately too."""
    import sympy

    if isinstance(value, list):
        if not value:
            return "no solution"
        return " or ".join(", ".join(map(shown, v)) if isinstance(v, list) else shown(v) for v in value)[:LONGEST]
    if isinstance(value, sympy.Eq):
        return f"{value.lhs} = {shown(value.rhs)}"
    if value.has(sympy.nan, sympy.zoo):
        raise ValueError("it has no value (a division by zero, or infinities against each other)")
    if value in (sympy.true, sympy.false):
        return str(bool(value)).lower()
    exact = _decimal(value) if value.is_Rational else str(value)
    if not value.is_number or value.is_Integer or "." in exact or not value.is_finite:
        return _cut(
            exact.replace("**", "^").replace("oo", "infinity") if value.is_infinite else exact.replace("**", "^")
        )
    exact = exact.replace("**", "^")
    return _cut(f"{exact} ≈ {_approximate(value)}")


def _decimal(value: sympy.Rational) -> str:
    """An exact decimal if there is one of a reasonable length, else a fraction."""
    rest, places = value.q, 0
    while rest % 10 == 0:
        rest, places = rest // 10, places + 1
    for prime in (2, 5):
        while rest % prime == 0:
            rest, places = rest // prime, places + 1
    if rest != 1 or value.q == 1 or places > 30:
        return str(value)
    digits = str(abs(value.p) * 10**places // value.q).rjust(places + 1, "0")
    decimal = f"{digits[:-places]}.{digits[-places:]}".rstrip("0").rstrip(".")
    return f"-{decimal}" if value < 0 else decimal


def _approximate(value: Any) -> str:
    text = str(value.evalf(DIGITS))
    if "." in text and "e" not in text and "I" not in text:
        text = text.rstrip("0").rstrip(".")
    return text


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + f"… ({len(text)} characters)"


CALCULATOR = Tool(
    name="calculator",
    # No whole examples: small models copy them.
    description=(
        "Computes the exact value of a mathematical expression, and solves equations: + - * / ^ %, sqrt, sin, log, "
        "mean, round, solve(equation, x), diff(f, x), integrate(f, x, a, b), limit(f, x, a), simplify, factor. Use it "
        "for every calculation."
    ),
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "maxLength": 250, "description": "What to compute."}},
        "required": ["expression"],
        "additionalProperties": False,
    },
    function=calculate,
)
