"""What the trainer reports, and what follows from it: versions, checkpoints, a trainer that comes back.

Owns: which reports count, and what a checkpoint frees. Never: what the trainer is sent (``rounds.py``). Invariant: a
report that is repeated, or of a trainer that was replaced, changes nothing; each later report also stands for those
before it that were lost.

    RoundDone ──► StepDone ──► CheckpointSaved          TrainerReady: the first one, or again from its checkpoint
"""

from __future__ import annotations

from orchestrator.core.dispatch.planning import compare_lengths
from orchestrator.core.fleet import elastic
from orchestrator.core.lanes.evaluation import EvaluationLane
from orchestrator.core.model.groups import Batch
from orchestrator.core.model.outbox import parse_entry_id
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.retention import Checkpoint
from orchestrator.core.rollout.admission import TrainLane, outcome_of
from orchestrator.core.rollout.attempts import confirm_admission, take_back
from orchestrator.core.training.rounds import finish_run, members_of, replay_from, why_over
from transport.contracts.messages import CheckpointSaved, DropRows, RoundDone, StepDone, TrainerReady, TrimRounds
from transport.contracts.types import GroupId, WeightIdentity, WorkerKind


def round_done(p: Pipeline, event: RoundDone) -> None:
    """The trainer works in the log's order: rounds sent before this one are done too."""
    training = p.training
    if event.round_id not in training.rounds:
        return
    for round_id in list(training.rounds):
        del training.rounds[round_id]
        if round_id == event.round_id:
            break
    training.progress_s = p.now_s


def step_done(p: Pipeline, report: StepDone) -> None:
    trained = p.training.trained_version
    if report.weights.epoch != p.lineage.epoch or not trained < report.weights.version <= p.training.batch:
        return  # repeated, or of a trainer that was replaced
    if report.weights.version == trained + 1:
        elastic.trained(p, p.batches[trained], report.stepped_s)
    _train_up_to(p, report.weights)


def _train_up_to(p: Pipeline, weights: WeightIdentity) -> None:
    """Batches below this version are trained: the former ones too, should their report be lost."""
    training = p.training
    newly_trained = [p.batches[index] for index in range(training.trained_version, weights.version)]
    for batch in newly_trained:
        compare_lengths(p, batch)
    for batch in newly_trained:
        _report_outcomes(p, batch)
    training.trained_version = weights.version
    training.rounds = {round_id: of for round_id, of in training.rounds.items() if of >= weights.version}
    training.progress_s = p.now_s
    p.lineage.publish(weights.version)
    p.fleet.publish(weights)


def _report_outcomes(p: Pipeline, batch: Batch) -> None:
    """Once, also when a rolled-back trainer trains the batch again."""
    if batch.outcomes_reported:
        return
    batch.outcomes_reported = True
    for group in members_of(p, batch, None):
        group.outcome = "trained"
        p.outbox.emit(outcome_of(group))


# -- a trainer starts


def trainer_ready(p: Pipeline, report: TrainerReady, train: TrainLane, evaluation: EvaluationLane) -> None:
    """A trainer of a higher epoch goes on from its checkpoint; one of the same epoch repeats where it is.

    It does so after a broker came back that may have lost its reports.
    """
    weights = report.weights
    p.fleet.others[report.worker_id] = WorkerKind.TRAIN
    if weights.epoch > p.lineage.epoch:
        _restart(p, report, train, evaluation)
    elif weights.epoch == p.lineage.epoch and p.training.trained_version < weights.version <= p.training.batch:
        _train_up_to(p, weights)


def _restart(p: Pipeline, report: TrainerReady, train: TrainLane, evaluation: EvaluationLane) -> None:
    """It replays the rounds log by itself.

    Rounds on the log keep the ranks they were packed for; a trainer of another ``dp_size`` spreads them itself, and
    rounds released from now on are packed for it.
    """
    version = report.weights.version
    if not _can_replay(p, version):
        reach = (
            f"rows before {p.retention.freed.version} are freed and batches from {p.training.batch} on were never sent"
        )
        finish_run(p, f"the trainer came back with version {version}: {reach}", failed=True)
        return
    if not p.batches:
        p.next_batch = p.training.batch = max(p.next_batch, version)
    evaluation.trainer_restarted(version)
    p.retention.go_back(version)
    p.training.dp_size, p.training.damaged = report.dp_size, report.damaged
    p.training.trained_version = version
    lost = p.lineage.restart(report.weights)
    if lost:
        train.drop_lost_versions(version)
    p.fleet.publish(report.weights)
    replay_from(p, parse_entry_id(report.cursor))


def _can_replay(p: Pipeline, version: int) -> bool:
    """Whether the batches after ``version`` are all known. A state without batches can begin anywhere."""
    if not p.batches and not p.lineage.epoch:
        return True
    return p.retention.freed.version <= version <= p.training.batch


# -- checkpoints


def checkpoint_saved(p: Pipeline, report: CheckpointSaved) -> None:
    """Free what the checkpoint contains; end the run when it is the one after the last command.

    A checkpoint contains its batches, so it also stands for a StepDone that was lost.
    """
    training, weights = p.training, report.weights
    if weights.epoch != p.lineage.epoch or weights.version > training.batch:
        return  # of a trainer that was replaced
    if weights.version > training.trained_version:
        _train_up_to(p, weights)
    cursor = parse_entry_id(report.cursor)
    if p.retention.save(Checkpoint(weights.version, cursor), p.settings.keep_checkpoints):
        _free(p)
    if training.finish_id is not None and cursor >= training.finish_id:
        _end_training(p)


def _end_training(p: Pipeline) -> None:
    """The trainer has read its last command: the run is over, unless it was resumed meanwhile."""
    reason = why_over(p)
    if reason:
        finish_run(p, reason)
    else:
        p.training.finish_id = None


def broker_used(p: Pipeline, retained_bytes: int) -> None:
    """A broker over budget is relieved of what was kept for a damaged checkpoint."""
    p.retention.use(retained_bytes, p.settings.max_retained_bytes)
    _free(p)


def _free(p: Pipeline) -> None:
    """Free rows and rounds that no trainer can come to need any more."""
    oldest = p.retention.free(p.settings.keep_checkpoints)
    if oldest is None:
        return
    freed: list[GroupId] = []
    for index in [index for index in p.batches if index < oldest.version]:
        batch = p.batches.pop(index)
        freed += batch.members
        for group_id in batch.group_ids:
            _free_group(p, group_id)
    if freed:
        p.outbox.emit(DropRows(group_ids=tuple(freed)))
    p.outbox.trim_rounds(oldest.cursor)
    p.outbox.emit(TrimRounds(cursor=oldest.cursor.entry))


def _free_group(p: Pipeline, group_id: GroupId) -> None:
    """It is not needed any more, not even by a broker that loses its tail."""
    group = p.groups[group_id]
    if group.worker_id:
        take_back(p, group, "a checkpoint contains its batch")
    confirm_admission(p, group)
    del p.groups[group_id]
