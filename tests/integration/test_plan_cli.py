"""``streamrl-orchestrator plan``: what it answers, and what it says of input that makes no sense."""

from __future__ import annotations

import json
import math
import random
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from orchestrator.cli.commands import app
from orchestrator.errors import ConfigError, DataError, ExitCode, exit_code
from orchestrator.planning.profiles import fit
from tests.unit.test_fitting import measurements

GPUS = ("--gpus", "8xH800")
SMALL = ("--batch", 8, "--group-size", 2, "--processes", 1)
MODEL = ("--model", "SmolLM2-1.7B")


def call(*arguments: object) -> tuple[str, str]:
    """(standard output, standard error); errors of ours come out as they are."""
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@cache
def planned(*arguments: object, batch: int = 16) -> dict[str, Any]:
    """The answer; what several tests ask for is planned once."""
    printed, _ = call("--group-size", 2, *arguments, "--batch", batch, "--processes", 1, "--json")
    return json.loads(printed)


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chance = random.Random(4)
    path = tmp_path_factory.mktemp("lengths") / "lengths.txt"
    drawn = [min(4000, round(600 * math.exp(chance.gauss(0, 0.8)))) + 1 for _ in range(400)]
    path.write_text("\n".join(map(str, drawn)))
    return path


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(map(str, lines)))
    return path


def test_the_answer_names_the_plan_the_runner_up_and_why(lengths: Path):
    printed, progress = call(*GPUS, *MODEL, "--lengths", lengths, *SMALL)
    assert "SmolLM2-1.7B on 8xH800; in_flight, 8 prompts x 2, grpo; 400 lengths" in printed
    assert "generate on" in printed
    assert "train on" in printed
    assert ", the default of such a run" in printed
    for title in ("plan ", "runner-up ", "the runner-up, ", "no schedule of this split beats", "simulated, the others"):
        assert title in printed
    assert "best so far" in progress


def test_the_plan_is_within_its_pool_and_above_its_bound(lengths: Path):
    answer = planned(*GPUS, *MODEL, "--lengths", lengths)
    plan, other = answer["plan"], answer["runner_up"]
    assert plan["generation_gpus"] + plan["training_gpus"] + sum(answer["released"].values()) == 8
    assert plan["ranks"] * plan["training_tensor_parallel"] * plan["pipeline_parallel"] == plan["training_gpus"]
    assert plan["iteration_s"] >= max(plan["bound_generation_s"], plan["bound_training_s"])
    assert plan["iteration_s"] <= 1.01 * other["iteration_s"]
    assert 0 < answer["simulated"] <= answer["splits"]
    again = planned.__wrapped__(*GPUS, *MODEL, "--lengths", lengths)
    assert again["plan"] == plan, "the same seed, the same plan"


def test_a_synchronous_plan_trains_nothing_that_is_old(lengths: Path):
    answer = planned(*GPUS, *MODEL, "--lengths", lengths, "--pipeline", "stream")
    assert answer["plan"]["oldest_age"] == 0
    assert answer["plan"]["iteration_s"] > planned(*GPUS, *MODEL, "--lengths", lengths)["plan"]["iteration_s"]


def test_a_plan_with_a_shorter_tail_is_faster_and_its_settings_turn_the_aids_on(lengths: Path, tmp_path: Path):
    shape = (*GPUS, *MODEL, "--lengths", lengths, "--pipeline", "stream")
    plain, aided = planned(*shape), planned(*shape, "--defer", 4, "--probes", "--out", tmp_path / "plan.toml")
    assert (aided["probes"], aided["deferred"], aided["plan"]["oldest_age"]) == (True, 4, 1)
    assert aided["plan"]["dispatch"] == "pulled"
    assert aided["plan"]["iteration_s"] < plain["plan"]["iteration_s"]
    written = tomllib.loads((tmp_path / "plan.toml").read_text())["pipeline"]
    assert [written[key] for key in ("probes", "oversampled_groups", "oversampled_tail")] == [True, 4, "defer"]


def test_there_is_a_runner_up_also_where_bounds_leave_no_doubt(lengths: Path):
    answer = planned(*GPUS, *MODEL, "--lengths", lengths, "--pipeline", "rolling")
    sizes = [(answer[row]["generation_gpus"], answer[row]["training_gpus"]) for row in ("plan", "runner_up")]
    assert sizes[0] != sizes[1]
    assert answer["why"].startswith(f"the runner-up, {sizes[1][0]} + {sizes[1][1]}, is ")


