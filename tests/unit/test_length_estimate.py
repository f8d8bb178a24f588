"""The posterior that dispatch gets: quantiles and groups, against drawn lengths."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from ranker.protocol import ConstantPredictor, LengthEstimate


def drawn_groups(estimate: LengthEstimate, size: int, count: int) -> list[list[float]]:
    draw = random.Random(0)
    levels = [estimate.log_median + estimate.level_sigma * draw.gauss(0, 1) for _ in range(count)]
    return [[math.exp(level + estimate.sample_sigma * draw.gauss(0, 1)) for _ in range(size)] for level in levels]


def test_a_group_is_as_long_as_drawn_ones():
    estimate = LengthEstimate(mean_tokens=1000.0, level_sigma=0.3, sample_sigma=0.5)
    groups = drawn_groups(estimate, 8, 20_000)
    expected = estimate.group(8)
    assert expected.mean_tokens == pytest.approx(statistics.fmean(map(statistics.fmean, groups)), rel=0.01)
    assert expected.max_tokens == pytest.approx(statistics.fmean(map(max, groups)), rel=0.01)


def test_an_unknown_level_does_not_lengthen_a_groups_longest_but_noise_does():
    level = LengthEstimate(mean_tokens=1000.0, level_sigma=0.5, sample_sigma=0.0)
    noise = LengthEstimate(mean_tokens=1000.0, level_sigma=0.0, sample_sigma=0.5)
    assert level.group(16).max_tokens == pytest.approx(1000.0)
    assert noise.group(16).max_tokens > 2000.0
    assert noise.group(1).max_tokens == pytest.approx(1000.0, rel=0.01)


def test_quantiles_are_those_of_drawn_lengths():
    estimate = LengthEstimate(mean_tokens=500.0, level_sigma=0.4, sample_sigma=0.3)
    lengths = [length for group in drawn_groups(estimate, 1, 20_000) for length in group]
    assert statistics.fmean(length <= estimate.quantile(0.9) for length in lengths) == pytest.approx(0.9, abs=0.01)
    assert estimate.log_sigma == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("mean", "level", "sample", "observations"),
    [
        (0.0, 0.1, 0.1, 0.0),
        (math.nan, 0.1, 0.1, 0.0),
        (1.0, -0.1, 0.1, 0.0),
        (1.0, 0.1, math.inf, 0.0),
        (1.0, 0, 0, -1.0),
    ],
)
def test_an_impossible_posterior_is_refused(mean: float, level: float, sample: float, observations: float):
    with pytest.raises(ValueError, match=r"positive|negative"):
        LengthEstimate(mean_tokens=mean, level_sigma=level, sample_sigma=sample, observations=observations)


def test_a_group_has_a_sample():
    with pytest.raises(ValueError, match="at least one sample"):
        LengthEstimate(mean_tokens=1.0, level_sigma=0.1, sample_sigma=0.1).group(0)


def test_a_constant_predictor_prefers_nobody():
    predictor = ConstantPredictor(tokens=512.0)
    predictor.observe("a", [4000])
    first, second = predictor.predict(["a", "b"], ["long", "short"])
    assert first == second
    assert first.mean_tokens == 512.0
