"""Longest predicted first: the order in which groups start, and the packing that follows from it.

Owns: order only. Never: who is free, who is stale. Invariant: ties go to the lower index, so equal input gives an
equal plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def longest_first(predicted_tokens: float) -> float:
    """Sort key of a group: the longest predicted response comes first.

    Source: StreamRL sec. 5.3; a long sample that starts late is the tail that everyone waits for.
    """
    return -predicted_tokens


def assign_lpt(weights: Sequence[float], num_bins: int) -> list[list[int]]:
    """Spread weights over equal bins, heaviest first, each into the lightest bin.

    Args:    weights: [N] e.g. predicted tokens, each >= 0.  num_bins: M >= 1.
    Returns: [M] lists of indices, together a permutation of range(N); ties go to the lower index.
             The heaviest bin holds at most (4/3 - 1/(3M)) times what the best possible packing would.
    Raises:  ValueError: num_bins < 1 or a negative weight.
    Source:  StreamRL sec. 5.3; bound from Graham 1969. Differs: the paper leaves tie order open.
    """
    if num_bins < 1:
        raise ValueError(f"need at least one bin, got {num_bins}")
    if any(weight < 0 for weight in weights):
        raise ValueError("weights must not be negative")
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    lightest = [(0.0, index) for index in range(num_bins)]
    for item in sorted(range(len(weights)), key=lambda item: (-weights[item], item)):
        load, index = lightest[0]
        bins[index].append(item)
        heapq.heapreplace(lightest, (load + weights[item], index))
    return bins
