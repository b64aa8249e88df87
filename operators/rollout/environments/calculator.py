"""A calculator as a tool: the model writes `<calc>12*7</calc>` and reads `<result>84</result>`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from operators.rollout.environments.answers import is_correct, last_call

_MAX_CHARS = 200
_MAX_DIGITS = 40
_MAX_EXPONENT = 64
_BINARY: Mapping[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.Pow: lambda a, b: _power(a, b),
}


class Calculator:
    """A turn without a call is the answer: the reward is 1 if the text after its last `#` is the reference's, else 0.

    A call that cannot be computed returns `<error>…</error>`, and the episode continues.
    """

    stop = ("</calc>",)

    def reset(self, prompt: Mapping[str, Any]) -> str:
        self._reference = prompt["reference"]
        return ""

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        expression = last_call(text, "calc")
        if expression is None:
            return "", float(is_correct(text, self._reference)), True, {}
        try:
            return f"<result>{compute(expression)}</result>", 0.0, False, {}
        except (ValueError, ArithmeticError) as error:
            return f"<error>{error}</error>", 0.0, False, {"error": str(error)}


def compute(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ** and parentheses; fractions to 12 digits.

    Raises ValueError for other expressions and numbers of too many digits, ArithmeticError for undefined values.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"an expression may have at most {_MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not an expression: {expression.strip()[:40]}") from error
    value = _value(tree.body)
    return str(value) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses are supported")
    if max(abs(value.numerator), value.denominator) >= 10**_MAX_DIGITS:
        raise ValueError(f"a number has more than {_MAX_DIGITS} digits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _MAX_EXPONENT:
        raise ValueError(f"an exponent must be an integer up to {_MAX_EXPONENT}")
    return base ** int(exponent)
