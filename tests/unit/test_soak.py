"""What the figure ``soak`` makes of its readings: who grew, and what the run writes a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from benchmarks.soak import is_reached
from benchmarks.soak_growth import Reading, Written, bytes_a_batch, gains, gains_of_lives, ratio

MB = 1_000_000


def life(
    role: str,
    pid: int,
    began_s: float,
    seconds: int,
    nbytes: Callable[[float], float],
    descriptors: Callable[[float], int] = lambda age_s: 30,
) -> Iterable[Reading]:
    """A process that is read every 5 s. nbytes, descriptors: by its age."""
    for age_s in range(0, seconds, 5):
        yield Reading(
            at_s=began_s + age_s,
            role=role,
            pid=pid,
            age_s=age_s,
            nbytes=round(nbytes(age_s)),
            descriptors=descriptors(age_s),
            threads=4,
        )


def test_growth_is_what_a_process_gains_after_it_has_settled() -> None:
    readings = [
        *life("train", 1, 0, 3600, lambda age_s: 100 * MB + min(age_s, 600) * MB),  # fills its caches, and stays
        *life("score", 2, 0, 3600, lambda age_s: 100 * MB + 10 * MB * age_s / 3600),
        *life("broker", 3, 0, 300, lambda age_s: MB * (1 + age_s)),  # was killed too soon to be judged
        *life("generate", 4, 0, 3600, lambda age_s: 50 * MB, lambda age_s: 30 + int(age_s // 1000)),
    ]
    found = gains(readings, 600)
    assert found.keys() == {"train 1", "score 2", "generate 4"}
    assert found["train 1"] == (0.0, 0, 0)
    assert found["score 2"][0] == pytest.approx(10 / 106, rel=0.02)
    assert found["generate 4"] == (0.0, 2, 0)


def test_what_every_new_process_takes_over_is_growth_too() -> None:
    lives = [one for n in range(10) for one in life("train", n, 300 * n, 60, lambda age_s, n=n: (100 + n) * MB)]
    steady = [one for n in range(10) for one in life("score", n, 300 * n, 60, lambda age_s: 80 * MB)]
    assert gains_of_lives([*lives, *steady], 0) == {"train": pytest.approx(12 / 105, rel=0.05), "score": 0.0}


def test_the_journal_is_counted_a_batch_and_late_over_early() -> None:
    even = [Written(at_s=5.0 * n, batches=10 * n, journal_bytes=2000 * n) for n in range(121)]
    more = [Written(at_s=5.0 * n, batches=10 * n, journal_bytes=n * n) for n in range(121)]
    assert {value for _, value in bytes_a_batch(even, 60)} == {200}
    assert ratio(bytes_a_batch(even, 0)) == 1.0
    assert (ratio(bytes_a_batch(more, 0)) or 0) > 3
    assert ratio([(1.0, 2.0)] * 5) is None


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ({}, True),
        ({"soak_growth": 0.021}, False),
        ({"soak_lost": 1}, False),
        ({"soak_twice": 1}, False),
        ({"descriptors_gained": 5}, True),
        ({"descriptors_gained": 6}, False),
        ({"processes_measured": 0}, False),
        ({"survived": False}, False),
        ({"audit_clean": False}, False),
    ],
)
def test_a_soak_is_reached_when_nothing_is_lost_or_grows(changed: dict[str, object], reached: bool) -> None:
    none = dict.fromkeys(("soak_lost", "soak_twice", "descriptors_gained", "threads_gained"), 0)
    figures = {**none, "soak_growth": 0.02, "survived": True, "audit_clean": True, "processes_measured": 5}
    assert is_reached(figures | changed) == reached
