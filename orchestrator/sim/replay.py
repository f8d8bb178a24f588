"""A recorded journal, run again: the same events at the same times give the same commands.

Owns: reading a journal into commands. Never: writing one. It is the proof that the core is deterministic, and how an
audit knows what was commanded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from orchestrator.core.state import PipelineState
from orchestrator.runtime.journal import JournalError, first_snapshot, read_records
from transport.messages import Command, JournalRecord, encode


def recorded_commands(directory: Path) -> Iterator[tuple[JournalRecord, list[Command]]]:
    """Every journaled event with the commands that it caused, from the oldest snapshot on.

    Raises JournalError: history is damaged, or does not begin with a snapshot.
    """
    seq, snapshot = first_snapshot(directory)
    if snapshot is None:
        raise JournalError(directory, 0, "there is no snapshot to replay from")
    state = PipelineState.restore(snapshot)
    for record in read_records(directory, from_seq=seq + 1):
        yield record, state.handle(record.event, record.now_s)


def replay(directory: Path) -> list[tuple[JournalRecord, list[Command]]]:
    """All of ``recorded_commands``."""
    return list(recorded_commands(directory))


def digest(history: Iterable[tuple[JournalRecord, Sequence[Command]]]) -> str:
    """One hex digest of every command with its position: equal if and only if the decisions are."""
    total = hashlib.sha256()
    for record, commands in history:
        total.update(encode((record.seq, tuple(commands))))
    return total.hexdigest()
