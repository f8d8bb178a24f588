"""No progress is named, then ends the run."""

from __future__ import annotations

from typing import Literal

import pytest
import structlog

from orchestrator.core.model.pipeline import Wait
from orchestrator.errors import RunFailedError, StalledError
from orchestrator.loop.watchdog import Watchdog
from tests.fakes.manual_clock import ManualClock
from transport.broker.reach import Away
from transport.contracts.messages import (
    Event,
    GroupScored,
    RolloutFailed,
    RoundDone,
    RowsMissing,
    ScoringFailed,
    SlotOutcome,
    Tick,
    TrainerReady,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
)
from transport.contracts.settings import LivenessSettings
from transport.contracts.types import PromptId, RowId, WeightIdentity, WorkerId, WorkerKind, group_id

PROGRESS = RoundDone(round_id="1-0", num_rows=1, num_tokens=1, busy_s=0.1)
LIMITS = LivenessSettings(warn_s=4.0, stall_s=10.0)


class Waiting:
    """A run that waits at one stage."""

    paused = False

    def __init__(self, stage: str = "scoring", *, owner: str = "score-0.1", retried: bool = False) -> None:
        self.stage = stage
        self.owner = owner
        self.retried = retried

    def wait(self) -> Wait:
        waits_for = "the scores of 2 groups"
        return Wait(stage=self.stage, waits_for=waits_for, owner=self.owner, since_s=3.0, retried=self.retried)

    def describe_wait(self) -> str:
        return str(self.wait())


def joined(worker: str) -> WorkerJoined:
    return WorkerJoined(worker_id=WorkerId(worker), kind=WorkerKind.GENERATE)


def ready(worker: str, version: int) -> TrainerReady:
    return TrainerReady(worker_id=WorkerId(worker), weights=WeightIdentity(epoch=1, version=version))


def loaded(worker: str, version: int) -> WeightsLoaded:
    return WeightsLoaded(worker_id=WorkerId(worker), weights=WeightIdentity(epoch=1, version=version))


def test_time_alone_is_no_progress():
    clock = ManualClock()
    watchdog = Watchdog(LIMITS, clock)
    clock.advance(9.0)
    watchdog.observe(Tick())
    clock.advance(1.0)
    with pytest.raises(StalledError, match=r"no progress for 10 s: scoring waits for .*; to act: score-0\.1"):
        watchdog.check(Waiting())


def test_it_warns_once_of_each_wait_and_again_after_progress():
    clock = ManualClock()
    watchdog = Watchdog(LIMITS, clock)
    state = Waiting()
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            clock.advance(3.0)
            watchdog.check(state)
            clock.advance(1.0)
            watchdog.check(state)
            watchdog.check(state)
            state.stage = "training"
            watchdog.check(state)
            watchdog.observe(PROGRESS)
            state.stage = "scoring"
    said = [(entry["stage"], entry["seconds"], entry["owner"], entry["since_s"]) for entry in logs]
    assert said == [("scoring", 4, "score-0.1", 3.0), ("training", 4, "score-0.1", 3.0)] * 2


def test_the_status_names_what_blocks_from_the_first_limit_on():
    clock = ManualClock()
    watchdog = Watchdog(LIMITS, clock)
    clock.advance(3.9)
    assert watchdog.blocked(Waiting()) is None
    clock.advance(0.1)
    assert watchdog.blocked(Waiting()) == {
        "stage": "scoring",
        "waits_for": "the scores of 2 groups",
        "owner": "score-0.1",
        "waited_s": 1.0,
        "still_s": 4.0,
    }
    watchdog.observe(PROGRESS)
    assert watchdog.blocked(Waiting()) is None


def test_while_the_broker_is_away_nobody_else_is_blamed_and_its_own_bound_holds():
    clock, away = ManualClock(), [Away(address="redis:6379", seconds=5.0, reason="no answer", until_s=3600.0)]
    watchdog = Watchdog(LIMITS, clock, away=lambda: away[0] if away else None)
    with structlog.testing.capture_logs() as logs:
        for _ in range(4):
            clock.advance(9.0)
            watchdog.check(Waiting())
        away.clear()
        clock.advance(3.9)
        watchdog.check(Waiting())
    assert logs == []
    clock.advance(6.1)
    with pytest.raises(StalledError):
        watchdog.check(Waiting())


def test_workers_that_live_and_are_asked_again_have_more_time_than_who_is_silent():
    clock = ManualClock()
    watchdog = Watchdog(LIMITS, clock)
    state = Waiting(retried=True)
    clock.advance(3 * LIMITS.stall_s - 0.1)
    watchdog.check(state)
    clock.advance(0.1)
    with pytest.raises(StalledError, match="no progress"):
        watchdog.check(state)


@pytest.mark.parametrize(
    ("first", "again", "further"),
    [
        (joined("generate-0.1"), joined("generate-0.2"), joined("generate-1.1")),
        (ready("train-0.1", 2), ready("train-0.2", 2), ready("train-0.2", 3)),
        (loaded("generate-0.1", 0), loaded("generate-0.2", 0), loaded("generate-0.2", 1)),
        (PROGRESS, WorkerLost(worker_id=WorkerId("generate-0.1"), reason="its process ended"), PROGRESS),
        (PROGRESS, RowsMissing(row_ids=(RowId("0/0/0"),)), PROGRESS),
    ],
    ids=["joins", "is ready", "loads", "is lost", "asks again"],
)
def test_what_a_crash_loop_repeats_is_no_progress(first: Event, again: Event, further: Event):
    clock = ManualClock()
    watchdog = Watchdog(LIMITS, clock)
    for event, still_s in ((first, 0.0), (again, 5.0), (further, 0.0)):
        clock.advance(5.0)
        watchdog.observe(event)
        blocked = watchdog.blocked(Waiting())
        assert (blocked["still_s"] if blocked else 0.0) == still_s


