"""What was profiled is hardware: `simulate` and `plan` take it as it is, and say or refuse what it does not know."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from orchestrator.cli.commands import app
from orchestrator.core.model.settings import CoreSettings
from orchestrator.errors import ConfigError
from orchestrator.planning.profiles import Errors, Profile
from orchestrator.sim.costs import Sharing, TrainCost
from orchestrator.sim.engine import CostModel, Scenario, SharedMachine
from orchestrator.sim.simulate import simulate
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.llms import from_config
from transport.contracts.settings import DecodeCostSettings
from transport.contracts.types import WorkerId

PROFILE = Profile(
    model="random:qwen3-tiny",
    llm=None,
    engine="embedded",
    host="laptop",
    decode_cost=DecodeCostSettings(fixed_s=0.002, sample_s=0.0001, prefill_token_s=1e-5),
    train=TrainCost(round_s=0.01, token_s=1e-4, optimizer_s=0.05),
    publish_s=0.01,
    load_s=0.02,
    slots=16,
    context_tokens=400,
    micro_batch_tokens=4096,
    decode_beside=1.0,
    train_beside=1.0,
    held_out=Errors(median=0.02, worst=0.05),
    train_held_out=Errors(),
)
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}

Write = Callable[..., Path]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(20 + 37 * number % 200) for number in range(64)))
    return path


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str = "here.json", **changes: Any) -> Path:
        path = tmp_path / name
        profile = msgspec.structs.replace(PROFILE, llm=from_config(PROFILE.model, SHAPE))
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(profile, **changes)))
        return path

    return written


def ask(command: str, *arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [command, *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def simulated(profile: Path, lengths: Path, *arguments: object) -> dict[str, Any]:
    small = ("--batch", 8, "--group-size", 2, "--iterations", 8, "--prompt-tokens", 20, "--recall", 1)
    return ask("simulate", "--profile", profile, "--lengths", lengths, *small, *arguments)


def test_iterations_take_what_the_profile_says(write: Write, lengths: Path):
    data = simulated(write(), lengths, "--pipeline", "serial")
    assert data["model"] == "random:qwen3-tiny"
    assert (data["generation_gpus"], data["training_gpus"], data["notes"]) == (1, 1, [])
    assert data["iteration_s"] >= data["bound_s"]
    slower = write("slower.json", decode_cost=DecodeCostSettings(fixed_s=0.004, sample_s=0.0002, prefill_token_s=2e-5))
    more = simulated(slower, lengths, "--pipeline", "serial")
    assert more["bound_generation_s"] == pytest.approx(2 * data["bound_generation_s"], rel=3e-3)
    assert more["iteration_s"] > 1.3 * data["iteration_s"]
    loads = simulated(write("loads.json", load_s=0.52), lengths, "--pipeline", "serial")
    assert loads["iteration_s"] == pytest.approx(data["iteration_s"] + 0.5, abs=0.03)
    assert (
        simulated(write(), lengths, "--pipeline", "serial", "--generate", "2xmeasured")["iteration_s"]
        < data["iteration_s"]
    )


def test_both_at_once_are_slower_on_one_machine_and_in_turn_they_are_not(write: Write, lengths: Path):
    alone, shared = write(), write("shared.json", decode_beside=1.5, train_beside=1.4)
    assert simulated(shared, lengths, "--pipeline", "serial") == simulated(alone, lengths, "--pipeline", "serial")
    at_once = [simulated(path, lengths, "--pipeline", "in_flight")["iteration_s"] for path in (alone, shared)]
    assert 1.1 * at_once[0] < at_once[1] < 1.5 * at_once[0]


def test_more_at_once_than_cores_take_turns(write: Write, lengths: Path):
    one_core_each, half_a_core_each = (
        write(f"{share}.json", decode_share=share, train_share=share) for share in (1.0, 0.5)
    )
    serial = [
        simulated(path, lengths, "--pipeline", "serial", "--generate", "2xmeasured")["iteration_s"]
        for path in (write(), half_a_core_each, one_core_each)
    ]
    assert serial[0] == serial[1] < 1.2 * serial[0] < serial[2], "two engines on one core, the trainer waits"
    busy = TrainCost(round_s=0.01, token_s=5e-4, optimizer_s=0.05)
    at_once = [
        simulated(
            write(train=busy, **shares), lengths, "--pipeline", "in_flight", "--generate", "2xmeasured", "--slots", 4
        )
        for shares in ({}, {"decode_share": 0.5, "train_share": 0.5})
    ]
    of_trainer = [data["iteration_s"] for data in at_once]
    assert 1.05 * of_trainer[0] < of_trainer[1] < 1.5 * of_trainer[0], "two engines and the trainer on two cores"


def test_one_of_each_at_once_is_as_it_was_measured():
    """What both take beside one another has been measured on these cores: it is not charged again."""
    machine = SharedMachine(Sharing(decode_beside=2.2, train_beside=2.1, decode_share=1.0, train_share=1.0))
    decode, train = list[float](), list[float]()
    machine.engines.append(decode.append)
    machine.trainers.append(train.append)
    machine.note_decoding(WorkerId("a"), decodes=True)
    machine.note_training(trains=True)
    machine.note_decoding(WorkerId("b"), decodes=True)
    machine.note_decoding(WorkerId("b"), decodes=True)
    machine.note_training(trains=False)
    assert decode == pytest.approx([2.2, 2.2 * 3 / 2, 2.0]), "one of three turns where one of two was measured; of two"
    assert train == pytest.approx([2.1, 2.1 * 3 / 2])


def test_what_is_padded_takes_as_long_as_the_longest(write: Write, lengths: Path):
    cost = DecodeCostSettings(fixed_s=0.002, kv_token_s=1e-5)
    train = TrainCost(token_s=0.0, squared_token_s=1e-6)
    for whole, padded in (
        ({"decode_cost": cost}, {"decode_cost": msgspec.structs.replace(cost, padded=True)}),
        ({"train": train}, {"train": msgspec.structs.replace(train, padded=True)}),
    ):
        few = ("--pipeline", "serial", "--slots", 4)  # so that samples of different ages run together
        both = [simulated(write(**changes), lengths, *few)["iteration_s"] for changes in (whole, padded)]
        assert both[1] > 1.05 * both[0]


def test_work_beside_other_work_takes_exactly_as_long_as_told():
    """A trainer that is never alone is slower by its factor, and so is an engine."""

    def end_s(decode: float, train: float, fixed_s: float, round_s: float) -> float:
        costs = CostModel(
            decode=DecodeCost(fixed_s=fixed_s),
            train=TrainCost(token_s=0.0, round_s=round_s),
            sharing=Sharing(decode_beside=decode, train_beside=train),
        )
        core = CoreSettings(num_batches=6, groups_per_batch=4, group_size=2, max_staleness=1)
        return simulate(Scenario(core=core, workers=1, costs=costs)).end_s

    trains, generates = dict(fixed_s=1e-4, round_s=10.0), dict(fixed_s=0.1, round_s=1e-3)
    assert end_s(2.0, 1.0, **trains) == pytest.approx(end_s(1.0, 1.0, **trains), rel=0.02)
    assert end_s(1.0, 2.0, **generates) == pytest.approx(end_s(1.0, 1.0, **generates), rel=0.02)
    both = dict(fixed_s=0.02, round_s=5.0)
    assert end_s(1.3, 1.3, **both) > 1.05 * end_s(1.0, 1.0, **both)
    assert end_s(1.3, 1.3, **both) < 1.3 * end_s(1.0, 1.0, **both)


def test_what_was_not_measured_is_said_to_be_extrapolated(write: Write, lengths: Path):
    asked = ("--slots", 64, "--micro-batch-tokens", 8192, "--prompt-tokens", 300)
    notes = simulated(write(held_out=Errors(median=0.1, worst=0.4)), lengths, *asked)["notes"]
    assert [note.split(":")[0] for note in notes] == [
        "extrapolating to batches of 64 samples",
        "extrapolating to samples of 512 tokens",
        "extrapolating to micro-batches of 8192 tokens",
        "the profile's fit of decode steps is off by 40% at worst",
    ]


def test_a_plan_deals_out_profiled_machines(write: Write, lengths: Path):
    job = ("--lengths", lengths, "--batch", 8, "--group-size", 2, "--prompt-tokens", 20, "--processes", 1)
    data = ask("plan", "--profile", write(), "--gpus", "4xmeasured", *job)
    plan = data["plan"]
    assert plan["generation_gpus"] + plan["training_gpus"] + sum(data["released"].values()) == 4
    assert (plan["tensor_parallel"], plan["ranks"]) == (1, plan["training_gpus"])
    assert data["notes"] == []
    heavy = write("heavy.json", train=TrainCost(round_s=0.01, token_s=2e-3, optimizer_s=0.05))
    assert (
        ask("plan", "--profile", heavy, "--gpus", "4xmeasured", *job)["plan"]["training_gpus"] > plan["training_gpus"]
    )
    mixed = ask("plan", "--profile", write(train=None), "--gpus", "2xmeasured@here,1xA100@there", *job)["plan"]
    assert mixed["training_on"] == "A100@there", "a profile without a trainer can generate"


def test_a_plan_gives_engines_the_memory_that_they_were_profiled_with(write: Write, lengths: Path, tmp_path: Path):
    cost = DecodeCostSettings(fixed_s=0.002, sample_s=0.0001, kv_capacity_tokens=3000.0, padded=True)
    profile, out = write("little.json", decode_cost=cost), tmp_path / "plan.toml"
    job = ("--lengths", lengths, "--batch", 8, "--group-size", 2, "--prompt-tokens", 20, "--processes", 1)
    ask("plan", "--profile", profile, "--gpus", "2xmeasured", *job, "--out", out)
    planned = tomllib.loads(out.read_text())["generation"]
    assert (planned["engine"], planned["kv_tokens"]) == ("embedded", 3000)


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({}, ("--model", "SmolLM2-135M"), "the profile is of random:qwen3-tiny, not of SmolLM2-135M"),
        ({"llm": None}, (), "is no dense decoder"),
        ({"train": None}, (), "the profile has no trainer in it"),
        (
            {},
            ("--train", "colocated", "--pipeline", "serial"),
            "what a switch between the stages takes was not profiled",
        ),
        ({}, ("--tensor-parallel", "2", "--generate", "2xmeasured"), "do not split 2 ways in a node of measured"),
        ({}, ("--ranks", "1", "--train", "2xmeasured"), "one measured is one rank: 2 of them are no 1"),
    ],
)
def test_what_a_profile_cannot_say_is_refused(
    write: Write, lengths: Path, changes: dict[str, Any], arguments: tuple[str, ...], said: str
):
    with pytest.raises(ConfigError, match=said):
        simulated(write(**changes), lengths, *arguments)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("publish_s", -5.0), ("load_s", -1.0), ("slots", 0), ("context_tokens", -1), ("micro_batch_tokens", -1)),
        *(("decode_beside", 0.0), ("train_beside", 0.5), ("decode_share", -3.0)),
        *(("train", TrainCost(token_s=-1e-4)), ("train", TrainCost(token_s=1e-4, optimizer_s=-3.0))),
        ("train", TrainCost(token_s=1e-4, pass_tokens=-5)),
    ],
)
def test_a_profile_that_nothing_can_have_measured_is_refused(write: Write, lengths: Path, field: str, value: object):
    with pytest.raises(ConfigError, match=rf"Expected `(int|float)` >= (0|1).*\$\.{field}.*make a profile"):
        simulated(write(**{field: value}), lengths)


def test_a_file_that_is_no_profile_and_hardware_without_one_are_refused(tmp_path: Path, lengths: Path):
    torn = tmp_path / "torn.json"
    torn.write_text('{"model": "m"}')
    with pytest.raises(ConfigError, match=r"make a profile: .*streamrl-orchestrator profile"):
        simulated(torn, lengths)
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        simulated(tmp_path / "none.json", lengths)
    with pytest.raises(ConfigError, match="2xmeasured needs --profile FILE"):
        ask("simulate", "--generate", "2xmeasured", "--lengths", lengths)
    with pytest.raises(ConfigError, match="Give --model, or --profile"):
        ask("plan", "--gpus", "8xH800", "--lengths", lengths)
