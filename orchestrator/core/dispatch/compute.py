"""The dispatch policies by name, and how one answers the command that asks for a plan.

It runs beside the loop that decides, or inside the simulator, and sees nothing of the state: the same command under the
same settings gives the same answer. Whatever the input, a plan names every group once, or there is no instance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from orchestrator.core.dispatch.policies.even import even, even_longest_first, shuffled, two_class_max
from orchestrator.core.dispatch.policies.problem import GroupLength, Instance, Plan, Problem, repaired
from orchestrator.core.dispatch.policies.scored import scored
from orchestrator.core.dispatch.policies.slicing import slicing, steady_slicing
from orchestrator.core.model.settings import CoreSettings
from transport.contracts.messages import ComputePlan, PlanComputed, PlannedWorker, PlanShare

Planned: TypeAlias = Literal["even", "random", "two_class_max", "slicing", "paced", "scored"]
"""Policies that plan a batch. The others, "least_loaded" and "pulled", place one group after another."""

PLANNERS: Mapping[str, Callable[[Problem], Plan]] = MappingProxyType(
    {
        "even": even,
        "even_longest_first": even_longest_first,
        "random": shuffled,
        "two_class_max": two_class_max,
        "slicing": slicing,
        "paced": steady_slicing,
        "scored": scored,
    }
)


def plan_dispatch(policy: str, problem: Problem) -> Plan:
    """The plan of ``policy``: shares for every instance; none where there is none, and then no worker gets anything.

    Raises KeyError: no such policy; settings are checked where they are read.
    """
    planner = PLANNERS[policy]
    return planner(repaired(problem)) if problem.instances else Plan(shares=(), policy=policy)


def compute_plan(command: ComputePlan, settings: CoreSettings) -> PlanComputed:
    """Plan a batch. Raises KeyError: no such policy."""
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
    return Problem(
        groups=tuple(
            GroupLength(
                group_id=group.group_id,
                mean_tokens=group.predicted_tokens,
                sigma=group.predicted_sigma,
                num_samples=group.num_samples,
            )
            for group in command.groups
        ),
        instances=tuple(
            Instance(
                worker_id=worker.worker_id,
                cost=settings.decode_cost.scaled(worker.slowdown),
                max_running=max(1, worker.capacity),
                in_hand=_in_hand(worker),
            )
            for worker in command.workers
        ),
        prompt_tokens=command.prompt_tokens,
        max_tokens=settings.max_response_tokens or math.inf,
        train_token_s=settings.train_token_s if synchronous else 0.0,
        max_staleness=settings.max_staleness,
        tail_share=settings.tail_share,
        seed=command.batch,
    )


def _in_hand(worker: PlannedWorker) -> tuple[float, ...]:
    """Expected tokens of each sample: the longest, and the others' mean."""
    if not worker.in_hand:
        return ()
    others = worker.in_hand - 1
    rest = (worker.in_hand_tokens - worker.in_hand_longest) / max(1, others)
    return (worker.in_hand_longest, *[rest] * others)