def test_cheap_gpus_with_bandwidth_generate_and_fast_ones_train_when_cost_counts(lengths: Path):
    """StreamRL sec. 7.3. With little to train the optimizer's step would be what counts, which no GPU hastens."""
    goal = ("--minimise", "cost")
    pools = ("--gpus", "4xH20@west,4xH800@east", *MODEL, "--lengths", lengths, *goal)
    plan = planned(*pools, batch=128)["plan"]
    assert (plan["generation_on"], plan["training_on"]) == ("H20@west", "H800@east")
    dear = planned("--gpus", "4xH20@west,8xH800@east", *pools[2:], "--prices", "H20=100,H800=1")["plan"]
    assert (dear["generation_on"], dear["training_on"]) == ("H800@east", "H800@east")


def test_a_narrow_link_is_counted(lengths: Path):
    pools = ("--gpus", "8xH20@west,4xH800@east", *MODEL, "--lengths", lengths, "--minimise", "cost")
    wide, narrow = planned(*pools)["plan"], planned(*pools, "--link-gbps", 8)["plan"]
    assert narrow["transfer_s"] > 5 * wide["transfer_s"] or narrow["generation_on"] == narrow["training_on"]


def test_samples_of_a_group_and_a_model_of_ones_own(lengths: Path, tmp_path: Path):
    shape = {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 32000,
    }
    config = write(tmp_path / "config.json", json.dumps(shape))
    answer = planned("--gpus", "4xA100", "--model", config, "--lengths", lengths, "--group-size", 4)
    assert answer["settings"]["model"]["path"] == str(tmp_path)
    assert answer["samples_per_iteration"] == 64
    assert planned("--gpus", "4xA100", "--model", tmp_path, "--lengths", lengths)["model"] == tmp_path.name


@pytest.mark.parametrize(
    ("lines", "note"), [([500], "one prompt"), ([500] * 64, "all lengths are equal")], ids=["one prompt", "all equal"]
)
def test_lengths_that_say_little_still_give_a_plan_and_a_note(tmp_path: Path, lines, note):
    answer = planned(*GPUS, *MODEL, "--lengths", write(tmp_path / "lengths.txt", *lines))
    assert note in answer["notes"][0]
    assert answer["plan"]["iteration_s"] > 0


def test_two_gpus_are_one_instance_and_one_rank(lengths: Path):
    answer = planned("--gpus", "2xH800", "--model", "SmolLM2-135M", "--lengths", lengths)
    assert (answer["plan"]["instances"], answer["plan"]["ranks"]) == (1, 1)
    assert answer["runner_up"] is None
    assert answer["why"] == "there is no other split that fits"


@pytest.mark.parametrize("bad", ["0", "-3", "nan"])
def test_a_length_that_is_none_is_refused_by_its_line(tmp_path: Path, bad):
    with pytest.raises(DataError, match=r"lengths.txt:2: a length is a whole number of tokens") as refused:
        call(*GPUS, *MODEL, "--lengths", write(tmp_path / "lengths.txt", 10, bad))
    assert exit_code(refused.value) is ExitCode.BAD_CONFIG


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "8xB900", *MODEL), r"no GPU 'B900' is known; there are H800, H20, H100, H200, A100"),
        (("--gpus", "8xH100-80GB", *MODEL), r"known \(did you mean H100\?\); .*--profile FILE, and 8xmeasured"),
        ((*GPUS, "--model", "Qwen/Qwen2.5-7B-Instruct"), r"known model \(did you mean Qwen2.5-7B\?\)"),
        (("--gpus", "0xH800", *MODEL), r"0xH800: from 1 to"),
        (("--gpus", "H800", *MODEL), r"'H800' is not COUNTxTYPE\[@SITE\]"),
        (("--gpus", "8xH800,8xH800", *MODEL), r"H800 is named twice"),
        (("--gpus", "1xH800", *MODEL), r"does not fit into 1xH800. What would: .* 1 for the trainer, so 2 for both"),
        (("--gpus", "16xH800", "--model", "Qwen2.5-72B"), r"nothing fits: .* 4 for an instance, 32 for the trainer"),
        ((*GPUS, "--model", "Qwen9-1B"), r"neither a known model.* nor a config.json; known are Qwen2.5-3B, "),
        ((*GPUS, *MODEL, "--pipeline", "magic"), r"'magic' is not one of serial, mini_batch, stream"),
        ((*GPUS, *MODEL, "--minimise", "fun"), r"'fun' is not one of time, cost"),
        ((*GPUS, *MODEL, "--algorithm", "dqn"), r"'dqn' is not one of grpo"),
        ((*GPUS, *MODEL, "--prices", "H800=free"), r"'H800=free' is not TYPE=PRICE"),
        ((*GPUS, *MODEL, "--prices", "H20=1"), r"there is no H20 among the GPUs"),
    ],
)
def test_what_makes_no_sense_is_one_line_that_says_what_would(lengths: Path, arguments, words):
    with pytest.raises(ConfigError, match=words) as refused:
        call(*arguments, "--lengths", lengths)
    assert exit_code(refused.value) is ExitCode.BAD_CONFIG


