"""What to do with some GPUs: the best split, the runner-up, and the even split that needs no thought.

Owns: the order of a search: bounds, short simulations, long ones of the few that are close. Never: prints. Invariant:
everything that is compared in the end was simulated by the same window on the same lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.core.costs.analytic import decode_cost
from orchestrator.core.model.autoscale import estimate_of
from orchestrator.planning.allocation import Found, Objective, Outcome, Pool, Split, ranked, score, search, splits
from orchestrator.planning.split_search import (
    LONG,
    SHORT,
    Job,
    Prediction,
    Simulate,
    bound_of,
    iteration_s,
    predict,
    simulating,
    slots_of,
)
from orchestrator.sim.scenarios import Workload

CLOSE = 0.05
"""Short simulations are believed so far: whoever is within it of the best is simulated longer."""
FINALISTS = 6

Progress = Callable[[int, int, Outcome], None]


def silent(done: int, most: int, best: Outcome) -> None:
    """For callers who show nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answer. runner_up: of another size or place; None where there is no other.  even: the split that needs no
    thought, with its best degrees; None where none fits, or where it has the same sizes as the plan."""

    best: Prediction
    runner_up: Prediction | None
    even: Prediction | None
    found: Found


def advise(
    job: Job, pools: Sequence[Pool], minimise: Objective = "time", *, processes: int = 1, progress: Progress = silent
) -> Advice:
    """Search. Raises DoesNotFitError: nothing fits; the message says what would."""
    candidates = splits(
        job.llm,
        pools,
        context_tokens=job.context_tokens,
        max_instances=job.samples,
        minimise=minimise,
        assumed=job.assumed,
    )
    workload = job.workload(1)
    bounds = Bounds(job, workload)
    with simulating(processes) as simulate:
        found = search(
            candidates,
            bounds.iteration_s,
            lambda chosen: simulate(partial(iteration_s, job, SHORT), chosen),
            minimise=minimise,
            at_once=processes,
            progress=progress,
        )
        finalists = _finalists(found, candidates, bounds, minimise)
        return _judged(job, simulate, finalists, bounds.quickest(_even(candidates)), found, minimise)


def _judged(
    job: Job,
    simulate: Simulate,
    finalists: list[Split],
    even: Split | None,
    found: Found,
    minimise: Objective,
) -> Advice:
    compared = finalists if even is None or even in finalists else [*finalists, even]
    predictions = dict(zip(compared, simulate(partial(predict, job, LONG), compared), strict=True))
    measured = [
        Outcome(split=split, bound_s=0.0, iteration_s=prediction.iteration_s)
        for split, prediction in predictions.items()
    ]
    order = [outcome.split for outcome in ranked(measured, minimise)]
    others = [split for split in order[1:] if _place(split) != _place(order[0])]
    return Advice(
        best=predictions[order[0]],
        runner_up=predictions[others[0]] if others else None,
        even=predictions[even] if even in others else None,
        found=found,
    )


def _place(split: Split) -> tuple[str, int, str, int]:
    return split.generation.place, split.generation_gpus, split.training.place, split.training_gpus


def _finalists(found: Found, candidates: Sequence[Split], bounds: Bounds, minimise: Objective) -> list[Split]:
    """The close ones, and in any case one of another size: the best measured, else the one with the best bound."""
    order = ranked(found.outcomes, minimise)
    limit = (1 + CLOSE) * score(order[0], minimise)
    close = [outcome.split for outcome in order if score(outcome, minimise) <= limit][:FINALISTS]
    others = [outcome.split for outcome in order if _place(outcome.split) != _place(close[0])]
    if not others:
        elsewhere = [split for split in candidates if _place(split) != _place(close[0])]
        others = [outcome.split for outcome in ranked(map(bounds.outcome, elsewhere), minimise)]
    return list(dict.fromkeys([*close, *others[:1]]))


# -- bounds, and the split that needs no thought


class Bounds:
    """Bounds of splits, computed once each."""

    def __init__(self, job: Job, workload: Workload) -> None:
        self._job = job
        self._workload = workload
        self._makespans: dict[tuple[str, int], Callable[[int], float]] = {}
        self._known: dict[Split, tuple[float, float]] = {}

    def iteration_s(self, split: Split) -> float:
        """What no schedule of the job's pipeline beats."""
        return bound_of(self._job, self._workload, split).iteration_s(self._job.settings.max_staleness)

    def outcome(self, split: Split) -> Outcome:
        """As if it were reached."""
        bound_s = self.iteration_s(split)
        return Outcome(split=split, bound_s=bound_s, iteration_s=bound_s)

    def stages_s(self, split: Split) -> tuple[float, float]:
        """Each stage by itself: generation with even shares, longest first; training without waiting."""
        if split not in self._known:
            training_s = bound_of(self._job, self._workload, split).training_s
            self._known[split] = self._makespan(split)(split.instances), training_s
        return self._known[split]

    def _makespan(self, split: Split) -> Callable[[int], float]:
        key = split.generation.gpu.name, split.tensor_parallel
        if key not in self._makespans:
            job = self._job
            lengths = [
                float(group[sample % len(group)])
                for group in self._workload.lengths.lengths
                for sample in range(job.group_size)
            ]
            cost = decode_cost(job.llm, split.generation.gpu, split.tensor_parallel, job.assumed)
            self._makespans[key] = estimate_of(
                cost, lengths, prompt_tokens=float(job.prompt_tokens), max_running=slots_of(split.generation.gpu)
            )
        return self._makespans[key]

    def quickest(self, candidates: Sequence[Split]) -> Split | None:
        """Of these the one whose slower stage is the fastest."""
        return min(candidates, key=lambda split: max(self.stages_s(split)), default=None)


def _even(candidates: Sequence[Split]) -> list[Split]:
    """One pool each, or half and half of the only one: what needs no thought (StreamRL fig. 10)."""
    apart = [split for split in candidates if split.generation is not split.training and _whole(split)]
    return apart or [split for split in candidates if 2 * split.generation_gpus == split.generation.num_gpus]


def _whole(split: Split) -> bool:
    return (split.generation_gpus, split.training_gpus) == (split.generation.num_gpus, split.training.num_gpus)
