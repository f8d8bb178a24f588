"""From a score that ranks to a posterior that can be believed: mean, spread of the level, spread of the samples.

Owns: what was learned from validation prompts, which the trees never saw; on training prompts residuals are too small.
Invariant: the mean rises with the score, so calibration never changes a rank. Source: ours; dispatch needs the spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ranker.errors import RankerFileError
from ranker.logs import PromptLengths, log_means, mean_tokens
from ranker.protocol import UNKNOWN_SAMPLE_SIGMA, LengthEstimate

MAX_BINS = 8
PROMPTS_PER_BIN = 40
"""A standard deviation from 40 values is good to 11%."""
POOLED_WEIGHT = 20
"""Prompts that the spread over all bins counts for in each of them."""
MIN_REPEATED = 20
MIN_REPEATED_SHARE = 0.1
"""Prompts with several samples, below which the spread of samples is assumed: a few duplicates say nothing."""
SLOPES = (0.5, 1.5)
"""A steeper or flatter line means that there was too little to fit it from."""
MIN_SIGMA, MAX_SIGMA = 0.02, 3.0
MAX_LOG_TOKENS = math.log(1e9)


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """log mean tokens = intercept + slope * score. Spreads are interpolated between centers, in score.

    centers, level_sigmas, sample_sigmas: [1..MAX_BINS], centers rising.
    """

    intercept: float
    slope: float
    centers: list[float]
    level_sigmas: list[float]
    sample_sigmas: list[float]

    def estimates(self, scores: NDArray[np.float64]) -> list[LengthEstimate]:
        """[N] posteriors of prompts with these scores."""
        means = np.exp(np.clip(self.intercept + self.slope * scores, 0.0, MAX_LOG_TOKENS))
        levels = np.interp(scores, self.centers, self.level_sigmas)
        noises = np.interp(scores, self.centers, self.sample_sigmas)
        return [
            LengthEstimate(mean_tokens=float(mean), level_sigma=float(level), sample_sigma=float(noise))
            for mean, level, noise in zip(means, levels, noises, strict=True)
        ]

    def check(self) -> None:
        """Raises RankerFileError unless it could have been fitted here."""
        columns = (self.centers, self.level_sigmas, self.sample_sigmas)
        values = [self.intercept, self.slope, *self.centers, *self.level_sigmas, *self.sample_sigmas]
        fits = (
            len({len(column) for column in columns}) == 1
            and 1 <= len(self.centers) <= MAX_BINS
            and all(map(math.isfinite, values))
            and self.slope > 0
            and all(before <= after for before, after in zip(self.centers, self.centers[1:], strict=False))
            and all(0 <= sigma <= MAX_SIGMA for sigma in [*self.level_sigmas, *self.sample_sigmas])
        )
        if not fits:
            raise RankerFileError("the calibration of the stored ranker is not one that was fitted")


def calibrate(scores: NDArray[np.float64], samples: Sequence[PromptLengths]) -> Calibration:
    """Fit to scores of prompts that the scorer was not trained on. [N >= 1]"""
    truth, logs = mean_tokens(samples), log_means(samples)
    slope = _slope(scores, np.log(truth))
    intercept = float(np.log(truth.sum()) - np.log(np.exp(slope * scores).sum()))
    residuals = logs - (intercept + slope * scores)
    bins = np.array_split(np.argsort(scores, kind="stable"), _num_bins(len(samples)))
    noise = _sample_variances(samples, bins)
    spread = _shrunk([float(residuals[part].var()) for part in bins], [len(part) for part in bins])
    shares = [float(np.mean([1 / len(samples[index].tokens) for index in part])) for part in bins]
    if noise is None:  # one sample a prompt: what is level and what is noise cannot be told apart
        noise = [min(UNKNOWN_SAMPLE_SIGMA**2, variance / 2) for variance in spread]
    levels = [variance - share * each for variance, share, each in zip(spread, shares, noise, strict=True)]
    return Calibration(
        intercept=intercept,
        slope=slope,
        centers=[float(np.median(scores[part])) for part in bins],
        level_sigmas=[_sigma(variance) for variance in levels],
        sample_sigmas=[_sigma(variance) for variance in noise],
    )


def _num_bins(num_prompts: int) -> int:
    return max(1, min(MAX_BINS, num_prompts // PROMPTS_PER_BIN))


def _slope(scores: NDArray[np.float64], logs: NDArray[np.float64]) -> float:
    variance = float(scores.var())
    if variance == 0.0:
        return 1.0
    covariance = float(((scores - scores.mean()) * (logs - logs.mean())).mean())
    return min(max(covariance / variance, SLOPES[0]), SLOPES[1])


def _sample_variances(samples: Sequence[PromptLengths], bins: Sequence[NDArray[np.intp]]) -> list[float] | None:
    """Variance of log length within prompts, per bin; None where too few prompts have several samples."""
    variances = [
        float(np.var(np.log(sample.tokens), ddof=1)) if len(sample.tokens) > 1 else float("nan") for sample in samples
    ]
    known = [[variances[index] for index in part if not math.isnan(variances[index])] for part in bins]
    if sum(map(len, known)) < max(MIN_REPEATED, MIN_REPEATED_SHARE * len(samples)):
        return None
    return _shrunk([float(np.mean(values)) if values else 0.0 for values in known], [len(values) for values in known])


def _shrunk(variances: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Each bin's variance, pulled towards that of all of them."""
    pooled = float(np.average(variances, weights=counts))
    return [
        (variance * count + pooled * POOLED_WEIGHT) / (count + POOLED_WEIGHT)
        for variance, count in zip(variances, counts, strict=True)
    ]


def _sigma(variance: float) -> float:
    return min(max(math.sqrt(max(variance, 0.0)), MIN_SIGMA), MAX_SIGMA)
