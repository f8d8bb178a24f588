"""Is the ranker right, measured all the time: what it predicted before, against what was observed after.

Owns: a window of the newest groups, and whether the predictions are worth using. Dispatch by a poor ranking is worse
than no ranking: in simulation, slicing gains 7% at recall .75 and loses at .65. The flag changes only when recall at
20% is on the other side of ``TRUSTED_RECALL`` by more than it is uncertain, and otherwise stays. Source: ours.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranker.logs import PromptLengths, mean_tokens
from ranker.protocol import LengthEstimate
from transport.contracts.messages import RankerJudged

TAILS = (0.20, 0.10, 0.05)  # Source: StreamRL Table 4
INTERVAL = 0.8  # share of samples that a calibrated posterior keeps between its quantiles .1 and .9


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

    def membership(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[N] probability of each value to be among the ``count`` largest."""
        cut = np.partition(values, len(values) - count)[len(values) - count]
        above, tied = values > cut, values == cut
        return above + tied * ((count - above.sum()) / tied.sum())

    return float(membership(actual) @ membership(predicted)) / count


def tail_recalls(actual: NDArray[np.float64], predicted: NDArray[np.float64]) -> tuple[float, float, float]:
    at_20, at_10, at_5 = (tail_recall(actual, predicted, share) for share in TAILS)
    return at_20, at_10, at_5


def kendall_tau(actual: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    """Tau-b; 0 where either is constant, because it then orders nothing."""
    import scipy.stats  # takes half a second, which scoring alone saves

    result: Any = scipy.stats.kendalltau(actual, predicted)
    return 0.0 if np.isnan(result.statistic) else float(result.statistic)


def evaluate(estimates: Sequence[LengthEstimate], samples: Sequence[PromptLengths]) -> RankQuality:
    """Compare posteriors with what happened. [N >= 1] each, in the same order."""
    actual = mean_tokens(samples)
    predicted = np.array([estimate.mean_tokens for estimate in estimates])
    recall_20, recall_10, recall_5 = tail_recalls(actual, predicted)
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


WINDOW_GROUPS = 2_048  # about two batches of the paper's size: the standard error of recall at 20% is then 0.02
MIN_GROUPS = 256  # before that many it is 0.06, and what training said counts
JUDGED_EVERY = 32
TRUSTED_RECALL = 0.70
MARGIN = 1.5  # standard errors: with a full window the flag rises above 0.734 and falls below 0.666


class RunningQuality:
    """Recall of the newest groups, and the flag. Recording is cheap; figures cost a sort of the window."""

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted
        self.measured = False  # whether the flag rests on what was recorded, not on training or an earlier start
        self.num_groups = 0
        self._pairs: deque[tuple[float, float]] = deque(maxlen=WINDOW_GROUPS)

    def record(self, predicted_tokens: float, actual_tokens: float) -> None:
        """One group: its mean length as predicted at dispatch, and as it came."""
        self._pairs.append((predicted_tokens, actual_tokens))
        self.num_groups += 1
        self.measured = self.num_groups >= MIN_GROUPS
        if self.measured and self.num_groups % JUDGED_EVERY == 0:
            margin = MARGIN * math.sqrt(TRUSTED_RECALL * (1 - TRUSTED_RECALL) / (TAILS[0] * len(self._pairs)))
            recall = self.recalls()[0]
            if abs(recall - TRUSTED_RECALL) > margin:
                self.trusted = recall > TRUSTED_RECALL

    def judged(self) -> RankerJudged:
        """The figures of the window; about 2 ms."""
        recall_20, recall_10, recall_5 = self.recalls()
        return RankerJudged(
            num_groups=self.num_groups,
            recall_20=recall_20,
            recall_10=recall_10,
            recall_5=recall_5,
            kendall_tau=self.tau(),
            trusted=self.trusted,
            measured=self.measured,
        )

    def recalls(self) -> tuple[float, float, float]:
        """Tail recalls at 20, 10 and 5%; 0 before the first group."""
        if not self._pairs:
            return (0.0, 0.0, 0.0)
        predicted, actual = np.array(self._pairs).T
        return tail_recalls(actual, predicted)

    def tau(self) -> float:
        """Kendall's tau over the window; 0 before the second group."""
        if len(self._pairs) < 2:
            return 0.0
        predicted, actual = np.array(self._pairs).T
        return kendall_tau(actual, predicted)
