"""Every way of standing still has a name: the stage, what it waits for, who should act, since when."""

from __future__ import annotations

from orchestrator.core.fleet import REFUSED_S
from orchestrator.core.model.pipeline import Wait
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.model.workers import MAX_LOAD_ATTEMPTS
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import BrokerUsage, StopRequested, Tick, WorkerJoined, WorkerLost
from transport.contracts.types import GroupId, UpdateMode, WorkerId, WorkerKind

W0, W1 = WorkerId("generate-0.1"), WorkerId("generate-1.1")
TRAINER, SCORER = WorkerId("train-0.1"), WorkerId("score-0.1")


def core(**changes) -> CoreSettings:
    defaults = {"num_batches": 3, "groups_per_batch": 2, "group_size": 2, "max_staleness": 0}
    return CoreSettings(**(defaults | changes))


def ready_world(*, capacity: int = 64, **changes) -> PipelineWorld:
    """Everyone has joined, version 0 is served, batch 0 runs."""
    world = PipelineWorld.ready(core(**changes), capacity=capacity)
    world.tell(WorkerJoined(worker_id=SCORER, kind=WorkerKind.SCORE))
    return world


def wait_of(world: PipelineWorld) -> Wait:
    wait = world.state.wait()
    assert wait is not None
    return wait


def said(world: PipelineWorld) -> tuple[str, str, str]:
    wait = wait_of(world)
    return wait.stage, wait.waits_for, wait.owner


def test_no_trainer():
    world = PipelineWorld(core())
    assert said(world) == ("training", "a trainer to join", "train")
    world.tell(WorkerJoined(worker_id=TRAINER, kind=WorkerKind.TRAIN))
    assert said(world) == ("training", "the trainer to be ready", TRAINER)
    world = ready_world()
    world.tell(WorkerLost(worker_id=TRAINER, reason="its process ended"))
    assert said(world) == ("training", "a trainer to join", "train")


def test_the_prompt_source_does_not_answer():
    world = PipelineWorld(core())
    world.start_trainer()
    assert said(world) == ("prompts", f"{world.requests[0].count} prompts", "the prompt source")


def test_no_generation_worker():
    world = PipelineWorld(core())
    world.start_trainer()
    world.answer_prompts(8)
    assert said(world) == ("generation", "a generation worker to join", "generate")


def test_weights_are_not_loaded():
    world = PipelineWorld(core())
    world.start_trainer()
    world.answer_prompts(8)
    world.join()
    assert said(world) == ("weights", "weights e1v0 to be loaded", W0)
    for _ in range(MAX_LOAD_ATTEMPTS):
        world.load(W0, fails=True)
    assert said(world) == ("weights", "weights e1v0 to be loaded, which failed everywhere and is tried again", W0)


def test_weights_that_no_worker_can_load_end_the_run_with_the_reason():
    world = PipelineWorld(core())
    world.start_trainer()
    world.answer_prompts(8)
    world.join()
    world.join()
    for attempt in range(MAX_LOAD_ATTEMPTS):
        world.load(W0, fails=True, permanent=True)
        world.load(W1, fails=True, permanent=attempt > 0)
    world.tell(Tick())
    assert not world.finished, "another worker may join"
    world.now_s += REFUSED_S
    world.tell(Tick())
    assert world.failed
    assert world.finished == f"no generation worker can load weights e1v0 ({W0}, {W1}): checksum"


def test_weights_that_may_be_loaded_later_end_no_run():
    world = PipelineWorld(core())
    world.start_trainer()
    world.answer_prompts(8)
    world.join()
    for _ in range(MAX_LOAD_ATTEMPTS):
        world.load(W0, fails=True)
    world.now_s += 10 * REFUSED_S
    world.tell(Tick())
    assert not world.finished


def test_weights_of_the_next_batch_are_not_loaded():
    world = ready_world(update=UpdateMode.BARRIER)
    world.generate("0/0", "0/1")
    while world.unscored:
        world.score()
    while world.unread():
        world.train()
    world.answer_requests()
    assert said(world) == ("weights", "weights e1v1 to be loaded", W0)


def test_samples_do_not_come():
    world = ready_world()
    world.finish_sample(W0, GroupId("0/0"))
    assert said(world) == ("generation", "3 samples of 2 groups of batch 1", W0)


def test_all_slots_are_taken():
    world = ready_world(max_staleness=1, capacity=2)
    world.generate("0/0", "0/1")
    while world.unscored:
        world.score()
    world.lose_row(next(iter(world.rows)), GroupId("0/0"))
    assert said(world) == ("generation", "room for 1 group of batch 1", W0)


def test_scoring_does_not_answer():
    world = ready_world()
    world.generate("0/1")
    assert said(world) == ("scoring", "the scores of 1 group of batch 1", SCORER)
    world.tell(WorkerLost(worker_id=SCORER, reason="its lease ran out"))
    assert said(world) == ("scoring", "the scores of 1 group of batch 1", "score (none has joined)")


def test_the_trainer_is_silent():
    world = ready_world()
    world.generate("0/0")
    world.score()
    assert said(world) == ("training", "round 0.0 to be trained", TRAINER)
    world.generate("0/1")
    world.score()
    assert said(world) == ("training", "round 0.0 and 1 more to be trained", TRAINER)
    other = WorkerId("train-1.1")
    world.tell(WorkerJoined(worker_id=other, kind=WorkerKind.TRAIN))
    world.tell(WorkerLost(worker_id=other, reason="no sign of life"))
    assert said(world)[2] == "train-1.1, which is lost", "the ranks that are there wait for it"
    world.tell(WorkerJoined(worker_id=WorkerId("train-1.2"), kind=WorkerKind.TRAIN))
    assert said(world)[2] == f"{TRAINER}, train-1.2"
    world.tell(WorkerLost(worker_id=WorkerId("train-1.2"), reason="asked to", left=True))
    world.train()
    world.train()
    assert said(world) == ("training", "the step of batch 1", TRAINER)


def test_the_trainer_waits_for_rows_that_vanished():
    world = ready_world()
    world.generate("0/0")
    world.score()
    world.lose_row(next(iter(world.rows)), GroupId("0/0"))
    assert said(world) == ("generation", "1 sample of 1 group of batch 1", W0)


def test_the_end_waits_for_the_trainer():
    world = ready_world()
    world.tell(StopRequested(reason="enough"))
    assert said(world) == ("training", "the last checkpoint and the final model", TRAINER)
    while world.unread():
        world.train()
    assert world.state.wait() is None


def test_a_full_broker_is_named_beside_what_is_waited_for():
    world = ready_world()
    world.tell(BrokerUsage(retained_bytes=10**12))
    assert said(world) == (
        "generation",
        "4 samples of 2 groups of batch 1; nothing new is admitted, the rows that are kept are over their limit",
        W0,
    )


def test_the_wait_began_when_it_last_changed():
    world = ready_world()
    for now_s in (10.0, 20.0, 30.0):
        world.now_s = now_s
        world.tell(Tick())
    assert wait_of(world).since_s == 10.0
    assert "unchanged for 20 s" in world.state.describe_wait()
    world.finish_sample(W0, GroupId("0/0"))
    assert wait_of(world).since_s == 30.0, "a sample came: it waits for fewer"
    world.now_s = 40.0
    world.tell(Tick())
    world.now_s = 50.0
    world.tell(Tick())
    assert wait_of(world).since_s == 40.0
