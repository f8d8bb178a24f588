"""A whole simulated run: the state, the clock, and an actor for each process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from orchestrator.core.dispatch.compute import compute_plan
from orchestrator.core.model.outbox import CommandId
from orchestrator.sim.engine import Scenario, Simulation, SimulationLog
from orchestrator.sim.generation import SimulatedSupervisor, start_worker
from orchestrator.sim.rows import SimulatedPrompts, SimulatedRows
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
    with _without_collection():
        return simulation.run()


@contextmanager
def _without_collection() -> Iterator[None]:
    """No look for cyclic garbage meanwhile: a run makes none, and looking takes 6% of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
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
        if isinstance(command, ComputePlan):
            self._requested[command.batch] = command
            self._simulation.after(PLAN_S, partial(self._answer, command))

    def _answer(self, command: ComputePlan) -> None:
        """Of several requests for one batch, the last counts."""
        if self._requested.get(command.batch) is command:
            del self._requested[command.batch]
            self._simulation.report(compute_plan(command, self._simulation.state.settings))
