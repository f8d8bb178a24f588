"""pass@k against all choices of k answers, and against drawing them."""

from __future__ import annotations

from itertools import combinations

import pytest

from transport.contracts.pass_at_k import ks, pass_at_k
from workers.commands.evaluate import figures
from workers.errors import RunFilesError


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_it_is_the_share_of_choices_that_hold_a_right_answer(samples: int) -> None:
    for k in range(1, samples + 1):
        for right in range(samples + 1):
            answers = [True] * right + [False] * (samples - right)
            choices = list(combinations(answers, k))
            expected = sum(map(any, choices)) / len(choices)
            assert pass_at_k(samples, [right], k) == pytest.approx(expected, abs=1e-12)


def test_it_is_the_mean_over_problems() -> None:
    assert pass_at_k(8, [0, 8], 4) == 0.5
    assert pass_at_k(200, [100] * 3, 100) == pytest.approx(1.0)


def test_answers_are_taken_problem_by_problem() -> None:
    answers = [{"right": right, "well_formed": 1.0} for right in (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)]
    means = {"right": 0.5, "well_formed": 1.0}
    passes = {"pass@1": 0.5, "pass@2": 5 / 6, "pass@3": 1.0}
    assert figures(answers, 3, "right") == pytest.approx(means | passes)
    assert figures(answers, 1, "right") == means
    with pytest.raises(RunFilesError, match=r"no component 'solved'.*right, well_formed"):
        figures(answers, 3, "solved")


def test_the_k_that_are_told() -> None:
    assert [ks(n) for n in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


@pytest.mark.parametrize(("right", "k"), [([], 1), ([1], 0), ([1], 5), ([5], 1), ([-1], 1)])
def test_numbers_out_of_range_are_refused(right: list[int], k: int) -> None:
    with pytest.raises(ValueError, match="need 1 <= k"):
        pass_at_k(4, right, k)
