"""A whole simulated run: the state, the clock, and an actor for each process; and what one says to a user: what an
iteration takes, where time is lost, how far it is from the bound."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.core.dispatch.compute import compute_plan
from orchestrator.core.model.outbox import CommandId
from orchestrator.core.model.settings import CoreSettings
from orchestrator.observability.report.bubbles import Usage, stages, total, usage_by_window
from orchestrator.observability.report.spans import Timeline, build_timeline
from orchestrator.sim.costs import ASSUMED, Assumptions
from orchestrator.sim.engine import Scenario, Simulation, SimulationLog, counted
from orchestrator.sim.generation import SimulatedPrompts, SimulatedRows, SimulatedSupervisor, start_worker
from orchestrator.sim.scenarios import Bound, Layout, Workload, bound, scenario
from orchestrator.sim.training import SimulatedTrainer
from transport.contracts.messages import Command, ComputePlan


def simulate(scenario: Scenario) -> SimulationLog:
    """Run one scenario from start to end. Raises SimulationStalledError."""
    simulation = Simulation(scenario)
    rows = SimulatedRows(simulation)
    SimulatedPrompts(simulation)
    SimulatedPlanner(simulation)
    SimulatedTrainer(simulation, rows)
    SimulatedSupervisor(simulation, rows)
    for index in range(scenario.workers):
        start_worker(simulation, rows, index, incarnation=1)
    collects = gc.isenabled()
    gc.disable()  # a run makes no cyclic garbage, and looking for some takes 6% of its time
    try:
        return simulation.run()
    finally:
        if collects:
            gc.enable()


PLAN_S = 0.02
"""Of virtual time: 1,024 prompts on 16 instances take about that live (``make bench NAME=dispatch``)."""


class SimulatedPlanner:
    """Computes plans of dispatch by the live code."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._requested: dict[int, ComputePlan] = {}
        simulation.attach(self._execute, ComputePlan)

    def _execute(self, _: CommandId, command: Command) -> None:
        assert isinstance(command, ComputePlan)
        self._requested[command.batch] = command
        self._simulation.after(PLAN_S, partial(self._answer, command))

    def _answer(self, command: ComputePlan) -> None:
        """Of several requests for one batch, the last counts."""
        if self._requested.get(command.batch) is command:
            del self._requested[command.batch]
            self._simulation.report(compute_plan(command, self._simulation.state.settings))


# -- a user's scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
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


def performance(
    workload: Workload,
    layout: Layout,
    pipeline: CoreSettings,
    *,
    dispatch: str,
    iterations: int,
    assumed: Assumptions = ASSUMED,
) -> Performance:
    """Simulate it. pipeline: one of PIPELINES, or one with aids.

    Raises DoesNotFitError, ValueError (what cannot be split so), SampleTooLongError.
    """
    log = simulate(
        scenario(
            workload,
            layout,
            pipeline,
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
    return Performance(
        iteration_s=seconds,
        bound=least,
        bound_s=least.iteration_s(pipeline, in_turn=layout.colocated),
        samples_per_s=workload.batch * workload.group_size / seconds,
        tokens_per_s=log.tokens / iterations / seconds,
        usage={stage: total([usage[track][0] for track in tracks]) for stage, tracks in stages(timeline).items()},
        mean_age=log.mean_age,
        oldest_age=log.oldest_age,
        timeline=timeline,
    )
