"""Rows of programming problems, as reward ``code`` reads them: which functions are asked for, and what tests them.

    tests        one Python statement each, or one text: ``["assert add(1, 2) == 3"]``; also ``test_list`` (MBPP)
    entry_point  the function that the model is to write, or a list of them; without it, what the tests call
    setup        statements that come before the tests; also ``test_setup_code`` (MBPP)

Owns: the columns and what a row without them is told. Never: runs anything (workers/scoring/code.py).
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping, Sequence
from typing import cast

from transport.contracts.types import Struct

CODE_REWARD = "code"
"""The value of ``scoring.reward`` that names it."""
MAX_TESTS = 1000
MAX_CHARACTERS = 256 * 1024
"""Of all tests of a problem together."""


class CodeTask(Struct, frozen=True, kw_only=True):
    """entry_points: names of the functions that the tests may call, at least one.  setup, tests: Python source."""

    entry_points: list[str]
    setup: str
    tests: list[str]


def read_task(columns: Mapping[str, object]) -> CodeTask:
    """The task of a row. columns: those of the row beside question and answer.

    Raises ValueError that names the column: tests that are missing or no Python, an entry point that is no name or
    that no test calls.
    """
    key, tests = _first(columns, ("tests", "test_list", "test"))
    if isinstance(tests, str):
        tests = [tests]
    sources = [one for one in _items(tests) if isinstance(one, str)]
    if not sources or len(sources) != len(_items(tests)):
        raise ValueError(
            f"column {key!r} must be Python source, or a list of it that is not empty"
            if key
            else f"no column 'tests'; the row has {', '.join(map(repr, columns)) or 'no other columns'}"
        )
    _, setup = _first(columns, ("setup", "test_setup_code"))
    setup = setup if isinstance(setup, str) else ""
    if len(sources) > MAX_TESTS or sum(map(len, sources)) + len(setup) > MAX_CHARACTERS:
        raise ValueError(f"column {key!r} has more than {MAX_TESTS} tests or {MAX_CHARACTERS} characters")
    trees = [_parsed(source, key) for source in sources]
    before = _parsed(setup, "setup")
    named = columns.get("entry_point")
    names = [named] if isinstance(named, str) else _items(named)
    called = _called(trees)
    if not names:
        names = sorted(called - _defined([before, *trees]) - set(dir(builtins)))
        if not names:
            raise ValueError(f"column {key!r} calls no function that the model could write: set column 'entry_point'")
    entry_points = [name for name in names if isinstance(name, str) and name.isidentifier()]
    if len(entry_points) != len(names):
        raise ValueError("column 'entry_point' must be the name of a function, or a list of names")
    if not any(isinstance(node, ast.Name) and node.id in entry_points for tree in trees for node in ast.walk(tree)):
        raise ValueError(f"column {key!r} never uses {' or '.join(entry_points)}, so every answer would pass")
    return CodeTask(entry_points=entry_points, setup=setup, tests=sources)


def _first(columns: Mapping[str, object], names: Sequence[str]) -> tuple[str, object]:
    return next(((name, columns[name]) for name in names if columns.get(name) is not None), ("", None))


def _items(value: object) -> list[object]:
    return list(cast("Sequence[object]", value)) if isinstance(value, list | tuple) else []


def _parsed(source: str, column: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: brackets in brackets
        raise ValueError(f"column {column!r} is no Python: {error}: {source[:60]!r}") from error


def _called(trees: Sequence[ast.Module]) -> set[str]:
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def _defined(trees: Sequence[ast.Module]) -> set[str]:
    """Names that the tests define or import themselves."""
    found: set[str] = set()
    for node in [node for tree in trees for node in ast.walk(tree)]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
