"""Which worker gets the next group: the one with the least to do, or the one that a plan has chosen.

Owns: the order of handing out, the choice among workers that may take a group, and when a batch is planned. Never:
whether they may (``lifecycle.may_take``), nor the planning, which takes longer than an event may (``compute.py``).
Invariant: no planned group waits for a worker that is gone or unhealthy, nor while another has room, may take it and
would be done with it sooner; a batch waits for its plan once, until a deadline.

    any      a group without a plan: the worker with the fewest predicted tokens per slot
    probe    one of its samples alone, where the rest waits in any case; the rest follows it (``probes.py``)
    own      the worker has room: the first of its queue
    stolen   the worker has nothing left of the batch and runs less than its plan meant it to: the first of the queue
             behind which most tokens wait, if the forecast says it ends sooner here
    migrated the worker has nothing at all and nothing waits: a running group, once, if it ends much sooner here
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from orchestrator.core.dispatch.probes import follow_longest, probe_pays
from orchestrator.core.model.groups import MISSING, Batch, Group, Lane, Stage
from orchestrator.core.model.outbox import BatchPlanKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.settings import PULLED
from orchestrator.core.model.staleness import may_admit
from orchestrator.core.model.workers import Worker, with_room
from orchestrator.core.rollout.lifecycle import assign, enqueue_for, head, may_take, probe, release_plan, requeue
from transport.contracts.messages import ComputePlan, PlanComputed, PlannedGroup, PlannedWorker, RolloutFinished
from transport.contracts.types import WorkerId, parse_row_id


def dispatch(p: Pipeline) -> None:
    """Hand out groups while some worker may take the next one.

    The next group is of the earliest batch, and every rule is at least as strict for later batches: where none may take
    it, none may take any other. Of one batch, groups without a plan go first: they are late.
    """
    while not p.paused:
        group = head(p)
        if follow_longest(p, group):
            continue
        planned = p.plans.earliest_batch()
        if group is not None and (planned is None or group.batch <= planned):
            waits = p.frozen(group.batch) or p.plans.awaits(group.batch, p.now_s) or not _begun(p, group)
            if waits or not _assign_to_any(p, group):
                return
        elif planned is None or p.frozen(planned) or not _assign_planned(p, planned):
            return


# -- a group without a plan


def _assign_to_any(p: Pipeline, group: Group) -> bool:
    """Hand out the head of the queue. Returns whether a worker could take it."""
    alone = probe_pays(p, group)
    roomy = with_room(p.fleet.workers.values(), 1 if alone else group.num_missing, len(group.tokens))
    takers = [worker for worker in roomy if may_take(p, worker, group)]
    if takers:
        heapq.heappop(p.pending)
        (probe if alone else assign)(p, group, least_loaded(takers, group.excluded_worker))
    return bool(takers)


def gathers(p: Pipeline, group: Group) -> bool:
    """Whether the batch of ``group`` waits for all workers to begin it together, for ``plan_wait_s`` at most.

    They take new weights one after another, and the first would be given all groups that are longest.
    """
    start = p.plans.start
    if p.settings.dispatch != PULLED or group.lane is not Lane.TRAIN or group.batch < start.batch:
        return False
    late = not p.settings.plan_wait_s or (start.at_s and p.now_s >= start.at_s)
    return not late and not all(may_take(p, worker, group) for worker in p.fleet.workers.values() if worker.healthy)


def _begun(p: Pipeline, group: Group) -> bool:
    """Whether workers may have groups of the batch of ``group``: once all can take it, or from a deadline on, which is
    set when the first of them can.
    """
    start = p.plans.start
    if p.settings.dispatch != PULLED or group.batch < start.batch:
        return True
    if not any(may_take(p, worker, group) for worker in p.fleet.workers.values()):
        return False
    if not gathers(p, group):
        start.batch, start.at_s = group.batch + 1, 0.0
        return True
    start.at_s = start.at_s or p.now_s + p.settings.plan_wait_s
    return False


def least_loaded(workers: Sequence[Worker], excluded: WorkerId) -> Worker:
    """The worker with the fewest predicted tokens per slot; the excluded one only when it is alone.

    Together with the longest-first order this is list scheduling, so its makespan has the bound of Graham when workers
    are equal. Ties go to the worker that joined first.
    Source: StreamRL sec. 5.3 (greedy longest first). Ours: ``excluded``, a group that timed out goes elsewhere.
    """
    choices = [worker for worker in workers if worker.worker_id != excluded] if excluded else workers
    return min(choices or workers, key=lambda worker: worker.predicted_load / worker.capacity)


# -- planned groups


def _assign_planned(p: Pipeline, batch: int) -> bool:
    """Hand out planned groups of ``batch``. Returns whether none of them is left."""
    plans, workers = p.plans, p.fleet.workers
    for worker_id in [name for name in plans.queues if not workers[name].healthy]:
        release_plan(p, worker_id)
    for worker in with_room([workers[worker_id] for worker_id in plans.queues], 0, p.settings.group_size):
        while (group_id := plans.next_for(worker.worker_id, batch)) is not None:
            group = p.groups[group_id]
            if not with_room([worker], group.num_missing, len(group.tokens)) or not may_take(p, worker, group):
                break
            assign(p, group, worker)
    while _steal(p, batch):
        pass
    return plans.earliest_batch() != batch


def _steal(p: Pipeline, batch: int) -> bool:
    """One group starts elsewhere than planned. Returns whether there was one."""
    plans = p.plans

    def limit(worker: Worker) -> int:
        return plans.limits.get(worker.worker_id, worker.capacity)

    below_limit = [w for w in p.fleet.workers.values() if w.in_flight < limit(w) or not w.in_flight]
    idle = [worker for worker in below_limit if plans.next_for(worker.worker_id, batch) is None]
    owners = [worker_id for worker_id in plans.queues if plans.next_for(worker_id, batch) is not None]
    if not idle or not owners:
        return False
    owner = max(owners, key=plans.backlog.__getitem__)
    group = p.groups[plans.queues[owner][0].group_id]
    takers = [
        worker
        for worker in idle
        if worker.in_flight + group.num_missing <= max(limit(worker), group.num_missing)
        and may_take(p, worker, group)
        and _ends_sooner(p, group, owner, worker)
    ]
    if takers:
        assign(p, group, min(takers, key=lambda taker: plans.slowdown(taker.worker_id) * (taker.predicted_load + 1.0)))
    return bool(takers)


def _ends_sooner(p: Pipeline, group: Group, owner: WorkerId, taker: Worker) -> bool:
    """Whether the taker is done with it before its owner: the group is next there, but no slot is free yet.

    A slot becomes free once the owner has generated what it runs, shared among its slots. One whose slowdown is not
    known is as fast as the others.
    """
    plans, worker = p.plans, p.fleet.workers[owner]
    wait_tokens = worker.predicted_load / max(1, worker.capacity)
    here = plans.slowdown(taker.worker_id) * group.predicted_tokens
    return here <= plans.slowdown(owner) * (wait_tokens + group.predicted_tokens)


# -- migration of running work: taken back from a slow worker for an idle one that ends it sooner, starting over


MAX_TIME_SHARE = 0.5
"""Of the time it would still take where it is: starting over throws tokens away, and forecasts err."""
MIN_LEFT_SHARE = 0.25
"""Of the time it has been running: a group that took longer than predicted is not expected to end at once."""


def migrate(p: Pipeline) -> None:
    """One group to each idle worker, those first that would take longest where they are.

    Only groups of first attempts: one that failed or migrated before stays where it is.
    """
    if not p.settings.migrate_running or p.paused or p.stopping or p.plans.planned or head(p):
        return
    idle = [worker for worker in p.fleet.workers.values() if worker.healthy and not worker.in_flight]
    if not idle or not p.plans.slowdowns:
        return
    idle.sort(key=lambda worker: p.plans.measured_slowdown(worker.worker_id))
    running: list[tuple[float, Group]] = []
    for deadline in p.deadlines:
        group = p.live(deadline.group_id)
        if group is not None and group.stage is Stage.RUNNING and not deadline.attempt and not group.attempt:
            ran_s = p.now_s - group.started_s
            worker = p.fleet.workers[group.worker_id]
            forecast_s = group.predicted_tokens * _step_s(p, worker, worker.in_flight)
            running.append((max(forecast_s - ran_s, MIN_LEFT_SHARE * ran_s), group))
    running.sort(key=lambda left: (-left[0], left[1].group_id))
    for worker, (left_s, group) in zip(idle, running, strict=False):
        again_s = group.predicted_tokens * _step_s(p, worker, group.num_missing)
        if again_s < MAX_TIME_SHARE * left_s and may_take(p, worker, group):
            group.excluded_worker = group.worker_id
            requeue(p, group, "moved to an idle worker")


def _step_s(p: Pipeline, worker: Worker, samples: int) -> float:
    """Of this clock: what the cost model says, by what samples of the worker took instead."""
    slowdown = p.plans.measured_slowdown(worker.worker_id)
    return p.settings.decode_cost.step_s(min(samples, worker.capacity), 0.0) * slowdown


# -- asking for plans


RUNNING_SHARE = 0.5
"""Of what a running sample is expected to have: on average it is in the middle."""
FALLBACK = "even_longest_first"
"""In place of a policy that relies on predictions while these are not trusted, and of "scored" until they have been
compared with lengths: a bad ranker must not lose to none."""
WITHOUT_PREDICTIONS = ("even", "random")
"""Policies that look at none."""


def request_plans(p: Pipeline) -> None:
    """Have batches planned that were admitted since, as soon as there is a worker for them.

    Once more where workers came or went before the plan did, as at the start of a run.
    """
    if not p.settings.plans or (p.plans.next_batch >= p.next_batch and not p.plans.awaited):
        return
    workers = p.fleet.serving()
    if not workers:
        return
    for index in [index for index in p.plans.awaited if index not in p.batches]:
        _settle(p, index)  # trained and freed before its plan came
    for index in p.plans.awaited:
        asked = _open_request(p, index)
        if asked is not None and [one.worker_id for one in asked.workers] != [one.worker_id for one in workers]:
            _request(p, index, workers)
    for index in range(max(p.plans.next_batch, p.training.batch), p.next_batch):
        if not may_admit(index, p.training.trained_version, p.settings.max_staleness, p.settings.rollout_batches):
            break  # it began early with what was left to it: its new groups wait for weights
        p.plans.awaited[index] = p.now_s + p.settings.plan_wait_s
        _request(p, index, workers)
        p.plans.next_batch = index + 1


def _open_request(p: Pipeline, batch: int) -> ComputePlan | None:
    """For a plan of ``batch``."""
    found = p.outbox.open.get(BatchPlanKey(batch))
    command = found.issued.command if found is not None else None
    return command if isinstance(command, ComputePlan) else None


def _request(p: Pipeline, batch: int, workers: list[Worker]) -> None:
    groups = [p.groups[group_id] for group_id in p.batches[batch].group_ids]
    groups = [group for group in groups if group.stage is Stage.PENDING]
    if not groups:
        return
    policy = p.settings.dispatch
    trusted = policy in WITHOUT_PREDICTIONS or p.plans.may_trust(measured=policy == "scored")
    command = ComputePlan(
        plan_id=p.outbox.next_id.entry,
        batch=batch,
        policy=policy if trusted else FALLBACK,
        groups=tuple(
            PlannedGroup(
                group_id=group.group_id, predicted_tokens=tokens, predicted_sigma=sigma, num_samples=group.num_missing
            )
            for group in groups
            for tokens, sigma in [p.plans.calibration.corrected(group.predicted_tokens, group.predicted_sigma)]
        ),
        workers=tuple(_planned_worker(p, worker) for worker in workers),
        prompt_tokens=sum(group.prompt_tokens for group in groups) / len(groups),
    )
    p.outbox.emit_until(BatchPlanKey(batch), command)


def _planned_worker(p: Pipeline, worker: Worker) -> PlannedWorker:
    """With what it runs and what earlier plans still have for it."""
    held = [p.groups[group_id] for group_id in worker.groups]
    running = [(group, RUNNING_SHARE) for group in held if group.lane is Lane.TRAIN]
    waiting = [(p.groups[group_id], 1.0) for group_id, name in p.plans.planned.items() if name == worker.worker_id]
    left = [
        (group.num_missing, share * p.plans.calibration.corrected(group.predicted_tokens, 0.0)[0])
        for group, share in [*running, *waiting]
    ]
    return PlannedWorker(
        worker_id=worker.worker_id,
        capacity=worker.capacity,
        slowdown=p.plans.slowdown(worker.worker_id),
        in_hand=sum(samples for samples, _ in left),
        in_hand_tokens=sum((samples * tokens for samples, tokens in left), start=0.0),
        in_hand_longest=max((tokens for _, tokens in left), default=0.0),
    )


# -- using what comes, and learning from samples that ended


def use_plan(p: Pipeline, event: PlanComputed) -> None:
    """Use a plan that was asked for and is not too late; groups and workers it no longer fits go without."""
    asked = _open_request(p, event.batch)
    if asked is None or asked.plan_id != event.plan_id:
        return
    in_time = p.plans.awaits(event.batch, p.now_s)
    _settle(p, event.batch)
    for share in event.shares if in_time else ():
        worker = p.fleet.workers.get(share.worker_id)
        if worker is None or not worker.healthy:
            continue
        groups = [
            group
            for group in map(p.live, share.group_ids)
            if group is not None
            and (group.batch, group.stage) == (event.batch, Stage.PENDING)
            and group.group_id not in p.plans.planned
            and group.excluded_worker != worker.worker_id
        ]
        groups.sort(key=lambda group: not group.deferred)
        for rank, group in enumerate(groups):
            enqueue_for(p, worker.worker_id, group, rank)
        p.plans.limits[worker.worker_id] = min(worker.capacity, sum(group.num_missing for group in groups))
        cost = p.settings.decode_cost
        halfway = [(group.num_missing, group.prompt_tokens + group.predicted_tokens / 2) for group in groups]
        held = cost.held_tokens(
            sum(samples for samples, _ in halfway),
            sum(samples * tokens for samples, tokens in halfway),
            max((tokens for _, tokens in halfway), default=0),
        )
        p.plans.note_share(worker.worker_id, crowded=held > cost.kv_capacity_tokens)


def expire_plans(p: Pipeline) -> None:
    """Plans that did not come in time are not waited for any longer."""
    for batch in [batch for batch in p.plans.awaited if not p.plans.awaits(batch, p.now_s)]:
        _settle(p, batch)


def _settle(p: Pipeline, batch: int) -> None:
    p.plans.awaited.pop(batch, None)
    p.outbox.confirm(BatchPlanKey(batch))


def observe_speed(p: Pipeline, event: RolloutFinished) -> None:
    """The seconds of a sample, over those of its steps at the batch that ran meanwhile.

    The batch is taken as the mean of what its share began with and what is left now. Where memory is too small for the
    share, what runs at once is not known, and nothing is learnt: equal workers seemed 2.3 times as fast as one another.
    """
    if not (p.settings.plans or p.settings.migrate_running):
        return
    group, worker = p.groups.get(parse_row_id(event.row_id)[0]), p.fleet.workers.get(event.worker_id)
    if group is None or worker is None or group.worker_id != event.worker_id or group.lane is Lane.EVAL:
        return
    if worker.worker_id in p.plans.crowded:
        return
    in_flight = min(worker.capacity, worker.in_flight)
    batch = (p.plans.limits.get(worker.worker_id, in_flight) + in_flight) / 2
    context = batch * (group.prompt_tokens + event.response_tokens / 2)
    expected_s = event.sampled_tokens * p.settings.decode_cost.step_s(batch, context)
    p.plans.observe_slowdown(worker.worker_id, event.engine_s, expected_s)


def compare_lengths(p: Pipeline, batch: Batch) -> None:
    """What was predicted for a whole batch with what came: what comes first of a batch are its short samples."""
    calibration = p.plans.calibration
    calibration.fade()
    for group in (p.groups[group_id] for group_id in batch.members):
        for tokens in group.tokens:
            if tokens != MISSING:
                calibration.add(group.predicted_tokens, group.predicted_sigma, tokens)
