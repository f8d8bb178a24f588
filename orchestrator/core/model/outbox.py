"""What the core has decided: commands with their ids, and those whose effect is not yet certain.

Owns: ids, and the set of outstanding commands. Never: I/O. Invariant: a command's id is (journal position of its event,
index among the event's commands); executing one twice under its id is harmless, so a broker that lost its tail and an
orchestrator that restarts are served alike: execute everything outstanding again.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from transport.contracts.messages import CloseMiniBatch, Command, FinishTraining, TrainRound
from transport.contracts.types import GroupId, WorkerId


class CommandId(NamedTuple):
    """seq: journal position of the event, from 1.  number: place among the commands of that event, from 0."""

    seq: int
    number: int

    @property
    def entry(self) -> str:
        """The id that the command's entry has on its stream: ``(12, 3)`` -> ``"12-3"``."""
        return f"{self.seq}-{self.number}"


def parse_entry_id(entry: str) -> CommandId:
    """``"12-3"`` -> ``CommandId(12, 3)``. Raises ValueError on anything else."""
    seq, _, number = entry.partition("-")
    return CommandId(int(seq), int(number))


class _Key(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What an outstanding command is about. Keys of two types are never equal, whatever they hold."""


class PromptsKey(_Key, frozen=True):
    """Prompts that were requested of the source."""


class HeldOutPromptsKey(_Key, frozen=True):
    """The held-out problems that were requested."""


class AdmissionKey(_Key, frozen=True):
    """The prompt columns of the groups that the command with this id admits."""

    command: CommandId


class DispatchKey(_Key, frozen=True):
    """The dispatch of one group."""

    group_id: GroupId


class AbortKey(_Key, frozen=True):
    """The abort of one group on one worker."""

    worker_id: WorkerId
    group_id: GroupId


class LoadKey(_Key, frozen=True):
    """The load of newer weights by one worker."""

    worker_id: WorkerId


class DrainKey(_Key, frozen=True):
    """The departure of one worker."""

    worker_id: WorkerId


class BatchPlanKey(_Key, frozen=True):
    """The plan of dispatch of one batch."""

    batch: int


class FinishKey(_Key, frozen=True):
    """The end of the run."""


Key: TypeAlias = (
    PromptsKey
    | HeldOutPromptsKey
    | AdmissionKey
    | DispatchKey
    | AbortKey
    | LoadKey
    | DrainKey
    | BatchPlanKey
    | FinishKey
)


class Issued(NamedTuple):
    id: CommandId
    command: Command


class Open(msgspec.Struct):
    """An issued command that ``holders`` things still wait for."""

    issued: Issued
    holders: int = 1


class Outbox(msgspec.Struct, kw_only=True):
    """Commands of the event being handled, and all that are outstanding.

    open: by what each is about, until confirmed.
    rounds: what was appended to the rounds log and is not yet in the oldest kept checkpoint, in order.
    """

    seq: int = 0
    emitted: list[Command] = msgspec.field(default_factory=list[Command])
    open: dict[Key, Open] = msgspec.field(default_factory=dict[Key, Open])
    rounds: list[Issued] = msgspec.field(default_factory=list[Issued])

    @property
    def next_id(self) -> CommandId:
        return CommandId(self.seq, len(self.emitted))

    def emit(self, command: Command) -> CommandId:
        self.emitted.append(command)
        return CommandId(self.seq, len(self.emitted) - 1)

    def emit_until(self, key: Key, command: Command, holders: int = 1) -> CommandId:
        """Decide ``command`` and keep it outstanding until ``confirm(key)`` was called ``holders`` times."""
        issued = Issued(self.emit(command), command)
        self.open[key] = Open(issued, holders)
        return issued.id

    def emit_round(self, command: TrainRound | CloseMiniBatch | FinishTraining) -> CommandId:
        """Decide an entry of the rounds log; outstanding until trimmed."""
        issued = Issued(self.emit(command), command)
        self.rounds.append(issued)
        return issued.id

    def confirm(self, key: Key) -> None:
        """One holder of ``key`` has what it waited for. Unknown keys are duplicates: ignored."""
        entry = self.open.get(key)
        if entry is None:
            return
        entry.holders -= 1
        if entry.holders <= 0:
            del self.open[key]

    def take(self) -> list[Command]:
        emitted, self.emitted = self.emitted, []
        return emitted

    def outstanding(self) -> list[Issued]:
        return sorted([*(entry.issued for entry in self.open.values()), *self.rounds], key=lambda issued: issued.id)
