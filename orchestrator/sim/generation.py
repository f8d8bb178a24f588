"""Simulated generation workers: continuous batching, weights taken between steps, sudden death.

Owns: what a generation worker would hold. Never: decisions. Invariant: exact between changes; with n samples running,
decode steps pass at a constant rate, so only the next end of a sample is scheduled.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import partial

from orchestrator.core.outbox import CommandId
from orchestrator.sim.engine import Simulation
from orchestrator.sim.rows import SimulatedRows
from transport.messages import (
    AbortRollouts,
    Command,
    DispatchGroups,
    GroupPlan,
    LoadWeights,
    RolloutFailed,
    RolloutFinished,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from transport.types import FinishReason, GroupId, WeightIdentity, WorkerId, WorkerKind, row_id


@dataclass(slots=True)
class _Sample:
    """A sample being decoded: it ends when its worker has decoded ``end_step`` tokens in all."""

    plan: GroupPlan
    sample: int
    oldest: WeightIdentity


@dataclass(slots=True)
class _Decoding:
    """Slots of a worker. steps: decode steps so far, a real number.  ends: heap of (end_step, order, sample)."""

    steps: float = 0.0
    since_s: float = 0.0
    ends: list[tuple[float, int, _Sample]] = field(default_factory=list)
    num_started: int = 0
    generation: int = 0


class SimulatedWorker:
    """One generation worker: ``capacity`` slots, each running sample gets one token a step."""

    def __init__(self, simulation: Simulation, rows: SimulatedRows, worker_id: WorkerId) -> None:
        self._simulation = simulation
        self._rows = rows
        self._worker_id = worker_id
        self._capacity = simulation.scenario.capacity
        self._weights: WeightIdentity | None = None
        self._waiting: list[tuple[float, int, GroupPlan, int]] = []
        self._decoding = _Decoding(since_s=simulation.clock.now_s())
        self._left: dict[GroupId, set[int]] = {}
        self._cursor = "0-0"
        self._alive = True
        simulation.attach(self._obey)
        simulation.tell(WorkerJoined(worker_id=worker_id, kind=WorkerKind.GENERATE, capacity=self._capacity))
        self._report()

    def kill(self) -> None:
        """It does nothing more, and tells nobody."""
        self._alive = False

    def _obey(self, command_id: CommandId, command: Command) -> None:
        if not self._alive or getattr(command, "worker_id", None) != self._worker_id:
            return
        costs = self._simulation.scenario.costs
        if isinstance(command, DispatchGroups):
            self._simulation.after(costs.dispatch_s, partial(self._claim, command_id, command.plans[0]))
        elif isinstance(command, AbortRollouts):
            self._simulation.after(costs.dispatch_s, partial(self._abort, command.group_ids[0], command.attempts[0]))
        elif isinstance(command, LoadWeights):
            self._simulation.after(costs.load_s, partial(self._load, command.weights))

    def _report(self) -> None:
        if not self._alive:
            return
        held = tuple(self._left)
        self._simulation.tell(WorkerReported(worker_id=self._worker_id, held=held, plans_cursor=self._cursor))
        self._simulation.after(self._simulation.scenario.costs.heartbeat_s, self._report)

    def _load(self, weights: WeightIdentity) -> None:
        if self._alive:
            self._weights = weights
            seconds = self._simulation.scenario.costs.load_s
            self._simulation.tell(WeightsLoaded(worker_id=self._worker_id, weights=weights, seconds=seconds))

    # -- decoding

    def _claim(self, command_id: CommandId, plan: GroupPlan) -> None:
        if not self._alive:
            return
        self._cursor = command_id.entry
        if self._simulation.strikes(self._simulation.scenario.faults.rollout_failure):
            failed = RolloutFailed(
                group_id=plan.group_id, worker_id=self._worker_id, samples=plan.samples, reason="simulated"
            )
            self._simulation.tell(failed)
            return
        self._left[plan.group_id] = set(plan.samples)
        for sample in plan.samples:
            heapq.heappush(self._waiting, (-plan.priority, self._decoding.num_started, plan, sample))
            self._decoding.num_started += 1
        self._advance()

    def _abort(self, group_id: GroupId, attempt: int) -> None:
        self._waiting = [one for one in self._waiting if one[2].group_id != group_id or one[2].attempt > attempt]
        heapq.heapify(self._waiting)
        decoding = self._decoding
        self._pass_time()
        decoding.ends = [
            one for one in decoding.ends if one[2].plan.group_id != group_id or one[2].plan.attempt > attempt
        ]
        heapq.heapify(decoding.ends)
        running = [one[2].plan.group_id for one in decoding.ends] + [one[2].group_id for one in self._waiting]
        if group_id not in running:
            self._left.pop(group_id, None)
        self._advance()

    def _pass_time(self) -> None:
        decoding, now_s = self._decoding, self._simulation.clock.now_s()
        if decoding.ends:
            step_s = self._simulation.scenario.costs.decode_step_s(len(decoding.ends))
            decoding.steps += (now_s - decoding.since_s) / step_s
        decoding.since_s = now_s

    def _advance(self) -> None:
        """Let time pass, fill free slots, and schedule the next end under the new number of samples."""
        if not self._alive or self._weights is None:
            return
        self._pass_time()
        decoding, scenario = self._decoding, self._simulation.scenario
        while self._waiting and len(decoding.ends) < self._capacity:
            _, order, plan, sample = heapq.heappop(self._waiting)
            length = scenario.lengths.tokens(plan.prompt_id, row_id(plan.group_id, sample))
            heapq.heappush(decoding.ends, (decoding.steps + length, order, _Sample(plan, sample, self._weights)))
        decoding.generation += 1
        if decoding.ends:
            steps_left = max(0.0, decoding.ends[0][0] - decoding.steps)
            step_s = scenario.costs.decode_step_s(len(decoding.ends))
            self._simulation.after(steps_left * step_s, partial(self._end_sample, decoding.generation))

    def _end_sample(self, generation: int) -> None:
        """The sample that was to end first has ended, unless something changed since that was scheduled."""
        if not self._alive or generation != self._decoding.generation or self._weights is None:
            return
        end_step, _, ended = self._decoding.ends[0]
        self._pass_time()
        self._decoding.steps = end_step  # exactly, not up to rounding
        heapq.heappop(self._decoding.ends)
        self._finish(ended)
        self._advance()

    def _finish(self, ended: _Sample) -> None:
        plan, row = ended.plan, row_id(ended.plan.group_id, ended.sample)
        left = self._left.get(plan.group_id, set())
        left.discard(ended.sample)
        if not left:
            self._left.pop(plan.group_id, None)
        assert self._weights is not None
        event = RolloutFinished(
            row_id=row,
            worker_id=self._worker_id,
            response_tokens=self._simulation.scenario.lengths.tokens(plan.prompt_id, row),
            finish_reason=FinishReason.STOP,
            oldest=ended.oldest,
            newest=self._weights,
        )
        self._rows.insert(row, event)


def start_worker(simulation: Simulation, rows: SimulatedRows, index: int, incarnation: int) -> None:
    """A worker of this name joins, now; it may be killed later, and be replaced."""
    worker_id = WorkerId(f"generate-{index}.{incarnation}")
    worker = SimulatedWorker(simulation, rows, worker_id)
    faults = simulation.scenario.faults
    if not faults.worker_loss_s:
        return

    def die() -> None:
        if simulation.clock.now_s() > faults.until_s:
            return
        worker.kill()
        simulation.after(faults.detect_s, partial(_lose_worker, simulation, worker_id))
        simulation.after(faults.restart_s, partial(start_worker, simulation, rows, index, incarnation + 1))

    simulation.after(simulation.chance.expovariate(1.0 / faults.worker_loss_s), die)


def _lose_worker(simulation: Simulation, worker_id: WorkerId) -> None:
    simulation.tell(WorkerLost(worker_id=worker_id, reason="killed"))
