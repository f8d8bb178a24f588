"""The simulated plan desk: the live planning code, called where it is asked for.

Owns: the moment of the answer. Never: a rule. Invariant: planning takes ``plan_s`` of virtual time, whatever it took.
"""

from __future__ import annotations

from functools import partial

from orchestrator.core.dispatch.compute import compute_plan
from orchestrator.core.model.outbox import CommandId
from orchestrator.sim.engine import Simulation
from transport.contracts.messages import Command, ComputePlan

PLAN_S = 0.02
"""Of virtual time: 1,024 prompts on 16 instances take about that live (``make bench NAME=dispatch``)."""


class SimulatedPlanner:
    """Answers ComputePlan."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._asked: dict[int, ComputePlan] = {}
        simulation.attach(self._obey, ComputePlan)

    def _obey(self, _: CommandId, command: Command) -> None:
        if isinstance(command, ComputePlan):
            self._asked[command.batch] = command
            self._simulation.after(PLAN_S, partial(self._answer, command))

    def _answer(self, command: ComputePlan) -> None:
        """Of several requests for one batch, the last counts."""
        if self._asked.get(command.batch) is command:
            del self._asked[command.batch]
            self._simulation.tell(compute_plan(command, self._simulation.state.settings))
