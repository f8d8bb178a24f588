"""``replay``: the journal is applied anew, and every state that was kept on the way must be met."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from orchestrator.config.run_directory import RunDir
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from orchestrator.journal import Journal
from orchestrator.sim import replay
from transport.contracts.messages import JournalRecord, RankerJudged

JUDGED = RankerJudged(trusted=False)


def rewritten(snapshot: bytes, **changes: float) -> bytes:
    """``snapshot`` with other numbers of the ranker, and those that equal their default left out."""
    state = msgspec.msgpack.decode(snapshot)
    ranker = {**state["plans"]["ranker"], **changes}
    state["plans"]["ranker"] = {name: value for name, value in ranker.items() if name == "trusted" or value}
    return msgspec.msgpack.encode(state)


def keep(run_dir: Path, **changes: float) -> None:
    """A journal of one event, and the state after it as an older version may have written it."""
    state = PipelineState(CoreSettings(num_batches=6, groups_per_batch=4, group_size=2))
    journal, _ = Journal.open(RunDir(run_dir).journal)
    journal.snapshot(state.snapshot(), 0)
    journal.append([JournalRecord(seq=1, now_s=0.5, event=JUDGED, cursor="1-0")])
    state.handle(JUDGED, 0.5)
    journal.snapshot(rewritten(state.snapshot(), **changes), 1)
    journal.close()


def test_a_state_that_left_out_defaults_is_the_same(tmp_path: Path):
    keep(tmp_path)
    assert replay.main(tmp_path) == 0


def test_a_state_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    keep(tmp_path, num_groups=7)
    assert replay.main(tmp_path) == 1
    assert "the state after event 1 is not the one that was kept" in capsys.readouterr().out
