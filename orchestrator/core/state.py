"""The decision core: one place where the pipeline's state changes, pure and synchronous.

Owns: which rule an event goes to, and the order in which their consequences are drawn. Never: I/O, clocks, threads,
randomness. Invariant: the same events at the same times give the same commands, live, in simulation and on replay.

    event ──► its rule changes the state ──► admit ──► release rounds ──► dispatch ──► load weights ──► commands
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from orchestrator.core.dispatch import handout, planning
from orchestrator.core.fleet import elastic, workers
from orchestrator.core.invariants import check
from orchestrator.core.lanes.evaluation import EvaluationLane
from orchestrator.core.lanes.service import ServeLane
from orchestrator.core.model.groups import Lane, Stage, plan_phases
from orchestrator.core.model.lanes import Evaluation, Request
from orchestrator.core.model.outbox import CommandId, entry_id, parse_entry_id
from orchestrator.core.model.pipeline import Pipeline, Wait
from orchestrator.core.model.settings import CoreSettings, changed, core_settings, reconfigured
from orchestrator.core.observe.view import (
    PipelineView,
    RunningView,
    describe_wait,
    longest_running,
    rows_reported,
    view,
)
from orchestrator.core.observe.wait_reasons import current_wait
from orchestrator.core.rollout.admission import TrainLane
from orchestrator.core.rollout.lifecycle import Lifecycle
from orchestrator.core.training import reports as trainer_reports
from orchestrator.core.training import rounds
from transport.contracts.messages import (
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
from transport.contracts.types import RowId, WeightIdentity, WorkerId, WorkerKind

__all__ = ["CommandId", "CoreSettings", "PipelineState", "PipelineView", "core_settings", "entry_id", "parse_entry_id"]

_decoder = msgspec.msgpack.Decoder(Pipeline)
_encoder = msgspec.msgpack.Encoder()


class PipelineState:
    """The state of one run."""

    def __init__(self, settings: CoreSettings) -> None:
        self._wire(Pipeline(settings=settings, configured=settings))

    def _wire(self, pipeline: Pipeline) -> None:
        self._p = pipeline
        settings = pipeline.settings
        self._phases = plan_phases(settings.mini_batches, settings.epochs, settings.record_logprobs)
        self._train = TrainLane(pipeline, self._phases)
        self._evaluation = EvaluationLane(pipeline)
        self._service = ServeLane(pipeline)
        lanes = {Lane.TRAIN: self._train, Lane.EVAL: self._evaluation, Lane.SERVE: self._service}
        self._life = Lifecycle(pipeline, lanes)

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
        """The settings that the run was last started with."""
        return self._p.configured

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
        """The highest of any trainer so far, 0 before the first."""
        return self._p.lineage.epoch

    @property
    def freed_version(self) -> int:
        """Rows of batches below it are freed: no trainer can go back further."""
        return self._p.retention.freed.version

    @property
    def rounds_begin(self) -> str:
        """Entries of the rounds log up to this one are freed; "" before any is."""
        freed = self._p.retention.freed
        return freed.cursor.entry if freed.cursor.seq else ""

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Apply ``event`` at ``now_s`` on the run's clock and return what to do, in order.

        The id of command ``i`` is ``CommandId(self.seq, i)``. A clock that went back counts as standing still.
        """
        p = self._p
        elastic.pass_time(p, now_s)
        p.now_s = max(p.now_s, now_s)
        p.outbox.begin()
        self._apply(event)
        if p.settings.service:
            self._finish_service()
        else:
            self._train.admit()
            rounds.release(p, self._phases)
        self._evaluation.advance()
        if not p.finished:
            workers.choose_next_to_load(p)
            planning.request_plans(p)
            handout.dispatch(p)
            self._evaluation.dispatch()
            workers.load_newest(p)
            elastic.release_drained(p)
        return p.outbox.take()

    def outstanding(self) -> list[tuple[CommandId, Command]]:
        """Commands whose effect is not certain, with their ids, oldest first: executing them again is harmless."""
        return [(issued.id, issued.command) for issued in self._p.outbox.outstanding()]

    def snapshot(self) -> bytes:
        """The whole state, settings included."""
        return _encoder.encode(self._p)

    @classmethod
    def restore(cls, snapshot: bytes, *, settings: CoreSettings | None = None) -> PipelineState:
        """The state that ``snapshot`` was made of.

        settings: the configuration from now on (a resumed run may train more batches); what was changed while the run
        went on stays where the configuration is as it was. Snapshot the state at once then, because events before and
        after obey different settings.
        Raises msgspec.ValidationError or msgspec.DecodeError on other bytes.
        """
        pipeline = _decoder.decode(snapshot)
        if settings is not None:
            pipeline.settings = reconfigured(pipeline.settings, pipeline.configured, settings)
            pipeline.configured = settings
        state = cls.__new__(cls)
        state._wire(pipeline)
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

    def rows_reported(self) -> list[RowId]:
        """Rows that must exist in the broker: reported, and neither dropped nor in a durable checkpoint."""
        return rows_reported(self._p)

    def rows_scored(self) -> list[RowId]:
        """Those of ``rows_reported`` that must have their advantage too."""
        return rows_reported(self._p, Stage.READY)

    def evaluation(self) -> Evaluation | None:
        """The evaluation that is under way. To be read, not changed."""
        return self._p.evaluations.current

    def check_invariants(self) -> None:
        """Raise BrokenInvariantError if the state contradicts itself. Costs time linear in the state: for tests."""
        check(self._p)

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

    # -- one rule for each event

    def _apply(self, event: Event) -> None:
        p = self._p
        match event:
            # groups
            case RolloutFinished():
                elastic.note_sample(p, event)
                planning.observe_speed(p, event)
                self._life.finished(event)
            case GroupScored():
                self._life.scored(event)
            case RolloutFailed():
                self._life.failed(event)
            case ScoringFailed():
                self._life.scoring_failed(event)
            case RowsMissing():
                self._life.missing(event)
            # generation workers
            case WorkerReported():
                workers.reported(p, self._life, event)
            case WorkerJoined():
                workers.joined(p, event)
            case WorkerLost():
                workers.lost(p, self._life, event)
            case WeightsLoaded():
                workers.weights_loaded(p, event)
            case WeightsFailed():
                workers.weights_failed(p, event)
            # the trainer
            case RoundDone():
                elastic.note_round(p, event)
                trainer_reports.round_done(p, event)
            case StepDone():
                trainer_reports.step_done(p, event)
            case CheckpointSaved():
                trainer_reports.checkpoint_saved(p, event)
            case TrainerReady():
                trainer_reports.trainer_ready(p, event, self._train, self._evaluation)
            case BrokerUsage():
                trainer_reports.broker_used(p, event.retained_bytes)
            # prompts, plans, predictions
            case PromptsArrived():
                self._train.prompts_arrived(event)
            case HeldOutPromptsArrived():
                self._evaluation.problems_arrived(event)
            case PlanComputed():
                planning.use_plan(p, event)
            case RankerJudged():
                p.plans.ranker = event
            # readers of a service run
            case PromptsSubmitted():
                self._service.submitted(event)
            case SamplesTaken():
                self._service.samples_taken(event)
            case RequestCancelled():
                self._service.cancelled(event)
            case WeightsPublished():
                self._service.published(event)
            # people: a request that cannot be granted changes nothing, and the view shows it
            case StopRequested():
                self._stop(event)
            case RunResumed():
                self._resume_run()
            case PauseRequested():
                p.paused = not p.stopping
            case ResumeRequested():
                p.paused = False
            case CheckpointRequested():
                p.retention.requested = True
            case SettingChanged():
                self._change_setting(event)
            case Tick():
                self._on_tick()
            case UpdateFailed() | WorkerStarted():
                pass  # for readers of the journal: the one is answered elsewhere, the other counts once it joins
            case _:
                assert_never(event)

    def _on_tick(self) -> None:
        """Deadlines are looked at here and nowhere else."""
        p = self._p
        self._life.expire()
        planning.expire_plans(p)
        handout.migrate(p)
        self._service.expire()
        rounds.expire_pacing(p)
        workers.expire_loads(p)
        self._evaluation.expire()
        elastic.keep_minimum(p)
        p.wait = current_wait(p)

    def _stop(self, event: StopRequested) -> None:
        """Also out of a pause: the batch in training could not finish otherwise."""
        p = self._p
        if p.stopping:
            return
        p.stop_reason = event.reason or "stopped"
        p.paused = False
        self._evaluation.give_up("the run stops")
        if not p.settings.service:  # what runs of requests finishes
            self._train.suspend()

    def _resume_run(self) -> None:
        self._p.stop_reason = ""
        self._p.paused = False
        rounds.reopen(self._p)
        self._service.reopen()

    def _change_setting(self, event: SettingChanged) -> None:
        """Not after the trainer's last command, either."""
        p = self._p
        wanted = changed(p.settings, event.key, event.value)
        if wanted is None or p.training.finish_id is not None:
            return
        if wanted.update is not p.settings.update:
            p.fleet.change_update()
        p.settings = wanted

    def _finish_service(self) -> None:
        if self._service.is_drained():
            rounds.finish_run(self._p, self._p.stop_reason)
