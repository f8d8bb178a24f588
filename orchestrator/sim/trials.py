"""Many experiments, each once, on several processes; and what they rest on: every constant 20% lower and higher.

Owns: doing equal work once. Never: what is measured (``experiment.py``), what it means. Invariant: results do not
depend on how many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from orchestrator.core.analytic import DoesNotFitError
from orchestrator.core.hardware import ASSUMED, Assumptions
from orchestrator.sim.experiment import Experiment

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
"""Hears how many of how many are done."""


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
    """Trial -> seconds, or why it does not fit. Equal trials, and moves that change nothing, are done once.

    jobs: processes, at least 1; 1 uses none but this.
    """
    wanted = list(dict.fromkeys(trials))
    twins = {trial: _twin(trial) for trial in wanted}
    todo = list(dict.fromkeys(twins.values()))
    found: dict[Trial, float | str] = {}
    for trial, result in zip(todo, _results(todo, jobs), strict=True):
        found[trial] = result
        if progress is not None:
            progress(len(found), len(todo))
    return {trial: found[twin] for trial, twin in twins.items()}


def _results(todo: Sequence[Trial], jobs: int) -> Iterator[float | str]:
    if jobs == 1:
        yield from map(Trial.run, todo)
        return
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        yield from pool.map(Trial.run, todo)


def _twin(trial: Trial) -> Trial:
    """The trial under the unmoved assumptions, where it costs the same under these."""
    if trial.assumed == ASSUMED:
        return trial
    try:
        same = trial.experiment.key(trial.assumed) == trial.experiment.key(ASSUMED)
    except DoesNotFitError:
        return trial
    return Trial(trial.experiment, trial.seed, trial.iterations) if same else trial


def moves() -> dict[str, Assumptions]:
    """What was moved, as "mfu x 0.8" -> assumptions with that constant moved."""
    moved: dict[str, Assumptions] = {}
    for field in msgspec.structs.fields(Assumptions):
        for factor in (1 - MOVE, 1 + MOVE):
            value = getattr(ASSUMED, field.name) * factor
            most = 1.0 if field.name in SHARES else float("inf")
            name = f"{field.name} x {factor:.1f}" if value <= most else f"{field.name} = 1"
            moved[name] = msgspec.structs.replace(ASSUMED, **{field.name: min(value, most)})
    return moved
