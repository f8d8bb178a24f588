"""StreamRL's Algorithm 1 as printed: how many GPUs generate, and how many train.

Owns: the printed rules, for comparison and as a fast first answer. Never: degrees of parallelism; ``generation_s`` and
``training_s`` are the best time of each stage on so many GPUs, infinite where the model does not fit (sec. 4.2).
Flaws of the print, each shown in ``tests/unit/test_algorithm_one.py``:

    max(Tgen, Ttrain)    is the iteration only where batches overlap wholly; a synchronous stream ends with the training
                         of its last samples, and wants more generation than the balance says
    first minimum        of equal maxima it takes whichever comes first, also one that gives a stage GPUs for nothing
    |difference|         of the shrunk stage may be least where it has become the slower one: the iteration grows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

StageTime: TypeAlias = Callable[[int], float]
"""GPUs -> seconds of one batch."""


def single_datacenter(
    num_gpus: int, generation_s: StageTime, training_s: StageTime, sizes: Iterable[int] = ()
) -> tuple[int, int]:
    """(generation, training) GPUs with the least max of both times, x + y <= num_gpus.

    sizes: GPUs that a stage may have, ascending; empty: any number. Each stage is asked once for every size.
    Returns: (0, 0) where neither fits. Source: StreamRL Algorithm 1, first part.
    """
    allowed = [size for size in (sizes or range(1, num_gpus)) if 0 < size < num_gpus]
    generating = [(size, generation_s(size)) for size in allowed]
    training = [(size, training_s(size)) for size in allowed]
    least_s, best = float("inf"), (0, 0)
    for x, generating_s in generating:
        for y, trained_s in training:
            if x + y <= num_gpus and max(generating_s, trained_s) < least_s:
                least_s, best = max(generating_s, trained_s), (x, y)
    return best


def cross_datacenter(
    num_generation: int,
    num_training: int,
    generation_s: StageTime,
    training_s: StageTime,
    generation_sizes: Iterable[int] = (),
    training_sizes: Iterable[int] = (),
) -> tuple[int, int]:
    """Everything, less what the faster stage has too much: its size whose time is nearest to the slower stage's.

    Source: StreamRL Algorithm 1, second part. Ties, which the paper leaves open, go to fewer GPUs.
    """
    generating_s, trained_s = generation_s(num_generation), training_s(num_training)
    if generating_s < trained_s:
        sizes = generation_sizes or range(1, num_generation + 1)
        return min(sizes, key=lambda size: abs(generation_s(size) - trained_s)), num_training
    sizes = training_sizes or range(1, num_training + 1)
    return num_generation, min(sizes, key=lambda size: abs(training_s(size) - generating_s))
