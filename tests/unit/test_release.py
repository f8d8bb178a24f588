"""What of a batch the trainer may have while the rest of it is generated, and which batches are opened together."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.config.load import resolve
from orchestrator.core.model.settings import CoreSettings, core_settings
from orchestrator.core.model.staleness import may_admit
from orchestrator.core.training import fills_round, num_released
from tests.fakes.obeyed_pipeline import groups_of
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.settings import PipelineSettings, Settings, TrainerSettings
from transport.contracts.types import UpdateMode, WorkerId

W0 = WorkerId("generate-0.1")
CORE = CoreSettings(num_batches=6, groups_per_batch=4, group_size=2, max_staleness=0, mini_batch_groups=2)


def world_of(**changes) -> PipelineWorld:
    return PipelineWorld.ready(msgspec.structs.replace(CORE, **changes))


@pytest.mark.parametrize(
    ("release", "num_queued", "num_before", "released"),
    [
        ("stream", 0, 0, 0),
        ("stream", 5, 2, 5),
        ("mini_batch", 2, 0, 0),
        ("mini_batch", 7, 0, 6),
        ("mini_batch", 5, 3, 3),
        ("mini_batch", 6, 3, 6),
        ("mini_batch", 2, 3, 2),  # released ones were taken out again
        ("batch", 5, 0, 0),
    ],
)
def test_how_many_are_released(release, num_queued, num_before, released):
    assert num_released(release, num_queued, num_before, mini_batch_groups=3) == released


def test_serial_training_waits_for_the_whole_batch():
    world = world_of(release="batch")
    world.make_ready("0/0", "0/1", "0/2")
    assert world.rounds_of(0) == []
    world.make_ready("0/3")
    assert sorted(groups_of(world.rounds_of(0))) == ["0/0", "0/1", "0/2", "0/3"]


def test_serial_training_waits_for_the_whole_batch_also_with_several_optimizer_steps():
    world = world_of(release="batch", mini_batches=2)
    world.make_ready("0/0", "0/1")
    assert world.rounds_of(0) == []
    world.make_ready("0/3", "0/2")
    assert sorted(groups_of(world.rounds_of(0))[:2]) == ["0/0", "0/1"]


def test_a_mini_batch_is_handed_over_when_it_is_full():
    world = world_of(release="mini_batch")
    world.make_ready("0/2")
    assert world.rounds_of(0) == []
    world.make_ready("0/0", "0/3")
    assert sorted(groups_of(world.rounds_of(0))) == ["0/0", "0/2"]


def test_the_rest_of_a_batch_is_handed_over_though_it_fills_no_mini_batch():
    world = world_of(release="mini_batch", mini_batch_groups=3)
    world.make_ready("0/0", "0/1", "0/2", "0/3")
    assert [sorted(groups_of([one])) for one in world.rounds_of(0)] == [["0/0", "0/1", "0/2"], ["0/3"]]


def test_rollout_batches_open_together_and_the_last_is_within_the_bound():
    assert [may_admit(batch, 0, max_staleness=1, rollout_batches=2) for batch in range(4)] == [True, True, False, False]
    assert not may_admit(2, 1, max_staleness=1, rollout_batches=2)
    assert may_admit(3, 2, max_staleness=1, rollout_batches=2)


def test_a_worker_finishes_a_rollout_of_two_batches_before_it_loads():
    world = world_of(max_staleness=1, rollout_batches=2, update=UpdateMode.BARRIER)
    world.make_ready("0/0", "0/1", "0/2", "0/3")
    while world.unread():
        world.train()
    assert "1/0" in world.workers[W0].plans, "the second batch is generated with the first one's weights"
    assert world.state.view().trained_version == 1
    assert not any(group.startswith("2/") for group in world.workers[W0].plans)


def test_the_core_is_told_the_mode():
    pipeline = PipelineSettings(release="mini_batch", mini_batch_groups=7, rollout_batches=2)
    core = core_settings(Settings(pipeline=pipeline, trainer=TrainerSettings(round_tokens=9)))
    assert (core.release, core.mini_batch_groups, core.rollout_batches) == ("mini_batch", 7, 2)
    assert core.round_tokens == 9


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ([], 0),
        (["trainer.ranks=2"], 4096),
        (["trainer.ranks=4", "trainer.parallel.tensor=4"], 4096),
        (["trainer.ranks=8"], 1024),
        (["trainer.ranks=2", "trainer.mini_batches=4"], 1024),
        (["trainer.ranks=2", "trainer.round_tokens=0"], 0),
        (["trainer.round_tokens=77"], 77),
    ],
)
def test_several_ranks_get_whole_micro_batches_while_there_are_rounds_to_stream(overrides: list[str], tokens: int):
    batch = ["sampling.max_new_tokens=1024", "pipeline.groups_per_batch=8", "pipeline.group_size=8"]
    read = resolve("tiny", [], [*batch, "trainer.micro_batch_tokens=4096", *overrides], {})
    assert core_settings(read.settings).round_tokens == tokens


@pytest.mark.parametrize(
    ("tokens", "num_ranks", "round_tokens", "fills"),
    [
        (5, 4, 0, True),
        (0, 2, 10, False),
        (19, 2, 10, False),
        (20, 2, 10, True),
        (20, 4, 10, False),
    ],
)
def test_whether_groups_are_enough_for_a_round(tokens, num_ranks, round_tokens, fills):
    assert fills_round(tokens, num_ranks, round_tokens) == fills
