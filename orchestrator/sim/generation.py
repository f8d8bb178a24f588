"""Simulated prompts, generation workers, rows and scoring.

One entry of the event heap stands for a worker's next boundary between two decode steps; whatever reaches the worker in
between takes effect at the first boundary after.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TypeAlias

from orchestrator.core.model.outbox import CommandId
from orchestrator.sim.engine import Action, Simulation
from transport.contracts.continuous_batching import ContinuousBatching, Sample
from transport.contracts.messages import (
    AbortRollouts,
    Command,
    DispatchGroups,
    DrainWorker,
    DropRows,
    GroupPlan,
    GroupScored,
    HeldOutPromptsArrived,
    LoadWeights,
    PartialGroup,
    PartialSample,
    PromptsArrived,
    RequestHeldOutPrompts,
    RequestPrompts,
    RolloutFailed,
    RolloutFinished,
    SpawnWorkers,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
    has_grown,
)
from transport.contracts.types import (
    FinishReason,
    GroupId,
    RowId,
    WeightIdentity,
    WorkerId,
    WorkerKind,
    is_evaluation,
    parse_row_id,
    row_id,
)

Spans: TypeAlias = tuple[tuple[WeightIdentity, int], ...]
"""(weights, tokens that they sampled), in order."""
FIRST_HELD_OUT = 1_000_000_000
"""Place of the first held-out prompt, behind all that are trained."""


class SampleTooLongError(ValueError):
    """A sample does not fit into the KV cache of an empty instance."""


class SimulatedPrompts:
    """The prompt source, with a ranker as good as the scenario's lengths say."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._num_read = 0
        simulation.attach(self._execute, RequestPrompts, RequestHeldOutPrompts)

    def _execute(self, _: CommandId, command: Command) -> None:
        assert isinstance(command, RequestPrompts | RequestHeldOutPrompts)
        answer = self._read if isinstance(command, RequestPrompts) else self._name_held_out
        self._simulation.after(self._simulation.scenario.costs.prompts_s, partial(answer, command.count))

    def _name_held_out(self, count: int) -> None:
        places = range(FIRST_HELD_OUT, FIRST_HELD_OUT + count)
        prompts = tuple(map(self._simulation.scenario.lengths.prompt, places))
        self._simulation.report(HeldOutPromptsArrived(prompts=prompts))

    def _read(self, count: int) -> None:
        scenario = self._simulation.scenario
        places = range(self._num_read, min(self._num_read + count, scenario.num_prompts))
        self._num_read = places.stop
        arrived = PromptsArrived(
            prompts=tuple(map(scenario.lengths.prompt, places)),
            source_positions=tuple(str(place + 1) for place in places),
            exhausted=self._num_read >= scenario.num_prompts,
        )
        self._simulation.report(arrived)


