"""Storage units of a run die with the rows that they hold, and join while it goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from orchestrator.sim.replay import recorded_commands
from tests.fakes.live_run import QUICK, LiveRun, check_whole
from transport.contracts.messages import WorkerJoined
from transport.contracts.types import WorkerKind

pytestmark = pytest.mark.chaos

UNITS = ("rows.store=units", "rows.units=2", "run.batches=12", "trainer.checkpoint_every=3")


def events(run: LiveRun) -> list[object]:
    return [record.event for record, _ in recorded_commands(run.run_dir / "journal")]


def test_a_run_outlives_its_units(tmp_path: Path):
    """Whether a row that is still wanted was in the unit that dies is chance; what becomes of it then is in
    tests/contract/test_unit_rows.py.
    """
    with LiveRun(tmp_path, *QUICK, *UNITS) as run:
        for batch in (2, 5):
            run.wait_for_batch(batch)
            run.kill("workers", "store")
        check_whole(run, batches=12)
        joined = [event for event in events(run) if isinstance(event, WorkerJoined) and event.kind is WorkerKind.STORE]
        assert len(joined) >= 2, "a killed one joins again, if the run lasts so long"


@pytest.mark.long
def test_a_run_is_resumed_although_its_units_went_with_all_rows(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, *UNITS) as run:
        run.wait_for_batch(4)
        run.interrupt(signal.SIGKILL)
        run.wait_for_end()
        run.wait_until_gone()
        run.start("--resume")
        check_whole(run, batches=12)
