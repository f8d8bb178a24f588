"""Many experiments, each once, on several processes; and what they rest on: every constant 20% lower and higher.

Equal work is done once; results do not depend on how many processes there are. With a file to keep them in, an
interrupted bench goes on where it was.
"""

from __future__ import annotations

import functools
import hashlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
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

ROOT = Path(__file__).parents[2]
DECIDING = ("orchestrator/core", "orchestrator/sim", "transport/contracts", "benchmarks/papers")
"""Folders whose code says what a trial comes to."""


class _Line(msgspec.Struct, frozen=True):
    trial: str
    result: float | str


@dataclass(slots=True)
class Kept:
    """Results of trials, and the file that keeps them; None: none does. Those of other code are not taken."""

    path: Path | None = None
    found: dict[str, float | str] = field(default_factory=dict[str, float | str])

    @classmethod
    def read(cls, path: Path | None) -> Kept:
        """Of a file that need not exist. A line that was cut off is left out."""
        kept = cls(path)
        if path is not None and path.exists():
            for line in path.read_bytes().splitlines():
                try:
                    one = msgspec.json.decode(line, type=_Line)
                except msgspec.DecodeError:
                    continue
                kept.found[one.trial] = one.result
        return kept

    def get(self, trial: Trial) -> float | str | None:
        return self.found.get(_name(trial))

    def add(self, trial: Trial, result: float | str) -> None:
        name = _name(trial)
        self.found[name] = result
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(_Line(name, result)) + b"\n")


def _name(trial: Trial) -> str:
    return hashlib.sha256(f"{_code()} {trial!r}".encode()).hexdigest()


@functools.cache
def _code() -> str:
    """Of the code that decides what trials come to."""
    digest = hashlib.sha256()
    for folder in DECIDING:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def run_trials(
    trials: Iterable[Trial], *, jobs: int = 1, progress: Progress | None = None, kept: Kept | None = None
) -> Results:
    """Trial -> seconds, or why it does not fit. jobs: processes, at least 1; 1 uses none but this."""
    return dict(each_result(trials, jobs=jobs, progress=progress, kept=kept))


def each_result(
    trials: Iterable[Trial], *, jobs: int = 1, progress: Progress | None = None, kept: Kept | None = None
) -> Iterator[tuple[Trial, float | str]]:
    """The same one after another, in their order, so that an interrupted call leaves those before.

    Equal trials, and those whose assumptions cost the same, are done once; those that are kept, not again.
    """
    kept = Kept() if kept is None else kept
    alike = _alike(trials)
    known = [next((result for trial in twins if (result := kept.get(trial)) is not None), None) for twins in alike]
    results = _results([twins[0] for twins, result in zip(alike, known, strict=True) if result is None], jobs)
    for done, (twins, earlier) in enumerate(zip(alike, known, strict=True), start=1):
        result = next(results) if earlier is None else earlier
        if earlier is None:
            kept.add(twins[0], result)
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
    for one in msgspec.structs.fields(Assumptions):
        if not isinstance(getattr(ASSUMED, one.name), int | float):
            continue
        for factor in (1 - MOVE, 1 + MOVE):
            value = getattr(ASSUMED, one.name) * factor
            most = 1.0 if one.name in SHARES else float("inf")
            name = f"{one.name} x {factor:.1f}" if value <= most else f"{one.name} = 1"
            moved[name] = msgspec.structs.replace(ASSUMED, **{one.name: min(value, most)})
    return moved
