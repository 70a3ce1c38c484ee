"""Formulas as people and models write them, to SymPy objects, by a parser that knows nothing else.

SymPy's own parser evaluates Python. This one has a grammar, and a table of the functions that may be called: nothing in
a formula reaches an attribute, a builtin or a file. What it cannot bound is how long SymPy computes, so it runs where
that is limited (`calculator`).

    equation := sum [("=" | "<" | "<=" | ">" | ">=" | "!=") sum]
    sum      := term (("+" | "-") term)*
    term     := factor (("*" | "/" | "mod" | "of" | nothing) factor)*
    factor   := ("+" | "-")* power
    power    := postfix ["^" factor]
    postfix  := atom ("!" | "%")*
    atom     := number | name | name "(" list ")" | "(" equation ")" | "[" list "]"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import sympy

from openk3.agents.tools.formula_functions import FUNCTIONS, Percent, factorial, power, scalar

MAX_LENGTH = 1000
MAX_DEPTH = 40

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3}(?![\w.]))?)"
    r"|(?P<name>[^\W\d_]\w*)|(?P<sign>\*\*|//|==|<=|>=|!=|[-+*/^%!()\[\],=<>|]))"
)
_REWRITTEN = str.maketrans(
    {"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "∗": "*", "（": "(", "）": ")", "，": ",", "％": "%",
     "＝": "=", "＋": "+", "≤": "<=", "≥": ">=", "≠": "!=", "π": " pi ", "∞": " oo ", "√": " sqrt ", "²": "^2",
     "³": "^3"}
)  # fmt: skip
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_RELATIONS: dict[str, Callable[..., Any]] = {
    "=": sympy.Eq, "==": sympy.Eq, "!=": sympy.Ne, "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge,
}  # fmt: skip
_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "E": sympy.E, "i": sympy.I, "I": sympy.I, "oo": sympy.oo, "inf": sympy.oo,
              "infinity": sympy.oo, "tau": 2 * sympy.pi}  # fmt: skip


def parse(formula: str) -> Any:
    """Return what a formula comes to: a number, an expression, a relation, or a list of them.

    Raises:
        ValueError: it is no formula; the text says where and why.
    """
    if len(formula) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(formula)} characters; at most {MAX_LENGTH} are possible")
    return _Parser(formula).whole()


class _Parser:
    def __init__(self, formula: str) -> None:
        text = formula.translate(_REWRITTEN).strip().rstrip("=?. ")
        if "(" not in text and "[" not in text:  # in a list of arguments a comma is no part of a number
            text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
        self._tokens: list[tuple[str, str]] = []
        place = 0
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None or match.lastgroup is None:
                raise ValueError(f"the expression cannot be read at {text[place : place + 20].strip()!r}")
            self._tokens.append((match.lastgroup, match.group(match.lastgroup)))
            place = match.end()
        self._place = 0
        self._depth = 0

    def whole(self) -> Any:
        if not self._tokens:
            raise ValueError("the expression is empty")
        value = self._equation()
        if self._place < len(self._tokens):
            raise ValueError(f"the expression cannot be read at {self._next()!r}")
        return value

    def _next(self) -> str:
        return self._tokens[self._place][1] if self._place < len(self._tokens) else ""

    def _kind(self) -> str:
        return self._tokens[self._place][0] if self._place < len(self._tokens) else "end"

    def _take(self, *signs: str) -> str:
        if self._next() in signs and self._kind() != "number":
            self._place += 1
            return self._tokens[self._place - 1][1]
        return ""

    def _need(self, sign: str) -> None:
        if not self._take(sign):
            raise ValueError(f"{sign!r} is missing before {self._next() or 'the end'!r}")

    def _equation(self) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"the expression is nested more than {MAX_DEPTH} levels deep")
        left = self._sum()
        if relation := self._take(*_RELATIONS):
            left = _RELATIONS[relation](scalar(left), scalar(self._sum()))
        self._depth -= 1
        return left

    def _sum(self) -> Any:
        value = self._term()
        while sign := self._take("+", "-"):
            # As on a pocket calculator, 200 + 10% is 220.
            other = self._term()
            if isinstance(other, Percent):
                other = scalar(value) * other.share
            value = scalar(value) + scalar(other) if sign == "+" else scalar(value) - scalar(other)
        return value

    def _term(self) -> Any:
        value = self._factor()
        while True:
            if sign := self._take("*", "/", "//", "%", "mod", "of"):
                value = _combined(sign, scalar(value), scalar(self._factor()))
            elif self._kind() in ("number", "name") or self._next() in ("(",):
                value = scalar(value) * scalar(self._factor())
            else:
                return value

    def _factor(self) -> Any:
        negative = False
        while sign := self._take("+", "-"):
            negative ^= sign == "-"
        value = self._power()
        return -scalar(value) if negative else value

    def _power(self) -> Any:
        base = self._postfix()
        if self._take("^", "**"):
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ValueError(f"the expression is nested more than {MAX_DEPTH} levels deep")
            exponent = scalar(self._factor())
            self._depth -= 1
            return power(scalar(base), exponent)
        return base

    def _postfix(self) -> Any:
        value = self._atom()
        while True:
            if self._take("!"):
                value = factorial(scalar(value))
            elif self._next() == "%" and not self._operand_follows():
                self._place += 1
                value = Percent(scalar(value) / 100)
            else:
                return value

    def _operand_follows(self) -> bool:
        """Whether the next sign stands between two operands, as in 7 % 3."""
        kind, text = self._tokens[self._place + 1] if self._place + 1 < len(self._tokens) else ("end", "")
        return kind == "number" or text == "(" or (kind == "name" and text not in ("of", "mod"))

    def _atom(self) -> Any:
        kind, text = self._kind(), self._next()
        if kind == "number":
            self._place += 1
            return sympy.Rational(text.replace("_", ""))  # exactly: 0.1 + 0.2 is 0.3
        if kind == "name":
            self._place += 1
            if text in _CONSTANTS:
                return _CONSTANTS[text]
            function = FUNCTIONS.get(text.lower())
            if function is not None:
                return function(*self._arguments(text))
            if self._next() == "(":
                raise ValueError(f"there is no function {text!r}; there are {', '.join(sorted(FUNCTIONS))}")
            return sympy.Symbol(text)
        if self._take("("):
            value = self._equation()
            self._need(")")
            return value
        if self._take("|"):
            value = sympy.Abs(scalar(self._sum()))
            self._need("|")
            return value
        if self._take("["):
            return self._list("]")
        raise ValueError(f"a number or a name is missing before {text or 'the end'!r}")

    def _arguments(self, name: str) -> list[Any]:
        if self._take("("):
            return self._list(")")
        if name == "sqrt":  # as in √2
            return [self._postfix()]
        raise ValueError(f"{name} is a function: give its arguments in parentheses")

    def _list(self, end: str) -> list[Any]:
        values: list[Any] = []
        while not self._take(end):
            if values:
                self._need(",")
            values.append(self._equation())
        return values


def _combined(sign: str, left: Any, right: Any) -> Any:
    if sign in ("*", "of"):
        return left * right
    if right == 0:
        raise ValueError("division by zero")
    if sign == "/":
        return left / right
    return sympy.floor(left / right) if sign == "//" else sympy.Mod(left, right)
