"""The learning rate of a batch: a pure function of its number, so that it needs no state and survives every restart."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    batch: int,
    num_batches: int,
    *,
    lr: float,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
    min_share: float = 0.0,
    warmup: int = 0,
) -> float:
    """The rate of all optimizer steps of a batch: a linear rise over the warm-up, then constant, linear or cosine.

    Args:    batch: from 0.  num_batches: those of the run as it is planned when the batch is closed, which may change
             while it goes on: the rate is then that of a schedule that was so long from the start. 0: it never falls.
             lr: the highest.  min_share: of it, left at the end, in [0, 1].  warmup: batches.
    Returns: in (0, lr] during the warm-up: its first batch moves, its last has the whole rate, as has the one after it.
             Then in [min_share * lr, lr]; the last batch is one step above the least, so that it moves, too.
    Source:  transformers' get_linear_schedule_with_warmup and get_cosine_with_min_lr_schedule_with_warmup at step
             ``batch``; in the warm-up at ``batch + 1``, because their first step has rate 0.
    """
    if batch < warmup:
        return lr * (batch + 1) / warmup
    if schedule == "constant" or num_batches <= 0:
        return lr
    progress = min(1.0, (batch - warmup) / max(1, num_batches - warmup))
    left = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * (min_share + (1.0 - min_share) * left)
