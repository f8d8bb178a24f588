"""A recorded journal, run again: the same events at the same times give the same commands.

It is the proof that the core is deterministic, and how an audit knows what was commanded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.config.run_directory import journal_of
from orchestrator.core.state import PipelineState
from orchestrator.journal import JournalError, all_snapshots, first_snapshot, read_whole_records
from transport.contracts.messages import Command, JournalRecord, encode


def recorded_commands(directory: Path) -> Iterator[tuple[JournalRecord, list[Command]]]:
    """Every journaled event with the commands that it caused, from the oldest snapshot on.

    A torn end is the end: a kill leaves it, or somebody is writing. Raises JournalError: history is damaged, or does
    not begin with a snapshot.
    """
    seq, snapshot = first_snapshot(directory)
    if snapshot is None:
        raise JournalError(directory, 0, "there is no snapshot to replay from")
    kept = dict(all_snapshots(directory))
    state = PipelineState.restore(snapshot)
    for record in read_whole_records(directory, from_seq=seq + 1):
        commands = state.handle(record.event, record.now_s)
        state = _with_settings_of(kept.get(record.seq), state)
        yield record, commands


def _with_settings_of(kept: bytes | None, state: PipelineState) -> PipelineState:
    """``state`` configured as the one kept at the same event: a resumed run may have changed that there."""
    if kept is None or (settings := PipelineState.restore(kept).configured) == state.configured:
        return state
    return PipelineState.restore(state.snapshot(), settings=settings)


def replay(directory: Path) -> list[tuple[JournalRecord, list[Command]]]:
    """All of ``recorded_commands``."""
    return list(recorded_commands(directory))


def main(run_dir: Path) -> int:
    """Replay the journal of ``run_dir`` and compare with every state that was kept. Returns 0; 1 if one differs."""
    directory = journal_of(run_dir)
    kept = dict(all_snapshots(directory))
    differing, num_commands, seq = diverging_snapshots(directory, kept)
    print(f"replayed {seq} events: {num_commands} commands, {len(kept)} kept states compared")
    for at in differing:
        print(f"the state after event {at} is not the one that was kept: the decisions have changed")
    return 1 if differing else 0


def diverging_snapshots(directory: Path, kept: Mapping[int, bytes]) -> tuple[list[int], int, int]:
    """(positions at which the replayed state differs from the kept one, commands, last event)."""
    start, snapshot = first_snapshot(directory)
    if snapshot is None:
        raise JournalError(directory, 0, "there is no snapshot to replay from")
    state = PipelineState.restore(snapshot)
    differing: list[int] = []
    num_commands = 0
    for record in read_whole_records(directory, from_seq=start + 1):
        num_commands += len(state.handle(record.event, record.now_s))
        state = _with_settings_of(kept.get(record.seq), state)
        if record.seq in kept and state.snapshot() != _written_anew(kept[record.seq]):
            differing.append(record.seq)
    return differing, num_commands, state.seq


def _written_anew(kept: bytes) -> bytes:
    """``kept`` as this version writes it: an older one may have left out what has a default now."""
    return PipelineState.restore(kept).snapshot()


def digest(history: Iterable[tuple[JournalRecord, Sequence[Command]]]) -> str:
    """One hex digest of every command with its position: equal if and only if the decisions are."""
    total = hashlib.sha256()
    for record, commands in history:
        total.update(encode((record.seq, tuple(commands))))
    return total.hexdigest()
