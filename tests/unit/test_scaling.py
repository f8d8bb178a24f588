"""When generation workers come and go: gain, hysteresis, confirmation, rest, limits."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.model.autoscale import Change, Estimate, Iteration, Scaling, estimate_of, pace_of
from orchestrator.core.model.settings import ScalingSettings
from transport.contracts.continuous_batching import DecodeCost

SETTINGS = ScalingSettings(min_workers=1, max_workers=8)
COST = DecodeCost(fixed_s=0.01, weights_s=0.01, sample_s=0.0005)


def shrinking(longest_s: float, work_s: float) -> Estimate:
    return lambda workers: longest_s + work_s / workers


def measured(batch: int, workers: int, generation_s: float, training_s: float, exposed_s: float = 0.0) -> Iteration:
    return Iteration(
        batch=batch, workers=workers, generation_s=generation_s, training_s=training_s, exposed_s=exposed_s
    )


def live(
    settings: ScalingSettings, estimate: Estimate, training_s: float, workers: int, iterations: int = 30
) -> list[Change]:
    """A run that does what is asked at once, measured without noise."""
    scaling, changes = Scaling(), []
    for batch in range(iterations):
        change = scaling.observe(settings, measured(batch, workers, estimate(workers), training_s), estimate)
        if change is not None:
            changes.append(change)
            workers = change.to_workers
    return changes


def test_slow_generation_gets_the_workers_that_pay_and_then_there_is_peace():
    (change,) = live(SETTINGS, shrinking(5.0, 20.0), 9.0, workers=2)
    assert (change.batch, change.from_workers, change.to_workers) == (1, 2, 5)
    assert change.after_s == 9.0
    assert change.reason == (
        "generation is slower by 6 s; 5 instead of 2 workers make an iteration 9 s instead of 15 s"
    )


def test_slow_training_lets_workers_go_one_unit_at_a_time_until_generation_would_be_slower():
    changes = live(SETTINGS, shrinking(0.0, 20.0), 10.0, workers=6)
    assert [change.to_workers for change in changes] == [5, 4, 3, 2]


def test_a_gap_that_workers_do_not_close_is_left_alone():
    """The longest sample is the end of generation."""
    stuck = shrinking(10.0, 1e-9)
    assert live(SETTINGS, stuck, 10.0, workers=4)[0].to_workers == 3, "what saves nothing goes"


def test_one_odd_iteration_changes_nothing():
    scaling = Scaling()
    for batch in range(20):
        slow = 30.0 if batch % 2 else 9.0
        assert scaling.observe(SETTINGS, measured(batch, 2, slow, 9.0), lambda workers: 18.0 / workers) is None


def test_after_a_change_nothing_is_judged_until_the_worker_has_served():
    settings = msgspec.structs.replace(SETTINGS, rest=4)
    scaling, estimate = Scaling(), shrinking(0.0, 20.0)
    found = [scaling.observe(settings, measured(batch, 1, 20.0, 10.0), estimate) for batch in range(8)]
    assert [change.batch for change in found if change is not None] == [1, 7]


def test_a_lost_worker_does_not_end_scaling():
    scaling, estimate = Scaling(), shrinking(0.0, 20.0)
    assert scaling.observe(SETTINGS, measured(0, 2, 10.0, 10.0), estimate) is None
    lost = [scaling.observe(SETTINGS, measured(batch, 1, 20.0, 10.0), estimate) for batch in (1, 2)]
    assert lost[0] is None
    assert lost[1] is not None
    assert lost[1].to_workers == 2


def test_limits_hold_also_for_a_run_that_starts_outside_of_them():
    settings = ScalingSettings(min_workers=2, max_workers=3)
    assert live(settings, shrinking(0.0, 99.0), 1.0, workers=1)[0].to_workers == 2
    assert live(settings, shrinking(0.0, 99.0), 1.0, workers=5)[0].to_workers == 3


def test_a_synchronous_run_counts_the_training_that_generation_waits_for():
    """Training is slower in sum, but generation is exposed: a worker more shortens the iteration all the same."""
    estimate, scaling = shrinking(0.0, 16.0), Scaling()
    found = [scaling.observe(SETTINGS, measured(batch, 2, 8.0, 9.0, exposed_s=5.0), estimate) for batch in range(2)]
    assert found[1] is not None
    assert (found[1].to_workers, found[1].after_s) == (4, 9.0)


def test_units_come_and_go_whole():
    settings = ScalingSettings(min_workers=2, max_workers=9, unit=2)
    assert {change.to_workers % 2 for change in live(settings, shrinking(0.0, 60.0), 10.0, workers=2)} == {0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_workers": 3, "max_workers": 2}, "min_workers <= max_workers"),
        ({"min_workers": 0}, "1 <= min_workers"),
        ({"max_loss": 0.05}, "added and drained in turn"),
        ({"unit": 0}, "unit and confirm"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        ScalingSettings(**changes)


def test_the_state_survives_a_snapshot():
    scaling = Scaling()
    scaling.observe(SETTINGS, measured(0, 2, 20.0, 10.0), shrinking(0.0, 40.0))
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(scaling), type=Scaling)
    assert restored == scaling


@given(
    longest_s=st.floats(0.0, 50.0),
    work_s=st.floats(0.1, 500.0),
    training_s=st.floats(0.1, 100.0),
    workers=st.integers(1, 8),
    unit=st.integers(1, 3),
)
def test_unchanged_measurements_end_in_a_fixed_number_of_workers(longest_s, work_s, training_s, workers, unit):
    """Hysteresis: whatever the run is like, nothing is added and drained in turn."""
    settings = ScalingSettings(min_workers=1, max_workers=8, unit=unit)
    changes = live(settings, shrinking(longest_s, work_s), training_s, workers, iterations=80)
    directions = {change.to_workers > change.from_workers for change in changes}
    assert len(directions) <= 1
    assert all(1 <= change.to_workers <= 8 for change in changes)
    assert not changes or changes[-1].batch < 60


def test_the_estimate_flattens_where_the_longest_sample_is_the_end():
    estimate = estimate_of(COST, [400.0] * 127 + [2000.0], max_running=16)
    seconds = [estimate(workers) for workers in (1, 2, 4, 8, 16)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] / seconds[1] > 1.2
    assert seconds[3] / seconds[4] < 1.1


def test_an_estimate_that_says_nothing_leaves_what_was_measured():
    empty = estimate_of(COST, [], max_running=16)
    assert empty(3) == 0.0
    assert measured(0, 2, 8.0, 4.0).generation_with(3, empty) == 8.0


# -- where batches overlap


def test_pace_is_throughput_while_the_end_of_one_batch_is_its_longest_sample():
    """One sample is long: alone it is the end of a batch, which more workers hardly shorten; overlapped it hides."""
    lengths = [100.0] * 200 + [800.0]
    alone = estimate_of(COST, lengths, max_running=64)
    pace = pace_of(COST, lengths, max_running=64, max_staleness=8)
    assert pace(2) / pace(4) > 1.5 > 1.2 > alone(2) / alone(4)


def test_pace_keeps_within_staleness_slots_and_memory():
    few, many = (pace_of(COST, [100.0] * 64, max_running=slots, max_staleness=1) for slots in (4, 64))
    assert few(1) > 2 * many(1)
    assert few(1) == pytest.approx(64 * 100 / 4 * COST.step_s(4, 0), rel=1e-3), "four at a time, for ever"
    one = pace_of(COST, [1000.0], max_running=64, max_staleness=3)
    assert one(1) == pytest.approx(1000 * COST.step_s(1, 0) / 4, rel=0.1), "it may take four periods"
    assert 0.9 * one(1) < one(7) < one(1)
    small = msgspec.structs.replace(COST, kv_capacity_tokens=400.0)
    assert pace_of(small, [100.0] * 64, max_running=64, max_staleness=1)(1) > 2 * many(1)
    mixed, padded = [100.0] * 63 + [300.0], msgspec.structs.replace(small, padded=True)
    summed, longest = (pace_of(cost, mixed, max_running=64, max_staleness=8)(1) for cost in (small, padded))
    assert longest > 2 * summed, "each of them takes as much memory as the longest"


@given(
    st.lists(st.floats(1, 5000), min_size=1, max_size=30),
    st.integers(1, 12),
    st.integers(1, 4),
    st.floats(0, 500),
)
def test_more_workers_and_older_versions_never_slow_the_pace(lengths, workers, staleness, prompt_tokens):
    def pace(workers: int, staleness: int) -> float:
        options = dict(prompt_tokens=prompt_tokens, max_running=16, max_staleness=staleness)
        return pace_of(msgspec.structs.replace(COST, kv_token_s=1e-6), lengths, **options)(workers)

    now_s = pace(workers, staleness)
    assert 0 < pace(workers + 1, staleness) <= now_s * (1 + 1e-5)
    assert pace(workers, staleness + 1) <= now_s * (1 + 1e-5)


def test_the_gap_rule_adds_at_once_and_the_gain_rule_after_two():
    estimate = shrinking(5.0, 20.0)
    gap = msgspec.structs.replace(SETTINGS, rule="gap")
    assert live(gap, estimate, 9.0, workers=2)[0].batch == 0
    assert [change.to_workers for change in live(gap, estimate, 9.0, workers=2)] == [3, 4, 5]
    assert not live(gap, shrinking(0.0, 20.0), 10.0, workers=6), "it never drains"
    iteration = measured(0, 2, 15.0, 9.0)
    assert (iteration.delta_s, iteration.saved_s(1, estimate)) == (6.0, pytest.approx(10.0 - 20.0 / 3))
