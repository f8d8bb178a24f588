"""One simulated scenario of a user: what an iteration takes, where time is lost, how far it is from the bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.core.costs.hardware import ASSUMED, Assumptions
from orchestrator.observability.report.bubbles import Usage, stages, total, usage_by_window
from orchestrator.observability.report.spans import Timeline, build_timeline
from orchestrator.sim.bounds import Bound, bound
from orchestrator.sim.log import counted
from orchestrator.sim.scenarios import PIPELINES, Layout, Workload, scenario
from orchestrator.sim.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scenario does, its first and last iterations left out.

    iteration_s: seconds from version to version.  bound: of each stage.  bound_s: of an iteration, as the pipeline may
    overlap.  samples_per_s, tokens_per_s: of responses.  usage: stage -> present and idle seconds by cause; of
    generation summed over instances, a slot that is never used being none.
    mean_age, oldest_age: versions that trained tokens were behind.
    """

    iteration_s: float
    bound: Bound
    bound_s: float
    samples_per_s: float
    tokens_per_s: float
    usage: Mapping[str, Usage]
    mean_age: float
    oldest_age: int
    timeline: Timeline


def run(
    workload: Workload,
    layout: Layout,
    pipeline: str,
    *,
    dispatch: str,
    iterations: int,
    assumed: Assumptions = ASSUMED,
) -> Outcome:
    """Simulate it. Raises DoesNotFitError, ValueError (what cannot be split so), SampleTooLongError."""
    log = simulate(
        scenario(
            workload,
            layout,
            PIPELINES[pipeline],
            iterations=iterations,
            assumed=assumed,
            dispatch=dispatch,
            record=True,
        )
    )
    warm_up, cool_down = counted(iterations)
    timeline = build_timeline(record for record, _ in log.history)
    edges = [log.published_s[warm_up - 1] if warm_up else 0.0, log.published_s[iterations - cool_down - 1]]
    usage = usage_by_window(timeline, edges)
    seconds = log.iteration_s(warm_up, cool_down)
    slots = layout.slots if layout.generation_gpu.measured is not None else 100_000
    least = bound(workload, replace(layout, slots=slots), assumed)
    in_turn_s = max(least.generation_s, least.longest_s) + least.training_s
    return Outcome(
        iteration_s=seconds,
        bound=least,
        bound_s=in_turn_s if layout.colocated else least.iteration_s(PIPELINES[pipeline].max_staleness),
        samples_per_s=workload.batch * workload.group_size / seconds,
        tokens_per_s=log.tokens / iterations / seconds,
        usage={stage: total([usage[track][0] for track in tracks]) for stage, tracks in stages(timeline).items()},
        mean_age=log.mean_age,
        oldest_age=log.oldest_age,
        timeline=timeline,
    )