def test_a_configuration_of_something_else_is_refused(lengths: Path, tmp_path: Path):
    experts = write(tmp_path / "config.json", json.dumps({"num_experts": 8}))
    with pytest.raises(ConfigError, match="only dense decoders are modelled"):
        call(*GPUS, "--model", experts, "--lengths", lengths)
    with pytest.raises(ConfigError, match=r"config\.json"):
        call(*GPUS, "--model", write(tmp_path / "config.json", "[]"), "--lengths", lengths)


def test_help_names_units():
    printed = CliRunner().invoke(app, ["plan", "--help"]).output
    for words in ("Gbit/s", "GPU-hour", "tokens", "seconds of an iteration"):
        assert words in printed


def test_the_settings_of_a_plan_are_those_of_a_run(lengths: Path, tmp_path: Path):
    printed, _ = call(*GPUS, *MODEL, "--lengths", lengths, *SMALL, "--out", tmp_path / "plan.toml")
    assert f"streamrl-orchestrator run --config {tmp_path / 'plan.toml'} --dry-run" in printed
    dry = ["run", "--config", str(tmp_path / "plan.toml"), "--dir", str(tmp_path), "--dry-run"]
    shown = CliRunner().invoke(app, dry, catch_exceptions=False).stdout
    ranks = re.search(r"train on +(\d+)xH800: \d+ data x", printed)[1]
    assert f"ranks = {ranks}  # {tmp_path / 'plan.toml'}:" in shown
    assert 'path = "HuggingFaceTB/SmolLM2-1.7B"' in shown


def test_fp8_is_planned_with_and_turned_on_in_the_settings(lengths: Path, tmp_path: Path):
    """Weights of a 72B in fp8 fit into fewer GPUs, so there are more instances to choose from."""
    call("--gpus", "48xH800", "--model", "Qwen2.5-72B", "--lengths", lengths, "--fp8-kv", "--fp8-weights", *SMALL,
         "--out", tmp_path / "p.toml")  # fmt: skip
    generation = tomllib.loads((tmp_path / "p.toml").read_text())["generation"]
    assert (generation["kv_dtype"], generation["weights_dtype"]) == ("fp8", "fp8")
    assert "drafts" not in generation


def test_drafts_are_planned_as_servers_draft_and_off_where_that_loses(lengths: Path, tmp_path: Path):
    """SGLang and vLLM draft equally many tokens at every step, however large the batch."""
    job = (*GPUS, *MODEL, "--lengths", lengths, *SMALL, "--out", tmp_path / "p.toml")
    printed, _ = call(*job, "--drafts", 0.9)
    depth = tomllib.loads((tmp_path / "p.toml").read_text())["generation"]["drafts"]
    assert 1 <= depth <= 8
    assert f"drafts ({depth} at every step)" in printed
    printed, _ = call(*job, "--drafts", 0.01)
    assert "drafts" not in tomllib.loads((tmp_path / "p.toml").read_text())["generation"]
    assert "drafts stay off" in printed


def test_a_profile_without_fp8_says_how_to_measure_it(lengths: Path, tmp_path: Path):
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(fit(measurements())))
    for option in ("--fp8-kv", "--fp8-weights"):
        with pytest.raises(ConfigError, match=f"measure it, too .*profile {option}"):
            call("--gpus", "4xmeasured", "--profile", path, "--lengths", lengths, option)
    with pytest.raises(ConfigError, match="a profile says nothing of drafts"):
        call("--gpus", "4xmeasured", "--profile", path, "--lengths", lengths, "--drafts", 0.5)
