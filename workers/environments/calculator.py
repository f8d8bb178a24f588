"""A calculator: the policy writes down what it wants to know, is told the result, and answers.

    policy       48 - 15 + 93 =
    tool         Result: 126
    policy       Answer: 126

A turn that asks for nothing, or answers, is the last one; it is judged as any response is (``scoring``).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_CHARACTERS = 200
"""Of an expression: longer ones are no arithmetic of a problem, and take long."""
MAX_RESULT = 1e15
"""Whole numbers up to here are exact also as floats."""
_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_NUMBER = r"[-(]*\d+(?:\.\d+)?\)*"
_EXPRESSION = re.compile(rf"({_NUMBER}(?:[ \t]*[-+*/][ \t]*{_NUMBER})+)\Z")
"""Two numbers or more, up to the end of a text."""


class Calculator:
    """An Environment (environment.py).

    says: what it tells, with the result in place of ``{result}``.  answer: what precedes an answer, in any case.
    """

    def __init__(self, says: str = "Result: {result}", answer: str = "Answer:") -> None:
        self._says = says
        self._answer = answer.lower()

    def reset(self, prompt: str, entry: dict[str, Any]) -> None:
        """The prompt says all."""

    def step(self, text: str, tokens: Sequence[int]) -> tuple[str | None, bool, None]:
        expression = _asked(text)
        if not expression or self._answer in text.lower():
            return None, True, None
        return self._says.replace("{result}", calculate(expression)), False, None


def _asked(text: str) -> str:
    """The last expression with an equals sign behind it: what a model that wants a result writes by itself; "": none.

    Looks at twice ``MAX_CHARACTERS`` before each sign, and so takes time in proportion to the text, whatever that is.
    """
    for piece in reversed(text.split("=")[:-1]):
        if found := _EXPRESSION.search(piece.rstrip(" \t")[-2 * MAX_CHARACTERS :]):
            return found[1]
    return ""


def calculate(expression: str) -> str:
    """The value of ``expression``, a whole number where it is one, or why there is none."""
    plain = expression.strip()
    if not plain or len(plain) > MAX_CHARACTERS:
        return "no expression"
    try:
        value = _value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return f"{plain} is no arithmetic"
    except ZeroDivisionError:
        return "division by zero"
    if abs(value) > MAX_RESULT:
        return "too large"
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def _value(node: ast.AST) -> float:
    """Raises ValueError for anything but numbers, + - * / and parentheses."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and abs(value) <= MAX_RESULT:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(left), _value(right))
            if abs(value) > MAX_RESULT:
                raise ValueError("too large")
            return value
        case _:
            raise ValueError("no arithmetic")
