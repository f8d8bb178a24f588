"""A machine that engines and trainer share: who works at the moment, so that the others know how fast they are.

Owns: that fact. Never: speeds. Invariant: who asked is told of every change, in the order of asking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transport.contracts.types import WorkerId

Hear = Callable[[bool], None]


@dataclass(slots=True)
class SharedMachine:
    """decoding: workers with running samples.  engines, trainers: told when the trainer, any engine begins or ends."""

    decoding: set[WorkerId] = field(default_factory=set[WorkerId])
    training: bool = False
    engines: list[Hear] = field(default_factory=list[Hear])
    trainers: list[Hear] = field(default_factory=list[Hear])

    def note_decoding(self, worker_id: WorkerId, decodes: bool) -> None:
        """A worker has samples that run, or has none."""
        before = bool(self.decoding)
        (self.decoding.add if decodes else self.decoding.discard)(worker_id)
        if before != bool(self.decoding):
            _tell(self.trainers, not before)

    def note_training(self, trains: bool) -> None:
        """The trainer begins to work, or ends."""
        if trains != self.training:
            self.training = trains
            _tell(self.engines, trains)


def _tell(hearers: list[Hear], begins: bool) -> None:
    for hear in hearers:
        hear(begins)
