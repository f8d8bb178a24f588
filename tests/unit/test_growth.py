"""Parsers of foreign text take steps in proportion to it. `make bench NAME=growth` measures seconds."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from benchmarks.growth import GROWTH, PARSERS
from orchestrator.config import rules
from orchestrator.config.run_directory import RunDir
from orchestrator.config.starts import read_starts

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


def test_a_document_that_is_nested_too_deep_is_damage_like_any_other(tmp_path: Path):
    rundir = RunDir(tmp_path)
    rundir.starts.write_text('{"x": ' + "[" * 5_000 + "]" * 5_000 + "}\n")
    assert read_starts(rundir) == []


def test_what_cannot_be_decoded_is_expected_to_be_too_deep_as_well():
    """By its one name, ``DECODE_ERRORS``."""
    root = Path(rules.__file__).parents[2]
    handled = re.compile(r"(?:except|suppress)\b[^\n]*(?:MsgspecError|msgspec\.DecodeError)[^\n]*")
    files = [
        path for folder in ("orchestrator", "workers", "transport", "ranker") for path in (root / folder).rglob("*.py")
    ]
    found = {path.name: handled.findall(path.read_text()) for path in files if path.name != "errors.py"}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert any("DECODE_ERRORS" in path.read_text() for path in files)
