"""What the pipeline waits for: at which stage, for what, and who should act.

Owns: the answer to "why does nothing happen?". Never: the judgement that it takes too long; a healthy pipeline waits
for something all the time, and the watchdog knows how long nothing came. Invariant: pure; it costs time linear in one
batch's groups and the workers, so it is looked for at ticks and by people, not at every event.

Asked from the end of the pipe: what does the trainer lack, and what does that lack?

    no trainer ─► rows of a sent round ─► the trainer itself ─► groups of the batch in training ─► its prompts
                                                                 scoring, generation, weights
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.core.model.groups import Group, Stage
from orchestrator.core.model.pipeline import Pipeline, Wait, WaitStage
from orchestrator.core.rollout.attempts import is_fresh
from transport.contracts.types import WorkerKind

NAMED = 4
"""Workers named in one sentence."""
UNREADY = (Stage.PENDING, Stage.RUNNING, Stage.SCORING)
PAUSER = "the person who paused it: streamrl-orchestrator resume"
PROMPT_SOURCE = "the prompt source"


def find_wait(p: Pipeline) -> Wait | None:
    """What the pipeline waits for now, as if the wait began now. None once the run is over."""
    if p.finished:
        return None
    if p.settings.service:
        return _service(p)
    return (
        _trainer_to_come(p)
        or _groups(p, _sent_and_unready(p))
        or _trainer(p)
        or _batch_in_training(p)
        or _wait(p, "deciding", "something unknown: this is a bug", "orchestrator")
    )


def current_wait(p: Pipeline) -> Wait | None:
    """What the pipeline waits for now, since when nothing of it has changed."""
    found = find_wait(p)
    if found is not None and p.wait is not None and found.is_same(p.wait):
        return p.wait
    return found


def _wait(p: Pipeline, stage: WaitStage, waits_for: str, owner: str) -> Wait:
    """Whatever else is waited for, a full broker is worth knowing."""
    full = "; nothing new is admitted, the broker is over max_retained_bytes" if p.retention.over_budget else ""
    return Wait(stage=stage, waits_for=waits_for + full, owner=owner, since_s=p.now_s)


# -- a service run


def _service(p: Pipeline) -> Wait | None:
    """None while it waits for nothing: every request that there is waits for its reader, or there is none."""
    if p.fleet.newest is None:
        return _wait(p, "weights", "a first version of the weights", WorkerKind.PUBLISH.value) if p.requests else None
    groups = [group for group in p.groups.values() if group.stage in (Stage.PENDING, Stage.RUNNING)]
    return _groups(p, groups) if groups else None


# -- the trainer


def _trainer_to_come(p: Pipeline) -> Wait | None:
    trainers = _others(p, WorkerKind.TRAIN)
    if not trainers:
        return _wait(p, "training", "a trainer to join", WorkerKind.TRAIN.value)
    if not p.training.dp_size:
        return _wait(p, "training", "the trainer to be ready", _names(trainers))
    return None


def _trainer(p: Pipeline) -> Wait | None:
    """It was sent something and has not answered."""
    training = p.training
    owner = _names(_others(p, WorkerKind.TRAIN))
    if training.rounds:
        first, more = next(iter(training.rounds)), len(training.rounds) - 1
        behind = f" and {more} more" if more else ""
        return _wait(p, "training", f"round {first}{behind} to be trained", owner)
    if training.batch > training.trained_version:
        return _wait(p, "training", f"the step of {_place(p, training.trained_version)}", owner)
    if training.finish_id is not None:
        return _wait(p, "training", "the last checkpoint and the final model", owner)
    return None


def _sent_and_unready(p: Pipeline) -> list[Group]:
    """Groups of a round whose rows went missing: the trainer cannot go on before they are made again."""
    batches = (p.batches[index] for index in p.batches if p.training.trained_version <= index <= p.training.batch)
    ready = Stage.READY  # ten thousand groups are looked at, a few times a second
    return [
        group
        for batch in batches
        for group in map(p.groups.__getitem__, batch.group_ids)
        if group.sent and group.stage is not ready and group.stage in UNREADY
    ]


# -- what it is to be sent next


def _batch_in_training(p: Pipeline) -> Wait | None:
    batch = p.batches.get(p.training.batch)
    if batch is None or batch.pending_refills:
        return _prompts(p)
    return _groups(p, [p.groups[group_id] for group_id in batch.group_ids])


def _prompts(p: Pipeline) -> Wait | None:
    if p.prompts.requested:
        return _wait(p, "prompts", _plural(p.prompts.requested, "prompt"), PROMPT_SOURCE)
    return None


def _groups(p: Pipeline, groups: Iterable[Group]) -> Wait | None:
    """The stage nearest to the trainer that still has some of ``groups``."""
    by_stage: dict[Stage, list[Group]] = {stage: [] for stage in Stage}
    for group in groups:
        by_stage[group.stage].append(group)
    if scoring := by_stage[Stage.SCORING]:
        scorers = _others(p, WorkerKind.SCORE)
        owner = _names(scorers) if scorers else f"{WorkerKind.SCORE.value} (none has joined)"
        return _wait(p, "scoring", f"the scores of {_count(p, scoring)}", owner)
    if running := by_stage[Stage.RUNNING]:
        samples = sum(group.num_missing for group in running)
        owner = _names(sorted({group.worker_id for group in running}))
        return _wait(p, "generation", f"{_plural(samples, 'sample')} of {_count(p, running)}", owner)
    pending = by_stage[Stage.PENDING]
    return _dispatch(p, pending) if pending else None


def _dispatch(p: Pipeline, pending: Sequence[Group]) -> Wait:
    """Why no worker has taken the next group."""
    if p.paused:
        return _wait(p, "generation", f"the end of the pause, to dispatch {_count(p, pending)}", PAUSER)
    fleet = p.fleet
    workers = list(fleet.workers.values())
    if not workers:
        return _wait(p, "generation", "a generation worker to join", WorkerKind.GENERATE.value)
    healthy = [worker for worker in workers if worker.healthy]
    if not healthy:
        names = _names(worker.worker_id for worker in workers)
        return _wait(p, "weights", f"weights {fleet.newest} to be loaded, which failed everywhere", names)
    batch = pending[0].batch
    if p.plans.awaits(batch, p.now_s):
        return _wait(p, "deciding", f"the plan of {_place(p, batch)}", "orchestrator")
    fresh = [worker for worker in healthy if is_fresh(p, worker, pending[0])]
    if fresh:
        return _wait(p, "generation", f"room for {_count(p, pending)}", _names(worker.worker_id for worker in fresh))
    kept = [worker for worker in healthy if fleet.keeps(worker)]
    if kept:
        pinned = f"the evaluation of {fleet.pin}, before newer weights are loaded"
        return _wait(p, "weights", pinned, _names(worker.worker_id for worker in kept))
    loading = [worker for worker in healthy if worker.loading is not None] or healthy
    return _wait(p, "weights", f"weights {fleet.newest} to be loaded", _names(worker.worker_id for worker in loading))


def _count(p: Pipeline, groups: Sequence[Group]) -> str:
    return f"{_plural(len(groups), 'group')} of {_place(p, groups[0].batch)}"


def _place(p: Pipeline, batch: int) -> str:
    """A batch as people count it: from 1, as requests always are."""
    return f"request {batch}" if p.settings.service else f"batch {batch + 1}"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _others(p: Pipeline, kind: WorkerKind) -> list[str]:
    return [worker_id for worker_id, of in p.fleet.others.items() if of is kind]


def _names(workers: Iterable[str]) -> str:
    names = list(workers)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
