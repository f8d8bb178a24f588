"""Who computes on which GPU of one machine, for machines of 1 to 16; the driver is a stand-in on PATH."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.config.load import render, resolve
from orchestrator.config.rules import violations
from orchestrator.core.placement import Bounds, ModelPool, Needs, PlacementError, fill, place
from orchestrator.errors import ConfigError, ExitCode, exit_code
from orchestrator.launch.gpus import PlacedGpus, place_gpus, with_numbers
from orchestrator.launch.processes import workers_of
from tests.fakes.command_line import orchestrator
from tests.fakes.gpu_driver import FakeDriver
from transport.contracts.types import WorkerKind
from transport.errors import GpuError
from transport.process.gpus import VISIBLE, take_gpus

MODELS = {"": ModelPool(workers=1)}


def test_the_trainer_gets_the_first_gpus_and_generation_the_rest():
    placed = place(range(8), Needs(ranks=2, workers=3, gpus_per_worker=2))
    assert placed.trainer == (0, 1)
    assert placed.generation == ((2, 3), (4, 5), (6, 7))
    assert placed.idle == ()
    assert placed.gpus(WorkerKind.TRAIN, 1) == (1,)
    assert placed.gpus(WorkerKind.GENERATE, 2) == (6, 7)
    assert placed.gpus(WorkerKind.SCORE, 0) == ()
    assert placed.share((2, 3)) == 1.0


def test_one_gpu_is_shared_by_all_with_equal_shares_of_its_memory():
    placed = place([0], Needs(ranks=1, workers=2, models=MODELS))
    everyone = [(WorkerKind.TRAIN, 0), (WorkerKind.GENERATE, 0), (WorkerKind.GENERATE, 1), (WorkerKind.SCORE, 0)]
    assert [placed.gpus(*who) for who in everyone] == [(0,)] * 4
    assert placed.shares == {0: 0.22}


def test_workers_share_what_the_trainer_leaves():
    placed = place(range(3), Needs(ranks=1, workers=3))
    assert [placed.gpus(WorkerKind.GENERATE, index) for index in range(4)] == [(1,), (2,), (1,), (2,)]
    assert placed.shares == {0: 1.0, 1: 0.45, 2: 1.0}


def test_workers_go_to_the_trainers_gpus_where_none_is_left():
    placed = place(range(2), Needs(ranks=2, workers=2))
    assert placed.generation == ((0,), (1,))
    assert placed.shares == {0: 0.45, 1: 0.45}


def test_a_reference_model_gets_an_idle_gpu_before_it_shares():
    needs = Needs(ranks=1, workers=1, models=MODELS)
    assert place(range(3), needs).models == {"": (2,)}
    shared = place(range(2), needs)
    assert shared.models == {"": (0,)}
    assert shared.shares == {0: 0.45, 1: 1.0}


def test_a_critic_gets_an_idle_gpu_of_its_own_or_the_one_that_it_is_given():
    needs = Needs(ranks=1, workers=1, models=MODELS, critics=1)
    placed = place(range(4), needs)
    assert (placed.models[""], placed.critic, placed.idle) == ((2,), (3,), ())
    assert placed.gpus(WorkerKind.CRITIC, 0) == (3,)
    assert placed.share(placed.critic) == 1.0
    shared = place(range(3), needs)
    assert (shared.models[""], shared.critic) == ((2,), (0,))
    assert shared.shares == {0: 0.45, 1: 1.0, 2: 1.0}
    assert place(range(8), Needs(ranks=1, workers=1, critics=1, critic=[5, 6])).critic == (5,)
    assert place(range(4), Needs(ranks=1, workers=1)).gpus(WorkerKind.CRITIC, 0) == ()


def test_numbers_that_are_left_open_leave_a_gpu_for_the_critic():
    assert fill(range(8), Bounds(), Bounds(), critics=1) == (4, 3)


def test_what_the_user_names_is_used_and_nothing_else():
    placed = place(range(8), Needs(ranks=1, workers=2, trainer=[7], generation=[1, 2]))
    assert (placed.trainer, placed.generation, placed.idle) == ((7,), ((1,), (2,)), (0, 3, 4, 5, 6))
    beside = place(range(8), Needs(ranks=2, workers=1, generation=[0, 1]))
    assert beside.trainer == (2, 3), "a trainer that may choose stays off what generation was given"


def test_pools_of_models_that_score_have_gpus_of_their_own():
    pools = {"": ModelPool(workers=2), "reward": ModelPool(workers=3, gpus=[0, 1]), "reference": ModelPool(workers=1)}
    placed = place(range(8), Needs(ranks=2, workers=2, models=pools))
    assert (placed.trainer, placed.generation) == ((2, 3), ((4,), (5,))), "not on those that the user named for others"
    assert placed.models == {"": (6,), "reward": (0, 1), "reference": (7,)}
    assert [placed.gpus(WorkerKind.SCORE, index, "reward") for index in range(3)] == [(0,), (1,), (0,)]
    assert placed.gpus(WorkerKind.SCORE, 0, "advantages") == (), "which loads none"
    assert placed.shares == {0: 0.45, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 0.45, 7: 1.0}
    assert fill(range(8), Bounds(), Bounds(), models=3) == (4, 1)


def test_gpus_that_others_hold_are_left_alone():
    placed = place([3, 5, 6], Needs(ranks=1, workers=2))
    assert (placed.trainer, placed.generation, placed.idle) == ((3,), ((5,), (6,)), ())


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("ranks", [0, 1, 2, 5])
def test_every_process_has_its_gpus_and_no_memory_is_promised_twice(ranks: int, each: int):
    for num_gpus in range(1, 17):
        for workers in (0, 1, 3, 16):
            needs = Needs(
                ranks=ranks,
                workers=workers,
                gpus_per_worker=each,
                models=MODELS if ranks else {},
                critics=int(ranks > 1),
            )
            if ranks > num_gpus or (workers and each > num_gpus):
                with pytest.raises(PlacementError, match=r"set (trainer.ranks|generation.gpus_per_worker)="):
                    place(range(num_gpus), needs)
                continue
            _check(num_gpus, needs)


def _check(num_gpus: int, needs: Needs) -> None:
    placed = place(range(num_gpus), needs)
    ranked = [placed.gpus(WorkerKind.TRAIN, index) for index in range(needs.ranks)]
    assert len({gpu for (gpu,) in ranked}) == needs.ranks, "NCCL takes one rank a GPU"
    serving = [placed.gpus(WorkerKind.GENERATE, index) for index in range(needs.workers)]
    assert all(len(set(gpus)) == needs.gpus_per_worker for gpus in serving)
    everyone = [*ranked, *serving, *placed.models.values()]
    everyone += [placed.critic] if needs.critics else []
    for gpu in range(num_gpus):
        shares = [placed.share(gpus) for gpus in everyone if gpu in gpus]
        assert sum(shares) <= 1.0
        assert (not shares) == (gpu in placed.idle)
    if len({gpu for gpus in everyone for gpu in gpus}) == sum(map(len, everyone)):
        assert {placed.share(gpus) for gpus in everyone} <= {1.0}
    else:
        asked = needs.ranks + needs.workers * needs.gpus_per_worker + len(needs.models) + needs.critics
        assert asked > num_gpus, "there was room for all"


# --- how many there are to be


@pytest.mark.parametrize(
    ("num_gpus", "each", "models", "numbers"),
    [
        (1, 1, 0, (1, 1)),
        (2, 1, 0, (1, 1)),
        (8, 1, 0, (4, 4)),
        (16, 1, 0, (8, 8)),
        (8, 2, 0, (4, 2)),
        (16, 4, 0, (8, 2)),
        (8, 1, 1, (4, 3)),
        (7, 1, 0, (2, 5)),
    ],
)
def test_the_trainer_gets_half_and_generation_the_rest(num_gpus: int, each: int, models: int, numbers: tuple[int, int]):
    assert fill(range(num_gpus), Bounds(), Bounds(), gpus_per_worker=each, models=models) == numbers


def test_a_number_that_was_given_leaves_the_other_all_that_is_left():
    eight, fixed = range(8), Bounds(low=3, high=3)
    assert fill(eight, Bounds(), fixed) == (4, 3)
    assert fill(eight, Bounds(), Bounds(low=7, high=7)) == (1, 7)
    assert fill(eight, fixed, Bounds()) == (3, 5)
    assert fill(eight, Bounds(), Bounds(high=2)) == (4, 2)
    assert fill(range(16), Bounds(), Bounds(high=2)) == (8, 2)
    assert fill(range(16), Bounds(), Bounds(low=1, high=1), gpus_per_worker=4) == (8, 1)
    assert fill(eight, Bounds(low=0, high=0), Bounds()) == (0, 8), "nothing is trained on a GPU"
    assert fill(eight, Bounds(), Bounds(low=0, high=0)) == (8, 0), "nothing is generated on one"


def test_ranks_keep_to_what_their_layout_and_the_rounds_allow():
    eight = range(8)
    assert fill(eight, Bounds(high=2), Bounds()) == (2, 6), "a batch of two groups"
    assert fill(range(12), Bounds(low=3, step=3), Bounds()) == (6, 6)
    assert fill(range(6), Bounds(low=4, step=4), Bounds()) == (4, 2), "layers over four ranks"
    assert fill(eight, Bounds(low=5), Bounds()) == (8, 1), "a model that needs five"
    assert fill(eight, Bounds(low=6, high=4), Bounds()) == (4, 4)


def test_gpus_that_the_user_named_bound_both():
    eight = range(8)
    assert fill(eight, Bounds(), Bounds(), trainer=[0, 1]) == (2, 6)
    assert fill(eight, Bounds(), Bounds(), generation=[6, 7]) == (4, 2)
    assert fill(eight, Bounds(), Bounds(), generation=[4, 5, 6, 7], gpus_per_worker=2) == (4, 2)
    assert fill(eight, Bounds(), Bounds(), trainer=[0, 1, 2, 3], generation=[0, 1, 2, 3]) == (4, 4)


@pytest.mark.parametrize("each", [1, 2, 4])
@pytest.mark.parametrize("models", [0, 1])
def test_no_gpu_is_idle_but_what_is_too_few_for_a_worker(each: int, models: int):
    for num_gpus in range(each + 1 + models, 65):
        ranks, workers = fill(range(num_gpus), Bounds(), Bounds(), gpus_per_worker=each, models=models)
        idle = num_gpus - ranks - workers * each - models
        assert 0 <= idle < each, f"{num_gpus} GPUs: {ranks} ranks, {workers} workers"
        placed = place(
            range(num_gpus),
            Needs(ranks=ranks, workers=workers, gpus_per_worker=each, models=MODELS if models else {}),
        )
        assert set(placed.shares.values()) == {1.0}


# --- with the settings of a run, on this machine


def placed_with(*overrides: str) -> PlacedGpus | None:
    return place_gpus(resolve("smollm2", [], overrides, {}).settings)


def lines_of(placed: PlacedGpus) -> list[str]:
    return placed.lines(workers_of(placed.settings))


@pytest.mark.parametrize(
    ("count", "overrides", "lines"),
    [
        (1, [], ["GPU 0  H100, 80 GiB  train-0, generate-0 (45% of its memory each)"]),
        (2, [], ["GPU 0  H100, 80 GiB  train-0", "GPU 1  H100, 80 GiB  generate-0"]),
        (
            8,
            ["generation.engine=sglang", "generation.workers=3", "generation.gpus_per_worker=2"],
            [
                "GPU 0  H100, 80 GiB  train-0",
                "GPU 1  H100, 80 GiB  train-1",
                *(f"GPU {gpu}  H100, 80 GiB  generate-{(gpu - 2) // 2}" for gpu in range(2, 8)),
            ],
        ),
        (
            8,
            ["trainer.ranks=2", "generation.workers=1"],
            [
                "GPU 0  H100, 80 GiB  train-0",
                "GPU 1  H100, 80 GiB  train-1",
                "GPU 2  H100, 80 GiB  generate-0",
                *(f"GPU {gpu}  H100, 80 GiB  idle" for gpu in range(3, 8)),
            ],
        ),
    ],
)
def test_a_dry_run_shows_who_computes_where(
    driver: FakeDriver, tmp_path: Path, count: int, overrides: list[str], lines: list[str]
):
    driver(count)
    asked = [part for override in overrides for part in ("--set", override)]
    done = orchestrator("run", "--preset", "smollm2", "--dry-run", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.removeprefix("# ") for line in done.stdout.splitlines() if line.startswith("# GPU")] == lines


def test_idle_gpus_come_with_the_setting_that_would_use_them(driver: FakeDriver):
    driver(8)
    placed = placed_with("trainer.ranks=1", "generation.workers=1")
    assert placed is not None
    assert lines_of(placed)[-1] == "idle GPUs would be used with --set generation.workers=7"


def test_workers_are_told_their_gpus_on_their_command_lines(driver: FakeDriver):
    driver(4)
    placed = placed_with("generation.engine=vllm", "generation.gpus_per_worker=2")
    assert placed is not None
    assert placed.arguments(WorkerKind.TRAIN, 1) == ["--gpus", "1"]
    assert placed.arguments(WorkerKind.GENERATE, 0) == ["--gpus", "2,3", "--gpus-each", "2"]
    assert placed.arguments(WorkerKind.SCORE, 0) == []
    driver(1)
    shared = placed_with()
    assert shared is not None
    assert shared.arguments(WorkerKind.GENERATE, 0) == ["--gpus", "0", "--gpu-share", "0.45"]


def test_a_run_keeps_the_numbers_that_a_machine_gave_it(driver: FakeDriver):
    """Its configuration holds them with where they came from; more GPUs of a later machine change nothing."""
    driver(8)
    asked = resolve("smollm2", [], [], {})
    decided = with_numbers(asked, place_gpus(asked.settings))
    assert "ranks = 4  # default; auto, on 8 GPUs\n" in render(decided)
    assert "workers = 4  # default; auto, on 8 GPUs\n" in render(decided)
    driver(16)
    assert with_numbers(decided, place_gpus(decided.settings)) == decided
    driver(0)
    assert with_numbers(asked, place_gpus(asked.settings)) == asked
    assert (asked.settings.trainer.num_ranks, asked.settings.generation.num_workers) == (1, 1)


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        ([], (8, 8)),
        (["pipeline.groups_per_batch=2"], (2, 14)),
        (["trainer.mini_batches=4"], (2, 14)),
        (["trainer.parallel.tensor=4", "pipeline.groups_per_batch=2"], (8, 8)),
        (["trainer.parallel.data=1", "trainer.parallel.tensor=2"], (2, 14)),
        (["algorithm.kl_coef=0.1"], (8, 7)),
        (["generation.min_workers=2", "generation.max_workers=4"], (8, 4)),
        (["generation.engine=sglang", "generation.gpus_per_worker=4"], (8, 2)),
        (["trainer.device=cpu"], (1, 16)),
        (["generation.device=cpu"], (8, 1)),
        (["generation.engine=sglang", "generation.engine_url=http://h:1"], (8, 1)),
        (["trainer.gpus=0-3"], (4, 12)),
    ],
)
def test_settings_bound_what_fills_a_machine(driver: FakeDriver, overrides: list[str], numbers: tuple[int, int]):
    driver(16)
    placed = placed_with(*overrides)
    assert placed is not None
    assert (placed.settings.trainer.num_ranks, placed.settings.generation.num_workers) == numbers
    assert not list(violations(placed.settings))


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.device=cpu", "generation.device=cpu"],
        ["trainer.device=cuda:1", "generation.device=cuda:0"],
        ["trainer.engine=emulated", "generation.engine=emulated"],
    ],
)
def test_who_computes_elsewhere_gets_none(driver: FakeDriver, overrides: list[str]):
    driver(2)
    assert placed_with(*overrides) is None


@pytest.mark.parametrize(
    ("count", "overrides", "words"),
    [
        (2, ["trainer.gpus=2"], "trainer.gpus 2: there is no GPU 2 here; nvidia-smi shows 2, numbered from 0"),
        (0, ["generation.gpus=0-1"], "generation.gpus 0-1: there is no GPU 0, 1 here; nvidia-smi shows none"),
        (
            4,
            ["trainer.ranks=2", "trainer.gpus=1"],
            "trainer.ranks: 2 ranks need a GPU each, and there are 1 for them; set trainer.ranks=1",
        ),
        (
            2,
            ["trainer.ranks=3"],
            "trainer.ranks: 3 ranks need a GPU each, and there are 2 for them; set trainer.ranks=2",
        ),
        (
            1,
            ["generation.engine=sglang", "generation.gpus_per_worker=2"],
            "generation.gpus_per_worker: a worker needs 2 GPUs, and there are 1 for it",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(
    driver: FakeDriver, count: int, overrides: list[str], words: str
):
    driver(count)
    with pytest.raises((ConfigError, GpuError)) as refused:
        placed_with(*overrides)
    assert exit_code(refused.value) == ExitCode.BAD_CONFIG
    assert words in str(refused.value)


def test_a_gpu_that_another_run_holds_is_not_promised(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    driver(2)
    take_gpus("0")  # as a worker of another run does
    monkeypatch.delenv(VISIBLE)
    placed = placed_with()
    assert placed is not None
    assert lines_of(placed) == [
        "GPU 0  H100, 80 GiB  held by another run",
        "GPU 1  H100, 80 GiB  train-0, generate-0 (45% of its memory each)",
    ]
    with pytest.raises(ConfigError, match="GPU 0 is held by a worker of another run"):
        placed_with("trainer.gpus=0")


# --- models that are too large for the usual half

QWEN2 = {"7B": (28, 3584, 18944, 28, 4), "14B": (48, 5120, 13824, 40, 8), "32B": (64, 5120, 27648, 40, 8)}
QWEN2["72B"] = (80, 8192, 29568, 64, 8)
"""Layers, width, width of the MLP, heads, key-value heads."""
DIMENSIONS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def model_like(directory: Path, size: str) -> Path:
    """Its configuration alone."""
    config = dict(zip(DIMENSIONS, QWEN2[size], strict=True)) | {"model_type": "qwen2", "vocab_size": 152_064}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("size", "count", "offload", "numbers"),
    [
        ("7B", 3, "optimizer", (2, 1)),
        ("14B", 6, "none", (4, 2)),
        ("14B", 8, "none", (4, 4)),
        ("32B", 16, "optimizer", (8, 8)),
        ("32B", 12, "optimizer", (8, 4)),
    ],
)
def test_a_model_that_needs_more_than_half_of_the_gpus_gets_them(
    driver: FakeDriver, tmp_path: Path, size: str, count: int, offload: str, numbers: tuple[int, int]
):
    driver(count)
    placed = placed_with(f"model.path={model_like(tmp_path, size)}", f"trainer.offload={offload}")
    assert placed is not None
    assert (placed.settings.trainer.ranks, placed.settings.generation.workers) == numbers
    assert not placed.placement.idle


@pytest.mark.parametrize(
    ("size", "count", "says"),
    [
        ("32B", 8, r"may have 7 of the GPUs here, .* needs 164\.6 GB of each rank .* 77\.0 GB are usable; it takes .*"),
        ("32B", 16, r"may have 15 of the GPUs here, .*; it takes .*trainer\.offload = \"optimizer\""),
        ("72B", 8, r"it takes .*trainer\.ranks = 32"),
        ("72B", 16, r"it takes .*trainer\.ranks = 32"),
    ],
)
def test_a_model_that_fits_no_split_says_what_would(
    driver: FakeDriver, tmp_path: Path, size: str, count: int, says: str
):
    driver(count)
    with pytest.raises(ConfigError, match=rf"^trainer\.ranks: .*{says}"):
        placed_with(f"model.path={model_like(tmp_path, size)}")
