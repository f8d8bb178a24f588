"""Graders of our own for the reasoning_gym tasks whose own scorer executes what a model wrote, or what comes with it.

    data        the answer is compared with what the entry holds; only full marks count, which theirs gives for no more
    expression  the answer is read by ``Reader``, which walks Python's syntax tree and evaluates no text

Owns: what is right in these tasks; and, for the whole process, that no text is compiled into code while an answer is
graded (``forbid_code_from_text``). Invariant: nothing that comes with an answer or an entry is evaluated, and what
an answer can make us compute is bounded by MAX_CHARACTERS and MAX_BITS, or by the reward's limits of time and memory.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import FrameType
from typing import Any

Entry = Mapping[str, Any]
"""The task entry of a prompt: what the data source wrote into the column TASK_ENTRY; ``answer`` is the right answer."""
Grade = Callable[[str, Entry], bool]
"""(answer, entry) -> whether it is right. Raises what an answer of another form makes it raise: it is not right."""

MAX_CHARACTERS = 500
"""Of an expression: the longest right answer of these tasks has a third of them."""
MAX_BITS = 4096
"""Of a number in an expression: 9**9**9**9 does not fit into memory."""
EXPRESSION = "<expression>"
"""File name that ``Reader`` gives to the text it parses: ``forbid_code_from_text`` lets nothing else be parsed."""

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Reader:
    """Reads one expression of numbers, names, ``+ - * /`` and, where it may, ``**`` and functions.

    number: makes a value of a number's text.  names, functions: what may be named; everything else is no expression.
    """

    def __init__(
        self,
        number: Callable[[str], Any],
        names: Mapping[str, Any] | None = None,
        functions: Mapping[str, Callable[[Any], Any]] | None = None,
        *,
        powers: bool = False,
    ) -> None:
        self._number = number
        self._names = names or {}
        self._functions = functions or {}
        self._powers = powers
        self.numbers: list[str] = []

    def read(self, text: str) -> Any:
        """The value of ``text``. Raises ValueError for what is no such expression; ArithmeticError for 1/0."""
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"{len(text)} characters")
        try:
            tree = ast.parse(text.strip(), EXPRESSION, mode="eval")
        except (SyntaxError, MemoryError, RecursionError) as error:  # the last two: brackets in brackets
            raise ValueError(f"no expression: {error}") from error
        return self._value(tree.body)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
                self.numbers.append(repr(node.value))
                return _bounded(self._number(repr(node.value)))
            case ast.Name(id=name) if name in self._names:
                return self._names[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._value(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=right) if self._powers:
                base, exponent = self._value(left), self._value(right)  # sympy's
                if exponent.is_number and abs(exponent) * max(1, _bits(base)) > MAX_BITS:
                    raise ValueError(f"a power of more than {MAX_BITS} bits")
                return _bounded(base**exponent)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _bounded(_OPERATORS[type(op)](self._value(left), self._value(right)))
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in self._functions:
                return self._functions[name](self._value(argument))
            case _:
                raise ValueError(f"{type(node).__name__} is not allowed in an expression")


def _bounded(value: Any) -> Any:
    if _bits(value) > MAX_BITS:
        raise ValueError(f"a number of more than {MAX_BITS} bits")
    return value


def _bits(value: Any) -> int:
    """Of the number in front of ``value``, sympy's or a Fraction."""
    number = value.as_coeff_Mul()[0] if hasattr(value, "as_coeff_Mul") else value
    if not (number.is_Rational if hasattr(number, "is_Rational") else isinstance(number, Fraction)):
        return 0
    return max(int(number.numerator).bit_length(), int(number.denominator).bit_length())


# --- data -------------------------------------------------------------------------------------------------------------


def _equals_answer(answer: str, entry: Entry) -> bool:
    return answer.strip() == str(entry["answer"]).strip()


def _same_order(answer: str, entry: Entry) -> bool:
    """A list of numbers in the asked order, each at most 1 from the right one (theirs: models round)."""
    given, right = (json.loads(text.replace("'", '"')) for text in (answer, str(entry["answer"])))
    if not isinstance(given, list) or not isinstance(right, list):
        raise ValueError("not a list")
    numbers = [float(number) for number in given]
    ordered = numbers == sorted(numbers, reverse=entry["metadata"]["direction"] != "ascending")
    close = all(abs(a - float(b)) <= 1 for a, b in zip(numbers, right, strict=False))
    return ordered and len(numbers) == len(right) and close


