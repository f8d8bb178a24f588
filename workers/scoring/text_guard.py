"""No own verifier compiles text into code: the interpreter refuses it in the whole process.

The scorers that are used were read, and none evaluates an answer (transport/contracts/gym_tasks.py). This enforces
it, also for what a library does inside: sympy's parser evaluates text, and its ``lambdify`` compiles names of
symbols.

Owns: an audit hook (PEP 578), which cannot be removed. Never: confines code that runs already (that is jail.py's).
"""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

from workers.scoring.graders import EXPRESSION

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
    """Whether what ``frame`` compiles is a module, a number, or read without being executed (graders.py)."""
    if filename == EXPRESSION or (isinstance(source, bytes) and _ONE_NUMBER.fullmatch(source)):
        return True
    if frame is not None and frame.f_code.co_filename.endswith(_MAKES_CODE):
        return True
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True  # a module is imported for the first time
        frame = frame.f_back
    return False
