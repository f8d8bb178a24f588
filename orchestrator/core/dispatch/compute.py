"""From the command that asks for a plan to the event that answers it.

Owns: the translation. Never: a rule, and nothing of the state: it runs beside the loop that decides, or inside the
simulator. Invariant: the same command under the same settings gives the same answer.
"""

from __future__ import annotations

import math

from orchestrator.core.dispatch.policies.registry import plan_dispatch
from orchestrator.core.dispatch.problem import GroupLength, Instance, Problem
from orchestrator.core.model.settings import CoreSettings
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.messages import ComputePlan, PlanComputed, PlannedWorker, PlanShare


def compute_plan(command: ComputePlan, settings: CoreSettings) -> PlanComputed:
    """Plan a batch. An unknown policy is a KeyError: settings are checked where they are read."""
    plan = plan_dispatch(command.policy, problem_of(command, settings))
    shares = [
        PlanShare(worker_id=worker.worker_id, group_ids=tuple(group.group_id for group in share))
        for worker, share in zip(command.workers, plan.shares, strict=True)
    ]
    return PlanComputed(
        plan_id=command.plan_id, batch=command.batch, shares=tuple(shares), policy=plan.policy, end_s=plan.end_s
    )


def problem_of(command: ComputePlan, settings: CoreSettings) -> Problem:
    """The planning problem that ``command`` describes. Where versions are waited for, the end is that of training."""
    synchronous = settings.max_staleness == 0 and settings.release == "stream"
    groups = tuple(
        GroupLength(
            group_id=group.group_id,
            mean_tokens=group.predicted_tokens,
            sigma=group.predicted_sigma,
            num_samples=group.num_samples,
        )
        for group in command.groups
    )
    return Problem(
        groups=groups,
        instances=tuple(_instance(worker, settings.decode_cost) for worker in command.workers),
        prompt_tokens=command.prompt_tokens,
        max_tokens=settings.max_response_tokens or math.inf,
        train_token_s=settings.train_token_s if synchronous else 0.0,
        max_staleness=settings.max_staleness,
        seed=command.batch,
    )


def _instance(worker: PlannedWorker, cost: DecodeCost) -> Instance:
    """What is in hand is its longest sample and the others' mean."""
    others = max(0, worker.in_hand - 1)
    rest = (worker.in_hand_tokens - worker.in_hand_longest) / others if others else 0.0
    in_hand = (worker.in_hand_longest, *[rest] * others) if worker.in_hand else ()
    return Instance(
        worker_id=worker.worker_id,
        cost=cost.scaled(worker.slowdown),
        max_running=max(1, worker.capacity),
        in_hand=in_hand,
    )
