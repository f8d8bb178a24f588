"""Plans of dispatch: asking for them, using those that come, and what they learn from samples that ended.

Owns: when a batch is planned, and the second look at a plan. Never: the planning, which takes longer than an event may:
it is done outside, on the values that the command carries. Invariant: a batch waits for its plan once, until a
deadline; a plan that comes later, names what has changed meanwhile, or never comes, costs nothing but the plan.
"""

from __future__ import annotations

from orchestrator.core.model.groups import MISSING, Batch, Group, Lane, Stage
from orchestrator.core.model.outbox import BatchPlanKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker
from orchestrator.core.rollout.attempts import enqueue_for
from transport.contracts.messages import (
    ComputePlan,
    PlanComputed,
    PlannedGroup,
    PlannedWorker,
    PlanShare,
    RolloutFinished,
)
from transport.contracts.types import GroupId, parse_row_id

RUNNING_SHARE = 0.5
"""Of what a running sample is expected to have: on average it is in the middle."""
FALLBACK = "even_longest_first"
"""In place of a policy that relies on predictions while these are not trusted, and of "scored" until they have been
compared with lengths: a bad ranker must not lose to none."""
WITHOUT_PREDICTIONS = ("even", "random")
"""Policies that look at none."""


# -- asking


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
        p.plans.awaited[index] = p.now_s + p.settings.plan_wait_s
        _request(p, index, workers)
    p.plans.next_batch = p.next_batch


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
    command = ComputePlan(
        plan_id=p.outbox.next_id.entry,
        batch=batch,
        policy=_policy(p),
        groups=tuple(_planned_group(p, group) for group in groups),
        workers=tuple(_planned_worker(p, worker) for worker in workers),
        prompt_tokens=sum(group.prompt_tokens for group in groups) / len(groups),
    )
    p.outbox.emit_until(BatchPlanKey(batch), command)


def _policy(p: Pipeline) -> str:
    """As configured, unless it would rely on predictions that are not (or no longer) trusted."""
    wanted = p.settings.dispatch
    if wanted in WITHOUT_PREDICTIONS or p.plans.may_trust(measured=wanted == "scored"):
        return wanted
    return FALLBACK


def _planned_group(p: Pipeline, group: Group) -> PlannedGroup:
    tokens, sigma = p.plans.calibration.corrected(group.predicted_tokens, group.predicted_sigma)
    return PlannedGroup(
        group_id=group.group_id, predicted_tokens=tokens, predicted_sigma=sigma, num_samples=group.num_missing
    )


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


# -- using what comes


def use_plan(p: Pipeline, event: PlanComputed) -> None:
    """Use a plan that was asked for and is not too late; groups and workers it no longer fits go without."""
    asked = _open_request(p, event.batch)
    if asked is None or asked.plan_id != event.plan_id:
        return
    in_time = p.plans.awaits(event.batch, p.now_s)
    _settle(p, event.batch)
    if in_time:
        for share in event.shares:
            _use(p, event.batch, share)


def _use(p: Pipeline, batch: int, share: PlanShare) -> None:
    worker = p.fleet.workers.get(share.worker_id)
    if worker is None or not worker.healthy:
        return
    groups = [group for group_id in share.group_ids if (group := _unplanned(p, batch, group_id)) is not None]
    groups = [group for group in groups if group.excluded_worker != worker.worker_id]
    for rank, group in enumerate(groups):
        enqueue_for(p, worker.worker_id, group, rank)
    p.plans.limits[worker.worker_id] = min(worker.capacity, sum(group.num_missing for group in groups))


def _unplanned(p: Pipeline, batch: int, group_id: GroupId) -> Group | None:
    group = p.live(group_id)
    if group is None or group.batch != batch or group.stage is not Stage.PENDING:
        return None
    return None if group_id in p.plans.planned else group


def expire_plans(p: Pipeline) -> None:
    """Plans that did not come in time are not waited for any longer."""
    for batch in [batch for batch in p.plans.awaited if not p.plans.awaits(batch, p.now_s)]:
        _settle(p, batch)


def _settle(p: Pipeline, batch: int) -> None:
    p.plans.awaited.pop(batch, None)
    p.outbox.confirm(BatchPlanKey(batch))


# -- what plans learn from samples that ended


def observe_speed(p: Pipeline, event: RolloutFinished) -> None:
    """The seconds of a sample, over those of its steps at the batch that ran meanwhile.

    The batch is taken as the mean of what its share began with and what is left now.
    """
    if not (p.settings.plans or p.settings.migrate_running):
        return
    group, worker = p.groups.get(parse_row_id(event.row_id)[0]), p.fleet.workers.get(event.worker_id)
    if group is None or worker is None or group.worker_id != event.worker_id or group.lane is Lane.EVAL:
        return
    in_flight = min(worker.capacity, worker.in_flight)
    batch = (p.plans.limits.get(worker.worker_id, in_flight) + in_flight) / 2
    context = batch * (group.prompt_tokens + event.response_tokens / 2)
    expected_s = event.response_tokens * p.settings.decode_cost.step_s(batch, context)
    p.plans.observe_slowdown(worker.worker_id, event.engine_s, expected_s)


def compare_lengths(p: Pipeline, batch: Batch) -> None:
    """What was predicted for a whole batch with what came: what comes first of a batch are its short samples."""
    calibration = p.plans.calibration
    calibration.fade()
    for group in (p.groups[group_id] for group_id in batch.members):
        for tokens in group.tokens:
            if tokens != MISSING:
                calibration.add(group.predicted_tokens, group.predicted_sigma, tokens)
