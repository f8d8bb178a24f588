"""The evaluation lane of the core: the pin, the budget, and every way in which an evaluation may end."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from orchestrator.core.view import rows_reported
from tests.fakes.obeyed_pipeline import HELD_OUT
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import (
    EVALUATION,
    AbortRollouts,
    DispatchGroups,
    DropRows,
    HeldOutPromptsArrived,
    LoadWeights,
    PromptRef,
    RequestHeldOutPrompts,
    RolloutFailed,
    RolloutFinished,
    ScoringFailed,
    StopRequested,
    Tick,
    WeightsPublished,
    WorkerLost,
)
from transport.contracts.types import (
    FinishReason,
    GroupId,
    PromptId,
    SamplingParams,
    UpdateMode,
    WeightIdentity,
    WorkerId,
    is_evaluation,
    row_id,
)


def core(**changes: object) -> CoreSettings:
    batches = {"num_batches": 6, "groups_per_batch": 2, "group_size": 2}
    return CoreSettings(**{**batches, "eval_every": 2, "eval_problems": HELD_OUT, "eval_budget": 0.25, **changes})


def world_evaluating(capacity: int = 8, workers: int = 1, **changes: object) -> PipelineWorld:
    """A world whose first evaluation, of the untrained model, has just been handed out as far as it may."""
    world = PipelineWorld(core(**changes))
    world.start_trainer()
    for _ in range(workers):
        world.load(world.join(capacity))
    world.answer_held_out()
    return world


def tries(world: PipelineWorld, worker: int = 0) -> list[GroupId]:
    plans = world.workers[WorkerId(f"generate-{worker}.1")].plans
    return [group_id for group_id in plans if is_evaluation(group_id)]


def answer_all(world: PipelineWorld) -> None:
    """Every try that is out is answered and scored, until no more comes."""
    while any(tries(world, worker) for worker in range(len(world.workers))):
        for worker, worker_id in enumerate(list(world.workers)):
            for group_id in tries(world, worker):
                world.finish_sample(worker_id, group_id)
        while world.unscored:
            world.score()


def publish_next(world: PipelineWorld) -> None:
    """The oldest open batch is generated, scored and trained; evaluations stand still."""
    version = world.trainer.version
    for _ in range(30):
        if world.trainer.version > version:
            return
        world.answer_requests()
        for worker_id, worker in world.workers.items():
            for group_id in [group_id for group_id in worker.plans if not is_evaluation(group_id)]:
                world.finish_sample(worker_id, group_id)
        for group_id in [group_id for group_id in world.unscored if not is_evaluation(group_id)]:
            world.unscored.remove(group_id)
            world.unscored.insert(0, group_id)
            world.score()
        while world.unread():
            world.train()
    raise AssertionError("no version came")


GENERATOR = WorkerId("generate-0.1")


@pytest.mark.parametrize(
    ("every", "ends", "versions"),
    [(0, False, []), (2, False, [0, 2, 4]), (0, True, [0, 6]), (4, True, [0, 4, 6])],
)
def test_the_weights_that_are_asked_for_are_evaluated_and_the_first_and_the_last(every, ends, versions):
    world = PipelineWorld(core(eval_every=every, eval_ends=ends, eval_budget=1.0))
    world.run_to_end()
    assert [outcome.weights.version for outcome in world.evaluations] == versions
    assert all(outcome.answered == outcome.problems == HELD_OUT for outcome in world.evaluations)
    assert not any(outcome.reason for outcome in world.evaluations)
    assert (world.finished, world.trainer.version) == ("all batches are trained", 6)


def test_the_end_of_a_run_waits_a_twentieth_of_its_time_for_the_last_evaluation():
    world = world_evaluating(num_batches=1, eval_every=0, eval_ends=True, eval_budget=1.0)
    answer_all(world)
    world.now_s = 1000.0
    publish_next(world)
    world.load(GENERATOR)
    assert tries(world), "the last weights are asked"
    assert world.state.pipeline.training.finish_id is None
    assert "answers of the last evaluation" in str(world.state.wait())
    world.now_s += 49.0
    world.tell(Tick())
    assert world.state.pipeline.training.finish_id is None
    world.now_s += 2.0
    world.tell(Tick())
    world.tell(Tick())
    assert world.evaluations[-1].reason == "the run's end had waited for it for 5% of the run's time"
    while world.unread():
        world.train()
    assert world.finished == "all batches are trained"


def test_a_run_that_is_stopped_waits_for_no_evaluation():
    world = world_evaluating(eval_every=0, eval_ends=True)
    world.tell(StopRequested(reason="enough"))
    while world.unread():
        world.train()
    world.tell(Tick())
    assert world.finished == "enough"


def test_answers_to_named_sets_are_told_one_by_one_and_sampled_as_the_set_says():
    world = PipelineWorld(core(eval_budget=1.0))
    sampling = SamplingParams(max_new_tokens=4, temperature=0.5)

    def problem(place: int) -> PromptRef:
        return PromptRef(
            prompt_id=PromptId(f"hard:{place // 2}"),
            prompt_tokens=2,
            predicted_tokens=5.0,
            eval_set="hard" if place else "",
            sampling=sampling if place else None,
        )

    world.start_trainer()
    world.load(world.join(8))
    plans = world.tell(HeldOutPromptsArrived(prompts=tuple(problem(place) for place in range(HELD_OUT))))
    asked = [plan for command in plans if isinstance(command, DispatchGroups) for plan in command.plans]
    assert sorted(plan.sampling is None for plan in asked if plan.batch == EVALUATION) == [False] * 4 + [True]
    assert {plan.sampling for plan in asked} == {None, sampling}
    answer_all(world)
    (outcome,) = world.evaluations
    assert outcome.answered == HELD_OUT
    told = sorted((answer.eval_set, answer.prompt_id) for answer in outcome.answers)
    assert told == [("hard", f"hard:{number}") for number in (0, 1, 1, 2)], "what is in no named set is not among them"


def test_nothing_is_evaluated_in_a_run_that_trains_nothing():
    state = PipelineState(core(service=True))
    state.handle(WeightsPublished(weights=WeightIdentity(epoch=1, version=0)), 0.0)
    assert state.view().newest is not None
    assert state.pipeline.evaluations.current is None
    assert not [one for one in state.handle(Tick(), 1.0) if isinstance(one, RequestHeldOutPrompts)]


def test_data_without_held_out_problems_is_never_evaluated():
    world = PipelineWorld(core())
    world.num_held_out = 0
    world.run_to_end()
    assert not world.evaluations


def test_the_outcome_is_the_mean_over_all_problems():
    world = world_evaluating()
    answer_all(world)
    (outcome,) = world.evaluations
    assert outcome.reward == 0.0  # the world's first sample of every group has no reward
    assert outcome.response_tokens == 3.0
    assert outcome.tokens == 3 * HELD_OUT


@pytest.mark.parametrize(("budget", "expected"), [(0.25, 2), (0.01, 1), (1.0, HELD_OUT)])
def test_an_evaluation_takes_its_share_of_the_slots_and_no_more(budget, expected):
    world = world_evaluating(eval_budget=budget)
    assert len(tries(world)) == expected


def test_what_is_predicted_to_be_longest_is_asked_first():
    world = PipelineWorld(core(eval_budget=0.25))
    world.start_trainer()
    world.load(world.join(8))
    lengths = {"a": 3.0, "b": 9.0, "c": 5.0}
    prompts = [PromptRef(prompt_id=PromptId(n), prompt_tokens=2, predicted_tokens=t) for n, t in lengths.items()]
    world.tell(HeldOutPromptsArrived(prompts=tuple(prompts)))
    asked = [world.workers[GENERATOR].plans[group_id][0].prompt_id for group_id in tries(world)]
    assert asked == ["b", "c"]


def test_problems_are_spread_over_the_workers_that_serve_the_pin():
    world = world_evaluating(workers=3, eval_budget=0.25)
    assert [len(tries(world, worker)) for worker in range(3)] == [2, 2, 1]


def test_a_plan_of_an_evaluation_goes_before_those_of_batches():
    world = world_evaluating()
    (plan, _), *_ = [plan for group_id, plan in world.workers[GENERATOR].plans.items() if is_evaluation(group_id)]
    world.answer_prompts(4)
    trained = [plan for group_id, (plan, _) in world.workers[GENERATOR].plans.items() if not is_evaluation(group_id)]
    assert plan.batch == EVALUATION
    assert plan.samples == (0,)
    assert trained
    assert plan.priority > max(one.priority for one in trained)


@pytest.mark.parametrize("update", list(UpdateMode))
def test_newer_weights_wait_for_the_evaluation_and_come_right_after_it(update):
    world = world_evaluating(update=update)
    publish_next(world)
    assert world.workers[GENERATOR].to_load is None
    newest = world.state.view().newest
    answer_all(world)
    assert [outcome.weights.version for outcome in world.evaluations] == [0]
    for group_id in list(world.workers[GENERATOR].plans):
        while group_id in world.workers[GENERATOR].plans:
            world.finish_sample(GENERATOR, group_id)
    assert world.workers[GENERATOR].to_load == newest


def test_people_see_what_is_asked_and_that_newer_weights_wait_for_it():
    world = world_evaluating(max_staleness=0)
    world.finish_sample(GENERATOR, tries(world)[0])
    shown = world.state.view().evaluation
    assert shown is not None
    assert (shown.number, shown.weights.version, shown.problems, shown.held) == (0, 0, HELD_OUT, False)
    assert (shown.waiting, shown.running, shown.scoring, shown.answered) == (2, 2, 1, 0)
    publish_next(world)
    wait = world.state.wait()
    assert wait is not None
    assert "the evaluation of e1v0, before newer weights are loaded" in str(wait)
    assert GENERATOR in wait.owner
    assert world.state.view().evaluation.held  # type: ignore[union-attr]


def test_newer_weights_give_the_evaluation_the_slots_that_training_leaves_free():
    world = world_evaluating(eval_budget=0.01, max_staleness=0)
    assert len(tries(world)) == 1
    publish_next(world)
    assert len(tries(world)) == HELD_OUT


def test_the_hold_ends_the_evaluation_short_and_the_load_comes_with_it():
    world = world_evaluating(eval_hold_s=5.0)
    world.finish_sample(GENERATOR, tries(world)[0])
    world.score()
    publish_next(world)
    world.now_s += 6.0
    commands = world.tell(Tick())
    (outcome,) = world.evaluations
    assert outcome.answered == 1
    assert "eval.hold_s" in outcome.reason
    kinds = [type(command) for command in commands]
    assert kinds.index(AbortRollouts) < kinds.index(LoadWeights), "told to stop before told to load"
    assert world.workers[GENERATOR].to_load is not None


def test_an_evaluation_that_takes_too_long_ends_short():
    world = world_evaluating(eval_timeout_s=10.0)
    world.now_s += 10.0
    world.tell(Tick())
    assert "eval.timeout_s" in world.evaluations[0].reason
    assert not tries(world)


def test_a_row_of_other_weights_does_not_count():
    world = world_evaluating(eval_budget=1.0)
    first = tries(world)[0]
    world.workers[GENERATOR].plans.pop(first)
    pinned, newer = (WeightIdentity(epoch=1, version=version) for version in (0, 1))
    commands = world.tell(
        RolloutFinished(
            row_id=row_id(first, 0),
            worker_id=GENERATOR,
            response_tokens=9,
            finish_reason=FinishReason.STOP,
            oldest=pinned,
            newest=newer,
        )
    )
    assert DropRows(group_ids=(first,)) in commands
    again = [plan for one in commands if isinstance(one, DispatchGroups) for plan in one.plans]
    assert [plan.group_id for plan in again] == [f"eval0/{HELD_OUT}"], "asked again under an id of its own"
    answer_all(world)
    assert world.evaluations[0].answered == HELD_OUT
    assert world.evaluations[0].tokens == 3 * HELD_OUT + 9, "what was generated in vain is a cost too"


def test_what_a_lost_worker_had_not_answered_goes_to_another_that_serves_the_pin():
    world = world_evaluating(workers=2, eval_budget=1.0)
    del world.workers[GENERATOR]
    world.tell(WorkerLost(worker_id=GENERATOR, reason="killed"))
    assert len(tries(world, 1)) == HELD_OUT
    worker_id = WorkerId("generate-1.1")
    for group_id in tries(world, 1):
        world.finish_sample(worker_id, group_id)
    while world.unscored:
        world.score()
    assert world.evaluations[0].answered == HELD_OUT


def test_nobody_left_to_serve_the_pin_ends_it_by_name():
    world = world_evaluating()
    publish_next(world)
    del world.workers[GENERATOR]
    world.tell(WorkerLost(worker_id=GENERATOR, reason="killed"))
    world.tell(Tick())
    assert "no worker serves" in world.evaluations[0].reason


@pytest.mark.parametrize("fault", ["lost on the way", "not scored", "row vanished"])
def test_an_answer_that_goes_wrong_is_asked_for_again(fault):
    world = world_evaluating()
    group_id = tries(world)[0]
    if fault == "lost on the way":
        del world.workers[GENERATOR].plans[group_id]
        world.report(GENERATOR)
    else:
        world.finish_sample(GENERATOR, group_id)
        assert rows_reported(world.state.pipeline) == [row_id(group_id, 0)]
        if fault == "row vanished":
            world.lose_row(row_id(group_id, 0), group_id)
        else:
            world.unscored.clear()
            world.tell(ScoringFailed(group_id=group_id, reason="a reward hangs"))
    answer_all(world)
    assert world.evaluations[0].answered == HELD_OUT


def test_a_problem_that_keeps_failing_is_left_out_by_name():
    world = world_evaluating(eval_budget=1.0, max_attempts=2)
    for _ in range(2):
        failing = tries(world)[-1]
        del world.workers[GENERATOR].plans[failing]
        world.tell(RolloutFailed(group_id=failing, worker_id=GENERATOR, samples=(0,), reason="oom"))
    answer_all(world)
    (outcome,) = world.evaluations
    assert outcome.answered == HELD_OUT - 1
    assert "used up" in outcome.reason


def test_deaths_of_workers_are_no_failures_of_a_problem_until_it_killed_too_many():
    world = world_evaluating(eval_budget=1.0, max_attempts=1, max_deaths=3)
    for left in (False, True, False, True):
        (worker_id,) = world.workers
        del world.workers[worker_id]
        world.tell(WorkerLost(worker_id=worker_id, reason="killed", left=left))
        world.load(world.join(64))
    (worker_id,) = world.workers
    assert len(world.workers[worker_id].plans) >= HELD_OUT
    del world.workers[worker_id]
    world.tell(WorkerLost(worker_id=worker_id, reason="killed"))
    world.load(world.join(64))
    (outcome,) = world.evaluations
    assert (outcome.answered, "used up" in outcome.reason) == (0, True)


def test_a_trainer_that_starts_again_ends_it_and_its_version_is_evaluated_anew():
    world = world_evaluating()
    world.start_trainer()
    assert world.evaluations[0].reason == "the trainer started again"
    current = world.state.pipeline.evaluations.current
    assert current is not None
    assert current.weights == WeightIdentity(epoch=2, version=0)


def test_a_stop_ends_it_and_nothing_new_is_asked():
    world = world_evaluating()
    world.tell(StopRequested(reason="ctrl-c"))
    assert world.evaluations[0].reason == "the run stops"
    world.turn()
    assert not tries(world)


def test_a_snapshot_of_before_there_were_evaluations_is_readable():
    state = PipelineState(core(eval_every=0))
    old = msgspec.msgpack.decode(state.snapshot())
    del old["evaluations"], old["fleet"]["pin"], old["fleet"]["pin_wanted"]
    for name in [name for name in old["settings"] if name.startswith("eval_")]:
        del old["settings"][name]
    restored = PipelineState.restore(msgspec.msgpack.encode(old))
    assert restored.pipeline.evaluations.current is None
    assert restored.settings.eval_every == 0
