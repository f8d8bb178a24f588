"""What must be kept, and what a full broker changes.

Owns: kept checkpoints and the byte budget. Never: the rows themselves. Invariant: rows of a trained batch are freed
only once a durable checkpoint contains the batch; the rounds log is freed up to the oldest checkpoint that is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from orchestrator.core.outbox import CommandId


class Checkpoint(NamedTuple):
    """A durable checkpoint. cursor: last entry of the rounds log that it contains."""

    version: int
    cursor: CommandId


class Retention(msgspec.Struct, kw_only=True):
    """Checkpoints that are kept, oldest first, and the bytes retained in the broker. requested: someone wants one."""

    checkpoints: list[Checkpoint] = msgspec.field(default_factory=list[Checkpoint])
    retained_bytes: int = 0
    requested: bool = False
    force_checkpoint: bool = False
    over_budget: bool = False

    @property
    def durable_version(self) -> int:
        """Rows of batches below it are freed. -1 before the first checkpoint."""
        return self.checkpoints[-1].version if self.checkpoints else -1

    def save(self, checkpoint: Checkpoint, keep: int) -> bool:
        """Take note of a checkpoint. Returns False for one that is known or older."""
        if self.checkpoints and checkpoint <= self.checkpoints[-1]:
            return False
        if self.checkpoints and checkpoint.version == self.checkpoints[-1].version:
            self.checkpoints.pop()  # the same weights saved again, further along the log
        self.checkpoints.append(checkpoint)
        del self.checkpoints[: -max(1, keep)]
        return True

    def reaches(self, entry: CommandId) -> bool:
        """Whether the newest checkpoint contains this entry of the rounds log."""
        return bool(self.checkpoints) and self.checkpoints[-1].cursor >= entry

    def use(self, retained_bytes: int, max_retained_bytes: int) -> None:
        """Bytes that the broker holds: at the limit a checkpoint will be forced, above it admission closes."""
        self.retained_bytes = retained_bytes
        self.force_checkpoint = retained_bytes >= max_retained_bytes
        self.over_budget = retained_bytes > max_retained_bytes

    def checkpoint_due(self, batch: int, every: int, is_last: bool) -> bool:
        """Whether a checkpoint follows ``batch``. A forced or requested one is due once."""
        forced = self.force_checkpoint or self.requested
        self.force_checkpoint = self.requested = False
        return forced or is_last or (every > 0 and (batch + 1) % every == 0)
