"""The part of a journal that is reported: all of it, or the newest events of a long run.

A run at full speed makes millions of events, and its report must not take longer than its user waits for it. What is
left out costs nothing: the state that was kept where the reported part begins says who was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.core.state import PipelineState
from orchestrator.runtime.journal import newest_snapshot_before, read_whole_records
from transport.messages import Event, JournalRecord, TrainerReady, WorkerJoined
from transport.types import WorkerKind

MAX_EVENTS = 500_000
"""About 350,000 samples: half a minute of work and half a GB."""


def newest_records(journal: Path, *, most: int = MAX_EVENTS) -> Iterator[JournalRecord]:
    """All records of a journal of ``most`` or fewer; else about the newest ``most``, after events that bring in whoever
    was there before them.

    Raises JournalError.
    """
    found = newest_snapshot_before(journal, most)
    if found is None:
        yield from read_whole_records(journal)
        return
    seq, snapshot = found
    state = PipelineState.restore(snapshot)
    for event in present(state):
        yield JournalRecord(seq=seq, now_s=state.now_s, event=event, cursor="")
    yield from read_whole_records(journal, from_seq=seq + 1)


def present(state: PipelineState) -> Iterator[Event]:
    """Events that would bring everybody in who is there in ``state``."""
    view = state.view()
    for worker in view.workers:
        yield WorkerJoined(
            worker_id=worker.worker_id, kind=WorkerKind.GENERATE, capacity=worker.capacity, weights=worker.loaded
        )
    for worker_id, kind in state.other_workers().items():
        if kind is WorkerKind.TRAIN and view.newest is not None:
            yield TrainerReady(worker_id=worker_id, weights=view.newest)
