"""What happens to groups: dispatch, loss, failure, refill, short close."""

from __future__ import annotations

from orchestrator.core.model.groups import STABLE_S
from orchestrator.core.model.settings import CoreSettings, core_settings
from tests.fakes.obeyed_pipeline import groups_of
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import (
    AbortRollouts,
    AdmitGroups,
    CloseMiniBatch,
    Command,
    DispatchGroups,
    GroupPlan,
    GroupScored,
    RolloutFailed,
    RolloutFinished,
    ScoringFailed,
    Tick,
    TrainRound,
    WorkerLost,
    WorkerReported,
)
from transport.contracts.settings import Settings
from transport.contracts.types import FinishReason, GroupId, RowId, WeightIdentity, WorkerId


def core(**changes) -> CoreSettings:
    defaults = {"num_batches": 2, "groups_per_batch": 2, "group_size": 2, "max_staleness": 0, "rollout_timeout_s": 10.0}
    return CoreSettings(**(defaults | changes))


def ready_world(settings: CoreSettings, *, workers: int = 1, prompts: int = 100) -> PipelineWorld:
    return PipelineWorld.ready(settings, workers=workers, capacity=8, prompts=prompts)


def plans(commands: list[Command]) -> list[tuple[WorkerId, GroupPlan]]:
    return [(one.worker_id, plan) for one in commands if isinstance(one, DispatchGroups) for plan in one.plans]


def finish_group(world: PipelineWorld, worker_id: WorkerId, group_id: GroupId) -> None:
    while group_id in world.workers[worker_id].plans:
        world.finish_sample(worker_id, group_id)


W0, W1 = WorkerId("generate-0.1"), WorkerId("generate-1.1")
G0, G1 = GroupId("0/0"), GroupId("0/1")


def test_nothing_is_dispatched_before_weights_are_served():
    world = PipelineWorld(core())
    world.start_trainer()
    worker_id = world.join()
    world.answer_prompts(10)
    assert not world.workers[worker_id].plans
    world.load(worker_id)
    assert world.workers[worker_id].plans


def test_longest_predicted_goes_first_to_the_least_loaded_worker():
    """The fake source predicts 5, 6, 7, 8 tokens for its first four prompts."""
    world = PipelineWorld(core(groups_per_batch=4), 100)
    world.start_trainer()
    world.join()
    world.join()
    world.answer_prompts(world.requests[0].count)
    world.load(W0)
    first = [plan.predicted_tokens for plan, _ in world.workers[W0].plans.values()]
    assert first == [8.0, 7.0, 6.0], "capacity 4 and one group of lookahead, longest first"
    world.load(W1)
    assert [plan.predicted_tokens for plan, _ in world.workers[W1].plans.values()] == [5.0]


def test_one_step_asynchronous_admits_the_next_batch_at_once():
    world = ready_world(core(max_staleness=1))
    assert {plan.batch for plan, _ in world.workers[W0].plans.values()} == {0, 1}


def test_a_lost_workers_group_goes_elsewhere_with_its_missing_samples_only():
    world = ready_world(core(groups_per_batch=1), workers=2)
    holder = next(worker_id for worker_id, worker in world.workers.items() if worker.plans)
    world.finish_sample(holder, G0, 1)
    del world.workers[holder]
    ((worker_id, plan),) = plans(world.tell(WorkerLost(worker_id=holder, reason="killed")))
    assert (worker_id, plan.samples, plan.attempt) == (next(iter(world.workers)), (0,), 1)


def lose_the_only_worker(world: PipelineWorld, after_s: float, *, left: bool = False) -> None:
    """The worker is lost so long after it got its groups, and another one joins and loads."""
    world.now_s += after_s
    (worker_id,) = world.workers
    del world.workers[worker_id]
    world.tell(WorkerLost(worker_id=worker_id, reason="killed", left=left))
    world.load(world.join(64))


def test_deaths_of_workers_are_no_attempts_of_the_prompts_that_they_ran():
    world = ready_world(core(max_attempts=1, max_deaths=4, rollout_timeout_s=10_000.0))
    for _ in range(3):
        lose_the_only_worker(world, STABLE_S + 1.0)  # far apart
        lose_the_only_worker(world, 1.0)
        lose_the_only_worker(world, 1.0, left=True)  # asked to go
    lose_the_only_worker(world, 1.0)
    assert world.outcomes == {}
    (worker_id,) = world.workers
    world.finish_sample(worker_id, G0)  # it is none that kills
    lose_the_only_worker(world, 1.0)
    assert set(world.outcomes) == {G1}


def test_a_prompt_that_kills_every_worker_is_given_up_before_their_restarts_are():
    settings = Settings()
    assert core_settings(settings).max_deaths <= settings.liveness.max_restarts
    world = ready_world(core(max_deaths=3, groups_per_batch=1))
    for _ in range(2):
        lose_the_only_worker(world, 5.0)
    assert world.outcomes == {}
    lose_the_only_worker(world, 5.0)
    assert world.outcomes[G0].outcome == "dead"
    assert "all 3 workers that ran it last" in world.outcomes[G0].reason


