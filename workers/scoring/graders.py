"""Graders of our own for reasoning_gym tasks, where the task's own scorer cannot be used as it is.

A scorer is replaced where it executes what a model wrote or what comes with it, where it gives full marks for an answer
without content or with a guess more than was asked for, or where an answer can keep it busy for seconds.

    text        the answer is compared with the entry's, word by word or value by value
    numbers     read as exact fractions; what is not finite is no number
    moves       the answer is played out; a move that is not possible makes it wrong
    expression  the answer is read by ``Reader``, which walks Python's syntax tree and evaluates no text

Owns: what is right in these tasks; and, for the whole process, that no text is compiled into code while an answer is
graded (``forbid_code_from_text``). Invariant: nothing that comes with an answer or an entry is evaluated, and what
an answer can make us compute is bounded by MAX_ANSWER, MAX_CHARACTERS, MAX_BITS and FORMS.
"""

from __future__ import annotations

import ast
import cmath
import json
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import FrameType
from typing import Any

Entry = Mapping[str, Any]
"""The task entry of a prompt: what the data source wrote into the column TASK_ENTRY; ``answer`` is the right answer."""
Grade = Callable[[str, Entry], bool]
"""(answer, entry) -> whether it is right. Raises what an answer of another form makes it raise: it is not right."""

