"""The event-exact instance against a loop over every token step, and what it does when the KV cache is full."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from orchestrator.core.costs.cost_model import DecodeCost
from orchestrator.sim.decoding import HEADROOM_TOKENS, Decoding, Sample, SampleTooLongError
from transport.contracts.messages import GroupPlan
from transport.contracts.types import GroupId, PromptId, WeightIdentity

ROOMY = DecodeCost(fixed_s=0.004, weights_s=0.006, gemm_sample_s=0.0007, sample_s=3e-5, kv_token_s=2e-6)
TIGHT = DecodeCost(
    fixed_s=0.004, weights_s=0.006, sample_s=3e-5, kv_token_s=2e-6, prefill_token_s=1e-5, kv_capacity_tokens=6000
)
PADDED = DecodeCost(
    fixed_s=0.004, sample_s=3e-5, kv_token_s=2e-6, prefill_token_s=1e-5, kv_capacity_tokens=9000, padded=True
)


def sample(index: int, length: int, *, prompt_tokens: int = 20, priority: float = 0.0) -> Sample:
    plan = GroupPlan(
        group_id=GroupId(f"0/{index}"),
        batch=0,
        prompt_id=PromptId(f"p{index}"),
        samples=(0,),
        group_size=1,
        predicted_tokens=float(length),
        priority=priority,
    )
    return Sample(plan, 0, prompt_tokens, length)


def run_events(cost: DecodeCost, capacity: int, arrivals: list[tuple[float, Sample]]) -> dict[str, float]:
    """Group id -> end, by jumping from change to change, as ``SimulatedWorker`` does."""
    decoding = Decoding(cost, capacity, 0.0)
    todo = sorted(arrivals, key=lambda arrival: arrival[0])
    ends: dict[str, float] = {}
    while todo or not decoding.idle:
        following = decoding.next_steps()
        steps = following
        if todo:
            until = decoding.steps_until(todo[0][0])
            steps = until if following is None else min(until, following)
        assert steps is not None
        now_s = decoding.boundary_s(steps)
        for ended in decoding.advance(steps, now_s):
            ends[ended.plan.group_id] = now_s
        while todo and todo[0][0] <= now_s + 1e-12:
            decoding.submit(todo.pop(0)[1])
        decoding.admit()
    assert decoding.context == 0
    return ends


@dataclass
class Looped:
    """One sample of the loop, which shares nothing with ``Decoding``."""

    name: str
    prompt: int
    length: int
    priority: float
    order: int
    done: int = 0


@dataclass
class Loop:
    """Token by token: every step of every sample, the context counted anew."""

    cost: DecodeCost
    capacity: int
    now_s: float = 0.0
    waiting: list[Looped] = field(default_factory=list)
    running: list[Looped] = field(default_factory=list)

    def context(self) -> int:
        return sum(one.prompt + one.done for one in self.running)

    def read_tokens(self) -> int:
        lengths = [one.prompt + one.done for one in self.running]
        return len(lengths) * max(lengths) if self.cost.padded else sum(lengths)

    def admit(self) -> None:
        while len(self.running) > 1 and self.context() + len(self.running) > self.cost.kv_capacity_tokens:
            youngest = min(self.running, key=lambda one: (one.prompt + one.done, -one.order))
            self.running.remove(youngest)
            self.waiting.append(youngest)
        prefill = 0
        while self.waiting and len(self.running) < self.capacity:
            self.waiting.sort(key=lambda one: (-one.priority, one.order))
            first = self.waiting[0]
            needed = self.context() + first.prompt + first.done + HEADROOM_TOKENS * (len(self.running) + 1)
            if self.running and needed > self.cost.kv_capacity_tokens:
                break
            self.running.append(self.waiting.pop(0))
            prefill += first.prompt + first.done
        self.now_s += self.cost.prefill_s(prefill)

    def step(self) -> list[str]:
        self.now_s += self.cost.step_s(len(self.running), self.read_tokens())
        for one in self.running:
            one.done += 1
        ended = [one for one in self.running if one.done == one.length]
        self.running = [one for one in self.running if one.done < one.length]
        return [one.name for one in ended]


def run_loop(cost: DecodeCost, capacity: int, arrivals: list[tuple[float, Sample]]) -> dict[str, float]:
    loop = Loop(cost, capacity)
    todo = sorted(arrivals, key=lambda arrival: arrival[0])
    ends: dict[str, float] = {}
    order = 0
    while todo or loop.waiting or loop.running:
        if not loop.running and not loop.waiting:
            loop.now_s = max(loop.now_s, todo[0][0])
        while todo and todo[0][0] <= loop.now_s + 1e-12:
            _, one = todo.pop(0)
            loop.waiting.append(Looped(one.plan.group_id, one.prompt_tokens, one.length, one.plan.priority, order))
            order += 1
        before_s = loop.now_s
        loop.admit()
        if loop.now_s > before_s:
            continue  # the end of a prefill is a boundary too
        for name in loop.step() if loop.running else []:
            ends[name] = loop.now_s
    return ends


def arrivals_of(seed: int, count: int, max_length: int) -> list[tuple[float, Sample]]:
    chance = random.Random(seed)
    return [
        (
            chance.choice([0.0, chance.uniform(0.0, 4.0)]),
            sample(index, chance.randint(1, max_length), priority=float(chance.randint(0, 3))),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("cost", [ROOMY, TIGHT, PADDED], ids=["roomy", "tight", "padded"])
def test_jumping_between_changes_equals_the_token_step_loop(cost, seed):
    capacity = 6 if seed % 2 else 40
    jumped = run_events(cost, capacity, arrivals_of(seed, 40, 600))
    looped = run_loop(cost, capacity, arrivals_of(seed, 40, 600))
    assert len(looped) == 40
    assert jumped == pytest.approx(looped, rel=1e-9)


def test_a_full_cache_retracts_the_youngest_and_keeps_its_tokens():
    decoding = Decoding(TIGHT, 8, 0.0)
    decoding.serve(WeightIdentity(epoch=1, version=0))
    for index in range(4):
        decoding.submit(sample(index, 2500, prompt_tokens=200))
    decoding.admit()
    while not decoding.num_retracted:
        steps = decoding.next_steps()
        assert steps is not None
        decoding.advance(steps, decoding.boundary_s(steps))
        decoding.admit()
    retracted = decoding.waiting[0][2]
    assert retracted.generated == decoding.steps > 1000
    assert retracted.spans == [(WeightIdentity(epoch=1, version=0), retracted.generated)]
    assert decoding.context <= TIGHT.kv_capacity_tokens


def test_tokens_are_counted_under_the_weights_that_sampled_them():
    old, new = WeightIdentity(epoch=1, version=3), WeightIdentity(epoch=1, version=4)
    decoding = Decoding(ROOMY, 8, 0.0)
    decoding.serve(old)
    decoding.submit(sample(0, 50))
    decoding.admit()
    decoding.advance(30, decoding.boundary_s(30))
    decoding.serve(new)
    (ended,) = decoding.advance(20, decoding.boundary_s(20))
    assert ended.spans == [(old, 30), (new, 20)]


def test_a_sample_that_can_never_fit_is_refused_by_name():
    with pytest.raises(SampleTooLongError, match="0/7/0 needs 7020 tokens of KV cache, the instance has 6000"):
        Decoding(TIGHT, 8, 0.0).submit(sample(7, 7000))


def test_a_group_prefills_its_prompt_once():
    plan = sample(0, 10).plan
    alone, group = (Decoding(TIGHT, 8, 0.0) for _ in range(2))
    alone.submit(Sample(plan, 0, 1000, 10))
    for index in range(4):
        group.submit(Sample(plan, index, 1000, 10))
    alone.admit()
    group.admit()
    assert alone.at_s == group.at_s == TIGHT.prefill_s(1000)
    assert math.isclose(group.context, 4000)
