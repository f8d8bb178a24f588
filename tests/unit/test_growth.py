"""Parsers of foreign text take steps in proportion to it. `make bench NAME=growth` measures seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from benchmarks.growth import GROWTH, PARSERS

CHARACTERS, OF_LINES = 600, 3_500
"""Of the shorter text; of lines with a key each it has a hundred or more."""
FEW = 2_000
"""Steps that a parser takes for any text."""


def steps(read: Callable[[str], object], text: str) -> int:
    """Calls of functions, Python's own among them; a pattern that backtracks is one of them, however long it takes."""
    count = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(called)
    try:
        read(text)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", PARSERS)
def test_twice_the_text_takes_twice_the_steps(name: str):
    parser = PARSERS[name]
    parser.read("")  # what is imported and compiled once
    for text, make in parser.texts():
        length = OF_LINES if parser.lines else CHARACTERS
        first, second = steps(parser.read, make(length)), steps(parser.read, make(2 * length))
        assert second <= GROWTH * first + FEW, (text, first, second)
