"""The plan desk: plans come as events, in order, computed beside the loop."""

from __future__ import annotations

import asyncio
import random

from orchestrator.core.dispatch.compute import compute_plan, problem_of
from orchestrator.core.model.settings import CoreSettings
from orchestrator.loop.execute import Planner
from orchestrator.loop.intake import new_inbox
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.messages import ComputePlan, PlanComputed, PlannedGroup, PlannedWorker
from transport.contracts.types import GroupId, WorkerId

SETTINGS = CoreSettings(
    num_batches=1,
    groups_per_batch=8,
    group_size=2,
    max_staleness=0,
    decode_cost=DecodeCost(fixed_s=0.02, sample_s=0.001),
    train_token_s=1e-4,
    max_response_tokens=1000,
)


def command(batch: int, num_groups: int = 8, *, policy: str = "slicing", slowdown: float = 1.0) -> ComputePlan:
    chance = random.Random(batch)
    groups = tuple(
        PlannedGroup(
            group_id=GroupId(f"{batch}/{slot}"),
            predicted_tokens=chance.uniform(10, 2000),
            predicted_sigma=0.3,
            num_samples=2,
        )
        for slot in range(num_groups)
    )
    workers = (
        PlannedWorker(worker_id=WorkerId("a"), capacity=8, slowdown=slowdown),
        PlannedWorker(worker_id=WorkerId("b"), capacity=8, in_hand=3, in_hand_tokens=300.0, in_hand_longest=200.0),
    )
    return ComputePlan(plan_id=f"{batch}-0", batch=batch, policy=policy, groups=groups, workers=workers)


async def test_plans_come_in_the_order_asked_for_the_last_of_each_batch():
    inbox, planner = new_inbox(), Planner(lambda: SETTINGS)
    task = asyncio.create_task(planner.run(inbox))
    planner.request(command(0, policy="even"))
    for batch in range(3):
        planner.request(command(batch))
    async with asyncio.timeout(30):
        answers = [(await inbox.get()).event for _ in range(3)]
    task.cancel()
    assert inbox.empty()
    assert [answer.policy for answer in answers if isinstance(answer, PlanComputed)] == ["slicing"] * 3
    assert [answer.plan_id for answer in answers if isinstance(answer, PlanComputed)] == ["0-0", "1-0", "2-0"]
    assert all(answer.compute_s > 0 for answer in answers if isinstance(answer, PlanComputed))


async def test_the_loop_goes_on_while_a_large_plan_is_computed():
    inbox, planner = new_inbox(), Planner(lambda: SETTINGS)
    task = asyncio.create_task(planner.run(inbox))
    planner.request(command(0, 8000, policy="scored"))
    turns = 0
    while inbox.empty():
        turns += 1
        await asyncio.sleep(0.001)
    task.cancel()
    assert turns > 5, "the plan was computed on the loop"


def test_a_command_says_all_that_a_plan_is_made_of():
    problem = problem_of(command(4, slowdown=3.0), SETTINGS)
    slow, busy = problem.instances
    assert slow.cost.step_s(2, 0) == 3 * busy.cost.step_s(2, 0)
    assert busy.in_hand == (200.0, 50.0, 50.0)
    assert problem.train_token_s == 1e-4
    assert problem.max_tokens == 1000
    assert compute_plan(command(4), SETTINGS) == compute_plan(command(4), SETTINGS)


def test_a_worker_has_nothing_in_hand_unless_a_plan_says_so():
    idle = PlannedWorker(worker_id=WorkerId("a"), capacity=8)
    assert (idle.in_hand, idle.in_hand_tokens, idle.in_hand_longest) == (0, 0.0, 0.0)
