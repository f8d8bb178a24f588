"""A whole simulated run: the state, the clock, and an actor for each process.

Owns: the wiring. Never: decisions.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.sim.engine import Scenario, Simulation, SimulationLog
from orchestrator.sim.generation import SimulatedSupervisor, start_worker
from orchestrator.sim.planning import SimulatedPlanner
from orchestrator.sim.rows import SimulatedPrompts, SimulatedRows
from orchestrator.sim.training import SimulatedTrainer


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
