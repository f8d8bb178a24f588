"""Is the ranker right, measured all the time: what it predicted before, against what was observed after.

Owns: a window of the newest groups, and whether the predictions are worth using. Dispatch by a poor ranking is worse
than no ranking: in simulation, slicing gains 7% at recall .75 and loses at .65. The flag changes only when recall at
20% is on the other side of ``TRUSTED_RECALL`` by more than it is uncertain, and otherwise stays. Source: ours.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from ranker.evaluate import TAILS, kendall_tau, tail_recall

WINDOW_GROUPS = 2_048
"""About two batches of the paper's size: the standard error of recall at 20% is then 0.02."""
MIN_GROUPS = 256
"""Before that many it is 0.06, and what training said counts."""
JUDGED_EVERY = 32
TRUSTED_RECALL = 0.70
MARGIN = 1.5
"""Standard errors: with a full window the flag rises above 0.734 and falls below 0.666."""


class RunningQuality:
    """Recall of the newest groups, and the flag. Recording is cheap; figures cost a sort of the window."""

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted
        self.num_groups = 0
        self._pairs: deque[tuple[float, float]] = deque(maxlen=WINDOW_GROUPS)

    @property
    def measured(self) -> bool:
        """Whether the flag rests on what was recorded, and not only on what training or an earlier start said."""
        return self.num_groups >= MIN_GROUPS

    def record(self, predicted_tokens: float, actual_tokens: float) -> None:
        """One group: its mean length as predicted at dispatch, and as it came."""
        self._pairs.append((predicted_tokens, actual_tokens))
        self.num_groups += 1
        if self.measured and self.num_groups % JUDGED_EVERY == 0:
            self._judge(self.recalls()[0])

    def _judge(self, recall: float) -> None:
        margin = MARGIN * math.sqrt(TRUSTED_RECALL * (1 - TRUSTED_RECALL) / (TAILS[0] * len(self._pairs)))
        if abs(recall - TRUSTED_RECALL) > margin:
            self.trusted = recall > TRUSTED_RECALL

    def recalls(self) -> tuple[float, float, float]:
        """Tail recalls at 20, 10 and 5%; 0 before the first group."""
        if not self._pairs:
            return (0.0, 0.0, 0.0)
        predicted, actual = np.array(self._pairs).T
        at_20, at_10, at_5 = (tail_recall(actual, predicted, share) for share in TAILS)
        return (at_20, at_10, at_5)

    def tau(self) -> float:
        """Kendall's tau over the window; 0 before the second group."""
        if len(self._pairs) < 2:
            return 0.0
        predicted, actual = np.array(self._pairs).T
        return kendall_tau(actual, predicted)
