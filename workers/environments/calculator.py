"""A calculator: the policy asks for a result, is told it, and answers.

    policy       Calculate: 12 + 7 * 3
    tool         Result: 33
    policy       Answer: 33

A turn that asks for nothing is the last one; what it answers is judged as any response is (``scoring``).
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


class Calculator:
    """An Environment (environment.py). marker: what precedes an expression in a turn, in any case."""

    def __init__(self, marker: str = "Calculate:") -> None:
        self._asked = re.compile(rf"{re.escape(marker)}[ \t]*([^\r\n]*)", re.IGNORECASE)

    def reset(self, prompt: str, entry: dict[str, Any]) -> None:
        """The prompt says all."""

    def step(self, text: str, tokens: Sequence[int]) -> tuple[str | None, bool, None]:
        asked = self._asked.search(text)
        if asked is None:
            return None, True, None
        return f"Result: {calculate(asked[1])}", False, None


def calculate(expression: str) -> str:
    """The value of ``expression``, a whole number where it is one, or why there is none."""
    plain = expression.replace("\u00d7", "*").replace("\u2212", "-").split("=")[0].strip(" .*`'\"")
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
