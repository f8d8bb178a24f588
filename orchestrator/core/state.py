"""The decision core: one place where the pipeline's state changes, pure and synchronous.

Owns: which rule an event goes to, and the order in which their consequences are drawn. Never: I/O, clocks, threads,
randomness. Invariant: the same events at the same times give the same commands, live, in simulation and on replay.

    event ──► its rule changes the state ──► admit ──► release rounds ──► dispatch ──► load weights ──► commands
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from orchestrator.core.control import Control
from orchestrator.core.dispatch import Order, Placement, least_loaded
from orchestrator.core.dispatch.assignments import Assignments
from orchestrator.core.dispatch.migration import Moving
from orchestrator.core.dispatch.plan_requests import PlanRequests
from orchestrator.core.dispatch.prediction_feedback import Experience
from orchestrator.core.fleet.elastic_fleet import ElasticFleet
from orchestrator.core.fleet.weights import Weights
from orchestrator.core.invariants import check
from orchestrator.core.lanes.evaluation_attempts import EvaluationTries
from orchestrator.core.lanes.evaluation_schedule import EvaluationSchedule
from orchestrator.core.lanes.service import Requests
from orchestrator.core.model.batches import Stage
from orchestrator.core.model.batching import plan_phases
from orchestrator.core.model.evaluation import Evaluation
from orchestrator.core.model.lpt import longest_first
from orchestrator.core.model.outbox import CommandId, entry_id, parse_entry_id
from orchestrator.core.model.pipeline import Pipeline, Wait
from orchestrator.core.model.service_request import Request
from orchestrator.core.model.settings import CoreSettings, core_settings, reconfigured
from orchestrator.core.observe.in_flight import RunningView, longest_running
from orchestrator.core.observe.view import PipelineView, describe_wait, rows_told, view
from orchestrator.core.observe.wait_reasons import current_wait, note_wait
from orchestrator.core.rollout.admission import Slots
from orchestrator.core.rollout.lifecycle import Rollouts
from orchestrator.core.trainer_reports import TrainerReports
from orchestrator.core.training.rounds import Rounds
from orchestrator.core.worker_reports import WorkerReports
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
        self._tries = EvaluationTries(pipeline)
        self._evaluation_schedule = EvaluationSchedule(pipeline, self._tries)
        self._plan_requests = PlanRequests(pipeline, self._assignments)
        self._moving = Moving(pipeline, self._assignments)
        self._experience = Experience(pipeline)
        self._elastic = ElasticFleet(pipeline)
        self._worker_reports = WorkerReports(pipeline, self._rollouts, self._weights, self._tries, self._elastic)
        self._trainer_reports = TrainerReports(
            pipeline, self._rounds, self._rollouts, self._evaluation_schedule, self._experience, self._elastic
        )
        self._control = Control(pipeline, self._rounds, self._rollouts, self._requests, self._evaluation_schedule)

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
        self._elastic.pass_time(now_s)
        p.now_s = max(p.now_s, now_s)
        p.outbox.begin()
        self._elastic.note(event)
        if not self._tries.take(event):
            self._apply(event)
        self._slots.admit()
        if p.settings.service:
            self._finish_service()
        else:
            self._rounds.release()
        self._evaluation_schedule.advance()
        if not p.finished:
            self._weights.pass_turn()
            self._plan_requests.request()
            self._assignments.dispatch()
            self._tries.dispatch()
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
        return rows_told(self._p) + self._tries.rows_told()

    def rows_scored(self) -> list[RowId]:
        """Those of ``rows_told`` that must have their advantage too."""
        return rows_told(self._p, Stage.READY)

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
        match event:
            case RolloutFinished():
                self._experience.observe(event)
                self._rollouts.finished(event)
            case GroupScored():
                self._rollouts.scored(event)
            case RoundDone() | StepDone() | CheckpointSaved() | TrainerReady():
                self._trainer_reports.take(event)
            case WorkerReported() | WorkerJoined() | WorkerLost():
                self._worker_reports.take(event)
            case Tick():
                self._on_tick()
            case PromptsArrived():
                self._slots.prompts_arrived(event)
            case HeldOutPromptsArrived():
                self._evaluation_schedule.problems_arrived(event)
            case WeightsLoaded():
                self._weights.loaded(event)
            case WeightsFailed():
                self._weights.failed(event)
            case RolloutFailed():
                self._rollouts.failed(event)
            case ScoringFailed():
                self._rollouts.scoring_failed(event)
            case RowsMissing():
                self._rollouts.missing(event)
                self._tries.missing(event)
            case PlanComputed():
                self._plan_requests.take(event)
            case RankerJudged():
                self._p.plans.ranker = event
            case BrokerUsage():
                self._rounds.broker_used(event.retained_bytes)
            case PromptsSubmitted() | SamplesTaken() | RequestCancelled() | WeightsPublished():
                self._requests.take(event)
            case (
                StopRequested()
                | PauseRequested()
                | ResumeRequested()
                | CheckpointRequested()
                | SettingChanged()
                | RunResumed()
            ):
                self._control.take(event)
            case UpdateFailed() | WorkerStarted():
                pass  # for whoever reads the journal: the one was told to who asked, the other counts once it joins
            case _:
                assert_never(event)

    def _on_tick(self) -> None:
        self._rollouts.expire()
        self._plan_requests.expire()
        self._moving.consider()
        self._requests.expire()
        self._rounds.expire_pacing()
        self._weights.expire()
        self._tries.expire()
        self._evaluation_schedule.expire()
        self._elastic.keep_minimum()
        note_wait(self._p)

    def _finish_service(self) -> None:
        if self._requests.is_drained():
            self._rounds.finish_run(self._p.stop_reason)
