"""What a run meets from outside: a broker that is away, foreign bytes in its streams, another run of its name."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
import redis

from tests.fakes.live_run import EMULATED, PACED, QUICK, LiveRun, check_whole
from transport.contracts.messages import MAX_MESSAGE_BYTES, encode

pytestmark = pytest.mark.chaos

OUTAGE_S = 10.0


def test_a_broker_that_is_away_for_ten_seconds_costs_nobody_a_place(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, *PACED, "run.batches=20") as run:
        run.wait_for_batch(2)
        broker = run.child("valkey-server")
        before = {run.child("workers", kind).pid for kind in ("generate", "score", "train")}
        broker.send_signal(signal.SIGSTOP)
        time.sleep(OUTAGE_S)  # the length of the outage is the input
        broker.send_signal(signal.SIGCONT)
        run.wait_for_batch(6)
        assert {run.child("workers", kind).pid for kind in ("generate", "score", "train")} == before
        check_whole(run, batches=20)
        assert "starting it again" not in run.output


FOREIGN = (b"", b"\xc1garbage", b"\x81\xa4type\xa7Missing", b"x" * (MAX_MESSAGE_BYTES + 1))
NO_ROWS = ("nonsense", "0/0/x", "0/0/\u00b2", "0/0/" + "9" * 5000, "-1/0/0", "../../x")
OWN = (":rounds", ":plans:", ":control:")
"""Streams that only the orchestrator writes, under ids of its own."""


def streams(client: redis.Redis, *, own: bool) -> list[str]:
    names = [key.decode() for key in client.scan_iter("streamrl:*") if client.type(key) == b"stream"]
    return [name for name in names if any(word in name for word in OWN) is own and not name.endswith(":dead")]


def test_foreign_bytes_in_the_shared_streams_are_passed_over(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, *PACED, "run.batches=12") as run:
        run.wait_for_batch(2)
        client = run.redis()
        shared = streams(client, own=False)
        assert len(shared) >= 3
        for stream in shared:
            for payload in FOREIGN:
                client.xadd(stream, {"payload": payload, "foreign": "yes"})
        client.close()
        check_whole(run, batches=12)


def test_events_of_rows_that_cannot_be_are_buried_and_the_run_goes_on(tmp_path: Path):
    with LiveRun(tmp_path, *EMULATED, *QUICK, "run.batches=12") as run:
        run.wait_for_batch(2)
        client = run.redis()
        (events,) = [stream for stream in streams(client, own=False) if stream.endswith(":events")]
        for row in NO_ROWS:
            client.xadd(events, {"payload": encode({"type": "RowsMissing", "row_ids": [row]})})
        dead = events.removesuffix("events") + "dead"
        run.wait_until(lambda: client.xlen(dead) == len(NO_ROWS), "letters of bad events")
        client.close()
        assert run.wait_for_end() == 0, run.describe()
        assert len(run.metrics()) == 12
        assert run.audit().returncode == 0
        assert "starting it again" not in run.output


@pytest.mark.parametrize("which", [OWN[0], *(pytest.param(one, marks=pytest.mark.long) for one in OWN[1:])])
def test_a_foreign_writer_of_the_orchestrators_streams_is_named(tmp_path: Path, which: str):
    with LiveRun(tmp_path, *PACED, "run.batches=400") as run:
        run.wait_for_batch(2)
        client = run.redis()
        (stream, *_) = [name for name in streams(client, own=True) if which in name]
        client.xadd(stream, {"payload": b"garbage"})
        client.close()
        assert run.wait_for_end() == 1
        assert re.search(r"which this run never wrote|rounds log", run.output), run.describe()
        run.wait_until_gone()


def test_a_second_run_of_a_live_name_is_refused_and_the_first_goes_on(tmp_path: Path):
    with LiveRun(tmp_path, *PACED, "run.batches=400") as run:
        run.wait_for_batch(1)
        same = ("run", "--preset", "tiny", "--name", "tiny")
        again = run.command(*same)
        assert again.returncode == 2
        assert "already holds a run" in again.stderr
        resumed = run.command(*same, "--resume")
        assert resumed.returncode == 2
        assert "is live (process" in resumed.stderr
        run.wait_for_batch(len(run.metrics()) + 2)
        run.interrupt(signal.SIGINT)
        assert run.wait_for_end() == 130
