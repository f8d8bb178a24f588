"""pass@k: how likely one of k answers to a problem is right, estimated without bias from n >= k of them.

Used by evaluations inside a run and by ``streamrl-worker evaluate``, so that both tell the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import fmean


def pass_rates(num_samples: int, num_right: Sequence[int]) -> dict[str, float]:
    """``pass@k`` -> its estimate, for every k that is told of ``num_samples`` answers; see ``pass_at_k``."""
    return {f"pass@{k}": pass_at_k(num_samples, num_right, k) for k in ks(num_samples)}


def pass_at_k(num_samples: int, num_right: Sequence[int], k: int) -> float:
    """Mean over problems of 1 - C(n - c, k) / C(n, k).

    Args:   num_samples: n answers to each problem.  num_right: [P] c of them are right, in [0, n].  k: in [1, n].
    Raises: ValueError: no problem, or a number out of its range.
    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, eq. 1.
    """
    if not num_right or not 1 <= k <= num_samples or not all(0 <= right <= num_samples for right in num_right):
        raise ValueError(f"need 1 <= k <= {num_samples} and counts in [0, {num_samples}], got k = {k} of {num_right}")
    return fmean(1.0 - comb(num_samples - right, k) / comb(num_samples, k) for right in num_right)


def ks(num_samples: int) -> list[int]:
    """The k that are told for n answers: 1, 2, 4, ... and n itself."""
    return [*(1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples), num_samples]
