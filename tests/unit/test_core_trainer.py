"""What the trainer is sent, and what its death, its checkpoints and the end of the run do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from orchestrator.core.model.groups import Stage
from orchestrator.core.model.settings import CoreSettings, core_settings
from orchestrator.core.state import PipelineState
from orchestrator.core.view import rows_reported
from tests.fakes.obeyed_pipeline import groups_of
from tests.fakes.pipeline_invariants import check
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import (
    AbortRollouts,
    BrokerUsage,
    CloseMiniBatch,
    DropRows,
    FinishTraining,
    RunResumed,
    StopRequested,
    Tick,
    TrainerReady,
    TrainRound,
    TrimRounds,
    WorkerJoined,
)
from transport.contracts.settings import AlgorithmSettings, PipelineSettings, Settings, TrainerSettings
from transport.contracts.types import GroupId, WeightIdentity, WorkerId, WorkerKind

W0 = WorkerId("generate-0.1")


def core(**changes) -> CoreSettings:
    defaults = {"num_batches": 4, "groups_per_batch": 4, "group_size": 2, "max_staleness": 0, "rollout_timeout_s": 10.0}
    return CoreSettings(**(defaults | changes))


def finish_batch(world: PipelineWorld, batch: int) -> None:
    world.answer_requests()
    world.make_ready(*[f"{batch}/{slot}" for slot in range(world.settings.groups_per_batch)])


def train_all(world: PipelineWorld) -> None:
    while world.unread():
        world.train()


# -- rounds


@pytest.mark.parametrize("max_tokens", [4096, 20])
def test_each_group_is_trained_by_the_rank_that_recorded_its_old_logprobs(max_tokens: int):
    """They stay in the process that computed them: sent to another rank, every such run ended, and --resume too."""
    settings = core(mini_batches=2, epochs=2, record_logprobs=True, micro_batch_tokens=max_tokens, groups_per_batch=6)
    world = PipelineWorld.ready(settings, dp_size=2)
    world.run_to_end()
    for batch in range(settings.num_batches):
        recorded = ranks_of(world.rounds_of(batch, "logprobs"))
        assert {rank for ranks in recorded.values() for rank in ranks} == {0, 1}
        assert ranks_of(world.rounds_of(batch)) == {group: ranks * 2 for group, ranks in recorded.items()}


def ranks_of(rounds: list[TrainRound]) -> dict[GroupId, list[int]]:
    """Group -> the ranks that it was sent to, in order."""
    found: dict[GroupId, list[int]] = {}
    for sent in rounds:
        for rank, groups in enumerate(sent.ranks):
            for rows in groups:
                found.setdefault(rows.group_id, []).append(rank)
    return found


def test_training_starts_with_the_first_finished_group():
    world = PipelineWorld.ready(core())
    world.make_ready("0/2")
    assert groups_of(world.rounds_of(0)) == ["0/2"]
    assert not world.closes()


def test_two_rounds_are_at_the_trainer_at_most():
    world = PipelineWorld.ready(core())
    world.make_ready("0/0", "0/1", "0/2")
    assert len(world.rounds_of(0)) == 2
    world.train()
    assert groups_of(world.rounds_of(0)) == ["0/0", "0/1", "0/2"]


def test_a_lost_confirmation_does_not_stop_the_rounds():
    world = PipelineWorld.ready(core())
    world.make_ready("0/0", "0/1", "0/2")
    world.now_s = 10.1
    world.tell(Tick())
    assert len(world.rounds_of(0)) == 3


def test_a_confirmed_round_confirms_those_before_it():
    world = PipelineWorld.ready(core())
    world.make_ready("0/0", "0/1", "0/2", "0/3")
    world.train(silent=True)
    world.train()
    assert len(world.rounds_of(0)) == 3
    assert world.state.view().rounds_outstanding == 1


def test_every_rank_gets_a_group_and_only_the_last_round_is_padded():
    world = PipelineWorld.ready(core(groups_per_batch=3), dp_size=2)
    world.make_ready("0/0")
    assert world.rounds_of(0) == []
    world.make_ready("0/1")
    (first,) = world.rounds_of(0)
    assert all(first.ranks)
    world.make_ready("0/2")
    assert sorted(bool(rank) for rank in world.rounds_of(0)[-1].ranks) == [False, True]


def test_a_round_waits_for_enough_tokens_and_not_for_what_will_never_come():
    """Groups of the fake workers have 9, 10 and 11 tokens in turn."""
    world = PipelineWorld.ready(core(groups_per_batch=6, round_tokens=19), dp_size=2)
    world.make_ready("0/0", "0/1", "0/2")
    assert world.rounds_of(0) == []
    world.make_ready("0/3")
    (first,) = world.rounds_of(0)
    assert sorted(sum(rows.num_tokens for rows in rank) for rank in first.ranks) == [19, 20]
    world.make_ready("0/4")
    assert len(world.rounds_of(0)) == 1
    world.make_ready("0/5")
    assert sorted(groups_of(world.rounds_of(0)[1:])) == ["0/4", "0/5"]


def test_a_round_waits_for_no_more_tokens_than_it_may_take():
    world = PipelineWorld.ready(core(groups_per_batch=6, round_tokens=10_000, micro_batch_tokens=19))
    world.make_ready("0/0")
    assert world.rounds_of(0) == []
    world.make_ready("0/1")
    assert sorted(groups_of(world.rounds_of(0))) == ["0/0", "0/1"]


def test_the_close_names_rows_tokens_and_the_sources_place():
    """Samples of the fake worker have 3 and 4 tokens."""
    world = PipelineWorld.ready(core())
    finish_batch(world, 0)
    train_all(world)
    (close,) = world.closes()
    assert (close.num_rows, close.num_tokens, close.short_by, close.source_position) == (8, 28, 0, "4")
    assert close.finishes_batch


def test_the_sources_place_never_goes_back():
    """A replacement in batch 0 takes a prompt from behind those of batch 1."""
    world = PipelineWorld.ready(core(max_staleness=1, groups_per_batch=2, drop_no_signal=True))
    while "0/0" in world.workers[W0].plans:
        world.finish_sample(W0, GroupId("0/0"))
    world.score(signal=False)
    world.make_ready("0/1", "0/2", "1/0", "1/1")
    train_all(world)
    assert [close.source_position for close in world.closes()] == ["5", "5"]


def test_a_later_mini_batch_waits_for_the_one_before():
    world = PipelineWorld.ready(core(mini_batches=2))
    world.make_ready("0/2", "0/3", "0/0")
    assert groups_of(world.rounds_of(0)) == ["0/0"]
    world.make_ready("0/1")
    train_all(world)
    order = [(c.mini_batch, type(c).__name__) for _, c in world.log if isinstance(c, TrainRound | CloseMiniBatch)]
    assert order == [
        (0, "TrainRound"),
        (0, "TrainRound"),
        (0, "CloseMiniBatch"),
        (1, "TrainRound"),
        (1, "CloseMiniBatch"),
    ]
    assert [close.finishes_batch for close in world.closes()] == [False, True]


def test_a_second_pass_waits_for_the_whole_batch():
    world = PipelineWorld.ready(core(epochs=2))
    world.make_ready("0/0", "0/1", "0/2")
    train_all(world)
    assert {one.pass_index for one in world.rounds_of(0)} == {0}
    world.make_ready("0/3")
    train_all(world)
    second = [one for one in world.rounds_of(0) if one.pass_index == 1]
    assert sorted(groups_of(second)) == ["0/0", "0/1", "0/2", "0/3"]


def test_recorded_logprobs_stream_and_training_follows_when_the_batch_is_recorded():
    world = PipelineWorld.ready(core(mini_batches=2, record_logprobs=True))
    world.make_ready("0/3", "0/2", "0/1")
    train_all(world)
    assert groups_of(world.rounds_of(0, "logprobs")) == ["0/3", "0/2", "0/1"]
    assert world.rounds_of(0) == []
    world.make_ready("0/0")
    train_all(world)
    assert sorted(groups_of(world.rounds_of(0))) == ["0/0", "0/1", "0/2", "0/3"]


def test_the_next_batch_streams_behind_a_closed_one():
    world = PipelineWorld.ready(core(max_staleness=1, groups_per_batch=1))
    finish_batch(world, 0)
    finish_batch(world, 1)
    assert [type(c).__name__ for _, c in world.log] == ["TrainRound", "CloseMiniBatch", "TrainRound", "CloseMiniBatch"]


# -- death of the trainer


def test_a_trainer_that_restarts_replays_the_log_and_nothing_is_sent_twice():
    world = PipelineWorld.ready(core(checkpoint_every=9))
    finish_batch(world, 0)
    train_all(world)
    assert world.state.view().trained_version == 1
    sent = len(world.log)
    world.start_trainer()
    assert world.state.view().trained_version == 0
    assert len(world.log) == sent
    assert len(world.unread()) == sent
    assert world.state.view().rounds_outstanding == 3, "they are to be done again"
    world.run_to_end()


def test_rollouts_under_lost_weights_start_over_and_their_rows_are_not_trained():
    world = PipelineWorld.ready(core(max_staleness=1, checkpoint_every=9, max_refills=0))
    finish_batch(world, 0)
    train_all(world)
    world.load(W0)  # version 1, which no checkpoint contains
    world.finish_sample(W0, GroupId("2/0"))
    world.start_trainer()
    assert world.outcomes[GroupId("2/0")].outcome == "stale"
    assert world.state.view().running == 0, "what ran was stopped"
    aborts = [c for _, c in world.state.outstanding() if isinstance(c, AbortRollouts)]
    assert {abort.group_ids[0] for abort in aborts} >= {"1/0", "1/1"}
    world.run_to_end()
    assert all(close.short_by == 0 for close in world.closes()), "such replacements do not use up refills"


def test_a_replacement_for_lost_weights_leaves_the_refills_to_others():
    world = PipelineWorld.ready(core(max_staleness=1, checkpoint_every=9, max_refills=1, drop_no_signal=True))
    finish_batch(world, 0)
    train_all(world)
    world.load(W0)
    world.finish_sample(W0, GroupId("2/0"))
    world.start_trainer()
    train_all(world)
    world.load(W0)
    finish_batch(world, 1)
    train_all(world)
    world.load(W0)
    while "2/1" in world.workers[W0].plans:
        world.finish_sample(W0, GroupId("2/1"))
    world.score(signal=False)
    world.run_to_end()
    assert world.closes()[2].short_by == 0


def test_rollouts_go_on_when_the_trainer_restarts_where_it_was():
    world = PipelineWorld.ready(core(max_staleness=1, checkpoint_every=1))
    finish_batch(world, 0)
    train_all(world)
    running = set(world.workers[W0].plans)
    world.start_trainer()
    assert set(world.workers[W0].plans) == running
    assert world.workers[W0].to_load == WeightIdentity(epoch=2, version=1)


def test_a_trainer_older_than_the_freed_rows_ends_the_run_by_name():
    world = PipelineWorld.ready(core(checkpoint_every=1, keep_checkpoints=1))
    finish_batch(world, 0)
    train_all(world)
    world.tell(TrainerReady(worker_id=WorkerId("train-0.9"), weights=WeightIdentity(epoch=9, version=0)))
    assert world.failed
    assert world.finished.startswith("the trainer came back with version 0")


def test_a_trainer_without_a_whole_checkpoint_ends_the_run_with_what_is_wrong_with_each():
    world = PipelineWorld.ready(core(checkpoint_every=1))
    for batch in range(2):
        finish_batch(world, batch)
        train_all(world)
        world.load(W0)
    weights, damaged = WeightIdentity(epoch=9, version=0), ("step-2: cut", "step-1: gone")
    world.tell(TrainerReady(worker_id=WorkerId("train-0.9"), weights=weights, damaged=damaged))
    assert world.failed
    assert "damaged checkpoints: step-2: cut; step-1: gone: put back a copy" in world.finished


def test_a_trainer_whose_only_checkpoint_is_damaged_begins_again_on_the_rows_that_were_kept():
    world = PipelineWorld.ready(core(checkpoint_every=1))
    finish_batch(world, 0)
    train_all(world)
    world.load(W0)
    weights = WeightIdentity(epoch=9, version=0)
    world.tell(TrainerReady(worker_id=WorkerId("train-0.9"), weights=weights, damaged=("step-1: cut",)))
    view = world.state.view()
    assert not world.failed
    assert (view.damaged_checkpoints, view.went_back_to, view.trained_version) == (("step-1: cut",), 0, 0)


def test_a_fresh_state_begins_where_the_checkpoint_is():
    state = PipelineState(core())
    state.handle(TrainerReady(worker_id=WorkerId("train-0.1"), weights=WeightIdentity(epoch=1, version=3)), 0.0)
    assert state.view().trained_version == 3
    check(state.pipeline)


# -- checkpoints, bytes


def test_rows_are_freed_by_the_checkpoint_that_contains_them():
    world = PipelineWorld.ready(core(checkpoint_every=2, keep_checkpoints=1))
    finish_batch(world, 0)
    train_all(world)
    assert world.dropped == set()
    world.load(W0)
    finish_batch(world, 1)
    commands = world.tell(Tick())
    while world.unread():
        world.train()
    assert world.dropped == {f"{batch}/{slot}" for batch in (0, 1) for slot in range(4)}
    assert not any(isinstance(one, DropRows | TrimRounds) for one in commands)
    assert not any(isinstance(c, TrainRound) for _, c in world.state.outstanding())


def test_the_log_is_kept_back_to_the_oldest_checkpoint_kept():
    world = PipelineWorld.ready(core(checkpoint_every=1, keep_checkpoints=2, max_staleness=0))
    kept: list[set[int]] = []
    for batch in range(3):
        finish_batch(world, batch)
        train_all(world)
        kept.append({c.batch for _, c in world.state.outstanding() if isinstance(c, TrainRound)})
        world.load(W0)
    assert kept == [{0}, {1}, {2}], "what the older of two checkpoints contains is never read again"


def test_a_trainer_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before():
    world = PipelineWorld.ready(core(checkpoint_every=1, keep_checkpoints=2))
    for batch in range(3):
        finish_batch(world, batch)
        train_all(world)
        world.load(W0)
    world.start_trainer(damaged=True)
    assert world.trainer.version == 2
    assert [one.version for one in world.state.pipeline.retention.checkpoints][-1] == 2, "the damaged one frees nothing"
    world.run_to_end()
    assert not world.failed


def test_a_broker_over_budget_keeps_rows_back_to_the_newest_checkpoint_only():
    world = PipelineWorld.ready(core(checkpoint_every=1, keep_checkpoints=2, max_retained_bytes=100))
    for batch in range(2):
        finish_batch(world, batch)
        train_all(world)
        world.load(W0)
    assert {group_id.split("/")[0] for group_id in world.dropped} == {"0"}
    world.tell(BrokerUsage(retained_bytes=101))
    assert {group_id.split("/")[0] for group_id in world.dropped} == {"0", "1"}


def test_a_full_broker_forces_a_checkpoint_and_closes_admission_without_deadlock():
    world = PipelineWorld.ready(core(max_staleness=1, checkpoint_every=99, max_retained_bytes=100))
    world.tell(BrokerUsage(retained_bytes=101))
    finish_batch(world, 0)
    train_all(world)
    assert world.closes()[0].checkpoint
    admitted = {group_id.split("/")[0] for group_id in world.admitted}
    assert admitted == {"0", "1"}, "batch 2 must wait"
    world.load(W0)
    finish_batch(world, 1)
    train_all(world)
    assert "2/0" in world.admitted, "with nothing else in hand, one batch goes on"
    world.run_to_end()


def test_usage_below_the_limit_opens_admission_again():
    world = PipelineWorld.ready(core(max_staleness=1, checkpoint_every=99, max_retained_bytes=100))
    world.tell(BrokerUsage(retained_bytes=101))
    finish_batch(world, 0)
    train_all(world)
    assert "2/0" not in world.admitted
    world.tell(BrokerUsage(retained_bytes=50))
    assert "2/0" in world.admitted


# -- the end


def test_the_run_ends_after_the_trainers_last_command_is_saved():
    world = PipelineWorld.ready(core(num_batches=1))
    finish_batch(world, 0)
    while len(world.unread()) > 1:
        world.train()
    assert isinstance(world.unread()[0][1], FinishTraining)
    assert not world.finished
    world.train()
    assert world.finished == "all batches are trained"
    assert {outcome.outcome for outcome in world.outcomes.values()} == {"trained"}


def test_a_stop_finishes_the_batch_in_training_and_freezes_the_others():
    world = PipelineWorld.ready(core(max_staleness=1))
    world.make_ready("0/0")
    world.tell(StopRequested(reason="ctrl-c"))
    assert {plan.batch for plan, _ in world.workers[W0].plans.values()} == {0}, "rollouts of batch 1 are stopped"
    world.make_ready("0/1", "0/2", "0/3")
    train_all(world)
    assert world.finished == "ctrl-c"
    assert world.trainer.version == 1
    assert [close.batch for close in world.closes()] == [0]


def test_a_stop_before_any_round_ends_at_once():
    world = PipelineWorld.ready(core())
    world.tell(StopRequested(reason="ctrl-c"))
    train_all(world)
    assert (world.finished, world.trainer.version) == ("ctrl-c", 0)


def test_a_resumed_run_goes_on_with_what_the_stop_froze():
    world = PipelineWorld.ready(core(max_staleness=1))
    world.make_ready("0/0", "1/0")
    world.tell(StopRequested(reason="ctrl-c"))
    world.make_ready("0/1", "0/2", "0/3")
    train_all(world)
    assert world.finished
    world.finished = ""
    world.tell(RunResumed())
    world.start_trainer()
    world.run_to_end()
    assert world.finished == "all batches are trained"
    assert len(world.closes()) == 4
    assert world.outcomes[GroupId("1/0")].outcome == "trained", "its rows were kept"


# -- snapshots, views, settings


def test_a_snapshot_restores_the_whole_state_and_may_take_new_settings():
    world = PipelineWorld.ready(core())
    world.make_ready("0/0")
    snapshot = world.state.snapshot()
    assert PipelineState.restore(snapshot).snapshot() == snapshot
    longer = PipelineState.restore(snapshot, settings=core(num_batches=9))
    assert longer.view().num_batches == 9
    with pytest.raises(msgspec.MsgspecError):
        PipelineState.restore(b"\x00" + snapshot)


def test_a_clock_that_goes_back_stands_still():
    state = PipelineState(core())
    state.handle(Tick(), 5.0)
    state.handle(Tick(), 1.0)
    assert state.now_s == 5.0


def test_the_view_counts_and_names_what_blocks():
    world = PipelineWorld(core())
    world.tell(Tick())
    world.start_trainer()
    world.join(64)
    world.load(W0)
    world.answer_prompts(8)
    view = world.state.view()
    assert (view.running, view.in_flight_samples) == (4, 8)
    assert view.wait == world.state.wait()
    assert "batch 1: 4 running" in world.state.describe_wait()
    world.finish_sample(W0, GroupId("0/0"))
    assert (rows_reported(world.state.pipeline), rows_reported(world.state.pipeline, Stage.READY)) == (["0/0/0"], [])
    world.make_ready("0/0")
    assert rows_reported(world.state.pipeline, Stage.READY) == ["0/0/0", "0/0/1"]
    assert world.state.pipeline.fleet.ids() == [W0, "train-0.1"]


def test_other_workers_are_counted_and_given_nothing():
    state = PipelineState(core())
    commands = state.handle(WorkerJoined(worker_id=WorkerId("score-0.1"), kind=WorkerKind.SCORE), 0.0)
    assert state.pipeline.fleet.ids() == ["score-0.1"]
    assert [type(one).__name__ for one in commands] == ["RequestPrompts"]


def test_core_settings_are_a_view_of_the_runs_settings():
    many = Settings(trainer=TrainerSettings(epochs=2), algorithm=AlgorithmSettings(old_logprobs="recomputed"))
    one = Settings(algorithm=AlgorithmSettings(old_logprobs="recomputed"))
    assert core_settings(many).record_logprobs
    assert not core_settings(one).record_logprobs, "with one step the trainer's own forward pass has them"
    assert core_settings(one).num_batches == one.run.batches


@pytest.mark.parametrize(
    ("asked", "max_staleness", "dispatch"),
    [("auto", 0, "scored"), ("auto", 1, "least_loaded"), ("auto", 3, "least_loaded"), ("even", 0, "even")],
)
def test_unless_told_batches_are_planned_where_they_are_waited_for(asked: Any, max_staleness: int, dispatch: str):
    pipeline = PipelineSettings(dispatch=asked, max_staleness=max_staleness)
    assert core_settings(Settings(pipeline=pipeline)).dispatch == dispatch


@pytest.mark.parametrize(("max_staleness", "dispatch"), [(0, "pulled"), (1, "least_loaded")])
def test_where_groups_are_probed_nothing_is_planned(max_staleness: int, dispatch: str):
    core = core_settings(Settings(pipeline=PipelineSettings(probes=True, max_staleness=max_staleness)))
    assert (core.dispatch, core.plans) == (dispatch, False)
