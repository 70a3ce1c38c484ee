"""The functions that a formula may call, and no others: from sqrt to solve."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import sympy

MAX_DIGITS = 4000  # of a power's or factorial's result
_LARGEST = 10**40  # numbers that are to be factorised


class Percent:
    """A percentage that has met no operand yet."""

    def __init__(self, share: Any) -> None:
        self.share = share


def scalar(value: Any) -> Any:
    """A value as a number or an expression; a percentage by itself is its share.

    Raises:
        ValueError: it is an equation or a list.
    """
    if isinstance(value, Percent):
        return value.share
    if isinstance(value, sympy.Expr):
        return value
    raise ValueError("an equation or a list stands where a number is needed")


def power(base: Any, exponent: Any) -> Any:
    """The power, unless its digits would fill the memory."""
    if base == 0 and exponent.is_negative:
        raise ValueError("division by zero")
    if base.is_Rational and exponent.is_Rational:
        size = math.log10(max(abs(base.p), base.q, 1)) if abs(base.p) < 10**300 else float(len(str(base.p)))
        if abs(exponent.p) / exponent.q * size > MAX_DIGITS:
            raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return base**exponent


def factorial(value: Any) -> Any:
    """The factorial, unless its digits would fill the memory."""
    if value.is_number and (not value.is_Integer or value < 0):
        raise ValueError("a factorial is of a whole number from 0 on")
    if value.is_Integer and value > 1400:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return sympy.factorial(value)


def _plain(function: Callable[..., Any], least: int = 1, most: int | None = None) -> Callable[..., Any]:
    """A function of scalars, with its number of arguments checked."""
    name = getattr(function, "__name__", "the function")

    def call(*arguments: Any) -> Any:
        if not least <= len(arguments) <= (most or least):
            raise ValueError(f"{name} takes {least}{f' to {most}' if most else ''} arguments, got {len(arguments)}")
        return function(*map(scalar, arguments))

    return call


def _log(value: Any, base: Any = sympy.E) -> Any:
    if value == 0 or base in (0, 1):
        raise ValueError("there is no such logarithm")
    return sympy.log(value, base)


def _round(value: Any, digits: Any = sympy.Integer(0)) -> Any:
    if not digits.is_Integer or abs(digits) > 100 or not value.is_real:
        raise ValueError("round takes a number and a whole number of digits")
    scale = sympy.Integer(10) ** digits
    return sympy.sign(value) * sympy.floor(abs(value) * scale + sympy.Rational(1, 2)) / scale  # half away from zero


def _integers(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        values = _numbers(arguments)
        if not all(value.is_Integer and abs(value) < _LARGEST for value in values):
            raise ValueError(f"{function.__name__} takes whole numbers of at most 40 digits")
        return sympy.sympify(function(*values))

    return call


def gcd(*values: Any) -> Any:
    return sympy.igcd(*values) if len(values) > 1 else abs(values[0])


def lcm(*values: Any) -> Any:
    return sympy.ilcm(*values) if len(values) > 1 else abs(values[0])


def isprime(value: Any) -> Any:
    return sympy.true if sympy.isprime(value) else sympy.false


def factors(value: Any) -> Any:
    """A whole number as the product of its primes, not multiplied out."""
    return sympy.Mul(
        *(sympy.Pow(p, k, evaluate=False) if k > 1 else p for p, k in sorted(sympy.factorint(int(value)).items())),
        evaluate=False,
    )


def binomial(n: Any, k: Any) -> Any:
    if n.is_Integer and abs(n) > 10_000:
        raise ValueError("binomial takes numbers up to 10,000")
    return sympy.binomial(n, k)


def _factor(value: Any) -> Any:
    return _integers(factors)(value) if scalar(value).is_Integer else sympy.factor(scalar(value))


def _numbers(arguments: tuple[Any, ...]) -> list[Any]:
    values = list(arguments[0]) if len(arguments) == 1 and isinstance(arguments[0], list) else list(arguments)
    if not values:
        raise ValueError("give at least one number")
    return [scalar(value) for value in values]


def _sum(*arguments: Any) -> Any:
    if len(arguments) == 4 and isinstance(arguments[1], sympy.Symbol):  # sum(k^2, k, 1, 10)
        term, variable, low, high = map(scalar, arguments)
        return sympy.summation(term, (variable, low, high))
    return sympy.Add(*_numbers(arguments))


def _product(*arguments: Any) -> Any:
    if len(arguments) == 4 and isinstance(arguments[1], sympy.Symbol):
        term, variable, low, high = map(scalar, arguments)
        if high.is_Integer and high > 1000:
            raise ValueError("a product has at most 1,000 factors")
        return sympy.product(term, (variable, low, high))
    return sympy.Mul(*_numbers(arguments))


def _mean(*arguments: Any) -> Any:
    values = _numbers(arguments)
    return sympy.Add(*values) / len(values)


def _median(*arguments: Any) -> Any:
    return statistics.median(_numbers(arguments))


def _stdev(*arguments: Any) -> Any:
    """Of a sample, as statistics.stdev."""
    values = _numbers(arguments)
    if len(values) < 2:
        raise ValueError("a standard deviation is of at least two numbers")
    mean = sympy.Add(*values) / len(values)
    return sympy.sqrt(sympy.Add(*((value - mean) ** 2 for value in values)) / (len(values) - 1))


def _variable(expression: Any, given: Any = None) -> Any:
    if isinstance(given, sympy.Symbol):
        return given
    if given is not None:
        raise ValueError(f"{given} is not a variable")
    free = sorted(expression.free_symbols, key=str)
    if len(free) != 1:
        raise ValueError(f"say for which variable; the expression has {', '.join(map(str, free)) or 'none'}")
    return free[0]


def diff(expression: Any, variable: Any = None, order: Any = sympy.Integer(1)) -> Any:
    """The derivative: diff(x^3, x), diff(x^3, x, 2)."""
    expression = scalar(expression)
    if expression.is_number:
        return sympy.Integer(0)
    if not order.is_Integer or not 1 <= order <= 20:
        raise ValueError("a derivative is of an order from 1 to 20")
    return sympy.simplify(sympy.diff(expression, _variable(expression, variable), int(order)))


def integrate(expression: Any, *rest: Any) -> Any:
    """The integral: integrate(x^2, x), integrate(x^2, x, 0, 1), integrate(x^2, (x, 0, 1)) in a list."""
    expression = scalar(expression)
    parts = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list) else list(rest)
    if len(parts) == 2:  # integrate(x^2, 0, 1)
        parts.insert(0, None)
    if len(parts) not in (0, 1, 3):
        raise ValueError("integrate takes an expression, a variable, and two bounds or none")
    variable = _variable(expression, parts[0] if parts else None)
    if len(parts) < 3:
        value = sympy.integrate(expression, variable)
    else:
        value = sympy.integrate(expression, (variable, scalar(parts[1]), scalar(parts[2])))
        if value.has(sympy.Integral) and not value.free_symbols:
            return value.evalf()
    if value.has(sympy.Integral):
        raise ValueError("no closed form of this integral was found")
    return value


def limit(expression: Any, variable: Any, to: Any, side: Any = None) -> Any:
    """The limit: limit(sin(x)/x, x, 0)."""
    return sympy.limit(scalar(expression), _variable(expression, variable), scalar(to), "+-" if side is None else "+")


def solve(equations: Any, *variables: Any) -> Any:
    """The solutions of an equation, of an expression that is to be zero, or of a list of either."""
    wanted = equations if isinstance(equations, list) else [equations]
    for equation in wanted:
        if not isinstance(equation, (sympy.Expr, sympy.Rel, sympy.logic.boolalg.BooleanAtom)):
            raise ValueError("solve takes equations")
    names = list(variables[0]) if variables and isinstance(variables[0], list) else list(variables)
    if not all(isinstance(name, sympy.Symbol) for name in names):
        raise ValueError("after the equations, solve takes variables")
    if any(equation == sympy.false for equation in wanted):
        return []
    wanted = [equation for equation in wanted if equation != sympy.true]
    if not wanted:
        raise ValueError("it is true whatever the variables are")
    if not names:
        names = sorted(set().union(*(equation.free_symbols for equation in wanted)), key=str)
        if len(names) > len(wanted):
            raise ValueError(f"say for which variable; there are {', '.join(map(str, names))}")
    try:
        if len(wanted) == 1 and len(names) == 1:
            if isinstance(wanted[0], sympy.Rel) and not isinstance(wanted[0], sympy.Eq):
                return sympy.solve_univariate_inequality(wanted[0], names[0])
            return [sympy.Eq(names[0], value, evaluate=False) for value in sympy.solve(wanted[0], names[0])]
        found = sympy.solve(wanted, names, dict=True)
    except NotImplementedError:
        return _numeric(wanted, names)
    return [[sympy.Eq(name, value, evaluate=False) for name, value in solution.items()] for solution in found]


def _numeric(equations: list[Any], names: list[Any]) -> Any:
    if len(equations) == 1 == len(names):
        try:
            return [sympy.Eq(names[0], sympy.nsolve(equations[0], names[0], 1), evaluate=False)]
        except (ValueError, NotImplementedError, TypeError):
            pass
    raise ValueError("no solution was found, which does not mean that there is none")


_SYMPY = ("sqrt", "cbrt", "exp", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh",
          "tanh", "asinh", "acosh", "atanh", "floor", "sign", "gamma", "erf")  # fmt: skip

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _plain(getattr(sympy, name)) for name in _SYMPY},
    "abs": _plain(sympy.Abs),
    "ceil": _plain(sympy.ceiling),
    "ceiling": _plain(sympy.ceiling),
    "arcsin": _plain(sympy.asin),
    "arccos": _plain(sympy.acos),
    "arctan": _plain(sympy.atan),
    "atan2": _plain(sympy.atan2, 2),
    "ln": _plain(_log),
    "log": _plain(_log, 1, 2),
    "log10": _plain(lambda value: _log(value, sympy.Integer(10))),
    "log2": _plain(lambda value: _log(value, sympy.Integer(2))),
    "pow": _plain(power, 2),
    "root": _plain(lambda value, n: power(value, 1 / n), 2),
    "mod": _plain(sympy.Mod, 2),
    "round": _plain(_round, 1, 2),
    "factorial": _plain(factorial),
    "degrees": _plain(lambda value: value * 180 / sympy.pi),
    "radians": _plain(lambda value: value * sympy.pi / 180),
    "binomial": _plain(binomial, 2),
    "comb": _plain(binomial, 2),
    "gcd": _integers(gcd),
    "lcm": _integers(lcm),
    "isprime": _integers(isprime),
    "factorint": _integers(factors),
    "max": lambda *arguments: sympy.Max(*_numbers(arguments)),
    "min": lambda *arguments: sympy.Min(*_numbers(arguments)),
    "sum": _sum,
    "summation": _sum,
    "product": _product,
    "mean": _mean,
    "average": _mean,
    "median": _median,
    "stdev": _stdev,
    "simplify": _plain(sympy.simplify),
    "expand": _plain(sympy.expand),
    "factor": _factor,
    "diff": diff,
    "derivative": diff,
    "integrate": integrate,
    "integral": integrate,
    "limit": limit,
    "solve": solve,
}
