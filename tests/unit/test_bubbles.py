"""Every idle second has one cause; the causes of small timelines are known by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.observability.report.bubbles import (
    Cause,
    Usage,
    bubbles_by_batch,
    total,
    usage_by_window,
    usage_within,
)
from orchestrator.observability.report.spans import (
    SCORING,
    TRAINER,
    Presence,
    Span,
    SpanKind,
    Timeline,
    Trained,
    in_lanes,
)

A, B = "generate-0.1", "generate-1.1"


def sample(worker: str, start_s: float, end_s: float, queued_s: float = 0.0) -> Span:
    return Span(track=worker, kind=SpanKind.SAMPLE, start_s=start_s, end_s=end_s, name="0/0/0", queued_s=queued_s)


def span(track: str, kind: SpanKind, start_s: float, end_s: float) -> Span:
    return Span(track=track, kind=kind, start_s=start_s, end_s=end_s, name=kind.value)


def timeline(*spans: Span, workers: tuple[str, ...] = (A,), slots: int = 2, end_s: float = 10.0) -> Timeline:
    present = [Presence(track=worker, start_s=0.0, end_s=end_s, capacity=slots) for worker in workers]
    trainer = Presence(track=TRAINER, start_s=0.0, end_s=end_s)
    trained = (Trained(incarnation=1, batch=0, at_s=end_s),)
    placed = in_lanes(spans)
    return Timeline(spans=placed, marks=(), presences=(*present, trainer), trained=trained, end_s=end_s)


def idle(line: Timeline, track: str) -> dict[Cause, float]:
    (usage,) = usage_by_window(line, [0.0, line.end_s])[track]
    assert usage.present_s == pytest.approx(line.end_s)
    return {cause: pytest.approx(seconds) for cause, seconds in usage.idle_s.items()}


def test_a_full_worker_is_not_idle():
    assert idle(timeline(sample(A, 0, 10), sample(A, 0, 10)), A) == {}


def test_a_half_empty_worker_in_the_tail_is_half_idle():
    line = timeline(sample(A, 0, 10), sample(A, 0, 4))
    assert idle(line, A) == {Cause.SKEW: 3.0}


def test_slots_that_are_never_filled_are_nobodys_bubble():
    line = timeline(sample(A, 0, 10), sample(A, 0, 4), slots=64)
    assert idle(line, A) == {Cause.SKEW: 3.0}
    assert idle(line, TRAINER) == {Cause.PIPELINE: 7.0, Cause.SKEW: 3.0}


def test_a_worker_without_samples_waits_for_the_tail_of_another():
    line = timeline(sample(A, 0, 10), sample(A, 0, 10), workers=(A, B))
    assert idle(line, B) == {Cause.SKEW: 10.0}


def test_free_slots_beside_claimed_samples_are_not_the_tails():
    line = timeline(sample(A, 0, 10), sample(A, 6, 10, queued_s=6.0))
    assert idle(line, A) == {Cause.OTHER: 3.0}


def test_an_empty_stage_waits_for_the_trainer_then_for_the_weights():
    line = timeline(
        span(TRAINER, SpanKind.ROUND, 0, 4),
        span(TRAINER, SpanKind.STEP, 4, 5),
        span(TRAINER, SpanKind.PUBLISH, 5, 6),
        span(A, SpanKind.LOAD, 6, 8),
        sample(A, 8, 10),
        sample(A, 8, 10),
    )
    assert idle(line, A) == {Cause.PIPELINE: 5.0, Cause.WEIGHTS: 3.0}
    assert idle(line, TRAINER) == {Cause.WEIGHTS: 3.0, Cause.PIPELINE: 2.0}


def test_a_load_names_the_idle_slots_of_its_own_worker_only():
    line = timeline(sample(A, 0, 10), sample(A, 0, 4), span(B, SpanKind.LOAD, 0, 10), workers=(A, B))
    assert idle(line, A) == {Cause.SKEW: 3.0}
    assert idle(line, B) == {Cause.WEIGHTS: 10.0}


def test_the_trainers_wait_is_split_by_how_full_the_slots_are():
    line = timeline(sample(A, 0, 10), sample(A, 0, 4))
    assert idle(line, TRAINER) == {Cause.PIPELINE: 7.0, Cause.SKEW: 3.0}


def test_waiting_for_scores_and_for_nobody():
    line = timeline(span(SCORING, SpanKind.SCORING, 0, 6))
    assert idle(line, TRAINER) == {Cause.SCORING: 6.0, Cause.OTHER: 4.0}
    assert idle(line, A) == {Cause.SCORING: 6.0, Cause.OTHER: 4.0}


def test_a_checkpoint_holds_up_the_trainer_and_the_stage_that_waits_for_it():
    line = timeline(span(TRAINER, SpanKind.CHECKPOINT, 0, 10))
    assert idle(line, TRAINER) == {Cause.OTHER: 10.0}
    assert idle(line, A) == {Cause.PIPELINE: 10.0}


def test_a_worker_counts_only_while_it_is_there():
    line = timeline(sample(A, 0, 10), sample(A, 0, 10))
    late = Presence(track=B, start_s=6.0, end_s=9.0, capacity=4)
    line = Timeline(
        spans=line.spans, marks=(), presences=(*line.presences, late), trained=line.trained, end_s=line.end_s
    )
    (usage,) = usage_by_window(line, [0.0, 10.0])[B]
    assert usage == Usage(present_s=pytest.approx(3.0), idle_s={Cause.SKEW: pytest.approx(3.0)})


def test_a_batch_gets_the_time_since_the_one_before():
    line = timeline(sample(A, 0, 10), sample(A, 0, 4))
    trained = (Trained(incarnation=1, batch=0, at_s=6.0), Trained(incarnation=1, batch=1, at_s=10.0))
    line = Timeline(spans=line.spans, marks=(), presences=line.presences, trained=trained, end_s=12.0)
    by_batch = bubbles_by_batch(line)
    assert by_batch[1, 0]["bubble_generation_skew_s"] == 1.0
    assert by_batch[1, 1]["bubble_generation_skew_s"] == 2.0
    assert by_batch[1, 1]["generation_present_s"] == 4.0
    assert by_batch[1, 1]["bubble_trainer_pipeline_s"] == 2.0


def test_each_track_may_have_windows_of_its_own():
    line = timeline(sample(A, 0, 10), sample(A, 0, 4), workers=(A, B))
    found = usage_within(line, {A: [2.0, 4.0, 6.0], B: [0.0, 10.0], TRAINER: []})
    assert [usage.busy_s for usage in found[A]] == [2.0, 1.0]
    assert [usage.idle_s for usage in found[B]] == [{Cause.SKEW: 10.0}]
    assert found[TRAINER] == []


times = st.integers(0, 40).map(lambda quarter: quarter / 4)
kinds = st.sampled_from(
    [
        (A, SpanKind.SAMPLE),
        (B, SpanKind.SAMPLE),
        (A, SpanKind.LOAD),
        (SCORING, SpanKind.SCORING),
        (TRAINER, SpanKind.ROUND),
        (TRAINER, SpanKind.PUBLISH),
    ]
)


@settings(max_examples=200)
@given(st.lists(st.tuples(kinds, times, times), max_size=12), st.lists(times, min_size=1, max_size=5))
def test_windows_add_up_and_no_second_is_counted_twice(drawn: list, cuts: list[float]):
    spans = [span(*where, min(a, b), max(a, b)) for where, a, b in drawn if a != b]
    line = timeline(*spans, workers=(A, B))
    whole = usage_by_window(line, [0.0, 10.0])
    cut = usage_by_window(line, [0.0, *sorted(set(cuts) - {0.0, 10.0}), 10.0])
    for track, (usage,) in whole.items():
        assert usage.present_s == pytest.approx(10.0)
        assert -1e-9 <= usage.busy_s <= 10.0 + 1e-9
        parts = total(cut[track])
        assert parts.present_s == pytest.approx(usage.present_s)
        for cause in Cause:
            assert parts.idle_s.get(cause, 0.0) == pytest.approx(usage.idle_s.get(cause, 0.0), abs=1e-9)