def test_a_prompt_that_kills_its_workers_late_is_given_up_too():
    world = ready_world(core(max_deaths=3, groups_per_batch=1, rollout_timeout_s=10_000.0))
    for _ in range(5):
        lose_the_only_worker(world, STABLE_S + 15.0)
    assert world.outcomes == {}
    lose_the_only_worker(world, STABLE_S + 15.0)
    assert world.outcomes[G0].outcome == "dead"


def test_a_row_counts_once_whoever_repeats_it():
    world = ready_world(core())
    world.finish_sample(W0, G0)
    told = next(event for event in reversed(world.told) if isinstance(event, RolloutFinished))
    before = world.state.view()
    assert world.tell(told) == []
    assert world.state.view().in_flight_samples == before.in_flight_samples


def test_a_report_without_a_claimed_group_shows_that_it_was_lost():
    world = ready_world(core(groups_per_batch=1))
    cursor = world.workers[W0].cursor
    assert plans(world.tell(WorkerReported(worker_id=W0, held=(), plans_cursor="0-0"))) == [], "not claimed yet"
    assert plans(world.tell(WorkerReported(worker_id=W0, held=(G0,), plans_cursor=cursor))) == [], "it holds it"
    world.workers[W0].plans.clear()
    ((_, plan),) = plans(world.tell(WorkerReported(worker_id=W0, held=(), plans_cursor=cursor)))
    assert (plan.group_id, plan.attempt) == (G0, 1)


def test_a_group_that_times_out_is_aborted_and_goes_elsewhere():
    world = ready_world(core(groups_per_batch=1), workers=2)
    (holder,) = [worker_id for worker_id, worker in world.workers.items() if worker.plans]
    world.now_s = 9.9
    assert world.tell(Tick()) == []
    world.now_s = 10.0
    commands = world.tell(Tick())
    (abort,) = [one for one in commands if isinstance(one, AbortRollouts)]
    assert (abort.worker_id, abort.group_ids, abort.attempts) == (holder, (G0,), (0,))
    ((other, plan),) = plans(commands)
    assert other != holder
    assert plan.attempt == 1


def test_max_attempts_end_the_slot_as_dead_and_a_new_prompt_replaces_it():
    world = ready_world(core(max_attempts=2))
    failed = RolloutFailed(group_id=G0, worker_id=W0, samples=(0,), reason="engine")
    ((_, again),) = plans(world.tell(failed))
    assert again.group_id == G0
    commands = world.tell(failed)
    assert world.outcomes[G0].outcome == "dead"
    assert "engine" in world.outcomes[G0].reason
    ((_, replacement),) = plans(commands)
    assert replacement.group_id == "0/2"
    assert replacement.prompt_id != world.outcomes[G0].prompt_id


def test_a_failure_that_no_retry_helps_ends_the_slot_at_once():
    world = ready_world(core())
    world.tell(RolloutFailed(group_id=G0, worker_id=W0, samples=(0, 1), reason="prompt too long", retryable=False))
    assert world.outcomes[G0].outcome == "dead"
    assert G0 in world.dropped


def test_a_failure_told_by_another_than_the_holder_is_ignored():
    world = ready_world(core())
    assert world.tell(RolloutFailed(group_id=G0, worker_id=W1, samples=(0,), reason="late")) == []


def test_a_dead_letter_of_scoring_ends_the_slot():
    world = ready_world(core())
    finish_group(world, W0, G0)
    world.tell(ScoringFailed(group_id=G0, reason="the reward hangs"))
    assert world.outcomes[G0].outcome == "dead"


def test_a_row_past_the_bound_makes_its_slot_stale_and_the_same_prompt_is_tried_again():
    world = ready_world(core(num_batches=4))
    while world.state.view().trained_version == 0:
        world.turn()
    world.load(W0)
    holder, group_id = W0, next(iter(world.workers[W0].plans))
    prompt = world.workers[holder].plans[group_id][0].prompt_id
    old = WeightIdentity(epoch=1, version=0)
    commands = world.tell(
        RolloutFinished(
            row_id=RowId(f"{group_id}/0"),
            worker_id=holder,
            response_tokens=4,
            finish_reason=FinishReason.STOP,
            oldest=old,
            newest=WeightIdentity(epoch=1, version=1),
        )
    )
    assert world.outcomes[group_id].outcome == "stale"
    ((_, plan),) = plans(commands)
    assert plan.prompt_id == prompt
    assert plan.group_id != group_id


