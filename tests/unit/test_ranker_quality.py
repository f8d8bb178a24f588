"""Recall, ties, and the flag that says whether predictions are worth using."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranker.quality import JUDGED_EVERY, MIN_GROUPS, WINDOW_GROUPS, RunningQuality, kendall_tau, tail_recall


def test_recall_counts_the_longest_that_were_predicted():
    actual = np.array([10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert tail_recall(actual, actual, 0.2) == 1.0
    assert tail_recall(actual, -actual, 0.2) == 0.0
    one_of_two = np.array([10.0, 1.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 0.0])
    assert tail_recall(actual, one_of_two, 0.2) == 0.5


@given(
    actual=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    predicted=st.data(),
    share=st.sampled_from([0.1, 0.3, 0.5, 1.0]),
)
def test_ties_count_as_if_broken_at_random(actual: list[int], predicted: st.DataObject, share: float):
    guesses = predicted.draw(st.lists(st.integers(1, 4), min_size=len(actual), max_size=len(actual)))
    draw, count = random.Random(0), max(1, round(share * len(actual)))

    def longest(values: list[int]) -> set[int]:
        order = sorted(range(len(values)), key=lambda index: (-values[index], draw.random()))
        return set(order[:count])

    trials = [len(longest(actual) & longest(guesses)) / count for _ in range(800)]
    exact = tail_recall(np.array(actual, dtype=float), np.array(guesses, dtype=float), share)
    assert exact == pytest.approx(sum(trials) / len(trials), abs=0.07)


def test_a_constant_prediction_orders_nothing():
    actual, constant = np.arange(100.0), np.ones(100)
    assert tail_recall(actual, constant, 0.2) == pytest.approx(0.2)
    assert kendall_tau(actual, constant) == 0.0
    assert kendall_tau(actual, actual**3) == pytest.approx(1.0)


def fed(quality: RunningQuality, noise: float, groups: int, seed: int = 0) -> RunningQuality:
    draw = random.Random(seed)
    for _ in range(groups):
        actual = draw.lognormvariate(6.0, 1.0)
        quality.record(actual * draw.lognormvariate(0.0, noise), actual)
    return quality


def test_the_flag_rises_for_a_good_ranker_and_falls_for_a_bad_one():
    assert fed(RunningQuality(trusted=False), noise=0.1, groups=MIN_GROUPS + JUDGED_EVERY).trusted
    assert not fed(RunningQuality(trusted=True), noise=3.0, groups=MIN_GROUPS + JUDGED_EVERY).trusted


def test_a_few_groups_do_not_decide():
    assert fed(RunningQuality(trusted=True), noise=3.0, groups=MIN_GROUPS - 1).trusted
    assert not fed(RunningQuality(trusted=False), noise=0.1, groups=MIN_GROUPS - 1).trusted
    assert not fed(RunningQuality(trusted=False), noise=0.1, groups=MIN_GROUPS - 1).measured
    assert fed(RunningQuality(trusted=False), noise=0.1, groups=MIN_GROUPS).measured


def test_between_the_bounds_the_flag_stays():
    """Recall about 0.70: neither good enough to begin nor bad enough to stop."""
    for before in (True, False):
        quality = fed(RunningQuality(trusted=before), noise=0.59, groups=WINDOW_GROUPS)
        assert 0.67 < quality.recalls()[0] < 0.73
        assert quality.trusted is before


def test_only_the_newest_groups_count():
    quality = fed(RunningQuality(trusted=False), noise=0.05, groups=WINDOW_GROUPS)
    assert quality.trusted
    fed(quality, noise=3.0, groups=WINDOW_GROUPS, seed=1)
    assert not quality.trusted
    assert quality.tau() < 0.4
    assert quality.num_groups == 2 * WINDOW_GROUPS


def test_before_the_first_group_there_is_nothing_to_say():
    quality = RunningQuality(trusted=False)
    assert (quality.recalls(), quality.tau()) == ((0.0, 0.0, 0.0), 0.0)
