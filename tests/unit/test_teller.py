"""What whoever started a run is told, and that nothing is told twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.runtime.live import PlainView
from orchestrator.runtime.rundir import RunDir
from orchestrator.runtime.teller import Teller
from transport.broker.memory import MemoryBroker, MemoryServer
from transport.clock import ManualClock
from transport.settings import Settings
from transport.types import RunName


async def test_a_run_that_goes_on_tells_only_what_is_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rundir, broker = RunDir(tmp_path), MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    rundir.metrics.write_text(json.dumps({"batch": 0, "reward": 0.25}) + "\n")
    teller = Teller(Settings(), rundir, PlainView())
    with rundir.metrics.open("a") as file:
        file.write(json.dumps({"batch": 1, "reward": 0.5}) + "\n")
    for _ in range(2):
        await teller.show(broker)
    assert capsys.readouterr().out == "batch 2  reward 0.500\n"
    assert teller.summary(3.0, restarts=0).startswith("finished in 3 s: 2 batches  reward 0.25 -> 0.50")
