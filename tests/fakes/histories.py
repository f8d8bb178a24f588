"""Of the history of a run: its events or commands of a kind, and one digest of all commands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from orchestrator.sim.engine import SimulationLog
from transport.contracts.messages import Command, Event, JournalRecord, encode


def events_of(log: SimulationLog, kind: type[Event]) -> list[JournalRecord]:
    return [record for record, _ in log.history if isinstance(record.event, kind)]


def commands_of(log: SimulationLog, kind: type[Command]) -> list[Command]:
    return [command for _, commands in log.history for command in commands if isinstance(command, kind)]


def digest(history: Iterable[tuple[JournalRecord, Sequence[Command]]]) -> str:
    """One hex digest of every command with its position: equal if and only if the decisions are."""
    total = hashlib.sha256()
    for record, commands in history:
        total.update(encode((record.seq, tuple(commands))))
    return total.hexdigest()
