"""The event-exact instance against a loop over every token step, and what it does when the KV cache is full."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.contracts.continuous_batching import (
    HEADROOM_TOKENS,
    ContinuousBatching,
    DecodeCost,
    Drafts,
    Sample,
    cheapest,
    finish_times,
    num_drafted,
)
from transport.contracts.messages import GroupPlan
from transport.contracts.types import GroupId, PromptId, WeightIdentity

ROOMY = DecodeCost(fixed_s=0.004, weights_s=0.006, gemm_sample_s=0.0007, sample_s=3e-5, kv_token_s=2e-6)
TIGHT = DecodeCost(
    fixed_s=0.004, weights_s=0.006, sample_s=3e-5, kv_token_s=2e-6, prefill_token_s=1e-5, kv_capacity_tokens=6000
)
PADDED = DecodeCost(
    fixed_s=0.004, sample_s=3e-5, kv_token_s=2e-6, prefill_token_s=1e-5, kv_capacity_tokens=9000, padded=True
)


def sample(index: int, length: int, *, prompt_tokens: int = 20, priority: float = 0.0) -> Sample[GroupPlan]:
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


def run_events(cost: DecodeCost, capacity: int, arrivals: list[tuple[float, Sample[GroupPlan]]]) -> dict[str, float]:
    """Group id -> end, by jumping from change to change, as ``SimulatedWorker`` does."""
    batching = ContinuousBatching(cost, capacity, 0.0)
    todo = sorted(arrivals, key=lambda arrival: arrival[0])
    ends: dict[str, float] = {}
    while todo or not batching.idle:
        following = batching.next_steps()
        steps = following
        if todo:
            until = batching.steps_until(todo[0][0])
            steps = until if following is None else min(until, following)
        assert steps is not None
        now_s = batching.boundary_s(steps)
        for ended in batching.advance(steps, now_s):
            ends[ended.request.group_id] = now_s
        while todo and todo[0][0] <= now_s + 1e-12:
            batching.submit(todo.pop(0)[1])
        batching.admit()
    assert batching.context == 0
    return ends


@dataclass
class Looped:
    """One sample of the loop, which shares nothing with ``ContinuousBatching``."""

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

    def held(self, *entering: Looped) -> int:
        lengths = [one.prompt + one.done for one in (*self.running, *entering)]
        return len(lengths) * max(lengths, default=0) if self.cost.padded else sum(lengths)

    def admit(self) -> None:
        while len(self.running) > 1 and self.held() + len(self.running) > self.cost.kv_capacity_tokens:
            youngest = min(self.running, key=lambda one: (one.prompt + one.done, -one.order))
            self.running.remove(youngest)
            self.waiting.append(youngest)
        prefill = 0
        while self.waiting and len(self.running) < self.capacity:
            self.waiting.sort(key=lambda one: (-one.priority, one.order))
            first = self.waiting[0]
            needed = self.held(first) + HEADROOM_TOKENS * (len(self.running) + 1)
            if self.running and needed > self.cost.kv_capacity_tokens:
                break
            self.running.append(self.waiting.pop(0))
            prefill += first.prompt + first.done
        self.now_s += self.cost.prefill_s(prefill)

    def step(self) -> list[str]:
        self.now_s += self.cost.step_s(len(self.running), self.held())
        for one in self.running:
            one.done += 1
        ended = [one for one in self.running if one.done == one.length]
        self.running = [one for one in self.running if one.done < one.length]
        return [one.name for one in ended]


def run_loop(cost: DecodeCost, capacity: int, arrivals: list[tuple[float, Sample[GroupPlan]]]) -> dict[str, float]:
    loop = Loop(cost, capacity)
    todo = sorted(arrivals, key=lambda arrival: arrival[0])
    ends: dict[str, float] = {}
    order = 0
    while todo or loop.waiting or loop.running:
        if not loop.running and not loop.waiting:
            loop.now_s = max(loop.now_s, todo[0][0])
        while todo and todo[0][0] <= loop.now_s + 1e-12:
            _, one = todo.pop(0)
            loop.waiting.append(
                Looped(one.request.group_id, one.prompt_tokens, one.length, one.request.priority, order)
            )
            order += 1
        before_s = loop.now_s
        loop.admit()
        if loop.now_s > before_s:
            continue  # the end of a prefill is a boundary too
        for name in loop.step() if loop.running else []:
            ends[name] = loop.now_s
    return ends


def arrivals_of(seed: int, count: int, max_length: int) -> list[tuple[float, Sample[GroupPlan]]]:
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
    batching = ContinuousBatching(TIGHT, 8, 0.0)
    batching.serve(WeightIdentity(epoch=1, version=0))
    for index in range(4):
        batching.submit(sample(index, 2500, prompt_tokens=200))
    batching.admit()
    while not batching.num_retracted:
        steps = batching.next_steps()
        assert steps is not None
        batching.advance(steps, batching.boundary_s(steps))
        batching.admit()
    retracted = batching.waiting[0][2]
    assert retracted.generated == batching.steps > 1000
    assert retracted.spans == [(WeightIdentity(epoch=1, version=0), retracted.generated)]
    assert batching.context <= TIGHT.kv_capacity_tokens


def test_a_padded_cache_holds_so_many_samples_as_long_as_the_longest():
    """Ten times 20 tokens beside 880, in 9,000: summed all fit, padded not even those ten."""

    def most(padded: bool, max_context: float = math.inf) -> int:
        cost = DecodeCost(fixed_s=0.01, kv_capacity_tokens=9000, padded=padded)
        batching = ContinuousBatching(cost, 32, max_context=max_context)
        batching.submit(sample(0, 10, prompt_tokens=880, priority=1.0))
        for index in range(1, 11):
            batching.submit(sample(index, 10))
        batching.admit()
        return len(batching.running)

    assert most(padded=False) == 11
    assert most(padded=True) == 9000 // (880 + HEADROOM_TOKENS) == 7
    assert most(padded=True, max_context=900) == 10, "head-room ends where no sample goes beyond"


def test_tokens_are_counted_under_the_weights_that_sampled_them():
    old, new = WeightIdentity(epoch=1, version=3), WeightIdentity(epoch=1, version=4)
    batching = ContinuousBatching(ROOMY, 8, 0.0)
    batching.serve(old)
    batching.submit(sample(0, 50))
    batching.admit()
    batching.advance(30, batching.boundary_s(30))
    batching.serve(new)
    (ended,) = batching.advance(20, batching.boundary_s(20))
    assert ended.spans == [(old, 30), (new, 20)]


def test_a_sample_that_outgrows_the_cache_decodes_alone():
    (alone,) = finish_times(TIGHT, [7000], prompt_tokens=20, max_running=8)
    assert alone == pytest.approx(TIGHT.steps_s(1, 20, 7000))
    first, second = finish_times(TIGHT, [7000, 10], prompt_tokens=20, max_running=8)
    assert second < first


def test_a_group_prefills_its_prompt_once():
    plan = sample(0, 10).request
    alone, group = (ContinuousBatching(TIGHT, 8, 0.0) for _ in range(2))
    alone.submit(Sample(plan, 0, 1000, 10))
    for index in range(4):
        group.submit(Sample(plan, index, 1000, 10))
    alone.admit()
    group.admit()
    assert alone.at_s == group.at_s == TIGHT.prefill_s(1000)
    assert math.isclose(group.context, 4000)


# -- drafts


def test_tokens_of_a_step_are_the_geometric_sum_and_depth_0_is_the_cost_itself():
    cost = DecodeCost(fixed_s=0.002, weights_s=0.007, gemm_sample_s=3e-5, sample_s=1e-6, kv_token_s=2e-8)
    drafts = Drafts(acceptance=0.5, max_tokens=3, draft_s=0.001)
    plain, _, _, deep = drafts.costs(cost)
    assert plain is cost
    assert drafts.tokens_a_step(3) == 1.875
    assert deep.step_s(2, 100) == pytest.approx(
        (0.003 + max(0.007, 2 * 4 * 3e-5) + 2 * 4 * 1e-6 + 100 * 2e-8) / 1.875
    ), "verification reads the keys and values once"


def test_drafts_are_deep_in_small_batches_and_off_where_they_lose():
    cost = DecodeCost(fixed_s=0.002, weights_s=0.007, gemm_sample_s=3e-5)
    costs = Drafts(acceptance=0.55, max_tokens=8, draft_s=0.0002).costs(cost)
    depths = [costs.index(cheapest(costs, batch, 0)) for batch in (1, 32, 64, 128, 1000)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == 8
    assert depths[-1] == 0
    for batch in (1, 64, 1000):
        assert cheapest(costs, batch, 0).step_s(batch, 0) <= cost.step_s(batch, 0)


@pytest.mark.parametrize(("acceptance", "gain"), [(0.0, 1.0), (1.0, 9.0)])
def test_acceptance_of_0_drafts_nothing_and_of_1_all(acceptance, gain):
    cost = DecodeCost(fixed_s=0.01)
    chosen = cheapest(Drafts(acceptance=acceptance).costs(cost), 1, 0)
    assert cost.step_s(1, 0) / chosen.step_s(1, 0) == pytest.approx(gain)


@given(
    acceptance=st.floats(0, 1),
    batch=st.integers(1, 40),
    context=st.integers(0, 100_000),
    max_tokens=st.integers(0, 8),
    draft_s=st.sampled_from([0.0, 0.001]),
    gemm_s=st.sampled_from([0.0, 3e-5, 3e-4]),
)
def test_drafts_that_are_all_worth_the_same_are_as_deep_as_in_the_simulator(
    acceptance, batch, context, max_tokens, draft_s, gemm_s
):
    cost = DecodeCost(fixed_s=0.002, weights_s=0.007, gemm_sample_s=gemm_s, sample_s=1e-5, kv_token_s=2e-8)
    drafts = Drafts(acceptance=acceptance, max_tokens=max_tokens, draft_s=draft_s)
    costs = drafts.costs(cost)
    chances = [acceptance**place for place in range(1, max_tokens + 1) for _ in range(batch)]
    drafted = num_drafted(cost.step_s, batch, context, chances, draft_s=draft_s)
    assert 0 <= drafted <= len(chances)
    # The batch's samples need not all be as deep: it is never worse, and better only within one place.
    tokens = batch + sum(chances[:drafted])
    a_token_s = (cost.step_s(batch + drafted, context) + (draft_s if drafted else 0)) / tokens
    same_s = cheapest(costs, batch, context).step_s(batch, context) / batch
    assert a_token_s <= same_s * (1 + 1e-9)
    uniform = [num for num in (drafted // batch * batch, -(-drafted // batch) * batch) if num <= len(chances)]
    rounded = [
        (cost.step_s(batch + num, context) + (draft_s if num else 0)) / (batch + sum(chances[:num])) for num in uniform
    ]
    assert min(rounded) == pytest.approx(same_s, rel=1e-9)


def test_of_drafts_that_differ_the_likely_ones_are_verified():
    cost = DecodeCost(fixed_s=0.01, sample_s=0.002)
    assert num_drafted(cost.step_s, 4, 0, [0.9, 0.8, 0.1, 0.05]) == 2
    assert num_drafted(cost.step_s, 400, 0, [0.9, 0.8, 0.1, 0.05]) == 0, "in a large batch a token costs what it gives"
    assert num_drafted(cost.step_s, 4, 0, []) == 0
    assert num_drafted(cost.step_s, 4, 0, [1.0], draft_s=1.0) == 0


@pytest.mark.parametrize("wrong", [{"acceptance": 1.1}, {"acceptance": -0.1}, {"acceptance": 0.5, "max_tokens": -1}])
def test_drafts_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="acceptance <= 1"):
        Drafts(**wrong)


def test_a_batch_with_drafts_ends_sooner_and_gives_every_token():
    cost = DecodeCost(fixed_s=0.002, weights_s=0.007, gemm_sample_s=3e-5, prefill_token_s=1e-5)

    def run(drafts=None):
        batching = ContinuousBatching(cost, 8)
        if drafts is not None:
            batching.draft(drafts, cost)
        for place, length in enumerate((5, 50, 400)):
            batching.submit(sample(place, length, prompt_tokens=10))
        ended = []
        while not batching.idle:
            batching.admit()
            steps = batching.next_steps()
            ended += batching.advance(steps, batching.boundary_s(steps))
        assert [sample.generated for sample in ended] == [5, 50, 400]
        return batching.at_s

    plain = run()
    assert run(Drafts(acceptance=0.0)) == plain
    assert plain / run(Drafts(acceptance=0.55)) > 1.8
    always = [run(Drafts(acceptance=0.55, max_tokens=depth, every_step=True)) for depth in range(9)]
    assert always[0] == plain
    assert run(Drafts(acceptance=0.55)) <= min(always), "none is better than the best at each step"


def test_an_engine_that_drafts_at_every_step_loses_in_large_batches():
    cost = DecodeCost(fixed_s=0.002, weights_s=0.007, gemm_sample_s=3e-5)
    (deep,) = Drafts(acceptance=0.55, every_step=True).costs(cost)
    assert deep.step_s(1, 0) < cost.step_s(1, 0) / 2
    assert deep.step_s(256, 0) > 2 * cost.step_s(256, 0)
