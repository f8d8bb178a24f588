"""A long run is reported by its newest part, in which nobody is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.model.settings import core_settings
from orchestrator.core.state import PipelineState
from orchestrator.journal import Journal
from orchestrator.observability.report.bubbles import usage_by_window
from orchestrator.observability.report.record import newest_records
from orchestrator.observability.report.spans import TRAINER, build_timeline
from transport.contracts.messages import Event, JournalRecord, Tick, TrainerReady, WorkerJoined, WorkerLost
from transport.contracts.settings import Settings
from transport.contracts.types import WeightIdentity, WorkerId, WorkerKind

FIRST, SECOND, TRAIN = WorkerId("generate-0.1"), WorkerId("generate-1.1"), WorkerId("train-0.1")
EVENTS: list[Event] = [
    WorkerJoined(worker_id=FIRST, kind=WorkerKind.GENERATE, capacity=2),
    WorkerJoined(worker_id=SECOND, kind=WorkerKind.GENERATE, capacity=4),
    TrainerReady(worker_id=TRAIN, weights=WeightIdentity(epoch=1, version=0)),
    WorkerLost(worker_id=FIRST, reason="its process ended"),
    Tick(),
    Tick(),
    Tick(),
]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Seven events, one a second; the state is kept before them, after the fourth and after the sixth."""
    state = PipelineState(core_settings(Settings()))
    journal, _ = Journal.open(tmp_path)
    journal.snapshot(state.snapshot(), 0)
    for seq, event in enumerate(EVENTS, 1):
        state.handle(event, float(seq))
        journal.append([JournalRecord(seq=seq, now_s=float(seq), event=event)])
        if seq in (4, 6):
            journal.snapshot(state.snapshot(), seq)
    journal.close()
    return tmp_path


def test_a_short_run_is_reported_whole(journal: Path):
    assert [record.event for record in newest_records(journal, most=3)] == EVENTS


def test_the_newest_part_begins_with_whoever_was_there(journal: Path):
    found = list(newest_records(journal, most=2))
    assert [(record.seq, record.now_s, type(record.event)) for record in found] == [
        (4, 4.0, WorkerJoined),
        (4, 4.0, TrainerReady),
        (5, 5.0, Tick),
        (6, 6.0, Tick),
        (7, 7.0, Tick),
    ]
    timeline = build_timeline(found)
    assert (timeline.start_s, timeline.end_s, timeline.workers) == (4.0, 7.0, [SECOND])
    present = {track: usage.present_s for track, (usage,) in usage_by_window(timeline, [0.0, 7.0]).items()}
    assert present == {SECOND: 3.0, TRAINER: 3.0}
