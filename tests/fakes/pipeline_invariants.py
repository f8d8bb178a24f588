"""What must hold after every event, whatever came in which order.

Owns: the checks. Never: repairs. Invariant: they read the state and change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from orchestrator.core.model.groups import MISSING, NO_PROBE, Batch, BrokenInvariantError, Group, Lane, Stage
from orchestrator.core.model.outbox import DispatchKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import MAX_PAUSE_S, Worker
from transport.contracts.messages import TrainRound
from transport.contracts.types import batch_of


def check(pipeline: Pipeline) -> None:
    """Raise BrokenInvariantError naming the first contradiction found."""
    for problem in _problems(pipeline):
        raise BrokenInvariantError(problem)


def _problems(p: Pipeline) -> Iterator[str]:
    yield from _order_of_batches(p)
    yield from _surplus(p)
    yield from _links(p)
    yield from _evaluation(p)
    yield from _queue(p)
    for group in p.groups.values():
        yield from _group(p, group)
    for batch in p.batches.values():
        yield from _batch(p, batch)
    yield from _rounds(p)


def _order_of_batches(p: Pipeline) -> Iterator[str]:
    training = p.training
    if not training.trained_version <= training.batch <= p.next_batch:
        yield f"trained {training.trained_version} <= closed {training.batch} <= admitted {p.next_batch} does not hold"
    if sorted(p.batches) != list(range(p.next_batch - len(p.batches), p.next_batch)):
        yield f"batches {sorted(p.batches)} are not the ones before {p.next_batch}"
    if training.batch < p.next_batch and training.batch not in p.batches:
        yield f"batch {training.batch} is to be trained and unknown"


def _surplus(p: Pipeline) -> Iterator[str]:
    """No more is in hand beyond what is wanted than the settings say."""
    surplus = sum(p.batches[index].surplus for index in range(p.training.batch, p.next_batch))
    if p.settings.defers and surplus > p.settings.oversampled_groups:
        yield f"{surplus} groups are in hand beyond what open batches want"


def _links(p: Pipeline) -> Iterator[str]:
    """A group is running if and only if exactly one worker lists it."""
    listed = Counter(group_id for worker in p.fleet.workers.values() for group_id in worker.groups)
    running = {group.group_id for group in p.groups.values() if group.stage is Stage.RUNNING}
    if set(listed) != running or any(count > 1 for count in listed.values()):
        yield f"workers list {dict(listed)}, running are {sorted(running)}"
    for worker in p.fleet.workers.values():
        held = [p.groups[group_id] for group_id in worker.groups]
        expected = sum(group.num_asked for group in held)
        if worker.in_flight != expected:
            yield f"{worker.worker_id} counts {worker.in_flight} samples in flight, {expected} are expected of it"
        load = sum(group.num_asked * group.expected_tokens for group in held)
        if abs(worker.predicted_load - load) > 1e-6 * max(1.0, load):
            yield f"{worker.worker_id} counts {worker.predicted_load} tokens to come, its groups expect {load}"
        if worker.retry_at_s > p.now_s + MAX_PAUSE_S or worker.stands_aside != (worker.aside_s is not None):
            yield f"{worker.worker_id} failed {worker.load_failures} times, aside since {worker.aside_s}"
        if worker.evaluating != sum(group.lane is Lane.EVAL for group in held):
            yield f"{worker.worker_id} counts {worker.evaluating} attempts of evaluations, it holds others"
        waits = worker.loading is not None or p.fleet.keeps(worker) or worker.retry_at_s > 0
        if not p.fleet.loads_pending and p.fleet.behind(worker) and not worker.draining and not waits:
            yield f"{worker.worker_id} was not sent to load {p.fleet.newest}"


def _evaluation(p: Pipeline) -> Iterator[str]:
    """Each problem is in one place, each open attempt is a group, and the pin is the evaluation's."""
    current = p.evaluations.current
    groups = {group.group_id for group in p.groups.values() if group.lane is Lane.EVAL}
    if current is None:
        if groups or p.fleet.pin is not None:
            yield f"no evaluation is open, {p.fleet.pin} is pinned and there are {sorted(groups)}"
        return
    if groups != set(current.attempts) or p.fleet.pin != current.weights:
        yield f"there are {sorted(groups)} for an evaluation of {p.fleet.pin}, it has {sorted(current.attempts)}"
    places = [*current.waiting, *(attempt.problem for attempt in current.attempts.values())]
    if len(set(places)) != len(places) or len(places) + current.answered > current.num_problems:
        yield f"evaluation {current.number}: {current.answered} answered, and {sorted(places)} to come"
    if p.fleet.pin_wanted != bool(current.waiting):
        yield f"evaluation {current.number}: {len(current.waiting)} problems wait, wanted: {p.fleet.pin_wanted}"