def test_groups_without_signal_are_filtered_and_replaced_up_to_max_refills():
    world = ready_world(core(drop_no_signal=True, max_refills=1, num_batches=1))
    finish_group(world, W0, G0)
    world.score(signal=False)
    assert world.outcomes[G0].outcome == "filtered"
    world.answer_prompts(1)
    finish_group(world, W0, GroupId("0/2"))
    world.score(signal=False)
    finish_group(world, W0, G1)
    world.score()
    (close,) = world.closes()
    assert (close.num_rows, close.short_by) == (2, 1)
    world.run_to_end()
    assert world.outcomes[G1].outcome == "trained"


def test_a_batch_of_which_nothing_is_left_still_makes_its_version():
    world = ready_world(core(drop_no_signal=True, max_refills=0))
    for group_id in (G0, G1):
        finish_group(world, W0, group_id)
        world.score(signal=False)
    (close,) = world.closes()
    assert (close.num_rows, close.num_tokens, close.finishes_batch, close.short_by) == (0, 0, True, 2)
    world.run_to_end()
    assert world.trainer.version == 2


def test_groups_without_signal_are_trained_when_they_are_not_to_be_dropped():
    world = ready_world(core())
    finish_group(world, W0, G0)
    world.score(signal=False)
    assert groups_of(world.rounds_of(0)) == [G0]


def test_the_end_of_the_data_closes_the_last_batch_short():
    world = ready_world(core(num_batches=9), prompts=3)
    world.run_to_end()
    assert world.finished == "the data ended"
    assert [close.short_by for close in world.closes()] == [0, 1]


def test_no_data_at_all_ends_the_run():
    world = ready_world(core(), prompts=0)
    world.run_to_end()
    assert (world.finished, world.closes()) == ("the data ended", [])


def test_an_owed_replacement_is_forgiven_when_the_data_have_ended():
    world = ready_world(core(drop_no_signal=True, num_batches=1), prompts=2)
    finish_group(world, W0, G0)
    world.score(signal=False)
    world.run_to_end()
    assert world.closes()[-1].short_by == 1


def test_a_score_of_before_rows_were_lost_is_not_relied_on_once_another_is():
    """Told twice it stands for a row that is gone, and no score would ever come of the group again."""
    world = ready_world(core(release="mini_batch", mini_batch_groups=2))
    finish_group(world, W0, G0)
    world.score()
    (scored,) = (event for event in world.told if isinstance(event, GroupScored))
    world.lose_row(RowId("0/0/0"), G0)
    world.tell(scored)
    world.lose_row(RowId("0/0/1"), G0)
    assert world.workers[W0].plans[G0][0].samples == (0, 1)
    world.run_to_end()


def test_scores_prove_rows_that_were_never_told_of():
    world = ready_world(core())
    world.finish_sample(W0, G0)
    scored = GroupScored(group_id=G0, rewards=(0.0, 1.0), response_tokens=(3, 4), signal=True)
    commands = world.tell(scored)
    assert [abort.group_ids for abort in commands if isinstance(abort, AbortRollouts)] == [(G0,)]
    assert groups_of(world.rounds_of(0)) == [G0]
    assert not any(isinstance(one, TrainRound) for one in world.tell(scored)), "a repeated score is ignored"


def test_a_mini_batch_counts_what_the_policy_chose_and_a_round_all_that_is_computed():
    world = ready_world(core(groups_per_batch=1))
    finish_group(world, W0, G0)
    told = GroupScored(group_id=G0, rewards=(0.0, 1.0), response_tokens=(3, 4), signal=True, environment_tokens=5)
    commands = world.tell(told)
    (close,) = [one for one in commands if isinstance(one, CloseMiniBatch)]
    ((rows,),) = [rank for one in commands if isinstance(one, TrainRound) for rank in one.ranks]
    prompt_tokens = 2  # of the first one, see PipelineWorld
    assert (close.num_tokens, rows.num_tokens) == (2, prompt_tokens + 7)


def test_an_admission_is_outstanding_until_a_row_of_each_group_is_seen():
    world = ready_world(core())
    world.finish_sample(W0, G0)
    assert any(isinstance(command, AdmitGroups) for _, command in world.state.outstanding())
    world.finish_sample(W0, G1)
    assert not any(isinstance(command, AdmitGroups) for _, command in world.state.outstanding())


def test_prompts_are_asked_ahead_and_boundedly():
    world = PipelineWorld(core(num_batches=10, groups_per_batch=3, max_staleness=1))
    world.start_trainer()
    (request,) = world.requests
    assert request.count == 9, "two batches that may be admitted, and one ahead"


def test_a_repeated_answer_of_the_source_is_recognised():
    world = PipelineWorld(core(num_batches=10))
    world.start_trainer()
    world.answer_prompts(2)
    answer = next(event for event in reversed(world.told) if hasattr(event, "source_positions"))
    waiting = world.state.view().waiting_prompts
    world.tell(answer)
    assert world.state.view().waiting_prompts == waiting
    assert world.state.pipeline.prompts.last_position == "2"
