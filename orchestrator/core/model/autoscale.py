"""How many generation workers a run should have, as lengths and stage times drift.

Owns: the rule, and what it must remember between two iterations. Never: starts or ends a worker, reads a clock.
Invariant: the answer lies within ``min_workers`` and ``max_workers``; a worker that was drained is not wanted back by
the same measurements, because adding asks for more than draining may cost.

    measured iteration ──► the last ``confirm`` with these workers agree ──► Change, then ``rest`` iterations of peace

The trainer's size is fixed: another one means another process group, so a restart (StreamRL sec. 4.2). Ours: minimum
gain, hysteresis, confirmation, rest, limits and draining, which the paper leaves open. Its own rule is ``gap``, which
fires at every iteration once more instances do not shorten the longest sample, and never drains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TypeAlias

import msgspec

from orchestrator.core.model.settings import ScalingSettings
from transport.contracts.continuous_batching import DecodeCost, finish_times
from transport.contracts.types import WorkerId

Estimate: TypeAlias = Callable[[int], float]
"""Workers -> seconds that generation of a batch takes. Only its ratios count: they scale what was measured."""


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One trained batch, as measured.

    workers: that generated for it.
    generation_s: that generation needed. Where batches overlap: from one version to the next, without what workers
    waited for the trainer (mean over workers).
    training_s: that the trainer was busy: rounds and optimizer.
    exposed_s: of the training, what came after the batch's last sample while generation waited for it; 0 where batches
    overlap (max_staleness >= 1).
    """

    batch: int
    workers: int
    generation_s: float
    training_s: float
    exposed_s: float = 0.0

    @property
    def delta_s(self) -> float:
        """StreamRL's delta (sec. 4.2): by how much generation is the slower stage."""
        return self.generation_s - self.training_s

    def predicted_s(self, workers: int, estimate: Estimate) -> float:
        """This iteration with other workers: generation as the estimate says, training as it was."""
        return max(self.generation_with(workers, estimate) + self.exposed_s, self.training_s)

    def saved_s(self, more: int, estimate: Estimate) -> float:
        """StreamRL's delta': by how much generation shortens with ``more`` workers besides."""
        return self.generation_s - self.generation_with(self.workers + more, estimate)

    def generation_with(self, workers: int, estimate: Estimate) -> float:
        """What was measured, scaled by the estimate's ratio: its bias cancels."""
        now_s = estimate(self.workers) if workers != self.workers else 0.0
        return self.generation_s * estimate(workers) / now_s if now_s > 0 else self.generation_s


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """From so many workers to so many, after ``batch``.

    delta_s: mean of what was judged.  before_s, after_s: an iteration now, and as predicted.
    """

    batch: int
    from_workers: int
    to_workers: int
    delta_s: float
    before_s: float
    after_s: float

    @property
    def reason(self) -> str:
        """For journal and people."""
        slower = "generation" if self.delta_s > 0 else "training"
        return (
            f"{slower} is slower by {abs(self.delta_s):.3g} s; {self.to_workers} instead of {self.from_workers} "
            f"workers make an iteration {self.after_s:.3g} s instead of {self.before_s:.3g} s"
        )


class Scaling(msgspec.Struct, kw_only=True):
    """What is remembered: the iterations that count, and the peace that is left.

    workers: that are wanted now, 0 before the first iteration.  peace: iterations that will not be judged.
    """

    workers: int = 0
    peace: int = 0
    recent: list[Iteration] = msgspec.field(default_factory=list[Iteration])

    def observe(self, settings: ScalingSettings, iteration: Iteration, estimate: Estimate) -> Change | None:
        """Judge one iteration; returns what to change, mostly nothing.

        An iteration with other workers than wanted is not judged while the change may still be on its way; after
        ``rest`` iterations what is there is taken for granted, so that a lost worker does not end all scaling.
        """
        if settings.rule == "gap":
            return gap(settings, iteration, estimate)
        if self.peace > 0:
            self.peace -= 1
            self.recent.clear()
            return None
        if iteration.workers != self.workers:
            self.workers = iteration.workers
            self.recent.clear()
        self.recent = [*self.recent[-(settings.confirm - 1) :], iteration] if settings.confirm > 1 else [iteration]
        wanted = self._wanted(settings, estimate)
        if wanted == self.workers:
            return None
        change = Change(
            batch=iteration.batch,
            from_workers=self.workers,
            to_workers=wanted,
            delta_s=fmean(recent.delta_s for recent in self.recent),
            before_s=fmean(recent.predicted_s(self.workers, estimate) for recent in self.recent),
            after_s=fmean(recent.predicted_s(wanted, estimate) for recent in self.recent),
        )
        self.workers, self.peace = wanted, settings.rest
        self.recent.clear()
        return change

    def _wanted(self, settings: ScalingSettings, estimate: Estimate) -> int:
        """The smallest change that all iterations call for; none where they do not agree on its direction."""
        workers = self.workers
        if not settings.min_workers <= workers <= settings.max_workers:
            return min(max(workers, settings.min_workers), settings.max_workers)
        wanted = [gainful(settings, iteration, estimate) for iteration in self.recent]
        if len(wanted) < settings.confirm or min(wanted) <= workers <= max(wanted):
            return workers
        return min(wanted) if min(wanted) > workers else max(wanted)


