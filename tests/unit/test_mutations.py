"""The draw of ``make bench NAME=mutants``: what is changed, what is left alone, and that it is found again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.mutants import Nearness
from benchmarks.mutations import KINDS, Mutation, draw, folder_of, is_real, locate, points, shares

ROOT = Path(__file__).parents[2]
FILE = "orchestrator/core/sums.py"

CHANGED = '''
def add(values, *, first=1):
    """1 + 1 is not changed, nor is `not`."""
    total = first
    for value in values:
        if value < 0 and not total:
            break
        total = total + min(value, 8)
    values.clear()
    return total
'''
LEFT_ALONE = '''
"""min(1, 2) if not 3"""
from typing import TYPE_CHECKING
import msgspec
__all__ = ["a"[1:]]
if TYPE_CHECKING:
    LIMIT = 1
class Texts(msgspec.Struct, frozen=True):
    wait_s: float = 5.0
    def __repr__(self) -> str:
        return "a" + str(1 + 2)
    def speak(self, items: tuple[int, 3], wait_s: float = 2.0) -> None:
        """Not 1."""
        assert items is not None
        log.info("of %d", 1 + 2)
        print(not items, 1)
        name = f"{self.wait_s * 2 + 1}"
        raise ValueError("not one of 3" + name)
class OwnError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
'''


def test_every_kind_is_found_where_it_changes_what_is_done() -> None:
    found = {point.mutation.kind: point.mutation for point in points(FILE, CHANGED.encode())}
    assert found.keys() | {"arithmetic", "compare"} == KINDS.keys()
    assert {one.function for one in found.values()} == {"add"}
    assert (found["not"].before, found["not"].after) == (
        "if value < 0 and not total:",
        "if value < 0 and total:",
    )
    assert found["default"].after == "def add(values, *, first=0):"
    assert found["condition"].after == "if not (value < 0 and not total):"
    assert found["minmax"].after == "total = total + max(value, 8)"


def test_texts_annotations_durations_and_logs_are_left_alone() -> None:
    assert [point.mutation.diff for point in points(FILE, LEFT_ALONE.encode())] == []


def test_a_point_changes_its_place_alone_and_the_file_still_compiles() -> None:
    source = (ROOT / "ranker/history.py").read_bytes()
    some = points("ranker/history.py", source)[::5]
    assert len(some) > 10
    for point in some:
        mutant = point.apply(source)
        assert is_real(point, source), point.mutation
        assert mutant[: point.start] == source[: point.start]
        assert mutant[point.start + len(point.text) :] == source[point.end :]


def test_a_seed_draws_the_same_from_every_folder_and_once_in_a_function(tmp_path: Path) -> None:
    sizes = {"orchestrator/core/rollout": 5, "orchestrator/cli": 2, "ranker": 1}
    for folder, size in sizes.items():
        (tmp_path / folder).mkdir(parents=True)
        for number in range(size):
            more = CHANGED + CHANGED.replace("def add", "async def also_add")
            (tmp_path / folder / f"sums_{number}.py").write_text(f"SIZE = {number}\n{more}")
    drawn = draw(tmp_path, 8, 5)
    assert drawn == draw(tmp_path, 8, 5) != draw(tmp_path, 8, 6)
    assert max(Counter((one.file, one.function) for one in drawn).values()) == 1
    assert Counter(folder_of(one.file) for one in drawn) == {"orchestrator/core": 5, "orchestrator/cli": 2, "ranker": 1}
    (tmp_path / "ranker/sums_0.py").write_text(CHANGED.replace("total", "result"))
    of_others = [one for one in drawn if folder_of(one.file) != "ranker"]
    assert [one for one in draw(tmp_path, 8, 5) if folder_of(one.file) != "ranker"] == of_others


def test_shares_follow_the_lines_and_leave_no_folder_out() -> None:
    assert shares({"a": 900, "b": 90, "c": 1}, 10) == {"a": 8, "b": 1, "c": 1}
    with pytest.raises(ValueError, match="ask for 2 or more"):
        shares({"a": 1, "b": 1}, 1)


@pytest.mark.parametrize(
    ("file", "text", "is_there"),
    [
        (FILE, "import os\n\n" + CHANGED, True),
        ("workers/moved.py", CHANGED, True),
        (FILE, CHANGED.replace("min(value, 8)", "min(8, value)"), False),
        (FILE, CHANGED.replace("def add", "def added"), False),
    ],
)
def test_a_mutation_is_found_again_by_function_and_text(tmp_path: Path, file: str, text: str, is_there: bool) -> None:
    (mutation,) = (one.mutation for one in points(FILE, CHANGED.encode()) if one.mutation.kind == "minmax")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    located = locate(tmp_path, mutation)
    assert (located is not None) == is_there
    if located:
        where, point = located
        assert where == file
        assert b"max(value, 8)" in point.apply(text.encode())


def test_the_nearest_tests_of_the_fast_tiers_come_first(tmp_path: Path) -> None:
    files = {
        "orchestrator/core/sums.py": CHANGED,
        "orchestrator/core/uses.py": "from orchestrator.core import sums",
        "tests/integration/test_near.py": "from orchestrator.core.sums import add",
        "tests/unit/test_near.py": "from orchestrator.core.sums import other",
        "tests/unit/test_names_it.py": "from orchestrator.core.sums import add",
        "orchestrator/core/calls.py": "from orchestrator.core.uses import sums",
        "tests/unit/test_far.py": "import orchestrator.core.uses",
        "tests/unit/test_further.py": "import orchestrator.core.calls",
        "tests/unit/test_other.py": "import os",
        "tests/chaos/test_kills.py": "from orchestrator.core.sums import add",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    nearness = Nearness(tmp_path)
    mutation = Mutation(file=FILE, function="add", kind="call", before="", after="")
    names = ["unit/test_names_it", "unit/test_near", "integration/test_near", "unit/test_far", "unit/test_further"]
    assert nearness.tests_of(mutation, FILE) == [f"tests/{name}.py" for name in names]
    assert nearness.tests == sorted(nearness.tests)
    assert "tests/chaos/test_kills.py" not in nearness.tests
