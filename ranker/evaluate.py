"""How well predictions rank: tail recall as in the paper's Table 4, Kendall's tau, and whether the spread is believed.

Owns: the definitions of these figures. Pure functions of arrays. Source: StreamRL Table 4 for recall; ours for ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranker.lengths import PromptLengths, mean_tokens
from ranker.protocol import LengthEstimate

TAILS = (0.20, 0.10, 0.05)
"""Source: StreamRL Table 4."""
INTERVAL = 0.8
"""Share of samples that a calibrated posterior keeps between its quantiles .1 and .9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankQuality:
    """recall_20, recall_10, recall_5: tail recalls.  kendall_tau: -1..1.  coverage: of the 80% interval, by sample."""

    num_prompts: int
    recall_20: float
    recall_10: float
    recall_5: float
    kendall_tau: float
    coverage: float


def tail_recall(actual: NDArray[np.float64], predicted: NDArray[np.float64], share: float) -> float:
    """Of the longest ``share`` of prompts, the part that is among the predicted longest; random: ``share``.

    Args:    actual, predicted: [N >= 1], any monotone scale.  share: 0 < share <= 1.
    Returns: expected recall when ties, in both, are broken at random, so that a constant prediction scores ``share``
             and lengths that end at a cap are not decided by the order of the file.
    Source:  StreamRL sec. 7.3, Table 4. Differs: the paper says nothing of ties.
    """
    count = max(1, round(share * len(actual)))
    return float(_membership(actual, count) @ _membership(predicted, count)) / count


def _membership(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """[N] probability of each value to be among the ``count`` largest, ties broken at random."""
    cut = np.partition(values, len(values) - count)[len(values) - count]
    above, tied = values > cut, values == cut
    return above + tied * ((count - above.sum()) / tied.sum())


def kendall_tau(actual: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    """Tau-b; 0 where either is constant, because it then orders nothing."""
    import scipy.stats  # takes half a second, which scoring alone saves

    result: Any = scipy.stats.kendalltau(actual, predicted)
    return 0.0 if np.isnan(result.statistic) else float(result.statistic)


def evaluate(estimates: Sequence[LengthEstimate], samples: Sequence[PromptLengths]) -> RankQuality:
    """Compare posteriors with what happened. [N >= 1] each, in the same order."""
    actual = mean_tokens(samples)
    predicted = np.array([estimate.mean_tokens for estimate in estimates])
    recall_20, recall_10, recall_5 = (tail_recall(actual, predicted, share) for share in TAILS)
    inside = [
        estimate.quantile((1 - INTERVAL) / 2) <= tokens <= estimate.quantile((1 + INTERVAL) / 2)
        for estimate, sample in zip(estimates, samples, strict=True)
        for tokens in sample.tokens
    ]
    return RankQuality(
        num_prompts=len(samples),
        recall_20=recall_20,
        recall_10=recall_10,
        recall_5=recall_5,
        kendall_tau=kendall_tau(actual, predicted),
        coverage=float(np.mean(inside)),
    )