# --- expressions ------------------------------------------------------------------------------------------------------


def _makes(target: Callable[[Entry], int]) -> Grade:
    """An expression of the entry's numbers, each used once, that makes ``target``."""

    def grade(answer: str, entry: Entry) -> bool:
        reader = Reader(Fraction)
        value = reader.read(answer)
        return sorted(reader.numbers) == sorted(map(str, entry["metadata"]["numbers"])) and value == target(entry)

    return grade


def _integrates(answer: str, entry: Entry) -> bool:
    """Its derivative is the integrand; a constant C may stand in it."""
    import sympy

    variable = sympy.Symbol(entry["metadata"]["variable"])
    difference = sympy.diff(_symbolic(answer), variable) - _symbolic(entry["metadata"]["integrand"])
    return bool(sympy.simplify(difference) == 0)


def _symbolic(text: object) -> Any:
    import sympy

    letters = {letter: sympy.Symbol(letter) for letter in "abcdfghjklmnopqrstuvwxyzABCDFGHJKLMPRTUVWXYZ"}
    functions = "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log sqrt".split()  # noqa: SIM905
    named = {name: getattr(sympy, name) for name in functions} | {"ln": sympy.log}
    return Reader(sympy.Rational, {**letters, "E": sympy.E, "pi": sympy.pi}, named, powers=True).read(str(text))


OUR_GRADERS: dict[str, Grade] = {
    "binary_matrix": _equals_answer,
    # 0x1f, 0b11111 and 31 are the same
    "bitwise_arithmetic": lambda answer, entry: int(answer, 0) == int(str(entry["answer"]), 0),
    "countdown": _makes(lambda entry: entry["metadata"]["target"]),
    "game_of_life_halting": lambda answer, entry: answer.casefold() == str(entry["answer"]).casefold(),
    "intermediate_integration": _integrates,
    "n_queens": lambda answer, entry: answer in entry["metadata"]["valid_answers"],
    "number_sorting": _same_order,
    "polynomial_multiplication": lambda answer, entry: bool(_symbolic(answer) == _symbolic(entry["answer"])),
    "puzzle24": _makes(lambda entry: 24),
    "simple_integration": _integrates,
    "spiral_matrix": _equals_answer,
    "string_insertion": _equals_answer,
}
"""By task, the same tasks as ``transport.contracts.gym_tasks.OURS``."""


# --- no text becomes code ---------------------------------------------------------------------------------------------

# The scorers that are used were read, and none evaluates an answer (transport/contracts/gym_tasks.py). An audit hook
# (PEP 578), which cannot be removed, enforces it, also for what a library does inside: sympy's parser evaluates text,
# and its ``lambdify`` compiles names of symbols. It does not confine code that runs already (that is jail.py's).

_ONE_NUMBER = re.compile(rb"from sympy import \*|Integer \(\d+ *\)|Float \('[\d.eE+-]+' *\)")
"""What sympy evaluates for a number that math_verify has read: it cannot be more than a number."""
_MAKES_CODE = ("sympy/polys/monomials.py",)
"""Compiles products of exponents for a number of variables. No name and no text gets into them."""


class CodeFromTextError(RuntimeError):
    """Something tried to compile text into code while an answer was graded."""


def forbid_code_from_text() -> None:
    """From now on, in the whole process and for good."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "compile" and not is_harmless(arguments[0], arguments[1], sys._getframe(1)):
        raise CodeFromTextError("grading an answer would execute text: refused")


def is_harmless(source: object, filename: object, frame: FrameType | None) -> bool:
    """Whether what ``frame`` compiles is a module, a number, or read without being executed (``Reader``)."""
    if filename == EXPRESSION or (isinstance(source, bytes) and _ONE_NUMBER.fullmatch(source)):
        return True
    if frame is not None and frame.f_code.co_filename.endswith(_MAKES_CODE):
        return True
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True  # a module is imported for the first time
        frame = frame.f_back
    return False
