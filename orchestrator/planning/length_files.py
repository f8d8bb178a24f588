"""A user's response lengths: the file, and representative batches of it for simulation.

Owns: reading, and the choice of what stands for a batch. Never: repairs a length. Invariant: every batch holds the same
lengths, evenly spaced quantiles of the file, in an order of its own, so that a few iterations say what many would.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

from orchestrator.errors import DataError
from orchestrator.sim.lengths import RecordedLengths, error_of_recall
from transport.contracts.given_lengths import Say, read_groups, warn
from transport.errors import LengthFileError

Group = tuple[int, ...]
"""Response lengths of one prompt's samples, tokens."""

UNIT_SIGMA = 0.8
"""Spread for which the error of a recall is looked up; it is proportional to the spread."""


def read_lengths(path: Path, group_size: int = 1, say: Say = warn) -> list[Group]:
    """Groups of lengths: a number a line, ``group_size`` lines a prompt; or JSON lines with ``output_tokens``.

    JSON lines are those of ``streamrl-orchestrator rank``: a prompt with one length or all of its samples'. Empty lines
    and what follows a ``#`` do not count; what is no length is skipped, and ``say`` hears of it.
    Raises: DataError: unreadable, empty, or too much in it is no length; names file and line.
    """
    if _is_log(path):
        return _logged(path, say)
    try:
        return read_groups(path, group_size, say)
    except LengthFileError as error:
        raise DataError(str(error)) from error


def _is_log(path: Path) -> bool:
    if path.suffix == ".gz":
        return True
    try:
        return path.read_bytes()[:4096].lstrip().startswith(b"{")
    except OSError:
        return False  # who reads it says why


def _logged(path: Path, say: Say) -> list[Group]:
    from ranker.errors import RankerError
    from ranker.logs import read_log

    try:
        return [sample.tokens for sample in read_log(path, say=say)]
    except RankerError as error:
        raise DataError(str(error)) from error


def representative(
    groups: Sequence[Group], *, batch: int, batches: int, prompt_tokens: int, recall: float | None, seed: int = 0
) -> RecordedLengths:
    """``batches`` batches of ``batch`` prompts each, and what a ranker says of them.

    recall: share of the longest 20% that the ranker finds, see ``lengths.long_tailed``; None: it knows each mean.
    """
    ordered = sorted(groups, key=fmean)
    chosen = [ordered[int((place + 0.5) / batch * len(ordered))] for place in range(batch)]
    chance = random.Random(f"representative/{seed}")
    lengths = [group for _ in range(batches) for group in chance.sample(chosen, batch)]
    logs = [math.log(fmean(group)) for group in chosen]
    middle, sigma = fmean(logs), pstdev(logs)
    error = 0.0 if recall is None else error_of_recall(recall) * sigma / UNIT_SIGMA
    trust = sigma * sigma / (sigma * sigma + error * error) if sigma else 0.0
    left = error * math.sqrt(trust)

    def expected(group: Group) -> float:
        seen = math.log(fmean(group)) + chance.gauss(0.0, error)
        return math.exp(middle + trust * (seen - middle) + left * left / 2)

    return RecordedLengths(
        lengths=lengths,
        questions=[prompt_tokens] * len(lengths),
        predicted=[expected(group) for group in lengths],
        sigma=math.hypot(left, within(chosen)),
    )


def within(groups: Sequence[Group]) -> float:
    """Spread of log lengths among the samples of a prompt, root mean square over prompts."""
    spreads = [pstdev([math.log(tokens) for tokens in group]) for group in groups if len(group) > 1]
    return math.sqrt(fmean(spread * spread for spread in spreads)) if spreads else 0.0