def _queue(p: Pipeline) -> Iterator[str]:
    """Every pending group waits in the heap, or for the one worker that a plan has chosen and that is there."""
    waiting = {entry.group_id for entry in p.pending} - set(p.plans.planned)
    for worker_id, queue in p.plans.queues.items():
        if worker_id not in p.fleet.workers:
            yield f"groups are planned for {worker_id}, which is not there"
        if not queue or p.plans.planned.get(queue[0].group_id) != worker_id:
            yield f"the queue of {worker_id} does not begin with a group that is planned for it"
        waiting |= {entry.group_id for entry in queue if p.plans.planned.get(entry.group_id) == worker_id}
    for group_id in p.plans.planned:
        if group_id not in p.groups or p.groups[group_id].stage is not Stage.PENDING:
            yield f"{group_id} is planned and does not wait"
    for group in p.groups.values():
        if group.stage is Stage.PENDING and group.group_id not in waiting:
            yield f"{group.group_id} is pending and not queued: it is lost"


def _worker(p: Pipeline, group: Group) -> Worker:
    return p.fleet.workers[group.worker_id]


def _group(p: Pipeline, group: Group) -> Iterator[str]:
    name = group.group_id
    if group.lane is Lane.TRAIN and p.settings.membership == "fixed" and group.first_batch != batch_of(name):
        yield f"{name} of batch {group.batch}, deferred: {group.deferred}, began for another batch than it says"
    if group.num_missing != sum(tokens == MISSING for tokens in group.tokens):
        yield f"{name} counts {group.num_missing} missing samples of {group.tokens}"
    if group.stage is Stage.RUNNING and name not in p.fleet.workers[group.worker_id].groups:
        yield f"{name} runs on {group.worker_id}, which does not list it"
    alone = group.probe != NO_PROBE
    if (alone or group.followed) and (group.stage is not Stage.RUNNING or (alone and group.followed)):
        yield f"{name} is {group.stage}, probe: {group.probe}, followed: {group.followed}"
    if alone and (not group.lacks(group.probe) or name not in {one.group_id for one in _worker(p, group).probing}):
        yield f"{name} is probed by sample {group.probe}, whose others nobody would send"
    if group.stage is not Stage.RUNNING and group.worker_id:
        yield f"{name} is {group.stage} and bound to {group.worker_id}"
    if (DispatchKey(name) in p.outbox.open) != (group.stage is Stage.RUNNING):
        yield f"{name} is {group.stage}, its plan is {'' if DispatchKey(name) in p.outbox.open else 'not '}outstanding"
    if group.stage in (Stage.SCORING, Stage.READY) and group.num_missing:
        yield f"{name} is {group.stage} without all of its rows"
    if group.stage in (Stage.PENDING, Stage.RUNNING) and not group.num_missing:
        yield f"{name} is {group.stage} with nothing missing"
    if group.stage is Stage.ENDED and (group.sent or group.outcome in (None, "trained")):
        yield f"{name} ended as {group.outcome}, sent: {group.sent}"


def _batch(p: Pipeline, batch: Batch) -> Iterator[str]:
    groups = [p.groups[group_id] for group_id in batch.group_ids]
    members = {group.group_id for group in groups if group.sent or group.stage is Stage.READY}
    if set(batch.members) != members:
        yield f"batch {batch.index} has members {sorted(batch.members)}, ready or sent are {sorted(members)}"
    if not set(batch.queue) <= members:
        yield f"batch {batch.index} queues groups that are not its members: {sorted(batch.queue)}"
    queued = sum(p.groups[group_id].num_tokens for group_id in batch.queue)
    if batch.queue_tokens != queued:
        yield f"batch {batch.index} counts {batch.queue_tokens} tokens that wait for a round, there are {queued}"
    unsettled = Counter(batch.pending_refills)
    unsettled.update(
        group.mini_batch for group in groups if not group.sent and group.stage not in (Stage.READY, Stage.ENDED)
    )
    if [unsettled[mini_batch] for mini_batch in range(len(batch.unsettled))] != batch.unsettled:
        yield f"batch {batch.index} counts {batch.unsettled} unsettled slots, there are {dict(unsettled)}"
    if batch.index < p.training.batch and any(batch.unsettled):
        yield f"batch {batch.index} is closed with unsettled slots"


def _rounds(p: Pipeline) -> Iterator[str]:
    """No row is in two rounds of one kind and pass; no round holds a slot that ended untrained."""
    seen: set[tuple[str, str, int]] = set()
    for issued in p.outbox.rounds:
        if not isinstance(issued.command, TrainRound):
            continue
        command = issued.command
        for rows in (rows for rank in command.ranks for rows in rank):
            place = (rows.group_id, command.kind, command.pass_index)
            if place in seen:
                yield f"{rows.group_id} is in two rounds of {command.kind} pass {command.pass_index}"
            seen.add(place)
            group = p.groups.get(rows.group_id)
            if group is not None and group.lane is not Lane.TRAIN:
                yield f"{rows.group_id} of the {group.lane} lane is in a round"
            if group is not None and group.stage is Stage.ENDED:
                yield f"{rows.group_id} is in a round and ended as {group.outcome}"
