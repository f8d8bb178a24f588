"""The pure functions of the core: order, placement, staleness, packing."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.dispatch.handout import least_loaded
from orchestrator.core.model.groups import (
    TRANSITIONS,
    BrokenInvariantError,
    Group,
    Lane,
    Phase,
    Stage,
    mini_batch_of_slot,
    plan_phases,
)
from orchestrator.core.model.staleness import Lineage, is_too_old, may_admit, may_dispatch, may_resume
from orchestrator.core.model.workers import Worker, with_room
from orchestrator.core.rollout.lifecycle import plan_priority
from orchestrator.core.training import pack_round
from transport.contracts.types import GroupId, PromptId, WeightIdentity, WorkerId


def load(worker_id: str, capacity: int = 8, in_flight: int = 0, predicted_load: float = 0.0) -> Worker:
    worker = Worker(worker_id=WorkerId(worker_id), capacity=capacity)
    worker.in_flight, worker.predicted_load = in_flight, predicted_load
    return worker


def group(**fields) -> Group:
    fields = {"batch": 0, "predicted_tokens": 1.0, "tokens": [-1], "num_missing": 1, "prompt_tokens": 2} | fields
    return Group(group_id=GroupId("0/0"), prompt_id=PromptId("p0"), **fields)


def identity(epoch: int, version: int) -> WeightIdentity:
    return WeightIdentity(epoch=epoch, version=version)


def best_makespan(weights: list[int], num_bins: int) -> int:
    """Brute force over every assignment."""
    best = sum(weights)
    for choice in product(range(num_bins), repeat=len(weights)):
        loads = [0] * num_bins
        for weight, index in zip(weights, choice, strict=True):
            loads[index] += weight
        best = min(best, max(loads))
    return best


@given(weights=st.lists(st.integers(0, 20), max_size=6), num_workers=st.integers(1, 3))
def test_longest_first_to_the_least_loaded_ends_within_the_bound_of_list_scheduling(weights, num_workers):
    loads = {WorkerId(str(index)): 0.0 for index in range(num_workers)}
    for weight in sorted(weights, reverse=True):
        workers = [load(worker_id, predicted_load=tokens) for worker_id, tokens in loads.items()]
        loads[least_loaded(workers, WorkerId("")).worker_id] += weight
    bound = (4 / 3 - 1 / (3 * num_workers)) * best_makespan(weights, num_workers)
    assert max(loads.values()) <= bound + 1e-9


def test_least_loaded_counts_predicted_tokens_for_each_slot():
    small = load("a", capacity=4, predicted_load=40.0)
    large = load("b", capacity=8, predicted_load=60.0)
    assert least_loaded([small, large], WorkerId("")) is large


def test_an_excluded_worker_is_taken_only_when_it_is_alone():
    idle, busy = load("a"), load("b", predicted_load=99.0)
    assert least_loaded([idle, busy], WorkerId("a")) is busy
    assert least_loaded([idle], WorkerId("a")) is idle


def test_room_is_the_slots_and_one_group_of_lookahead():
    full, over = load("a", capacity=8, in_flight=8), load("b", capacity=8, in_flight=9)
    assert with_room([full, over], 4, group_size=4) == [full]
    assert with_room([full, over], 3, group_size=4) == [full, over]


def test_an_earlier_batch_outranks_any_prediction():
    def priority(batch: int, predicted_tokens: float, lane: Lane = Lane.TRAIN) -> float:
        return plan_priority(group(batch=batch, predicted_tokens=predicted_tokens, lane=lane))

    assert priority(3, 1.0) > priority(4, 1_000_000.0)
    assert priority(3, 20.0) > priority(3, 10.0)
    assert priority(9, 1.0, Lane.EVAL) > priority(0, 1_000_000.0)


def test_a_group_moves_along_the_table_of_transitions_alone():
    for stage in Stage:
        for following in Stage:
            one = group(stage=stage)
            if following in TRANSITIONS[stage]:
                one.move(following)
                assert one.stage is following
            else:
                with pytest.raises(BrokenInvariantError, match=f"0/0 is {stage} and cannot become {following}"):
                    one.move(following)


def test_the_gate_counts_versions_within_the_epoch():
    assert may_dispatch(3, identity(2, 2), epoch=2, max_staleness=1)
    assert not may_dispatch(4, identity(2, 2), epoch=2, max_staleness=1)
    assert not may_dispatch(3, identity(1, 3), epoch=2, max_staleness=1)
    assert not may_dispatch(0, None, epoch=2, max_staleness=1)
    assert may_admit(1, trained_version=0, max_staleness=1)
    assert not may_admit(1, trained_version=0, max_staleness=0)
    assert is_too_old(3, 1, max_staleness=1)
    assert not is_too_old(3, 2, max_staleness=1)


def test_a_rollback_takes_its_versions_out_of_the_lineage():
    lineage = Lineage()
    assert not lineage.restart(identity(1, 0))
    lineage.version = 1
    lineage.version = 2
    assert lineage.contains(identity(1, 2))
    assert lineage.restart(identity(2, 1)), "version 2 of epoch 1 is lost"
    assert lineage.contains(identity(1, 1))
    assert not lineage.contains(identity(1, 2))
    assert not lineage.contains(identity(2, 2)), "not published yet"
    assert not lineage.contains_row(identity(1, 1), identity(2, 1)), "its middle may be of the lost version"
    assert lineage.contains_row(identity(1, 0), identity(1, 1))
    assert lineage.restart(identity(3, 0))
    assert not lineage.contains(identity(1, 1)), "a deeper rollback reaches former epochs"


def test_what_a_lossy_restart_interrupts_starts_over_and_other_tokens_are_gone_on_from():
    """A row that goes on reaches from its kept tokens to the weights of now."""
    lineage = Lineage()
    lineage.restart(identity(1, 0))
    lineage.version = 6
    kept = identity(1, 5)
    assert may_resume(6, kept, kept, lineage, max_staleness=2)
    assert lineage.restart(identity(2, 5)), "version 6 is lost"
    assert lineage.contains(kept)
    assert not may_resume(6, kept, kept, lineage, max_staleness=2)
    assert may_resume(6, identity(2, 5), identity(2, 5), lineage, max_staleness=2)
    assert not may_resume(6, identity(2, 5), identity(2, 6), lineage, max_staleness=2), "not published yet"


def test_a_restart_at_the_newest_version_loses_nothing():
    lineage = Lineage()
    lineage.restart(identity(1, 0))
    lineage.version = 1
    assert not lineage.restart(identity(2, 1))
    assert lineage.contains_row(identity(1, 0), identity(2, 1))


def test_parts_are_equal_and_in_admission_order():
    assert [mini_batch_of_slot(slot, 6, 2) for slot in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [mini_batch_of_slot(slot, 3, 2) for slot in range(3)] == [0, 0, 1]


def test_phases_record_first_then_walk_mini_batches_of_each_pass():
    assert plan_phases(2, 2, record_logprobs=True) == (
        Phase(kind="logprobs"),
        Phase(kind="train", pass_index=0, mini_batch=0),
        Phase(kind="train", pass_index=0, mini_batch=1),
        Phase(kind="train", pass_index=1, mini_batch=0),
        Phase(kind="train", pass_index=1, mini_batch=1),
    )
    assert plan_phases(1, 1, record_logprobs=False) == (Phase(kind="train", mini_batch=0),)


@given(
    tokens=st.lists(st.integers(1, 120), min_size=1, max_size=20),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(50, 150),
)
def test_a_round_fills_every_rank_and_keeps_the_cap(tokens, num_ranks, max_tokens):
    ranks = pack_round(tokens, num_ranks, max_tokens)
    chosen = [index for rank in ranks for index in rank]
    assert len(ranks) == num_ranks
    assert len(set(chosen)) == len(chosen) > 0
    assert all(ranks) or len(tokens) < num_ranks
    assert all(len(rank) == 1 or sum(tokens[index] for index in rank) <= max_tokens for rank in ranks)
    assert 0 in chosen, "the group that waited longest goes"


def test_a_round_balances_tokens():
    assert pack_round([10, 40, 20, 30], num_ranks=2, max_tokens=50) == [[1, 0], [3, 2]]


@given(
    tokens=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    given_before=st.lists(st.integers(0, 200), min_size=1, max_size=4),
)
def test_rounds_even_out_what_ranks_were_given(tokens, given_before):
    """As any list scheduling: no rank ends above the others by more than what it got last."""
    ranks = pack_round(tokens, len(given_before), 10_000, given_before)
    loads = [before + sum(tokens[index] for index in rank) for before, rank in zip(given_before, ranks, strict=True)]
    assert sorted(index for rank in ranks for index in rank) == list(range(len(tokens)))
    for load, rank in zip(loads, ranks, strict=True):
        assert not rank or load - min(tokens[index] for index in rank) <= min(loads)


def test_a_rank_that_has_no_room_is_passed_by():
    assert pack_round([30, 30, 30], num_ranks=2, max_tokens=60, given=[0, 100]) == [[0, 1], [2]]
