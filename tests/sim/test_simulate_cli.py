"""``streamrl-orchestrator simulate``: a small scenario whole, and mistakes by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.commands import app
from orchestrator.core.model.settings import chosen_dispatch, core_settings, default_dispatch
from orchestrator.errors import ConfigError, DataError
from orchestrator.planning.allocation import Pool, Split
from orchestrator.planning.plan_search import Job
from orchestrator.sim.costs import GPUS
from orchestrator.sim.llms import QWEN_7B
from orchestrator.sim.scenarios import PIPELINES
from transport.contracts.settings import GenerationSettings, PipelineSettings, RankerSettings, Settings
from transport.contracts.types import UpdateMode

SMALL = ["simulate", "--model", "Qwen2.5-7B", "--generate", "4xH800", "--train", "4xH800", "--batch", "32"]
SMALL += ["--iterations", "6", "--ranks", "1", "--recall", "1"]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(100 + 37 * number % 900) for number in range(64)))
    return path


def ask(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_scenario_says_seconds_bubbles_and_its_bound_and_draws_itself(lengths, tmp_path):
    out = tmp_path / "out"
    data = json.loads(ask("--lengths", str(lengths), "--json", "--out", str(out)))
    assert data["iteration_s"] >= data["bound_s"] > 0
    assert data["over_bound"] == pytest.approx(data["iteration_s"] / data["bound_s"], rel=1e-3)
    assert data["oldest_token_age"] <= 1
    assert all(0 <= sum(causes.values()) < 1 for causes in data["idle"].values())
    assert (out / "timeline.svg").read_text().startswith("<svg")
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    text = ask("--lengths", str(lengths))
    assert f"iteration   {data['iteration_s']:.4g} s" in text
    assert "skew" in text or "pipeline" in text


def test_equal_seeds_give_equal_answers():
    first, again, other = (ask("--json", "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other


def test_colocated_gpus_work_in_turn(lengths):
    data = json.loads(ask("--lengths", str(lengths), "--train", "colocated", "--pipeline", "serial", "--json"))
    assert data["training_gpus"] == data["generation_gpus"] == 4
    assert data["iteration_s"] >= data["bound_training_s"] + data["bound_generation_s"]


def test_what_shortens_the_tail_is_simulated_and_named(tmp_path: Path):
    path = tmp_path / "lengths.jsonl"
    rows = [{"prompt": f"p{n}", "output_tokens": [60 + 40 * n % 3000, 50 + 40 * n % 3000]} for n in range(64)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = ["--lengths", str(path), "--group-size", "2", "--pipeline", "stream"]
    plain, deferred = (json.loads(ask(*shape, *aid, "--json")) for aid in ([], ["--defer", "4"]))
    assert deferred["iteration_s"] < plain["iteration_s"]
    assert (plain["oldest_token_age"], deferred["oldest_token_age"], deferred["deferred"]) == (0, 1, 4)
    assert deferred["iteration_s"] >= deferred["bound_s"]
    assert ask(*shape, "--defer", "4", "--probes").startswith("Qwen2.5-7B, stream, probes, 4 deferred, pulled; ")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["--train", "colocated"], ConfigError, "--train: .* as --pipeline serial has it; in_flight trains while"),
        (["--train", "colocated", "--pipeline", "stream"], ConfigError, "stream trains while it generates"),
        (
            ["--defer", "32"],
            ConfigError,
            "--defer: pipeline.oversampled_groups must be above 0 .* below",
        ),
        (["--defer", "2", "--pipeline", "rolling"], ConfigError, '--defer: pipeline.membership must be "fixed"'),
        (["--probes"], ConfigError, "--probes: pipeline.probes must be false with pipeline.group_size 1"),
        (
            ["--probes", "--group-size", "2", "--dispatch", "scored"],
            ConfigError,
            '--probes: pipeline.dispatch must be "auto"',
        ),
        (["--model", "nope"], ConfigError, "neither a known model"),
        (["--generate", "5xH800", "--tensor-parallel", "4"], ConfigError, "no whole instances of 4"),
        (["--generate", "0xH800"], ConfigError, "--generate: 0xH800: from 1"),
        (["--generate", "8xH900"], ConfigError, "--generate: no GPU 'H900'"),
        (["--train", "8xH800,8xH20"], ConfigError, "--train: one pool"),
        (["--model", "Qwen2.5-72B"], ConfigError, "at least 4 H800 to generate and 32 H800 to train, or"),
        (["--ranks", "3"], ConfigError, "cannot be dealt out to 3 ranks"),
        (["--tensor-parallel", "3", "--generate", "6xH800"], ConfigError, "do not split 3 ways"),
        (["--pipeline", "x"], ConfigError, "not one of serial"),
        (["--dispatch", "x"], ConfigError, "not one of even"),
        (["--draft-depth", "2"], ConfigError, "--draft-depth: nothing is drafted without --drafts"),
        (["--lengths", "/does/not/exist"], DataError, "cannot be read"),
    ],
)
def test_mistakes_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False)


@pytest.mark.parametrize(("named", "missing"), [("--generate", "--train 4xH100"), ("--train", "--generate 4xH100")])
def test_gpus_that_nobody_named_are_not_added(named: str, missing: str):
    with pytest.raises(ConfigError, match=f"{named}: nothing says which GPUs .* add them, as {missing}"):
        CliRunner().invoke(app, ["simulate", named, "4xH100"], catch_exceptions=False)


@pytest.mark.parametrize("content", ["700\n", "300\n" * 50])
def test_one_length_and_equal_lengths_are_a_workload(content, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    assert json.loads(ask("--lengths", str(path), "--json"))["over_bound"] > 0.99, "of a few iterations, not of all"


POOL = Pool(gpu=GPUS["H800"], num_gpus=8, price=1.0)
ONE_EACH = Split(
    generation=POOL,
    generation_gpus=1,
    tensor_parallel=1,
    training=POOL,
    training_gpus=1,
    ranks=1,
    training_tensor_parallel=1,
    pipeline_parallel=1,
)


@pytest.mark.parametrize("pipeline", ["stream", "fully_async", "in_flight", "rolling_staggered"])
@pytest.mark.parametrize("instances", [1, 2, 3])
def test_run_plan_and_simulate_choose_the_same_dispatch(pipeline: str, instances: int, lengths: Path):
    core = PIPELINES[pipeline]
    settings = Settings(
        pipeline=PipelineSettings(max_staleness=core.max_staleness, update=core.update),
        generation=GenerationSettings(workers=instances),
        ranker=RankerSettings(kind="text"),
    )
    of_run = chosen_dispatch(settings)
    assert core_settings(settings).dispatch == of_run
    of_split = replace(ONE_EACH, generation_gpus=instances)
    assert Job(llm=QWEN_7B, groups=((1,),), pipeline=pipeline).dispatch(of_split) == of_run
    shape = ["--generate", f"{instances}xH800", "--tensor-parallel", "1", "--pipeline", pipeline]
    assert json.loads(ask("--lengths", str(lengths), *shape, "--json"))["dispatch"] == of_run
    assert ask("--lengths", str(lengths), *shape).startswith(f"Qwen2.5-7B, {pipeline}, {of_run}; ")


@pytest.mark.parametrize(("instances", "usual"), [(2, "least_loaded"), (3, "paced")])
def test_plans_are_the_default_where_many_workers_take_versions_in_flight(instances: int, usual: str):
    asked = PipelineSettings(max_staleness=1, update=UpdateMode.IN_FLIGHT)
    assert default_dispatch(asked, num_workers=instances) == usual
    assert default_dispatch(asked, num_workers=instances, ranked=False) == "least_loaded"
    assert default_dispatch(PipelineSettings(max_staleness=0), num_workers=instances) == "scored"
