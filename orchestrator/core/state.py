"""The decision core: one place where the pipeline's state changes, pure and synchronous.

Owns: which rule an event goes to, and the order in which their consequences are drawn. Never: I/O, clocks, threads,
randomness. Invariant: the same events at the same times give the same commands, live, in simulation and on replay.

    event ──► its rule changes the state ──► admit ──► release rounds ──► dispatch ──► load weights ──► commands
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec

from orchestrator.core import critic, fleet, training
from orchestrator.core.dispatch import handout
from orchestrator.core.lanes.evaluation import EvaluationLane
from orchestrator.core.lanes.service import ServeLane
from orchestrator.core.model.groups import NO_WORKER, Lane, plan_phases
from orchestrator.core.model.outbox import CommandId, HeldOutPromptsKey, PromptsKey
from orchestrator.core.model.pipeline import Pipeline, Wait
from orchestrator.core.model.precision import Precision
from orchestrator.core.model.settings import CoreSettings, changed, reconfigured
from orchestrator.core.rollout.admission import TrainLane
from orchestrator.core.rollout.lifecycle import Lifecycle
from orchestrator.core.view import PipelineView, current_wait, describe_wait, view
from transport.contracts import messages
from transport.contracts.messages import Command, Event, SettingChanged, StopRequested
from transport.contracts.types import UpdateMode

_decoder = msgspec.msgpack.Decoder(Pipeline)
_encoder = msgspec.msgpack.Encoder()


class PipelineState:
    """The state of one run. pipeline: all of it, to be read and not changed."""

    def __init__(self, settings: CoreSettings) -> None:
        self._wire(Pipeline(settings=settings, configured=settings))

    def _wire(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        settings = pipeline.settings
        self._phases = plan_phases(settings.mini_batches, settings.epochs, settings.record_logprobs)
        self._train = TrainLane(pipeline, self._phases)
        self._evaluation = EvaluationLane(pipeline)
        self._service = ServeLane(pipeline)
        lanes = {Lane.TRAIN: self._train, Lane.EVAL: self._evaluation, Lane.SERVE: self._service}
        self._life = Lifecycle(pipeline, lanes)

    @property
    def seq(self) -> int:
        """Events applied so far: the journal position of the last one."""
        return self.pipeline.outbox.seq

    @property
    def now_s(self) -> float:
        """The run's clock at the last event."""
        return self.pipeline.now_s

    @property
    def settings(self) -> CoreSettings:
        return self.pipeline.settings

    @property
    def paused(self) -> bool:
        """Whether dispatch is held by request."""
        return self.pipeline.paused

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Apply ``event`` at ``now_s`` on the run's clock and return what to do, in order.

        The id of command ``i`` is ``CommandId(self.seq, i)``. A clock that went back counts as standing still.
        """
        p = self.pipeline
        fleet.pass_time(p, now_s)
        p.now_s = max(p.now_s, now_s)
        p.outbox.seq += 1
        self._apply(event)
        if not p.settings.service:
            self._train.admit()
            training.release(p, self._phases)
        elif self._service.is_drained():
            training.finish_run(p, p.stop_reason)
        self._evaluation.advance()
        if not p.finished:
            if p.settings.update is UpdateMode.STAGGERED:
                p.fleet.choose_next_to_load()  # before dispatch, which spares that one
            handout.request_plans(p)
            handout.dispatch(p)
            self._evaluation.dispatch()
            fleet.load_newest(p)
            fleet.release_drained(p)
        return p.outbox.take()

    def outstanding(self) -> Sequence[tuple[CommandId, Command]]:
        """Commands whose effect is not certain, with their ids, oldest first: executing them again is harmless."""
        return self.pipeline.outbox.outstanding()

    def snapshot(self) -> bytes:
        return _encoder.encode(self.pipeline)

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
            if settings.fp8 != pipeline.configured.fp8:  # it is tried, and judged, anew
                pipeline.precision = Precision()
            pipeline.settings = reconfigured(pipeline.settings, pipeline.configured, settings)
            pipeline.configured = settings
        state = cls.__new__(cls)
        state._wire(pipeline)
        return state

    def view(self) -> PipelineView:
        return view(self.pipeline)

    def wait(self) -> Wait | None:
        """What the run waits for now, since when, and who should act; None once it is over."""
        return current_wait(self.pipeline)

    def describe_wait(self) -> str:
        """The same in words, and where everything is."""
        return describe_wait(self.pipeline)

    def _apply(self, event: Event) -> None:
        p = self.pipeline
        match event:
            # groups
            case messages.RolloutFinished():
                fleet.note_sample(p, event)
                handout.observe_speed(p, event)
                self._life.finished(event)
            case messages.GroupScored():
                self._life.scored(event)
            case messages.RolloutFailed():
                self._life.failed(event)
            case messages.ScoringFailed():
                self._life.scoring_failed(event)
            case messages.RowsMissing():
                self._life.missing(event)
            # generation workers
            case messages.WorkerReported():
                fleet.reported(p, self._life, event)
            case messages.WorkerJoined():
                fleet.joined(p, event)
            case messages.WorkerLost():
                fleet.lost(p, self._life, event)
            case messages.WeightsLoaded():
                fleet.weights_loaded(p, event)
            case messages.WeightsFailed():
                fleet.weights_failed(p, event)
            # the trainer
            case messages.RoundDone():
                fleet.note_round(p, event)
                training.round_done(p, event)
            case messages.StepDone():
                training.step_done(p, event)
            case messages.CheckpointSaved():
                training.checkpoint_saved(p, event)
            case messages.TrainerReady():
                training.trainer_ready(p, event, self._train, self._evaluation)
            case messages.CriticReported():
                critic.reported(p, event)
            case messages.BrokerUsage():
                training.rows_retained(p, event)
            # prompts, plans, predictions
            case messages.PromptsArrived():
                if p.prompts.arrive(event):
                    p.outbox.confirm(PromptsKey())
            case messages.HeldOutPromptsArrived():
                p.outbox.confirm(HeldOutPromptsKey())
                if p.evaluations.problems is None:  # they are the same for the whole run
                    p.evaluations.problems = list(event.prompts)
            case messages.PlanComputed():
                handout.use_plan(p, event)
            case messages.RankerJudged():
                p.plans.ranker = event
            # readers of a service run
            case messages.PromptsSubmitted():
                self._service.submitted(event)
            case messages.SamplesTaken():
                self._service.samples_taken(event)
            case messages.RequestCancelled():
                self._service.cancelled(event)
            case messages.WeightsPublished():
                self._service.published(event)
            # people: a request that cannot be granted changes nothing, and the view shows it
            case StopRequested():
                self._stop(event)
            case messages.RunResumed():
                p.stop_reason, p.paused = "", False
                p.elastic.spawned, p.elastic.asked_s = 0, []  # this life begins with the workers of its settings
                training.reopen(p)
                self._service.reopen()
            case messages.PauseRequested():
                p.paused = not p.stopping
            case messages.ResumeRequested():
                p.paused = False
            case messages.CheckpointRequested():
                p.retention.requested = True
            case SettingChanged():
                self._change_setting(event)
            case messages.Tick():
                self._on_tick()
            case messages.UpdateFailed() | messages.WorkerStarted():
                pass  # for readers of the journal: the one is answered elsewhere, the other counts once it joins
            case _:
                assert_never(event)

    def _on_tick(self) -> None:
        """Deadlines are looked at here and nowhere else."""
        p = self.pipeline
        self._life.expire()
        handout.expire_plans(p)
        handout.migrate(p)
        self._service.expire()
        training.expire_pacing(p)
        fleet.expire_loads(p)
        if why := fleet.refused_everywhere(p):
            training.finish_run(p, why, failed=True)
        self._evaluation.expire()
        fleet.keep_minimum(p)
        p.wait = current_wait(p)

    def _stop(self, event: StopRequested) -> None:
        """Also out of a pause: the batch in training could not finish otherwise."""
        p = self.pipeline
        if p.stopping:
            return
        p.stop_reason = event.reason or "stopped"
        p.paused = False
        self._evaluation.give_up("the run stops")
        if not p.settings.service:  # what runs of requests finishes
            self._train.suspend()

    def _change_setting(self, event: SettingChanged) -> None:
        """Not after the trainer's last command, either."""
        p = self.pipeline
        wanted = changed(p.settings, event.key, event.value)
        if wanted is None or p.training.finish_id is not None:
            return
        if wanted.update is not p.settings.update:
            p.fleet.next_to_load, p.fleet.loads_pending = NO_WORKER, True
        p.settings = wanted
