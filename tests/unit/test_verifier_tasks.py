"""Which answers the scan of gym tasks takes for right by chance."""

from __future__ import annotations

import pytest

from benchmarks.verifier_tasks import is_same


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    [
        ("0", "0.375", False),
        ("0.0", "0", True),
        ("35", "3.5", False),
        ("true", "True", True),
        ("16.909271810540783", "16.91°", True),
        ("0.3", "0", False),
        ("Bo is a knave and Al is a hero", "Al is a hero, and Bo is a knave.", True),
        ("Bo is a hero and Al is a knave", "Al is a hero, and Bo is a knave.", False),
        ("nan", "nan", True),
        ("nan", "8.0 + 3.0i", False),
        ("b, a", "a, b", False),
    ],
)
def test_an_answer_is_the_right_one_in_other_words(answer: str, right: str, same: bool) -> None:
    assert is_same(answer, right) is same
