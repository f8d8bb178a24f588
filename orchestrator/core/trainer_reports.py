"""What the trainer reports, and what follows from it: versions, checkpoints, a trainer that comes back.

Owns: which reports count. Never: what the trainer is sent (``rounds.py``). Invariant: a report that is repeated, or of
a trainer that was replaced, changes nothing; each later report also stands for those before it that were lost.

    RoundDone ──► StepDone ──► CheckpointSaved          TrainerReady: the first one, or again from its checkpoint
"""

from __future__ import annotations

from typing import TypeAlias, assert_never

from orchestrator.core.dispatch.prediction_feedback import Experience
from orchestrator.core.fleet.elastic_fleet import ElasticFleet
from orchestrator.core.lanes.evaluation_schedule import EvaluationSchedule
from orchestrator.core.model.outbox import parse_entry_id
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.rollout.lifecycle import Rollouts
from orchestrator.core.training.rounds import Rounds
from transport.contracts.messages import CheckpointSaved, RoundDone, StepDone, TrainerReady
from transport.contracts.types import WeightIdentity, WorkerKind

TrainerReport: TypeAlias = RoundDone | StepDone | CheckpointSaved | TrainerReady


class TrainerReports:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(
        self,
        pipeline: Pipeline,
        rounds: Rounds,
        rollouts: Rollouts,
        evaluation_schedule: EvaluationSchedule,
        experience: Experience,
        elastic: ElasticFleet,
    ) -> None:
        self._p = pipeline
        self._rounds = rounds
        self._rollouts = rollouts
        self._evaluation_schedule = evaluation_schedule
        self._experience = experience
        self._elastic = elastic

    def take(self, report: TrainerReport) -> None:
        match report:
            case RoundDone():
                self._rounds.round_done(report)
            case StepDone():
                self._step_done(report)
            case CheckpointSaved():
                self._checkpoint_saved(report)
            case TrainerReady():
                self._ready(report)
            case _:
                assert_never(report)

    def _step_done(self, report: StepDone) -> None:
        p = self._p
        trained = p.training.trained_version
        if report.weights.epoch != p.lineage.epoch or not trained < report.weights.version <= p.training.batch:
            return  # repeated, or of a trainer that was replaced
        if report.weights.version == trained + 1:
            self._elastic.trained(p.batches[trained], report.stepped_s)
        self._train_up_to(report.weights)

    def _train_up_to(self, weights: WeightIdentity) -> None:
        for index in range(self._p.training.trained_version, weights.version):
            self._experience.learn(self._p.batches[index])
        self._rounds.batch_trained(weights.version - 1)
        self._p.lineage.publish(weights.version)
        self._p.fleet.publish(weights)

    def _checkpoint_saved(self, report: CheckpointSaved) -> None:
        """A checkpoint contains its batches, so it also stands for a StepDone that was lost."""
        training, weights = self._p.training, report.weights
        if weights.epoch != self._p.lineage.epoch or weights.version > training.batch:
            return  # of a trainer that was replaced
        if weights.version > training.trained_version:
            self._train_up_to(weights)
        self._rounds.checkpoint_saved(report)

    def _ready(self, report: TrainerReady) -> None:
        """A trainer of a higher epoch goes on from its checkpoint; one of the same epoch says again where it is.

        It does so after a broker came back that may have lost its reports.
        """
        p, weights = self._p, report.weights
        p.fleet.others[report.worker_id] = WorkerKind.TRAIN
        if weights.epoch > p.lineage.epoch:
            self._restart(report)
        elif weights.epoch == p.lineage.epoch and p.training.trained_version < weights.version <= p.training.batch:
            self._train_up_to(weights)

    def _restart(self, report: TrainerReady) -> None:
        """It replays the rounds log by itself.

        Rounds on the log keep the ranks they were packed for; a trainer of another ``dp_size`` spreads them itself, and
        rounds released from now on are packed for it.
        """
        p, version = self._p, report.weights.version
        if not self._can_replay(version):
            self._rounds.finish_run(f"the trainer came back with version {version}: {self._reach()}", failed=True)
            return
        if not p.batches:
            p.next_batch = p.training.batch = max(p.next_batch, version)
        self._evaluation_schedule.trainer_restarted(version)
        p.retention.go_back(version)
        p.training.dp_size, p.training.damaged = report.dp_size, report.damaged
        p.training.trained_version = version
        lost = p.lineage.restart(report.weights)
        if lost:
            self._rollouts.drop_lost_versions(version)
        p.fleet.publish(report.weights)
        self._rounds.replay_from(parse_entry_id(report.cursor))

    def _can_replay(self, version: int) -> bool:
        """Whether the batches after ``version`` are all known. A state without batches can begin anywhere."""
        p = self._p
        if not p.batches and not p.lineage.epoch:
            return True
        return p.retention.freed.version <= version <= p.training.batch

    def _reach(self) -> str:
        freed, sent = self._p.retention.freed.version, self._p.training.batch
        return f"rows before {freed} are freed and batches from {sent} on were never sent"
