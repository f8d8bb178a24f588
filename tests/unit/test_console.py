"""What whoever started a run is told, and that nothing is told twice."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from orchestrator.config.run_directory import RunDir
from orchestrator.launch.console import RunConsole
from orchestrator.observability.live import PlainView
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import Entry, buried
from transport.contracts.settings import Settings
from transport.contracts.types import RunName


async def test_a_run_that_goes_on_tells_only_what_is_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rundir, broker = RunDir(tmp_path), MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    rundir.metrics.write_text(json.dumps({"batch": 0, "reward": 0.25}) + "\n")
    console = RunConsole(Settings(), rundir, PlainView())
    with rundir.metrics.open("a") as file:
        file.write(json.dumps({"batch": 1, "reward": 0.5}) + "\n")
    for _ in range(2):
        await console.show(broker)
    assert capsys.readouterr().out == "batch 2  reward 0.500\n"
    assert console.summary(3.0).startswith("finished in 3 s: 2 batches  reward 0.25 -> 0.50")


async def test_a_batch_that_is_trained_again_is_called_so_and_the_same_advice_given_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rundir, broker = RunDir(tmp_path), MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    rundir.metrics.write_text(json.dumps({"batch": 0, "reward": 0.25}) + "\n")
    console = RunConsole(Settings(), rundir, PlainView())
    for batch in range(11):
        with rundir.metrics.open("a") as file:
            file.write(json.dumps({"batch": batch, "reward": 0.5, "grad_norm": 0.0}) + "\n")
        await console.show(broker)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("batch 1 again: ")
    first, tenth = (line for line in said if line.startswith("warning: "))
    assert "larger group_size" in first
    assert tenth.startswith("warning: batch 10 carries no gradient: ")
    assert tenth.endswith("(10 batches so far)")


async def test_the_summary_counts_a_batch_that_was_trained_again_once(tmp_path: Path):
    rundir = RunDir(tmp_path)
    lines = [{"batch": batch, "reward": reward} for batch, reward in ((0, 0.1), (1, 0.9), (1, 0.5))]
    rundir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rundir.starts.write_text('{"started": "2026-01-01T00:00:00+00:00"}\n' * 2)
    said = RunConsole(Settings(), rundir, PlainView()).summary(3.0)
    assert said.startswith("finished in 3 s since it was resumed: 2 batches  reward 0.10 -> 0.50")


def test_the_summary_says_that_the_data_ended_early(tmp_path: Path):
    rundir, defaults = RunDir(tmp_path), Settings()
    rundir.metrics.write_text(json.dumps({"batch": 0, "reward": 0.5}) + "\n")
    settings = msgspec.structs.replace(
        defaults,
        run=msgspec.structs.replace(defaults.run, batches=3),
        data=msgspec.structs.replace(defaults.data, passes=2),
    )
    said = RunConsole(settings, rundir, PlainView()).summary(3.0)
    assert said.startswith("finished in 3 s: 1 batches of 3, as the data ended (data.passes = 2)")


def status_with(**scoring: object) -> bytes:
    worker = {"worker": "score-0.1", "doing": "waiting", "counters": {}, **scoring}
    return json.dumps({"trained_version": 0, "num_batches": 2, "workers": [worker]}).encode()


@pytest.mark.parametrize(
    ("scoring", "told"),
    [
        ({"counters": {"jailed": 0.0}}, 1),
        ({"counters": {"jailed": 0.0}, "doing": "starting"}, 0),
        ({"counters": {"jailed": 1.0}}, 0),
        ({}, 0),
    ],
)
async def test_rewards_without_a_jail_are_part_of_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scoring: dict[str, object], told: int
):
    broker = MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    console = RunConsole(Settings(), RunDir(tmp_path), PlainView())
    for _ in range(2):
        await broker.put_meta(keys.STATUS, status_with(**scoring))
        await console.show(broker)
    assert capsys.readouterr().out.count("score-0.1 runs rewards without a jail") == told


@pytest.mark.parametrize(
    ("version", "where"), [(4, "version 4"), (0, "the base model, for want of a whole checkpoint")]
)
async def test_a_damaged_checkpoint_is_told_once_with_what_the_run_goes_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: int, where: str
):
    broker = MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    console = RunConsole(Settings(), RunDir(tmp_path), PlainView())
    status = {"trained_version": 5, "num_batches": 9, "damaged_checkpoints": ["step-6: cut"], "went_back_to": version}
    for _ in range(2):
        await broker.put_meta(keys.STATUS, json.dumps(status).encode())
        await console.show(broker)
    assert capsys.readouterr().out.count(f"damaged checkpoint, going on from {where}: step-6: cut") == 1


async def test_what_was_given_up_is_told_once_and_counted_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    broker = MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    console = RunConsole(Settings(), RunDir(tmp_path), PlainView())
    for number in range(2):
        letter = buried(keys.EVENTS, f"{number}-1", f"reason {number}", Entry())
        await broker.append(keys.DEAD, letter)
        await console.show(broker)
    assert capsys.readouterr().out.count("given up: ") == 1
    assert "2" in console.summary(3.0)


def test_the_summary_begins_with_held_out_problems_and_counts_filtered_groups(tmp_path: Path):
    rundir = RunDir(tmp_path)
    lines = [
        {"eval": 0, "version": 0, "eval_reward": 0.0},
        {"batch": 0, "reward": 0.1},
        {"batch": 1, "reward": 0.3, "reward_with_filtered": 0.8},
        {"eval": 1, "version": 2, "eval_reward": 0.75},
    ]
    rundir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = RunConsole(Settings(), rundir, PlainView()).summary(3.0)
    assert said.startswith("finished in 3 s: 2 batches  held-out 0.00 -> 0.75  reward 0.10 -> 0.80")


async def test_what_is_wrong_with_a_worker_that_goes_on_is_said_once_and_when_it_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    broker = MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    console = RunConsole(Settings(), RunDir(tmp_path), PlainView())
    for trouble in ("its server is lost (signal 9)", "its server is lost (signal 9)", "", "no checkpoint yet"):
        await broker.put_meta(keys.STATUS, status_with(worker="generate-0.1", trouble=trouble))
        await console.show(broker)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("generate-0.1: ")]
    assert said == [
        "generate-0.1: its server is lost (signal 9)",
        "generate-0.1: that is over",
        "generate-0.1: no checkpoint yet",
    ]


async def test_attempts_that_fail_are_said_at_first_and_at_ten_times_as_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    broker = MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    console = RunConsole(Settings(), RunDir(tmp_path), PlainView())
    for count in (1, 3, 12, 40):
        status = json.loads(status_with())
        status["failed"] = {"samples": {"count": count, "last": "step took too long"}}
        await broker.put_meta(keys.STATUS, json.dumps(status).encode())
        await console.show(broker)
    said = [line for line in capsys.readouterr().out.splitlines() if "at samples" in line]
    assert said == [
        "1 attempt at samples failed and is made again, the last one: step took too long",
        "12 attempts at samples failed and are made again, the last one: step took too long",
    ]
