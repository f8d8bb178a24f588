"""Which worker gets the next group: the one with the least to do, or the one that a plan has chosen.

Owns: the order of handing out, and the choice among workers that may take a group. Never: whether they may
(``attempts.may_take``). Invariant: no planned group waits for a worker that is gone or unhealthy, nor while another
has room, may take it and would be done with it sooner.

    any      a group without a plan: the worker with the fewest predicted tokens per slot
    own      the worker has room: the first of its queue
    stolen   the worker has nothing left of the batch and runs less than its plan meant it to: the first of the queue
             behind which most tokens wait, if the forecast says it ends sooner here
    migrated the worker has nothing at all and nothing waits: a running group, once, if it ends much sooner here
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from orchestrator.core.model.groups import Group, Stage
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker
from orchestrator.core.rollout.attempts import assign, head, may_take, release_plan, requeue
from transport.contracts.types import WorkerId


def dispatch(p: Pipeline) -> None:
    """Hand out groups while some worker may take the next one.

    The next group is of the earliest batch, and every rule is at least as strict for later batches: where none may take
    it, none may take any other. Of one batch, groups without a plan go first: they are late.
    """
    while not p.paused:
        group = head(p)
        planned = p.plans.earliest_batch()
        if group is not None and (planned is None or group.batch <= planned):
            if p.frozen(group.batch) or p.plans.awaits(group.batch, p.now_s) or not _assign_to_any(p, group):
                return
        elif planned is None or p.frozen(planned) or not _assign_planned(p, planned):
            return


# -- a group without a plan


def _assign_to_any(p: Pipeline, group: Group) -> bool:
    """Hand out the head of the queue. Returns whether a worker could take it."""
    roomy = with_room(p.fleet.workers.values(), group.num_missing, len(group.tokens))
    takers = [worker for worker in roomy if may_take(p, worker, group)]
    if takers:
        heapq.heappop(p.pending)
        assign(p, group, least_loaded(takers, group.excluded_worker))
    return bool(takers)


def least_loaded(workers: Sequence[Worker], excluded: WorkerId) -> Worker:
    """The worker with the fewest predicted tokens per slot; the excluded one only when it is alone.

    Together with the longest-first order this is list scheduling, so its makespan has the bound of Graham when workers
    are equal. Ties go to the worker that joined first.
    Source: StreamRL sec. 5.3 (greedy longest first). Ours: ``excluded``, a group that timed out goes elsewhere.
    """
    choices = [worker for worker in workers if worker.worker_id != excluded] if excluded else workers
    return min(choices or workers, key=lambda worker: worker.predicted_load / worker.capacity)


def with_room(workers: Iterable[Worker], num_samples: int, group_size: int) -> list[Worker]:
    """Workers that may hold ``num_samples`` more: their slots, and one group of lookahead.

    The lookahead keeps slots busy while a plan travels; more of it would fix the order of groups too early.
    It is asked at every event while a group waits, of a thousand workers too: one comparison each, before other rules.
    """
    lookahead = group_size - num_samples
    return [worker for worker in workers if worker.in_flight <= worker.capacity + lookahead]


# -- planned groups


def _assign_planned(p: Pipeline, batch: int) -> bool:
    """Hand out planned groups of ``batch``. Returns whether none of them is left."""
    plans, workers = p.plans, p.fleet.workers
    for worker_id in [name for name in plans.queues if not workers[name].healthy]:
        release_plan(p, worker_id)
    for worker in with_room([workers[worker_id] for worker_id in plans.queues], 0, p.settings.group_size):
        _start_own(p, worker, batch)
    while _steal(p, batch):
        pass
    return plans.earliest_batch() != batch


def _start_own(p: Pipeline, worker: Worker, batch: int) -> None:
    while (group_id := p.plans.next_for(worker.worker_id, batch)) is not None:
        group = p.groups[group_id]
        if not with_room([worker], group.num_missing, len(group.tokens)) or not may_take(p, worker, group):
            return
        assign(p, group, worker)


def _steal(p: Pipeline, batch: int) -> bool:
    """One group starts elsewhere than planned. Returns whether there was one."""
    plans = p.plans
    idle = [worker for worker in _below_limit(p) if plans.next_for(worker.worker_id, batch) is None]
    owners = [worker_id for worker_id in plans.queues if plans.next_for(worker_id, batch) is not None]
    if not idle or not owners:
        return False
    owner = max(owners, key=plans.backlog.__getitem__)
    group = p.groups[plans.queues[owner][0].group_id]
    takers = [worker for worker in idle if _can_take(p, worker, group) and _ends_sooner(p, group, owner, worker)]
    if not takers:
        return False
    taker = min(takers, key=lambda worker: plans.slowdown(worker.worker_id) * (worker.predicted_load + 1.0))
    assign(p, group, taker)
    return True


def _below_limit(p: Pipeline) -> list[Worker]:
    """Workers that run less than their share meant them to, or nothing."""
    limits = p.plans.limits
    return [
        worker
        for worker in p.fleet.workers.values()
        if worker.in_flight < limits.get(worker.worker_id, worker.capacity) or not worker.in_flight
    ]


def _can_take(p: Pipeline, worker: Worker, group: Group) -> bool:
    limit = p.plans.limits.get(worker.worker_id, worker.capacity)
    fits = worker.in_flight + group.num_missing <= max(limit, group.num_missing)
    return fits and may_take(p, worker, group)


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
REASON = "moved to an idle worker"


def migrate(p: Pipeline) -> None:
    """One group to each idle worker, those first that would take longest where they are."""
    if not p.settings.migrate_running or p.paused or p.stopping or p.plans.planned or head(p):
        return
    idle = [worker for worker in p.fleet.workers.values() if worker.healthy and not worker.in_flight]
    if not idle or not p.plans.slowdowns:
        return
    running = sorted(((_left_s(p, group, began_s), group) for group, began_s in _candidates(p)), key=_longest)
    idle.sort(key=lambda worker: p.plans.measured_slowdown(worker.worker_id))
    for worker, (left_s, group) in zip(idle, running, strict=False):
        again_s = group.predicted_tokens * _step_s(p, worker, group.num_missing)
        if again_s < MAX_TIME_SHARE * left_s and may_take(p, worker, group):
            group.excluded_worker = group.worker_id
            requeue(p, group, REASON)


def _candidates(p: Pipeline) -> list[tuple[Group, float]]:
    """Groups of first attempts and since when they run. One that failed or migrated before stays where it is."""
    found = [(p.live(one.group_id), one) for one in p.deadlines if not one.attempt]
    return [
        (group, one.at_s - p.settings.rollout_timeout_s)
        for group, one in found
        if group is not None and group.stage is Stage.RUNNING and not group.attempt
    ]


def _left_s(p: Pipeline, group: Group, began_s: float) -> float:
    """What the group still takes on its worker, by the forecast."""
    worker = p.fleet.workers[group.worker_id]
    ran_s = p.now_s - began_s
    return max(group.predicted_tokens * _step_s(p, worker, worker.in_flight) - ran_s, MIN_LEFT_SHARE * ran_s)


def _step_s(p: Pipeline, worker: Worker, samples: int) -> float:
    """Of this clock: what the cost model says, by what samples of the worker took instead."""
    slowdown = p.plans.measured_slowdown(worker.worker_id)
    return p.settings.decode_cost.step_s(min(samples, worker.capacity), 0.0) * slowdown


def _longest(running: tuple[float, Group]) -> tuple[float, str]:
    return -running[0], running[1].group_id
