"""Many experiments, each once, on several processes; and what they rest on: every constant 20% lower and higher.

Equal work is done once; results do not depend on how many processes there are.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from benchmarks.papers.experiments import Experiment
from orchestrator.sim.costs import ASSUMED, Assumptions, DoesNotFitError

MOVE = 0.2
"""By which each constant is moved: about the width of the ranges that the sources of ``Assumptions`` give."""
SHARES = frozenset(
    {
        "memory_efficiency",
        "kv_efficiency",
        "gemm_efficiency",
        "link_efficiency",
        "usable_memory",
        "mfu",
        "host_efficiency",
        "network_efficiency",
    }
)
"""Constants that are a share of something: they are moved up to 1 at most."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how many of how many are done."""
PROGRESS_EVERY_S = 5.0
"""Between two lines of progress where there is no terminal."""


class ProgressLine:
    """How far it is, on standard error: a line that changes, or a line every few seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._terminal = sys.stderr.isatty()
        self._began_s = self._said_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done < total and now_s - self._said_s < (0.2 if self._terminal else PROGRESS_EVERY_S):
            return
        self._said_s = now_s
        end = "\r" if self._terminal and done < total else "\n"
        line = f"{self._what} {done} of {total}, {now_s - self._began_s:.0f} s"
        print(f"{line:<60}" if self._terminal else line, file=sys.stderr, end=end, flush=True)


@dataclass(frozen=True, slots=True)
class Trial:
    """One experiment to be done. The result of one that does not fit is the reason."""

    experiment: Experiment
    seed: int
    iterations: int
    assumed: Assumptions = ASSUMED

    def run(self) -> float | str:
        try:
            return self.experiment.seconds(self.seed, self.iterations, self.assumed)
        except DoesNotFitError as error:
            return str(error)


Results: TypeAlias = Mapping[Trial, float | str]


def run_trials(trials: Iterable[Trial], *, jobs: int = 1, progress: Progress | None = None) -> Results:
    """Trial -> seconds, or why it does not fit. jobs: processes, at least 1; 1 uses none but this."""
    return dict(each_result(trials, jobs=jobs, progress=progress))


def each_result(
    trials: Iterable[Trial], *, jobs: int = 1, progress: Progress | None = None
) -> Iterator[tuple[Trial, float | str]]:
    """The same one after another, in their order, so that an interrupted call leaves those before.

    Equal trials, and those whose assumptions cost the same, are done once.
    """
    alike = _alike(trials)
    results = _results([twins[0] for twins in alike], jobs)
    for done, (twins, result) in enumerate(zip(alike, results, strict=True), start=1):
        if progress is not None:
            progress(done, len(alike))
        for trial in twins:
            yield trial, result


def _results(todo: Sequence[Trial], jobs: int) -> Iterator[float | str]:
    if jobs == 1:
        yield from map(Trial.run, todo)
        return
    with ProcessPoolExecutor(max_workers=jobs, initializer=_leave_interrupts_to_the_parent) as pool:
        yield from pool.map(Trial.run, todo)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _alike(trials: Iterable[Trial]) -> list[list[Trial]]:
    """The trials, those together that must have one result."""
    wanted = list(dict.fromkeys(trials))
    counts = Counter((trial.experiment, trial.seed, trial.iterations) for trial in wanted)
    found: dict[Hashable, list[Trial]] = {}
    for trial in wanted:
        same = trial.experiment, trial.seed, trial.iterations
        found.setdefault((same, _key(trial)) if counts[same] > 1 else same, []).append(trial)
    return list(found.values())


def _key(trial: Trial) -> Hashable:
    try:
        return trial.experiment.key(trial.assumed)
    except DoesNotFitError as error:
        return str(error)


def moves() -> dict[str, Assumptions]:
    """What was moved, as "mfu x 0.8" -> assumptions with that constant moved; what is no number stays."""
    moved: dict[str, Assumptions] = {}
    for field in msgspec.structs.fields(Assumptions):
        if not isinstance(getattr(ASSUMED, field.name), int | float):
            continue
        for factor in (1 - MOVE, 1 + MOVE):
            value = getattr(ASSUMED, field.name) * factor
            most = 1.0 if field.name in SHARES else float("inf")
            name = f"{field.name} x {factor:.1f}" if value <= most else f"{field.name} = 1"
            moved[name] = msgspec.structs.replace(ASSUMED, **{field.name: min(value, most)})
    return moved