class SimulatedRows:
    """The row store and the scoring tasks behind it: a group that becomes whole is scored a little later.

    Only the first insert of a row counts and is reported.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rows: dict[RowId, tuple[Spans, int]] = {}
        self._missing: dict[GroupId, int] = {}
        self._dropped: set[GroupId] = set()
        self._partial: dict[RowId, Spans] = {}
        simulation.attach(self._execute, DropRows)

    def _execute(self, _: CommandId, command: Command) -> None:
        assert isinstance(command, DropRows)
        self._dropped.update(command.group_ids)
        for group_id in command.group_ids:
            for row in self._rows_of(group_id):
                self._rows.pop(row, None)
                self._partial.pop(row, None)

    def has(self, row: RowId) -> bool:
        return row in self._rows

    def spans(self, row: RowId) -> Spans:
        """Which weights sampled how many tokens of the row."""
        return self._rows[row][0]

    def num_tokens(self, row: RowId) -> int:
        """Response length of the row."""
        return self._rows[row][1]

    def keep(self, row: RowId, spans: Spans) -> None:
        """What a running sample has got so far."""
        self._partial[row] = spans

    def partial(self, row: RowId) -> Spans:
        """What an earlier attempt left of it."""
        return self._partial.get(row, ())

    def lose(self, row: RowId) -> None:
        group_id, _ = parse_row_id(row)
        del self._rows[row]
        self._missing[group_id] = self._missing.get(group_id, 0) + 1

    def insert(self, event: RolloutFinished, sample: Sample[GroupPlan]) -> None:
        """The first insert wins, and only it is reported; a dropped group takes none."""
        group_id, row = sample.request.group_id, event.row_id
        if row in self._rows or group_id in self._dropped:
            return
        self._partial.pop(row, None)
        self._rows[row] = tuple(sample.spans), event.response_tokens
        self._simulation.log.tokens += event.response_tokens
        self._simulation.report(event)
        missing = self._missing.get(group_id, sample.request.group_size) - 1
        self._missing[group_id] = missing
        if not missing:
            del self._missing[group_id]
            self._simulation.after(self._simulation.scenario.costs.scoring_s, partial(self._score, group_id))

    def _rows_of(self, group_id: GroupId) -> list[RowId]:
        size = 1 if is_evaluation(group_id) else self._simulation.scenario.core.group_size
        return [row_id(group_id, sample) for sample in range(size)]

    def _score(self, group_id: GroupId) -> None:
        rows = [self._rows.get(row) for row in self._rows_of(group_id)]
        lengths = tuple(row[1] for row in rows if row is not None)
        if len(lengths) == len(rows):
            rewards = tuple(float(length % 2) for length in lengths)
            signal = len(set(rewards)) > 1
            event = GroupScored(group_id=group_id, rewards=rewards, response_tokens=lengths, signal=signal)
            self._simulation.report(event)


def _ages(spans: Iterable[tuple[WeightIdentity, int]]) -> tuple[WeightIdentity, WeightIdentity]:
    """Oldest and newest."""
    weights = [one for one, _ in spans]
    return (weights[0], weights[0]) if len(weights) == 1 else (min(weights), max(weights))


class SimulatedWorker:
    """One generation worker: ``capacity`` slots, each running sample gets one token a step."""

    def __init__(self, simulation: Simulation, rows: SimulatedRows, worker_id: WorkerId, index: int) -> None:
        scenario = simulation.scenario
        self._simulation = simulation
        self._rows = rows
        self._worker_id = worker_id
        self._index = index
        self._cost = scenario.decode_cost(index)
        self._batching = ContinuousBatching[GroupPlan](
            self._cost, scenario.capacity, simulation.now_s, max_context=scenario.max_context
        )
        if scenario.costs.drafts is not None:
            self._batching.draft(scenario.costs.drafts, self._cost)
        self._arrived: WeightIdentity | None = None
        self._aborts: list[tuple[GroupId, int]] = []
        self._left: dict[GroupId, set[int]] = {}
        # By the identity of a sample that waits or runs, where there is any: tokens that it went on from, and what is
        # known of its weights and tokens.
        self._resumed: dict[int, int] = {}
        self._reported: dict[int, tuple[WeightIdentity, WeightIdentity]] = {}
        self._told: dict[int, int] = {}
        self._cursor = "0-0"
        self._alive = True
        self._plan = 0
        self._due_s = float("inf")
        self._joined_s = self._asked_s = simulation.now_s
        if simulation.machine is not None:
            simulation.machine.engines.append(self._company_changed)
        simulation.workers[worker_id] = self._execute
        simulation.report(WorkerJoined(worker_id=worker_id, kind=WorkerKind.GENERATE, capacity=scenario.capacity))
        self._report()
        if scenario.costs.partial_s:
            self._later(scenario.costs.partial_s, self._keep)

    def kill(self) -> None:
        """It does nothing more, and reports nothing."""
        self._alive = False
        steps = self._done_steps()
        for sample, spans in self._batching.so_far(steps):
            self._count(sample, sum(tokens for _, tokens in spans))
        for _, _, sample in self._batching.waiting:  # those that were retracted have tokens
            self._count(sample, sample.generated)
        if self._simulation.machine is not None:
            self._simulation.machine.note_decoding(self._worker_id, decodes=False)
        del self._simulation.workers[self._worker_id]

    def _execute(self, command_id: CommandId, command: Command) -> None:
        costs = self._simulation.scenario.costs
        if isinstance(command, DispatchGroups):
            self._later(costs.dispatch_s, partial(self._claim, command_id, command.plans[0]))
        elif isinstance(command, AbortRollouts):
            self._later(costs.dispatch_s, partial(self._abort, command.group_ids[0], command.attempts[0]))
        elif isinstance(command, LoadWeights):
            now_s = self._simulation.now_s
            self._asked_s = now_s
            begun_s = max(self._joined_s, self._simulation.published_s.get(command.weights, now_s))
            self._later(max(0.0, begun_s + costs.transfer_s - now_s), partial(self._receive, command.weights))
        elif isinstance(command, DrainWorker):
            self._later(costs.dispatch_s, partial(self._leave, command.reason))

    def _later(self, seconds: float, action: Action) -> None:
        """Unless it is dead by then."""
        self._simulation.after(seconds, lambda: action() if self._alive else None)

    def _leave(self, reason: str) -> None:
        assert not self._left, "a worker is drained while it holds groups"
        self.kill()
        self._simulation.report(WorkerLost(worker_id=self._worker_id, reason=f"drained: {reason}", left=True))

    def _report(self) -> None:
        self._report_held()
        self._later(self._simulation.scenario.costs.heartbeat_s, self._report)

    def _report_held(self, partial: tuple[PartialGroup, ...] = ()) -> None:
        held = tuple(self._left)
        self._simulation.report(
            WorkerReported(worker_id=self._worker_id, held=held, plans_cursor=self._cursor, partial=partial)
        )

    def _done_steps(self) -> int:
        """Steps since the last boundary that are done by now."""
        steps = self._batching.steps_until(self._simulation.now_s) if self._batching.running else 0
        return max(0, steps - 1)

    def _keep(self) -> None:
        """What running samples have got goes on the logs of their groups."""
        news: dict[tuple[GroupId, int], list[PartialSample]] = {}
        for sample, spans in self._batching.so_far(self._done_steps()):
            plan = sample.request
            if not spans or plan.group_id not in self._left or is_evaluation(plan.group_id):
                continue
            self._rows.keep(row_id(plan.group_id, sample.sample), tuple(spans))
            ages = oldest, newest = _ages(spans)
            tokens = sum(tokens for _, tokens in spans) if plan.alone else 0
            if self._reported.get(id(sample)) != ages or has_grown(tokens, self._told.get(id(sample), 0)):
                self._reported[id(sample)], self._told[id(sample)] = ages, tokens
                of_plan = news.setdefault((plan.group_id, plan.attempt), [])
                of_plan.append(PartialSample(sample=sample.sample, oldest=oldest, newest=newest, tokens=tokens))
        groups = [
            PartialGroup(group_id=group_id, attempt=attempt, samples=tuple(samples))
            for (group_id, attempt), samples in news.items()
        ]
        if groups:
            self._report_held(tuple(groups))
        self._later(self._simulation.scenario.costs.partial_s, self._keep)

    def _count(self, sample: Sample[GroupPlan], generated: int) -> None:
        """It holds no slot any more. generated: what it has got, with what it went on from."""
        if self._reported:
            self._reported.pop(id(sample), None)
            self._told.pop(id(sample), None)
        if self._resumed:
            generated -= self._resumed.pop(id(sample), 0)
        self._simulation.log.sampled_tokens += generated

    # -- what reaches it

    def _claim(self, command_id: CommandId, plan: GroupPlan) -> None:
        self._cursor = command_id.entry
        if self._simulation.strikes(self._simulation.scenario.faults.rollout_failure):
            failed = RolloutFailed(
                group_id=plan.group_id, worker_id=self._worker_id, samples=plan.samples, reason="simulated"
            )
            self._simulation.report(failed)
            return
        self._left.setdefault(plan.group_id, set()).update(plan.samples)
        lengths = self._simulation.scenario.lengths
        prompt_tokens = lengths.prompt_tokens(plan.prompt_id)
        for sample in plan.samples:
            length = lengths.tokens(plan.prompt_id, row_id(plan.group_id, sample))
            if prompt_tokens + length > self._cost.kv_capacity_tokens:
                raise SampleTooLongError(
                    f"{plan.group_id}/{sample} needs {prompt_tokens + length} tokens of KV cache, the instance has "
                    f"{self._cost.kv_capacity_tokens:.0f}"
                )
            waiting = Sample(plan, sample, prompt_tokens, length)
            if plan.partial and (spans := self._begun(plan, sample)):
                waiting.generated, waiting.spans = sum(tokens for _, tokens in spans), [*spans]
                self._resumed[id(waiting)], self._reported[id(waiting)] = waiting.generated, _ages(spans)
            self._batching.submit(waiting)
        self._want_boundary()

    def _begun(self, plan: GroupPlan, sample: int) -> Spans:
        """What the sample goes on from."""
        wanted = [one.oldest for one in plan.partial if one.sample == sample]
        spans = self._rows.partial(row_id(plan.group_id, sample)) if wanted else ()
        return spans if spans and _ages(spans)[0] == wanted[0] else ()

    def _abort(self, group_id: GroupId, attempt: int) -> None:
        self._aborts.append((group_id, attempt))
        self._want_boundary()

    def _receive(self, weights: WeightIdentity) -> None:
        """The bytes are here; they are loaded at the next boundary."""
        self._arrived = weights
        self._want_boundary()

    def _company_changed(self, slowdown: float) -> None:
        """From the next boundary on, a step takes so many times as long as alone."""
        self._cost = self._simulation.scenario.decode_cost(self._index).scaled(slowdown)
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
        self._set_cost()
        for group_id, attempt in self._aborts:
            stopped = batching.remove(
                lambda plan, of=group_id, upto=attempt: plan.group_id == of and plan.attempt <= upto
            )
            for sample in stopped:
                self._count(sample, sample.generated)
            if not batching.holds(group_id):
                self._left.pop(group_id, None)
        self._aborts.clear()
        self._take_weights()
        if batching.weights:
            batching.admit()
        if self._simulation.scenario.trace:
            self._simulation.log.batches.append((self._simulation.now_s, self._worker_id, len(batching.running)))
        if self._simulation.machine is not None:
            self._simulation.machine.note_decoding(self._worker_id, decodes=bool(batching.running))
        following = batching.next_steps()
        if following is not None:
            self._wake_after(following, batching.boundary_s(following))

    def _set_cost(self) -> None:
        """Of the next steps, which what is admitted may change."""
        if self._batching.cost is self._cost:
            return
        drafts = self._simulation.scenario.costs.drafts
        if drafts is None:
            self._batching.cost = self._cost
        elif self._batching.undrafted is not self._cost:
            self._batching.draft(drafts, self._cost)

    def _take_weights(self) -> None:
        weights, self._arrived = self._arrived, None
        if weights is None:
            return
        costs = self._simulation.scenario.costs
        self._batching.pause(costs.load_s)
        self._batching.serve(weights)
        seconds = self._simulation.now_s + costs.load_s - self._asked_s
        loaded = WeightsLoaded(worker_id=self._worker_id, weights=weights, seconds=seconds)
        self._later(costs.load_s, partial(self._simulation.report, loaded))

    def _finish(self, ended: Sample[GroupPlan]) -> None:
        plan = ended.request
        resumed, (oldest, newest) = self._resumed.get(id(ended), 0), _ages(ended.spans)
        self._count(ended, ended.generated)
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
            oldest=oldest,
            newest=newest,
            engine_s=self._simulation.now_s - (ended.admitted_s or 0.0),
            resumed_tokens=resumed,
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
        lost = WorkerLost(worker_id=worker_id, reason="killed")
        simulation.after(faults.detect_s, partial(simulation.report, lost))
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