def gainful(settings: ScalingSettings, iteration: Iteration, estimate: Estimate) -> int:
    """Workers that this iteration calls for: units are added while each saves enough, or one goes that saves nothing.

    Source: ours. What counts is the iteration, not the gap: a unit that overshoots balance still saves the gap, and one
    that shortens nothing (the longest sample alone is the end of generation) is not added however large the gap is.
    """
    workers, now_s = iteration.workers, iteration.predicted_s(iteration.workers, estimate)
    while workers + settings.unit <= settings.max_workers:
        more = workers + settings.unit
        saved_s = iteration.predicted_s(workers, estimate) - iteration.predicted_s(more, estimate)
        if saved_s < settings.min_gain * now_s:
            break
        workers = more
    fewer = iteration.workers - settings.unit
    if workers > iteration.workers or fewer < settings.min_workers:
        return workers
    return fewer if iteration.predicted_s(fewer, estimate) <= (1 + settings.max_loss) * now_s else workers


def gap(settings: ScalingSettings, iteration: Iteration, estimate: Estimate) -> Change | None:
    """A unit more when delta >= delta', the seconds of generation that it saves.

    It asks for no gain, confirmation or rest; ``max_workers`` alone ends it. Source: StreamRL sec. 4.2, as printed.
    """
    more = iteration.workers + settings.unit
    if more > settings.max_workers or iteration.delta_s < iteration.saved_s(settings.unit, estimate):
        return None
    return Change(
        batch=iteration.batch,
        from_workers=iteration.workers,
        to_workers=more,
        delta_s=iteration.delta_s,
        before_s=iteration.predicted_s(iteration.workers, estimate),
        after_s=iteration.predicted_s(more, estimate),
    )


def pace_of(
    cost: DecodeCost,
    lengths: Sequence[float],
    *,
    prompt_tokens: float = 0.0,
    max_running: int,
    max_staleness: int,
) -> Estimate:
    """Seconds from batch to batch that so many equal workers keep up with, where batches overlap.

    No worker is ever empty then: what counts is its throughput at the batch that its share keeps running, what slots
    and memory hold, and that the longest sample ends within the staleness bound.

    Args:    lengths: [N] response tokens of a recent batch, > 0.  max_running: slots of a worker.
    Source:  ours, the steady state of ``DecodeCost.steady_step_s``. 72B in flight, 3 -> 4 instances: simulated 22%
             sooner, by the end of one batch alone 14%.
    """
    tokens, longest = float(sum(lengths)), max(lengths)
    context = sum(length * (prompt_tokens + length / 2) for length in lengths)
    held = cost.held_tokens(tokens, context + prompt_tokens * len(lengths), prompt_tokens + longest)

    def keeps_up(workers: int, period_s: float) -> bool:
        share = workers * period_s
        step_s = cost.steady_step_s(tokens / share, context / share)
        return (
            longest * step_s <= (max_staleness + 1) * period_s
            and tokens * step_s <= max_running * share
            and held * step_s <= cost.kv_capacity_tokens * share
        )

    def seconds(workers: int) -> float:
        low, high = 0.0, cost.step_s(1, prompt_tokens)
        while not keeps_up(max(1, workers), high):
            low, high = high, 2 * high
        for _ in range(PACE_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if keeps_up(max(1, workers), middle) else (middle, high)
        return high

    return seconds


PACE_HALVINGS = 20
"""Of a doubled time from batch to batch: the rest, one in a million, is far below ``max_loss``."""


def estimate_of(
    cost: DecodeCost, lengths: Sequence[float], *, prompt_tokens: float = 0.0, max_running: int
) -> Estimate:
    """Generation of samples like these on so many equal workers, every one with its even share, longest first.

    Args:    lengths: [N] response tokens of a recent batch, > 0.  max_running: slots of a worker.
    Source:  StreamRL sec. 4.2 (profile and current workload). The instance with the longest sample is taken for all:
             shares are dealt from the sorted lengths, so the others end sooner.
    """
    longest = sorted(lengths, reverse=True)

    def seconds(workers: int) -> float:
        share = longest[:: max(1, workers)]
        return max(finish_times(cost, share, prompt_tokens=prompt_tokens, max_running=max_running), default=0.0)

    return seconds


class Elastic(msgspec.Struct, kw_only=True):
    """What is remembered of workers that come and go while a run goes on.

    since_s: when the newest version was trained, None before the first: until then nothing is measured.
    training_s: seconds of the trainer's work since.  idle_s: worker-seconds without a sample.  present_s: of all.
    begun_s, ended_s: since then, when the first sample ran, and when the last one came.
    spawned: workers asked for in all.  asked_s: when, of those that have not joined.  lost_s: by name without the
    incarnation, when a worker died that may be started again.  draining: workers that are to leave and not gone.
    judged: the last iteration.  saved_s: delta' of it.
    """

    scaling: Scaling = msgspec.field(default_factory=Scaling)
    since_s: float | None = None
    training_s: float = 0.0
    idle_s: float = 0.0
    present_s: float = 0.0
    begun_s: float | None = None
    ended_s: float | None = None
    spawned: int = 0
    asked_s: list[float] = msgspec.field(default_factory=list[float])
    lost_s: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    draining: list[WorkerId] = msgspec.field(default_factory=list[WorkerId])
    last: Change | None = None
    judged: Iteration | None = None
    saved_s: float = 0.0

    def compared(self, batch: int) -> dict[str, float]:
        """delta and delta' of the iteration that ended with ``batch``; {} where it was not judged."""
        if self.judged is None or self.judged.batch != batch:
            return {}
        return {"delta_s": self.judged.delta_s, "saved_s": self.saved_s}
