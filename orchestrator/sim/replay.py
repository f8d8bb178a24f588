"""A recorded journal, run again: the same events at the same times give the same commands.

It is the proof that the core is deterministic, and how an audit knows what was commanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.config.run_directory import journal_of
from orchestrator.core.state import PipelineState
from orchestrator.journal import JournalError, all_snapshots, first_snapshot, read_whole_records
from transport.contracts.messages import Command, JournalRecord


def recorded_commands(directory: Path) -> Iterator[tuple[JournalRecord, list[Command]]]:
    """Every journaled event with the commands that it caused, from the oldest snapshot on.

    A torn end is the end: a kill leaves it, or somebody is writing. Raises JournalError: history is damaged, or does
    not begin with a snapshot.
    """
    return ((record, commands) for record, commands, _, _ in _replayed(directory))


def _replayed(directory: Path) -> Iterator[tuple[JournalRecord, list[Command], PipelineState, bytes | None]]:
    """(event, commands that it caused, state after it, state that was kept after it)."""
    seq, snapshot = first_snapshot(directory)
    if snapshot is None:
        raise JournalError(directory, 0, "there is no snapshot to replay from")
    snapshots = dict(all_snapshots(directory))
    state = PipelineState.restore(snapshot)
    for record in read_whole_records(directory, from_seq=seq + 1):
        commands = state.handle(record.event, record.now_s)
        kept = snapshots.get(record.seq)
        if (
            kept is not None
            and (settings := PipelineState.restore(kept).pipeline.configured) != state.pipeline.configured
        ):
            state = PipelineState.restore(state.snapshot(), settings=settings)  # a resumed run has changed them there
        yield record, commands, state, kept


def main(run_dir: Path) -> int:
    """Replay the journal of ``run_dir`` and compare with every state that was kept. Returns 0; 1 if one differs."""
    directory = journal_of(run_dir)
    seq, _ = first_snapshot(directory)
    num_commands, differing = 0, list[int]()
    for record, commands, state, kept in _replayed(directory):
        seq, num_commands = record.seq, num_commands + len(commands)
        # restored first, because an older version may have left out what has a default now
        if kept is not None and state.snapshot() != PipelineState.restore(kept).snapshot():
            differing.append(seq)
    num_kept = len(dict(all_snapshots(directory)))
    print(f"replayed {seq} events: {num_commands} commands, {num_kept} kept states compared")
    for at in differing:
        print(f"the state after event {at} is not the one that was kept: the decisions have changed")
    return 1 if differing else 0