MAX_ANSWER = 40_000
"""Characters of an answer: ten times the longest right one of any task (127 moves of discs)."""
MAX_CHARACTERS = 500
"""Characters of an expression: three times the longest right one of these tasks."""
MAX_BITS = 4096
"""Bits of a number in an expression: 9**9**9**9 does not fit into memory."""
MAX_POWER = 100
"""Largest exponent in a polynomial."""
EXPRESSION = "<expression>"
"""File name that ``Reader`` gives to the text it parses: ``forbid_code_from_text`` lets nothing else be parsed."""

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Reader:
    """Reads one expression of numbers, names, ``+ - * /`` and, where they are given, ``**`` and functions.

    number: makes a value of a number's text.  names, functions: what may be named; everything else is no expression.
    power: (base, exponent) -> value; bounds what it computes.
    """

    def __init__(
        self,
        number: Callable[[str], Any],
        names: Mapping[str, Any] | None = None,
        functions: Mapping[str, Callable[[Any], Any]] | None = None,
        power: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._number = number
        self._names = names or {}
        self._functions = functions or {}
        self._power = power
        self.numbers: list[str] = []

    def read(self, text: str) -> Any:
        """The value of ``text``. Raises ValueError for what is no such expression; ArithmeticError for 1/0."""
        if len(text) > MAX_CHARACTERS or "#" in text:
            raise ValueError("no expression: it is too long, or has a comment")
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
            case ast.BinOp(left=left, op=ast.Pow(), right=right) if self._power:
                return _bounded(self._power(self._value(left), self._value(right)))
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


# --- text -------------------------------------------------------------------------------------------------------------

_AROUND = "*` .'\"\u2018\u2019\u201c\u201d"
"""Characters around a sentence that are not compared: extraction takes them off an answer."""


def _same(form: Callable[[str], object]) -> Grade:
    """Right if ``form`` makes the same of the answer and of the entry's answer."""
    return lambda answer, entry: form(answer) == form(str(entry["answer"]))


def _rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _sentence(text: str) -> list[str]:
    return text.strip(_AROUND).split()


def _roles(text: str) -> dict[str, str]:
    """ "Zoey is a knight, and Oliver is a knave." -> {"zoey": "knight", "oliver": "knave"}."""
    roles: dict[str, str] = {}
    for part in re.split(r", and |,| and |\n", text.strip(" .()").casefold()):
        name, verb, article, role = part.split()
        if name in roles or verb != "is" or article not in ("a", "an"):
            raise ValueError("not one role for each name")
        roles[name] = role
    return roles


def _listed_words(answer: str, entry: Entry) -> bool:
    return [word.strip() for word in answer.split(",")] == entry["metadata"]["sorted_words"]


def _json(text: str) -> object:
    """The value of a JSON text. Raises ValueError for NaN and Infinity, which are no JSON."""

    def refuse(name: str) -> object:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _equal_json(given: Any, right: Any) -> bool:
    """Equal values; 1 and 1.0 are the same number, 1 and true are not the same value."""
    match given, right:
        case (dict(), dict()):
            return given.keys() == right.keys() and all(_equal_json(given[key], right[key]) for key in right)
        case (list(), list()):
            return len(given) == len(right) and all(map(_equal_json, given, right))
        case _:
            return isinstance(given, bool) == isinstance(right, bool) and given == right


def _same_json(answer: str, entry: Entry) -> bool:
    return _equal_json(_json(answer), _json(str(entry["answer"])))


def _same_output(answer: str, entry: Entry) -> bool:
    """As JSON; a string may stand without its quotation marks, and what is no JSON is compared as text."""
    right = str(entry["answer"]).strip()
    if answer.strip() in (right, right.strip('"')):
        return True
    return _equal_json(_json(answer), _json(right))


# --- numbers ----------------------------------------------------------------------------------------------------------

_DIGITS = r"(?:[0-9]{1,100}|[0-9]{1,3}(?:,[0-9]{3}){1,30})(?:\.[0-9]{0,100})?|\.[0-9]{1,100}"
_NUMBER = re.compile(rf"[-+]?(?:{_DIGITS})(?:[eE][-+]?[0-9]{{1,3}})?")
_RATIO = re.compile(r"([-+]?[0-9]{1,100})\s*/\s*([0-9]{1,100})|\\[dt]?frac\{([0-9]{1,100})\}\{([0-9]{1,100})\}")
_REAL_FIRST = re.compile(rf"(?P<real>[-+]?(?:{_DIGITS})(?=[-+]))?(?P<imaginary>[-+]?(?:{_DIGITS})?)\*?[ij]")
_IMAGINARY_FIRST = re.compile(rf"(?P<imaginary>[-+]?(?:{_DIGITS})?)\*?[ij](?P<real>[-+](?:{_DIGITS}))")


def _number(text: str) -> Fraction:
    """The finite number that ``text`` is: -3.50, 1,000, $7, 2e-5. Raises ValueError for everything else."""
    bare = text.strip().replace("\u2212", "-").lstrip("$").rstrip("$").strip()
    if not _NUMBER.fullmatch(bare):
        raise ValueError(f"not a number: {text!r:.60}")
    return Fraction(bare.replace(",", ""))


def _number_or_word(text: str) -> Fraction | str:
    try:
        return _number(text)
    except ValueError:
        return text.strip(_AROUND).casefold()


def _ratio(text: str) -> tuple[int, int]:
    """Numerator and denominator of 3/8 or \\frac{3}{8} as they stand."""
    found = _RATIO.fullmatch(text.strip().strip("$").strip())
    if found is None:
        raise ValueError("not a fraction")
    top, bottom = (int(digits) for digits in found.groups() if digits is not None)
    return top, bottom


def _decimal(answer: str, entry: Entry) -> bool:
    """Within a millionth: the right answer has twelve digits."""
    right = _number(str(entry["answer"]))
    return abs(_number(answer) - right) <= abs(right) / 1_000_000


def _roots(answer: str, entry: Entry) -> bool:
    """The same numbers in any order, each rounded to four decimals or better."""
    given, right = (sorted(map(_number, text.strip("[] ").split(","))) for text in (answer, str(entry["answer"])))
    close = (abs(a - b) <= Fraction(1, 20_000) for a, b in zip(given, right, strict=False))
    return len(given) == len(right) and all(close)


def _probability(answer: str, entry: Entry) -> bool:
    """A fraction that is equal; or a decimal or a percentage, rounded, within 0.0001 and 1 % of the right one."""
    right = _number(str(entry["answer"]))
    bare = answer.strip().strip("$").strip()
    if "/" in bare or "frac" in bare:
        return abs(Fraction(*_ratio(bare)) - right) <= right / 10**9  # the entry has ten digits of it
    unit = Fraction(1, 100) if "%" in bare else Fraction(1)
    bare = bare.rstrip("\\% ")
    return abs(_number(bare) * unit - right) <= min(_last_digit(bare) * unit / 2, Fraction(1, 10_000), right / 100)


def _last_digit(number: str) -> Fraction:
    """Place value of the last digit: 0.001 for 2.345 and for 12.5e-2."""
    mantissa, _, exponent = number.lower().partition("e")
    return Fraction(10) ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def _complex(answer: str, entry: Entry) -> bool:
    """Both parts are those of the result, in either order; a part that is zero may be missing."""
    real, imaginary = _complex_parts(answer)
    return [real, imaginary] == [Fraction(part) for part in entry["metadata"]["result"]]


def _complex_parts(text: str) -> tuple[Fraction, Fraction]:
    bare = re.sub(r"[\s()$]", "", text).replace("\u2212", "-").lower()
    found = _REAL_FIRST.fullmatch(bare) or _IMAGINARY_FIRST.fullmatch(bare)
    if found is None:
        return _number(bare), Fraction(0)
    imaginary = found["imaginary"]
    return _number(found["real"] or "0"), _number(imaginary + "1" if imaginary in ("", "+", "-") else imaginary)


_DURATION = re.compile(
    r"(?P<days>-?[0-9]{1,9})(?:\s*days?)?|"
    r"(?:(?P<with_days>-?[0-9]{1,9})\s*days?\s*,?\s*)?"
    r"(?P<hours>[0-9]{1,9}):(?P<minutes>[0-9]{1,2})(?::(?P<seconds>[0-9]{1,2}(?:\.[0-9]{1,6})?))?"
)


def _duration(text: str) -> tuple[bool, Fraction]:
    """(whether it has a time of day, seconds) of "5 days", "07:12:37.250" or "67 days, 01:04"."""
    found = _DURATION.fullmatch(text.strip(_AROUND))
    if found is None:
        raise ValueError("not a duration")
    days, hours = int(found["days"] or found["with_days"] or 0), int(found["hours"] or 0)
    minutes = 60 * hours + int(found["minutes"] or 0)
    return found["hours"] is not None, 86_400 * days + 60 * minutes + Fraction(found["seconds"] or 0)


def _same_order(answer: str, entry: Entry) -> bool:
    """The same numbers in the same order, quoted or not."""
    given, right = (_json(text.replace("'", '"')) for text in (answer, str(entry["answer"])))
    if not isinstance(given, list) or not isinstance(right, list):
        raise ValueError("not a list")
    return [_number(str(one)) for one in given] == [_number(str(one)) for one in right]


# --- moves ------------------------------------------------------------------------------------------------------------

_AGENT = re.compile(r"Agent\[\s*([0-9]{1,3}\.5)\s*,\s*([0-9]{1,3}\.5)\s*\]")
_LIFT = re.compile(
    r"move\(\s*box_(?P<color>\w+)\s*,\s*"
    r"(?:target_(?P<target>\w+)|square\s*\[\s*(?P<row>[0-9]{1,3}\.5)\s*,\s*(?P<column>[0-9]{1,3}\.5)\s*\])\s*\)"
)


def _boxes_home(answer: str, entry: Entry) -> bool:
    """Every box reaches a target of its color. Raises where an agent is asked for what it cannot do."""
    squares: dict[str, list[str]] = {key: list(items) for key, items in entry["metadata"]["initial_state"].items()}
    for step in json.loads(answer):
        for agent, action in step.items():
            at, move = _AGENT.fullmatch(agent), _LIFT.fullmatch(action)
            if at is None or move is None:
                raise ValueError("not an action")
            here = squares[f"{at[1]}_{at[2]}"]
            here.remove(f"box_{move['color']}")
            if move["target"] == move["color"]:
                here.remove(f"target_{move['color']}")
            elif (
                move["row"] and abs(float(move["row"]) - float(at[1])) + abs(float(move["column"]) - float(at[2])) == 1
            ):
                squares[f"{move['row']}_{move['column']}"].append(f"box_{move['color']}")
            else:
                raise ValueError("neither a target of the box's color nor an adjacent square")
    return not any(item.startswith("box_") for items in squares.values() for item in items)


_SIDE = 6
"""Cells of a row and of a column of the board of cars."""
_EXIT = 2 * _SIDE + _SIDE - 1
"""Cell at the exit: the last one of the third row."""


def _car_out(answer: str, entry: Entry) -> bool:
    """The first car reaches the exit; every move is possible in full, but for its own out of the board."""
    board = entry["metadata"]["board_config"]
    labels = sorted(set(board) - {"o", "x"})
    cars = {
        chr(ord("A") + at): [cell for cell in range(len(board)) if board[cell] == labels[at]]
        for at in range(len(labels))
    }
    taken = {cell for cell in range(len(board)) if board[cell] != "o"}
    for move in re.split(r"[\s,]+", answer.strip(" ,'\"")):
        found = re.fullmatch(r"([A-Z])([+-])([1-6])", move)
        if found is None:
            raise ValueError("not a move")
        cells = cars[found[1]]
        step = (cells[1] - cells[0]) * (1 if found[2] == "+" else -1)
        for _ in range(int(found[3])):
            front = cells[-1] if step > 0 else cells[0]
            if found[1] == "A" and front == _EXIT:
                break
            ahead = front + step
            leaves_row = abs(step) == 1 and ahead // _SIDE != front // _SIDE
            if leaves_row or not 0 <= ahead < len(board) or ahead in taken:
                return False
            taken -= set(cells)
            cells[:] = [cell + step for cell in cells]
            taken |= set(cells)
    return _EXIT in cars["A"]


# --- expressions ------------------------------------------------------------------------------------------------------


def _makes(target: Callable[[Entry], int]) -> Grade:
    """An expression of the entry's numbers, each used once, that makes ``target``."""

    def grade(answer: str, entry: Entry) -> bool:
        reader = Reader(Fraction)
        value = reader.read(answer)
        return sorted(reader.numbers) == sorted(map(str, entry["metadata"]["numbers"])) and value == target(entry)

    return grade


@dataclass(frozen=True, slots=True)
class _Dual:
    """A function's value and its derivative at one point. Source: forward-mode automatic differentiation."""

    value: complex
    slope: complex = 0.0

    def __add__(self, other: _Dual) -> _Dual:
        return _Dual(self.value + other.value, self.slope + other.slope)

    def __sub__(self, other: _Dual) -> _Dual:
        return _Dual(self.value - other.value, self.slope - other.slope)

    def __mul__(self, other: _Dual) -> _Dual:
        return _Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def __truediv__(self, other: _Dual) -> _Dual:
        value = self.value / other.value
        return _Dual(value, (self.slope - value * other.slope) / other.value)

    def __neg__(self) -> _Dual:
        return _Dual(-self.value, -self.slope)

    def __pow__(self, other: _Dual) -> _Dual:
        value = self.value**other.value
        slope = other.value * self.value ** (other.value - 1) * self.slope if self.slope else 0.0
        return _Dual(value, slope + value * cmath.log(self.value) * other.slope if other.slope else slope)


_FUNCTIONS: dict[str, tuple[Callable[[complex], complex], Callable[[complex], complex]]] = {
    "sin": (cmath.sin, cmath.cos),
    "cos": (cmath.cos, lambda x: -cmath.sin(x)),
    "tan": (cmath.tan, lambda x: 1 / cmath.cos(x) ** 2),
    "sec": (lambda x: 1 / cmath.cos(x), lambda x: cmath.sin(x) / cmath.cos(x) ** 2),
    "csc": (lambda x: 1 / cmath.sin(x), lambda x: -cmath.cos(x) / cmath.sin(x) ** 2),
    "cot": (lambda x: 1 / cmath.tan(x), lambda x: -1 / cmath.sin(x) ** 2),
    "asin": (cmath.asin, lambda x: 1 / cmath.sqrt(1 - x * x)),
    "acos": (cmath.acos, lambda x: -1 / cmath.sqrt(1 - x * x)),
    "atan": (cmath.atan, lambda x: 1 / (1 + x * x)),
    "sinh": (cmath.sinh, cmath.cosh),
    "cosh": (cmath.cosh, cmath.sinh),
    "tanh": (cmath.tanh, lambda x: 1 / cmath.cosh(x) ** 2),
    "exp": (cmath.exp, cmath.exp),
    "log": (cmath.log, lambda x: 1 / x),
    "ln": (cmath.log, lambda x: 1 / x),
    "sqrt": (cmath.sqrt, lambda x: 0.5 / cmath.sqrt(x)),
}
"""By name: a function and its derivative."""
_POINTS = [sign * 0.171 * 1.62**step for step in range(13) for sign in (1, -1)]
"""Where a derivative is compared: from 0.171 to 56, so that a square root of 2 - 8x or -2x - 8 is real at some."""
_ENOUGH_POINTS = 5
"""Points at which both functions need a value: fewer would be met by chance."""


def _integrates(answer: str, entry: Entry) -> bool:
    """Its derivative is the integrand, compared at _POINTS; a constant C may stand in it."""
    compared = list(_slopes(answer, entry["metadata"]["integrand"], entry["metadata"]["variable"]))
    real = [pair for pair in compared if abs(pair[1].imag) <= 1e-9 * abs(pair[1])]
    chosen = real if len(real) >= _ENOUGH_POINTS else compared
    close = [abs(given - right) <= 1e-6 * max(abs(given), abs(right)) + 1e-12 for given, right in chosen]
    return len(close) >= _ENOUGH_POINTS and all(close)


def _slopes(answer: str, integrand: object, variable: str) -> Iterator[tuple[complex, complex]]:
    """(derivative of the answer, integrand) at the points at which both have a value."""
    for point in _POINTS:
        names = {"C": _Dual(0.739), "E": _Dual(cmath.e), "pi": _Dual(cmath.pi), variable: _Dual(point, 1.0)}
        reader = Reader(lambda text: _Dual(float(text)), names, _DUAL_FUNCTIONS, operator.pow)
        right = _at(reader, str(integrand))
        given = _at(reader, answer) if right is not None else None
        if right is not None and given is not None and cmath.isfinite(given.slope) and cmath.isfinite(right.value):
            yield given.slope, right.value


def _at(reader: Reader, text: str) -> _Dual | None:
    """None where there is no value, as of log(0), or no expression."""
    try:
        return reader.read(text)
    except (ArithmeticError, ValueError):
        return None


def _lifted(name: str) -> Callable[[_Dual], _Dual]:
    function, derivative = _FUNCTIONS[name]
    return lambda x: _Dual(function(x.value), derivative(x.value) * x.slope if x.slope else 0.0)


_DUAL_FUNCTIONS = {name: _lifted(name) for name in _FUNCTIONS}


def _polynomial(text: object) -> Any:
    """sympy's value of a polynomial, as it is written: nothing is multiplied out."""
    import sympy

    def power(base: Any, exponent: Any) -> Any:
        if not (exponent.is_Integer and 0 <= exponent <= MAX_POWER and exponent * _bits(base) <= MAX_BITS):
            raise ValueError(f"an exponent that is no whole number up to {MAX_POWER}, or more than {MAX_BITS} bits")
        return base**exponent

    letters = {letter: sympy.Symbol(letter) for letter in "abcdefghijklmnopqrstuvwxyzABCDFGHJKLMPRTUVWXYZ"}
    return Reader(sympy.Rational, letters, power=power).read(str(text))


OUR_GRADERS: dict[str, Grade] = {
    "arc_agi": _same(_rows),
    "binary_matrix": _same(_rows),
    # 0x1f, 0b11111 and 31 are the same
    "bitwise_arithmetic": lambda answer, entry: int(answer, 0) == int(str(entry["answer"]), 0),
    "boxnet": _boxes_home,
    "calendar_arithmetic": _same(_number_or_word),
    "codeio": _same_output,
    "coin_flip": _probability,
    "complex_arithmetic": _complex,
    "countdown": _makes(lambda entry: entry["metadata"]["target"]),
    "decimal_arithmetic": _decimal,
    "emoji_mystery": _same(_sentence),
    "figlet_font": _same(lambda text: text.replace(" ", "").casefold()),
    "fraction_simplification": _same(_ratio),
    "game_of_life": _same_json,
    "game_of_life_halting": lambda answer, entry: answer.casefold() == str(entry["answer"]).casefold(),
    "gsm_symbolic": _same(_number),
    "intermediate_integration": _integrates,
    "knights_knaves": _same(_roles),
    "letter_jumble": _same(lambda text: text.casefold().split()),
    "n_queens": lambda answer, entry: answer in entry["metadata"]["valid_answers"],
    "number_sorting": _same_order,
    "polynomial_equations": _roots,
    "polynomial_multiplication": lambda answer, entry: bool(_polynomial(answer) == _polynomial(entry["answer"])),
    "puzzle24": _makes(lambda entry: 24),
    "rearc": _same(_rows),
    "rush_hour": _car_out,
    "sentence_reordering": _same(lambda text: _sentence(text.casefold())),
    "simple_integration": _integrates,
    "spell_backward": _same(lambda text: text.strip().casefold()),
    "spiral_matrix": _same(_rows),
    "string_insertion": _same(str.strip),
    "time_intervals": _same(_duration),
    "word_sorting": _listed_words,
}
"""By task, the same tasks as ``transport.contracts.gym_tasks.OURS``."""

FORMS = {
    "advanced_geometry": r"[(\[]?[^(),]*(,[^(),]*)?[)\]]?",
    "quantum_lock": r"\s*[A-Ca-c]([\s,→>-]*[A-Ca-c])*\s*",
    "rubiks_cube": r"\s*([LRDUBFXYZMESlrdubfxyzmes2-9w']{1,5}(\s+|$)){1,400}",
    "sokoban": r"[LRUD\s]{0,2000}",
}
"""By task, what an answer has to look like before the task's own scorer sees it: the scorer passes over other
characters, so that a sentence is a row of moves, or is slow where there are many moves."""


def bounded(task: str, grade: Grade) -> Grade:
    """``grade`` for answers that it is sure to judge in time: no longer than MAX_ANSWER, and of the task's form."""
    form = re.compile(FORMS.get(task, ""), re.DOTALL) if task in FORMS else None

    def within(answer: str, entry: Entry) -> bool:
        return len(answer) <= MAX_ANSWER and (form is None or bool(form.fullmatch(answer))) and grade(answer, entry)

    return within


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
