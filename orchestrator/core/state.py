"""The decision core: one place where the pipeline's state changes, pure and synchronous.

Owns: which rule an event goes to, and the order in which their consequences are drawn. Never: I/O, clocks, threads,
randomness. Invariant: the same events at the same times give the same commands, live, in simulation and on replay.

    event ──► its rule changes the state ──► admit ──► release rounds ──► dispatch ──► load weights ──► commands
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from orchestrator.core.assignments import Assignments
from orchestrator.core.batches import Stage
from orchestrator.core.batching import plan_phases
from orchestrator.core.dispatch import Order, Placement, least_loaded
from orchestrator.core.elastic import ElasticFleet
from orchestrator.core.evaluating import Evaluating
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.fleet import Worker
from orchestrator.core.invariants import check
from orchestrator.core.lpt import longest_first
from orchestrator.core.moving import Moving
from orchestrator.core.outbox import CommandId, entry_id, parse_entry_id
from orchestrator.core.pipeline import Pipeline, Wait
from orchestrator.core.planning import Planning
from orchestrator.core.request import Request
from orchestrator.core.requests import Requests
from orchestrator.core.rollouts import Rollouts
from orchestrator.core.rounds import Rounds
from orchestrator.core.running import RunningView, longest_running
from orchestrator.core.settings import CoreSettings, changed, core_settings, reconfigured
from orchestrator.core.slots import REQUEST_KEY, Slots
from orchestrator.core.view import PipelineView, describe_wait, rows_told, view
from orchestrator.core.waits import current_wait, note_wait
from orchestrator.core.weights import Weights
from transport.messages import (
    BrokerUsage,
    CheckpointRequested,
    CheckpointSaved,
    Command,
    Event,
    GroupScored,
    HeldOutPromptsArrived,
    PauseRequested,
    PlanComputed,
    PromptsArrived,
    PromptsSubmitted,
    RankerJudged,
    RequestCancelled,
    ResumeRequested,
    RolloutFailed,
    RolloutFinished,
    RoundDone,
    RowsMissing,
    RunResumed,
    SamplesTaken,
    ScoringFailed,
    SettingChanged,
    StepDone,
    StopRequested,
    Tick,
    TrainerReady,
    UpdateFailed,
    WeightsFailed,
    WeightsLoaded,
    WeightsPublished,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
    WorkerStarted,
)
from transport.types import RowId, WeightIdentity, WorkerId, WorkerKind

__all__ = ["CommandId", "CoreSettings", "PipelineState", "PipelineView", "core_settings", "entry_id", "parse_entry_id"]

_decoder = msgspec.msgpack.Decoder(Pipeline)
_encoder = msgspec.msgpack.Encoder()


class PipelineState:
    """The state of one run. ``order`` and ``place`` are the dispatch policy; another policy is another function."""

    def __init__(
        self, settings: CoreSettings, *, order: Order = longest_first, place: Placement = least_loaded
    ) -> None:
        self._wire(Pipeline(settings=settings, configured=settings), order, place)

    def _wire(self, pipeline: Pipeline, order: Order, place: Placement) -> None:
        settings = pipeline.settings
        phases = plan_phases(settings.mini_batches, settings.epochs, settings.record_logprobs)
        self._p = pipeline
        self._assignments = Assignments(pipeline, order, place)
        self._requests = Requests(pipeline, self._assignments, phases)  # there are none but in a service run
        self._slots = self._requests if settings.service else Slots(pipeline, self._assignments, phases)
        self._rollouts = Rollouts(pipeline, self._assignments, self._slots, phases)
        self._rounds = Rounds(pipeline, self._slots, phases)
        self._weights = Weights(pipeline)
        self._evaluating = Evaluating(pipeline)
        self._planning = Planning(pipeline, self._assignments)
        self._moving = Moving(pipeline, self._assignments)
        self._elastic = ElasticFleet(pipeline)

    # -- what drivers use

    @property
    def seq(self) -> int:
        """Events applied so far: the journal position of the last one."""
        return self._p.outbox.seq

    @property
    def now_s(self) -> float:
        """The run's clock at the last event."""
        return self._p.now_s

    @property
    def settings(self) -> CoreSettings:
        return self._p.settings

    @property
    def configured(self) -> CoreSettings:
        """The settings that the run was last started with. Snapshots of before there was a difference have none."""
        return self._p.configured or self._p.settings

    @property
    def paused(self) -> bool:
        """Whether dispatch is held by request."""
        return self._p.paused

    @property
    def source_position(self) -> str:
        """The prompt source's state after the last prompt that arrived: where it goes on after a restart."""
        return self._p.prompts.last_position

    @property
    def trainer_epoch(self) -> int:
        """The highest that a trainer was told to have, 0 before the first."""
        return self._p.lineage.epoch

    @property
    def rounds_begin(self) -> str:
        """Entries of the rounds log up to this one are in the oldest kept checkpoint; "" before the first."""
        checkpoints = self._p.retention.checkpoints
        return checkpoints[0].cursor.entry if checkpoints else ""

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Apply ``event`` at ``now_s`` on the run's clock and return what to do, in order.

        The id of command ``i`` is ``CommandId(self.seq, i)``. A clock that went back counts as standing still.
        """
        p = self._p
        self._elastic.pass_time(now_s)
        p.now_s = max(p.now_s, now_s)
        p.outbox.begin()
        self._elastic.note(event)
        self._apply(event)
        self._slots.admit()
        if p.settings.service:
            self._finish_service()
        else:
            self._rounds.release()
        self._evaluating.advance()
        if not p.finished:
            self._weights.pass_turn()
            self._planning.request()
            self._assignments.dispatch()
            self._evaluating.dispatch()
            self._weights.load()
            self._elastic.release()
        return p.outbox.take()

    def outstanding(self) -> list[tuple[CommandId, Command]]:
        """Commands whose effect is not certain, with their ids, oldest first: executing them again is harmless."""
        return [(issued.id, issued.command) for issued in self._p.outbox.outstanding()]

    def snapshot(self) -> bytes:
        """The whole state, settings included."""
        return _encoder.encode(self._p)

    @classmethod
    def restore(
        cls,
        snapshot: bytes,
        *,
        settings: CoreSettings | None = None,
        order: Order = longest_first,
        place: Placement = least_loaded,
    ) -> PipelineState:
        """The state that ``snapshot`` was made of.

        settings: the configuration from now on (a resumed run may train more batches); what was changed while the run
        went on stays where the configuration is as it was. Snapshot the state at once then, because events before and
        after obey different settings.
        Raises msgspec.ValidationError or msgspec.DecodeError on other bytes.
        """
        pipeline = _decoder.decode(snapshot)
        if settings is not None:
            before = pipeline.configured or pipeline.settings
            pipeline.settings = reconfigured(pipeline.settings, before, settings)
            pipeline.configured = settings
        state = cls.__new__(cls)
        state._wire(pipeline, order, place)
        return state

    def view(self) -> PipelineView:
        """A summary for status and metrics."""
        return view(self._p)

    def longest_running(self) -> tuple[RunningView, ...]:
        """The groups that have been generated for the longest, for people."""
        return longest_running(self._p)

    def wait(self) -> Wait | None:
        """What the run waits for now, since when, and who should act; None once it is over."""
        return current_wait(self._p)

    def describe_wait(self) -> str:
        """The same in words, and where everything is."""
        return describe_wait(self._p)

    def worker_ids(self) -> list[WorkerId]:
        """Every worker that the core counts on, of all kinds."""
        return [*self._p.fleet.workers, *self._p.fleet.others]

    def other_workers(self) -> dict[WorkerId, WorkerKind]:
        """Those of ``worker_ids`` that do not generate."""
        return dict(self._p.fleet.others)

    def rows_told(self) -> list[RowId]:
        """Rows that must exist in the broker: told of, and neither dropped nor in a durable checkpoint."""
        return rows_told(self._p) + self._evaluating.rows_told()

    def rows_scored(self) -> list[RowId]:
        """Those of ``rows_told`` that must have their advantage too."""
        return rows_told(self._p, Stage.READY)

    def evaluation(self) -> Evaluation | None:
        """The evaluation that is under way. To be read, not changed."""
        return self._p.evaluations.current

    def check_invariants(self) -> None:
        """Raise BrokenInvariantError if the state contradicts itself. Costs time linear in the state: for tests."""
        check(self._p)

    # -- one rule for each event

    def _apply(self, event: Event) -> None:
        if not self._evaluating.take(event):
            self._apply_to_batches(event)

    def _apply_to_batches(self, event: Event) -> None:
        match event:
            case RolloutFinished():
                self._on_rollout(event)
            case GroupScored():
                self._rollouts.scored(event)
            case RoundDone():
                self._rounds.round_done(event)
            case WorkerReported():
                self._on_report(event)
            case Tick():
                self._on_tick()
            case PromptsArrived():
                if self._p.prompts.arrive(event):
                    self._p.outbox.confirm(REQUEST_KEY)
            case StepDone():
                self._on_step_done(event)
            case WeightsLoaded():
                self._weights.loaded(event)
            case WeightsFailed():
                self._weights.failed(event)
            case RolloutFailed():
                self._rollouts.failed(event)
            case PlanComputed():
                self._planning.take(event)
            case HeldOutPromptsArrived():
                pass  # of the evaluations alone
            case ScoringFailed():
                self._rollouts.scoring_failed(event)
            case RowsMissing():
                self._requests.missing(event.row_ids)
                self._rollouts.missing(event)
                self._evaluating.missing(event)
            case WorkerJoined():
                self._on_joined(event)
            case WorkerLost():
                self._on_lost(event)
            case TrainerReady():
                self._on_trainer_ready(event)
            case CheckpointSaved():
                self._on_checkpoint(event)
            case PromptsSubmitted():
                self._requests.submit(event)
            case SamplesTaken():
                self._requests.take(event)
            case RequestCancelled():
                self._requests.cancel(event)
            case WeightsPublished():
                self._requests.publish(event)
            case UpdateFailed():
                pass  # told to whoever asked; the journal shows it
            case BrokerUsage():
                self._p.retention.use(event.retained_bytes, self._p.settings.max_retained_bytes)
            case StopRequested():
                self._on_stop(event)
            case PauseRequested():
                self._p.paused = not self._p.stopping
            case ResumeRequested():
                self._p.paused = False
            case CheckpointRequested():
                self._p.retention.requested = True
            case SettingChanged():
                self._on_setting(event)
            case RankerJudged():
                self._p.plans.ranker = event
            case WorkerStarted():
                pass  # it counts once it joins; the journal shows why it came
            case RunResumed():
                self._p.stop_reason = ""
                self._p.paused = False
                self._rounds.reopen()
                self._requests.reopen()
            case _:
                assert_never(event)

    # -- requests of a service run

    def request(self, number: int) -> Request | None:
        """A request that is not all taken. To be read, not changed."""
        return self._p.requests.get(number)

    def requests(self) -> dict[int, Request]:
        """All of them, by number. To be read, not changed."""
        return self._p.requests

    def request_counts(self) -> dict[int, dict[str, int]]:
        """Samples of each of them, for people."""
        return {number: request.counts() for number, request in self._p.requests.items()}

    @property
    def last_request(self) -> int:
        """The highest number of any request so far."""
        return self._p.last_request

    def serving(self) -> dict[WorkerId, WeightIdentity | None]:
        """What each generation worker serves."""
        return {worker.worker_id: worker.loaded for worker in self._p.fleet.workers.values()}

    def _on_rollout(self, event: RolloutFinished) -> None:
        awaited = self._p.settings.service and self._requests.is_new(event.row_id)
        self._planning.observe(event)
        self._rollouts.finished(event)
        if awaited and not self._requests.is_new(event.row_id):
            self._requests.arrived(event.row_id)

    def _finish_service(self) -> None:
        if self._requests.is_drained():
            self._rounds.finish_run(self._p.stop_reason)

    # -- workers

    def _on_joined(self, event: WorkerJoined) -> None:
        fleet = self._p.fleet
        if event.kind is not WorkerKind.GENERATE:
            fleet.others[event.worker_id] = event.kind
        elif event.worker_id not in fleet.workers:
            capacity = max(1, event.capacity)
            fleet.join(Worker(worker_id=event.worker_id, capacity=capacity, loaded=event.weights))
            self._elastic.join(event.worker_id)

    def _on_lost(self, event: WorkerLost) -> None:
        fleet = self._p.fleet
        kind = fleet.others.pop(event.worker_id, None)
        if kind is WorkerKind.TRAIN and event.reason in ("drained", "finished"):
            self._rounds.trainer_left()
        worker = fleet.workers.get(event.worker_id)
        if worker is not None:
            self._evaluating.worker_lost(worker)
            self._rollouts.worker_lost(worker, event.reason)
            self._weights.forget(worker)
            self._elastic.forget(worker.worker_id)

    def _on_report(self, event: WorkerReported) -> None:
        worker = self._p.fleet.workers.get(event.worker_id)
        if worker is None:
            return
        if event.weights is not None:
            self._weights.serve(worker, event.weights)
        if event.capacity:
            worker.capacity = event.capacity
        self._rollouts.reconcile(worker, event)
        self._evaluating.reconcile(worker, event)

    def _on_tick(self) -> None:
        self._rollouts.expire()
        self._planning.expire()
        self._moving.consider()
        self._requests.expire()
        self._rounds.expire_pacing()
        self._weights.expire()
        self._evaluating.expire()
        note_wait(self._p)

    # -- the trainer

    def _on_step_done(self, event: StepDone) -> None:
        p = self._p
        trained = p.training.trained_version
        if event.weights.epoch != p.lineage.epoch or not trained < event.weights.version <= p.training.batch:
            return  # repeated, or of a trainer that was replaced
        if event.weights.version == trained + 1:
            self._elastic.trained(p.batches[trained], event.stepped_s)
        self._train_up_to(event.weights)

    def _train_up_to(self, weights: WeightIdentity) -> None:
        for index in range(self._p.training.trained_version, weights.version):
            self._planning.learn(self._p.batches[index])
        self._rounds.batch_trained(weights.version - 1)
        self._p.lineage.publish(weights.version)
        self._p.fleet.publish(weights)

    def _on_trainer_ready(self, event: TrainerReady) -> None:
        """A trainer of a higher epoch goes on from its checkpoint; it replays the rounds log by itself.

        One of the same epoch says where it is, after a broker came back that may have lost its reports.

        Rounds on the log keep the ranks they were packed for; a trainer of another ``dp_size`` spreads them itself, and
        rounds released from now on are packed for it.
        """
        p = self._p
        p.fleet.others[event.worker_id] = WorkerKind.TRAIN
        version = event.weights.version
        if event.weights.epoch == p.lineage.epoch and p.training.trained_version < version <= p.training.batch:
            self._train_up_to(event.weights)  # it says again where it is: a StepDone was lost
        if event.weights.epoch <= p.lineage.epoch:
            return  # repeated
        if not self._can_replay(version):
            self._rounds.finish_run(f"failed: the trainer came back with version {version}: {self._reach()}")
            return
        if not p.batches:
            p.next_batch = p.training.batch = max(p.next_batch, version)
        self._evaluating.trainer_restarted(version)
        p.training.dp_size = event.dp_size
        p.training.trained_version = version
        lost = p.lineage.restart(event.weights)
        if lost:
            self._rollouts.drop_lost_versions(version)
        p.fleet.publish(event.weights)
        self._rounds.replay_from(parse_entry_id(event.cursor))

    def _can_replay(self, version: int) -> bool:
        """Whether the batches after ``version`` are all known. A state without batches can begin anywhere."""
        p = self._p
        if not p.batches and not p.lineage.epoch:
            return True
        return max(0, p.retention.durable_version) <= version <= p.training.batch

    def _reach(self) -> str:
        durable = max(0, self._p.retention.durable_version)
        return f"rows before {durable} are freed and batches from {self._p.training.batch} on were never sent"

    def _on_checkpoint(self, event: CheckpointSaved) -> None:
        """A checkpoint contains its batches, so it also stands for a StepDone that was lost."""
        training, weights = self._p.training, event.weights
        if weights.epoch != self._p.lineage.epoch or weights.version > training.batch:
            return  # of a trainer that was replaced
        if weights.version > training.trained_version:
            self._train_up_to(weights)
        self._rounds.checkpoint_saved(event)

    def _on_stop(self, event: StopRequested) -> None:
        """Also out of a pause: the batch in training could not finish otherwise."""
        if not self._p.stopping:
            self._p.stop_reason = event.reason or "stopped"
            self._p.paused = False
            self._evaluating.give_up("the run stops")
            if not self._p.settings.service:  # what runs of requests finishes
                self._rollouts.suspend()

    # -- people

    def _on_setting(self, event: SettingChanged) -> None:
        """One that cannot be taken, or comes after the trainer's last command, changes nothing; the view shows it."""
        p = self._p
        wanted = changed(p.settings, event.key, event.value)
        if wanted is None or p.training.finish_id is not None:
            return
        if wanted.update is not p.settings.update:
            p.fleet.change_update()
        p.settings = wanted