def test_rewards_that_fail_for_most_groups_end_the_run_by_name():
    watchdog = Watchdog(LIMITS, ManualClock(), max_failed_share=0.5)
    for number in range(16):
        scored = number % 4 < 3
        watchdog.observe(
            GroupScored(group_id=group_id(0, number), rewards=(1.0,), response_tokens=(1,), signal=True)
            if scored
            else ScoringFailed(group_id=group_id(0, number), reason="reward of 0: NoneType, not a number")
        )
        watchdog.check(Waiting())
    for number in range(16, 30):
        watchdog.observe(ScoringFailed(group_id=group_id(0, number), reason="reward of 0: NoneType, not a number"))
    with pytest.raises(RunFailedError, match=r"18 of the last 30 groups have no rewards.*NoneType, not a number"):
        watchdog.check(Waiting())


def test_a_group_of_which_all_samples_fail_counts_once_and_all_of_few_are_enough():
    """A quarter of the groups without rewards is no reason to end a run, however many samples each of them has."""
    watchdog = Watchdog(LIMITS, ManualClock(), max_failed_share=0.5)
    for number in range(64):
        if number % 4 < 3:
            scored = GroupScored(group_id=group_id(0, number), rewards=(1.0,), response_tokens=(1,), signal=True)
            watchdog.observe(scored)
        else:
            for _ in range(8):
                watchdog.observe(ScoringFailed(group_id=group_id(0, number), reason="cannot judge"))
        watchdog.check(Waiting())
    watchdog = Watchdog(LIMITS, ManualClock(), max_failed_share=0.5)
    for number in range(8):
        watchdog.observe(ScoringFailed(group_id=group_id(0, number), reason="cannot judge"))
    with pytest.raises(RunFailedError, match="8 of the last 8 groups"):
        watchdog.check(Waiting())


def test_groups_that_die_before_they_are_scored_end_the_run_too_and_those_that_come_to_life_do_not():
    watchdog = Watchdog(LIMITS, ManualClock(), max_failed_share=0.5)

    def tell(number: int, outcome: Literal["filtered", "dead"]) -> None:
        group, reason = group_id(0, number), "the environment raised KeyError, attempt 3"
        failed = RolloutFailed(group_id=group, worker_id=WorkerId("generate-0.1"), samples=(0,), reason=reason)
        ended = SlotOutcome(group_id=group, prompt_id=PromptId("0"), outcome=outcome, reason=reason)
        watchdog.observe(failed)
        watchdog.observe(failed, [ended])

    for number in range(12):
        tell(number, "filtered")
    for number in range(12, 19):
        tell(number, "dead")
    watchdog.check_groups()
    tell(19, "dead")
    with pytest.raises(RunFailedError, match=r"8 of the last 8 groups.*because of: the environment raised KeyError"):
        watchdog.check_groups()


def test_what_an_engine_has_not_started_is_named_with_its_reason():
    clock = ManualClock()
    dog = Watchdog(LIMITS, clock)
    dog.pending = {"generate-1": "Slurm job 7: Resources"}
    clock.advance(5.0)
    blocked = dog.blocked(Waiting())
    assert blocked is not None
    assert blocked["pending"] == {"generate-1": "Slurm job 7: Resources"}
    clock.advance(6.0)
    with pytest.raises(StalledError, match=r"not started yet: generate-1 .Slurm job 7: Resources."):
        dog.check(Waiting())


def test_a_stall_names_why_its_owner_does_not_act_and_no_other_workers_trouble():
    clock = ManualClock()
    dog, waiting = Watchdog(LIMITS, clock), Waiting("generation")
    failed = RolloutFailed(
        group_id=group_id(0, 1), worker_id=WorkerId("generate-0.1"), samples=(0,), reason="slow:Slow took 2 s"
    )
    dog.observe(failed)
    dog.troubles = {"train-0.1": "no checkpoint"}
    clock.advance(6.0)
    blocked, elsewhere = dog.blocked(waiting), dog.blocked(Waiting("scoring"))
    assert blocked is not None
    assert elsewhere is not None
    assert blocked["why"] == "the last attempt failed: slow:Slow took 2 s"
    assert "why" not in elsewhere
    clock.advance(6.0)
    with pytest.raises(StalledError, match=r"score-0\.1; the last attempt failed: slow:Slow took 2 s"):
        dog.check(waiting)
    dog.troubles = {"score-0.1": "its disk is full"}
    dog.observe(PROGRESS)
    clock.advance(12.0)
    with pytest.raises(StalledError, match=r"score-0\.1; its disk is full\Z"):
        dog.check(waiting)


def test_a_wait_for_a_worker_names_those_that_start():
    clock = ManualClock()
    dog, waiting = Watchdog(LIMITS, clock), Waiting("generation", owner="generate")
    dog.starting = {"generate-0.1": 40.4, "score-0.1": 3.0}
    clock.advance(6.0)
    blocked = dog.blocked(waiting)
    assert blocked is not None
    assert blocked["why"] == "generate-0.1 starts since 40 s"
