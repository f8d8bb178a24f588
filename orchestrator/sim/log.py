"""What a simulated run leaves behind: its history if it was recorded, and what was counted in any case."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from transport.contracts.messages import Command, Event, JournalRecord, TrainerCommand, encode
from transport.contracts.types import RowId, WorkerId


@dataclass(slots=True)
class SimulationLog:
    """Every event with its commands, in order, if recorded, and the virtual time at which the run was over.

    num_events: that the state handled.  num_actions: of the event heap.
    trainer_busy_s: seconds that the trainer computed.  tokens: of all rows that were generated.
    trained: rows of each batch in the surviving lineage of weights, in the order trained.
    published_s: when each version was published, from 1.
    token_ages: how many trained tokens were sampled under weights that were so many versions behind when trained.
    batches: (when, worker, samples that decode from then on), if traced.  training: (when, seconds, what), if traced.
    """

    history: list[tuple[JournalRecord, list[Command]]] = field(default_factory=list)
    initial: bytes = b""
    end_s: float = 0.0
    finish_reason: str = ""
    num_events: int = 0
    num_actions: int = 0
    trainer_busy_s: float = 0.0
    tokens: int = 0
    trained: dict[int, list[RowId]] = field(default_factory=dict)
    published_s: list[float] = field(default_factory=list)
    token_ages: Counter[int] = field(default_factory=Counter)
    batches: list[tuple[float, WorkerId, int]] = field(default_factory=list)
    training: list[tuple[float, float, TrainerCommand]] = field(default_factory=list)

    def as_bytes(self) -> bytes:
        """The whole log, MessagePack; equal logs have equal bytes."""
        return encode([(record, commands) for record, commands in self.history])

    def events_of(self, kind: type[Event]) -> list[JournalRecord]:
        return [record for record, _ in self.history if isinstance(record.event, kind)]

    def commands_of(self, kind: type[Command]) -> list[Command]:
        return [command for _, commands in self.history for command in commands if isinstance(command, kind)]

    def iteration_s(self, warm_up: int = 0, cool_down: int = 0) -> float:
        """Mean seconds from one version to the next, without the first ``warm_up`` and the last ``cool_down``.

        The first ones fill the pipeline; beside the last ones nothing else is generated any more.
        """
        begin_s = self.published_s[warm_up - 1] if warm_up else 0.0
        last = len(self.published_s) - cool_down
        return (self.published_s[last - 1] - begin_s) / (last - warm_up)

    @property
    def oldest_age(self) -> int:
        """Versions that the oldest trained token was behind."""
        return max(self.token_ages, default=0)

    @property
    def mean_age(self) -> float:
        """Versions that a trained token was behind, on average."""
        total = sum(self.token_ages.values())
        return sum(age * tokens for age, tokens in self.token_ages.items()) / total if total else 0.0


def counted(iterations: int) -> tuple[int, int]:
    """(how many at the start fill the pipeline, how many at the end empty it): they do not count."""
    warm_up = min(4, iterations // 2)
    return warm_up, min(2, (iterations - warm_up) // 3)
