"""The critic: the second reader of the rounds log, and what its reports change.

It trains the same rounds as the trainer, into weights of its own, from a cursor of its own; so rows and rounds are
freed when a checkpoint of both contains them, and the run ends when both have saved past its last command. Nothing
waits for its versions here: a group waits for its values as for any other score.

Never: what it trains (the log says that), what its values are worth. Invariant: a report that is repeated, or of a
critic that was replaced, changes nothing.
"""

from __future__ import annotations

from orchestrator.core import fleet, training
from orchestrator.core.model.outbox import parse_entry_id
from orchestrator.core.model.pipeline import Checkpoint, Pipeline, note_checkpoint
from transport.contracts.messages import CheckpointSaved, CriticReported, StepDone, TrainerReady, damage_of
from transport.contracts.types import WorkerKind


def reported(p: Pipeline, event: CriticReported) -> None:
    """Its reports are those of a trainer. Of a run that has no critic they mean nothing."""
    if not p.settings.critic:
        return
    report = event.report
    match report:
        case TrainerReady():
            fleet.note_other(p, event.worker_id, WorkerKind.CRITIC)
            if report.weights.epoch > p.critic.epoch:
                _restart(p, report)
        case StepDone():
            if report.weights.epoch == p.critic.epoch and report.weights.version <= p.training.batch:
                p.critic.version = max(p.critic.version, report.weights.version)
        case CheckpointSaved():
            _saved(p, report)


def _restart(p: Pipeline, report: TrainerReady) -> None:
    """It goes on from its checkpoint, and reads the log from there by itself."""
    version, freed = report.weights.version, p.retention.freed.version
    if not freed <= version <= p.training.batch and p.batches:
        reach = f"rows before {freed} are freed and batches from {p.training.batch} on were never sent"
        why = f"the critic came back with version {version}: {reach}{damage_of(report.damaged)}"
        training.finish_run(p, why, failed=True)
        return
    p.critic.epoch, p.critic.version = report.weights.epoch, version
    p.critic.checkpoints = [one for one in p.critic.checkpoints if one.version <= version]  # others are damaged


def _saved(p: Pipeline, report: CheckpointSaved) -> None:
    weights = report.weights
    if weights.epoch != p.critic.epoch or weights.version > p.training.batch:
        return  # of a critic that was replaced
    p.critic.version = max(p.critic.version, weights.version)
    saved = Checkpoint(weights.version, parse_entry_id(report.cursor))
    if note_checkpoint(p.critic.checkpoints, saved, p.settings.keep_checkpoints):
        training.free_saved(p)
    training.end_if_saved(p)
