"""Growth of a run's processes and of its journal, from readings of what they occupy (``benchmarks/soak.py``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

SAMPLE_S = 5.0
"""From one reading to the next."""
YOUNG_S = 40.0
"""Age at which processes of one role are compared with one another: they have started."""
FEWEST, FEWEST_LIVES = 12, 6
"""Readings of a process, and processes of a role, from which a growth is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one process occupies at one moment. age_s: since it began. nbytes: memory that is its own."""

    at_s: float
    role: str
    pid: int
    age_s: float
    nbytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the run has written at one moment."""

    at_s: float
    batches: int
    journal_bytes: int


def gains(readings: Sequence[Reading], settle_s: float) -> dict[str, tuple[float, int, int]]:
    """Process that lived long enough -> (share of its memory gained in an hour, descriptors and threads gained).

    Medians of the first and the last third of its life after ``settle_s`` are compared.
    """
    by_process: defaultdict[tuple[str, int], list[Reading]] = defaultdict(list)
    for reading in readings:
        if reading.age_s >= settle_s:
            by_process[reading.role, reading.pid].append(reading)
    return {
        f"{role} {pid}": (
            _hourly(some),
            round(_change(some, lambda one: one.descriptors)),
            round(_change(some, lambda one: one.threads)),
        )
        for (role, pid), some in by_process.items()
        if len(some) >= FEWEST and some[-1].at_s - some[0].at_s >= settle_s / 2
    }


def gains_of_lives(readings: Sequence[Reading], after_s: float) -> dict[str, float]:
    """Role -> share of its memory gained in an hour, from one young process to the next."""
    young: dict[tuple[str, int], Reading] = {}
    for one in readings:
        if one.age_s >= YOUNG_S and one.at_s >= after_s:
            young.setdefault((one.role, one.pid), one)
    by_role: defaultdict[str, list[Reading]] = defaultdict(list)
    for one in young.values():
        by_role[one.role].append(one)
    return {role: _hourly(some) for role, some in by_role.items() if len(some) >= FEWEST_LIVES}


def _thirds(some: Sequence[Reading]) -> tuple[Sequence[Reading], Sequence[Reading]]:
    third = max(1, len(some) // 3)
    return some[:third], some[-third:]


def _change(some: Sequence[Reading], value: Callable[[Reading], float]) -> float:
    first, last = _thirds(some)
    return median(map(value, last)) - median(map(value, first))


def _hourly(some: Sequence[Reading]) -> float:
    """Share of their memory that readings gain in an hour."""
    hours = _change(some, lambda one: one.at_s) / 3600
    return _change(some, lambda one: one.nbytes) / max(1.0, median(one.nbytes for one in some)) / max(1e-9, hours)


def ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The median value of the last third of (moment, value) over that of the first; None of too few."""
    third = len(pairs) // 3
    if third < 2:
        return None
    values = [value for _, value in sorted(pairs)]
    return round(median(values[-third:]) / max(1e-9, median(values[:third])), 3)


def bytes_a_batch(written: Sequence[Written], after_s: float) -> list[tuple[float, float]]:
    """(moment, bytes that the journal gained a batch), of every minute in which batches were trained."""
    steps = written[:: round(60.0 / SAMPLE_S)]
    return [
        (one.at_s, (next_one.journal_bytes - one.journal_bytes) / (next_one.batches - one.batches))
        for one, next_one in pairwise(steps)
        if one.at_s >= after_s and next_one.batches > one.batches
    ]
