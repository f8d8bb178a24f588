"""The random harness itself: its draws are runs that start, its audit sees sabotage, and one round of it is whole."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import redis

from benchmarks.chaos_random import Tally, draw, play, served
from benchmarks.plain_audit import Expected, Findings, audit
from orchestrator.config.load import resolve
from tests.fakes.live_run import BATCHES, EMULATED, LiveRun

pytestmark = pytest.mark.chaos

EXPECTED = Expected(name="tiny", batches=BATCHES, group_size=4, rows=16)
FRAME = struct.Struct("<II")


def test_what_is_drawn_is_a_run_and_the_same_for_the_same_seed():
    for number in range(100):
        drawn = draw(3, number)
        assert drawn == draw(3, number)
        overrides = [f"{key}={json.dumps(value).strip()}" for key, value in drawn.settings.items()]
        assert resolve("tiny", [], overrides, {}).settings.run.batches == drawn.expected.batches


def test_one_round_is_whole(tmp_path: Path):
    tally = Tally()
    play(7, 0, tmp_path, tally)
    assert tally.failed == []
    assert tally.struck.total() > 0


# -- sabotage


def ledger_of(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-*"), key=lambda path: float(path.name[5:])) / "ledger.msgpack"


def forget_a_sample(run_dir: Path, broker: redis.Redis) -> None:
    path = ledger_of(run_dir)
    ledger = msgspec.msgpack.decode(path.read_bytes())
    slots = ledger["passes"][2][0]
    slots[min(slots)] &= 0b0111
    path.write_bytes(msgspec.msgpack.encode(ledger))


def claim_an_older_version(run_dir: Path, broker: redis.Redis) -> None:
    for _ in range(2):  # the last batch's, and the one at the end
        if ledger_of(run_dir).parent.name.startswith(f"step-{BATCHES}"):
            shutil.rmtree(ledger_of(run_dir).parent)


def take_out_an_event(run_dir: Path, broker: redis.Redis) -> None:
    path = max((run_dir / "journal").glob("segment-*.log"), key=lambda path: path.stat().st_size)
    raw = path.read_bytes()
    length, _ = FRAME.unpack_from(raw)
    second = FRAME.size + length
    length, _ = FRAME.unpack_from(raw, second)
    path.write_bytes(raw[:second] + raw[second + FRAME.size + length :])


def lose_the_last_steps(run_dir: Path, broker: redis.Redis) -> None:
    for path in (run_dir / "journal").glob("segment-*.log"):
        raw, offset, kept = path.read_bytes(), 0, b""
        while offset < len(raw):
            length, _ = FRAME.unpack_from(raw, offset)
            record = msgspec.msgpack.decode(raw[offset + FRAME.size : offset + FRAME.size + length])
            if record["event"]["type"] == "StepDone" and record["event"]["batch"] == BATCHES - 1:
                record["event"] = {"type": "Tick"}
            payload = msgspec.msgpack.encode(record)
            kept += FRAME.pack(len(payload), zlib.crc32(payload)) + payload
            offset += FRAME.size + length
        path.write_bytes(kept)


def send_a_round_twice(run_dir: Path, broker: redis.Redis) -> None:
    key = "streamrl:{tiny}:rounds"
    rounds = [{"group_id": "0/0", "samples": [0], "num_tokens": 1}]
    command = {"type": "TrainRound", "round_id": "x", "batch": 0, "ranks": [rounds]}
    for _ in range(2):
        broker.xadd(key, {"payload": msgspec.msgpack.encode(command)})


def announce_older_weights(run_dir: Path, broker: redis.Redis) -> None:
    manifest = {"weights": {"epoch": 0, "version": 1}}
    broker.xadd("streamrl:{tiny}:weights", {"payload": msgspec.msgpack.encode(manifest)})


def bury_something(run_dir: Path, broker: redis.Redis) -> None:
    broker.xadd("streamrl:{tiny}:dead", {"dead_queue": "tasks:reward", "dead_reason": "it hung"})


def tear_a_line_of_metrics(run_dir: Path, broker: redis.Redis) -> None:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:20], *lines[3:]]))


SABOTAGE: dict[Callable[[Path, redis.Redis], None], str] = {
    forget_a_sample: "slots not whole",
    claim_an_older_version: "is of version",
    take_out_an_event: "stands where",
    lose_the_last_steps: "without a step",
    send_a_round_twice: "sent twice",
    announce_older_weights: "announced after",
    bury_something: "dead letter of tasks:reward: it hung",
    tear_a_line_of_metrics: "without a line of metrics",
}


def look(run_dir: Path, act: Callable[[Path, redis.Redis], None] | None = None) -> Findings:
    with served(run_dir / "broker" / "aof") as broker:
        if act is not None:
            act(run_dir, broker)
        return audit(run_dir, broker, EXPECTED)


def test_the_plain_audit_sees_each_act_of_sabotage_and_nothing_else(tmp_path: Path):
    with LiveRun(tmp_path, *EMULATED, "emulated.time_scale=0.1") as run:
        assert run.wait_for_end() == 0, run.describe()
        found = look(run.run_dir)
        assert found.problems == []
        assert found.rows == 16 * BATCHES
        for act, said in SABOTAGE.items():
            copy = tmp_path / act.__name__
            shutil.copytree(run.run_dir, copy, ignore=shutil.ignore_patterns("*.sock"))
            assert any(said in problem for problem in look(copy, act).problems), act.__name__
