"""Simulated generation workers: what an instance decodes, weights taken between steps, sudden death.

One entry of the event heap stands for a worker's next boundary between two decode steps; whatever reaches the worker in
between takes effect at the first boundary after.
"""

from __future__ import annotations

from functools import partial

from orchestrator.core.model.outbox import CommandId
from orchestrator.sim.engine import Simulation
from orchestrator.sim.rows import SimulatedRows
from transport.contracts.continuous_batching import ContinuousBatching, Sample
from transport.contracts.messages import (
    AbortRollouts,
    Command,
    DispatchGroups,
    DrainWorker,
    GroupPlan,
    LoadWeights,
    RolloutFailed,
    RolloutFinished,
    SpawnWorkers,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from transport.contracts.types import FinishReason, GroupId, WeightIdentity, WorkerId, WorkerKind, row_id


class SampleTooLongError(ValueError):
    """A sample does not fit into the KV cache of an empty instance."""


class SimulatedWorker:
    """One generation worker: ``capacity`` slots, each running sample gets one token a step."""

    def __init__(self, simulation: Simulation, rows: SimulatedRows, worker_id: WorkerId, index: int) -> None:
        scenario = simulation.scenario
        self._simulation = simulation
        self._rows = rows
        self._worker_id = worker_id
        self._index = index
        self._cost = scenario.decode_cost(index)
        self._batching = ContinuousBatching[GroupPlan](self._cost, scenario.capacity, simulation.now_s)
        self._arrived: WeightIdentity | None = None
        self._aborts: list[tuple[GroupId, int]] = []
        self._left: dict[GroupId, set[int]] = {}
        self._cursor = "0-0"
        self._alive = True
        self._plan = 0
        self._due_s = float("inf")
        if simulation.machine is not None:
            simulation.machine.engines.append(self._training_changed)
        simulation.attach_worker(worker_id, self._execute)
        simulation.report(WorkerJoined(worker_id=worker_id, kind=WorkerKind.GENERATE, capacity=scenario.capacity))
        self._report()

    def kill(self) -> None:
        """It does nothing more, and reports nothing."""
        self._alive = False
        if self._simulation.machine is not None:
            self._simulation.machine.note_decoding(self._worker_id, decodes=False)
        self._simulation.detach_worker(self._worker_id)

    def _execute(self, command_id: CommandId, command: Command) -> None:
        costs = self._simulation.scenario.costs
        if isinstance(command, DispatchGroups):
            self._simulation.after(costs.dispatch_s, partial(self._claim, command_id, command.plans[0]))
        elif isinstance(command, AbortRollouts):
            self._simulation.after(costs.dispatch_s, partial(self._abort, command.group_ids[0], command.attempts[0]))
        elif isinstance(command, LoadWeights):
            self._simulation.after(costs.transfer_s, partial(self._receive, command.weights))
        elif isinstance(command, DrainWorker):
            self._simulation.after(costs.dispatch_s, partial(self._leave, command.reason))

    def _leave(self, reason: str) -> None:
        if self._alive:
            assert not self._left, "a worker is drained while it holds groups"
            self.kill()
            self._simulation.report(WorkerLost(worker_id=self._worker_id, reason=f"drained: {reason}", left=True))

    def _report(self) -> None:
        if not self._alive:
            return
        held = tuple(self._left)
        self._simulation.report(WorkerReported(worker_id=self._worker_id, held=held, plans_cursor=self._cursor))
        self._simulation.after(self._simulation.scenario.costs.heartbeat_s, self._report)

    # -- what reaches it

    def _claim(self, command_id: CommandId, plan: GroupPlan) -> None:
        if not self._alive:
            return
        self._cursor = command_id.entry
        if self._simulation.strikes(self._simulation.scenario.faults.rollout_failure):
            failed = RolloutFailed(
                group_id=plan.group_id, worker_id=self._worker_id, samples=plan.samples, reason="simulated"
            )
            self._simulation.report(failed)
            return
        self._left[plan.group_id] = set(plan.samples)
        lengths = self._simulation.scenario.lengths
        prompt_tokens = lengths.prompt_tokens(plan.prompt_id)
        for sample in plan.samples:
            length = lengths.tokens(plan.prompt_id, row_id(plan.group_id, sample))
            self._check_fits(plan, sample, prompt_tokens + length)
            self._batching.submit(Sample(plan, sample, prompt_tokens, length))
        self._want_boundary()

    def _check_fits(self, plan: GroupPlan, sample: int, tokens: int) -> None:
        if tokens > self._cost.kv_capacity_tokens:
            raise SampleTooLongError(
                f"{plan.group_id}/{sample} needs {tokens} tokens of KV cache, the instance has "
                f"{self._cost.kv_capacity_tokens:.0f}"
            )

    def _abort(self, group_id: GroupId, attempt: int) -> None:
        if self._alive:
            self._aborts.append((group_id, attempt))
            self._want_boundary()

    def _receive(self, weights: WeightIdentity) -> None:
        """The bytes are here; they are loaded at the next boundary."""
        if self._alive:
            self._arrived = weights
            self._want_boundary()

    def _training_changed(self, trains: bool) -> None:
        """From the next boundary on, a step takes longer, or no longer."""
        scenario = self._simulation.scenario
        self._cost = scenario.decode_cost(self._index).scaled(scenario.costs.decode_beside if trains else 1.0)
        if self._alive:
            self._want_boundary()

    # -- boundaries

    def _want_boundary(self) -> None:
        """Something waits for the end of the running step: wake up there, unless that is planned anyway."""
        batching = self._batching
        steps = batching.steps_until(self._simulation.now_s)
        at_s = batching.boundary_s(steps)
        if at_s < self._due_s:
            self._wake_after(steps, at_s)

    def _wake_after(self, steps: int, at_s: float) -> None:
        self._plan += 1
        self._due_s = at_s
        self._simulation.at(at_s, partial(self._wake, self._plan, steps))

    def _wake(self, plan: int, steps: int) -> None:
        """A boundary: samples end, weights are taken, slots are filled, the next boundary is planned."""
        if plan != self._plan or not self._alive:
            return
        self._due_s = float("inf")
        batching = self._batching
        for sample in batching.advance(steps, self._simulation.now_s):
            self._finish(sample)
        batching.cost = self._cost
        self._stop_aborted()
        self._take_weights()
        if batching.weights:
            batching.admit()
        self._simulation.note_batch(self._worker_id, len(batching.running))
        if self._simulation.machine is not None:
            self._simulation.machine.note_decoding(self._worker_id, decodes=bool(batching.running))
        following = batching.next_steps()
        if following is not None:
            self._wake_after(following, batching.boundary_s(following))

    def _stop_aborted(self) -> None:
        for group_id, attempt in self._aborts:
            self._batching.remove(lambda plan, of=group_id, upto=attempt: plan.group_id == of and plan.attempt <= upto)
            if not self._batching.holds(group_id):
                self._left.pop(group_id, None)
        self._aborts.clear()

    def _take_weights(self) -> None:
        weights, self._arrived = self._arrived, None
        if weights is None:
            return
        load_s = self._simulation.scenario.costs.load_s
        self._batching.pause(load_s)
        self._batching.serve(weights)
        self._simulation.after(load_s, partial(self._report_loaded, weights))

    def _report_loaded(self, weights: WeightIdentity) -> None:
        if self._alive:
            costs = self._simulation.scenario.costs
            seconds = costs.transfer_s + costs.load_s
            self._simulation.report(WeightsLoaded(worker_id=self._worker_id, weights=weights, seconds=seconds))

    def _finish(self, ended: Sample[GroupPlan]) -> None:
        plan = ended.request
        left = self._left.get(plan.group_id)
        if left is not None:
            left.discard(ended.sample)
            if not left:
                del self._left[plan.group_id]
        event = RolloutFinished(
            row_id=row_id(plan.group_id, ended.sample),
            worker_id=self._worker_id,
            response_tokens=ended.length,
            finish_reason=FinishReason.STOP,
            oldest=ended.spans[0][0],
            newest=ended.spans[-1][0],
            engine_s=self._simulation.now_s - (ended.admitted_s or 0.0),
        )
        self._rows.insert(event, ended)


def start_worker(simulation: Simulation, rows: SimulatedRows, index: int, incarnation: int) -> None:
    """A worker of this name joins, now; it may be killed later, and be replaced."""
    worker_id = WorkerId(f"generate-{index}.{incarnation}")
    worker = SimulatedWorker(simulation, rows, worker_id, index)
    faults = simulation.scenario.faults
    if not faults.worker_loss_s:
        return

    def die() -> None:
        if simulation.now_s > faults.until_s:
            return
        worker.kill()
        simulation.after(faults.detect_s, partial(_lose_worker, simulation, worker_id))
        simulation.after(faults.restart_s, partial(start_worker, simulation, rows, index, incarnation + 1))

    simulation.after(simulation.chance.expovariate(1.0 / faults.worker_loss_s), die)


class SimulatedSupervisor:
    """Starts the workers that are asked for, after those that the run began with."""

    def __init__(self, simulation: Simulation, rows: SimulatedRows) -> None:
        self._simulation = simulation
        self._rows = rows
        self._started = 0
        simulation.attach(self._execute, SpawnWorkers)

    def _execute(self, _: CommandId, command: Command) -> None:
        assert isinstance(command, SpawnWorkers)
        scenario = self._simulation.scenario
        while self._started < command.total:
            index = scenario.workers + self._started
            start = partial(start_worker, self._simulation, self._rows, index, 1)
            self._simulation.after(scenario.costs.spawn_s, start)
            self._started += 1


def _lose_worker(simulation: Simulation, worker_id: WorkerId) -> None:
    simulation.report(WorkerLost(worker_id=worker_id, reason="killed"))
