"""What must be kept, and what a full broker changes.

Owns: kept checkpoints and the byte budget. Never: the rows themselves. Invariant: rows of trained batches and the
rounds log are kept back to the checkpoint before the newest (to the base model, where there is one only), so that a
trainer that finds the newest damaged goes on from the one before it. A full broker comes first: over budget they are
kept back to the newest only, and so they are where ``keep_checkpoints`` is 1.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from orchestrator.core.model.outbox import CommandId


class Checkpoint(NamedTuple):
    """A durable checkpoint. cursor: last entry of the rounds log that it contains."""

    version: int
    cursor: CommandId


BASE_MODEL = Checkpoint(0, CommandId(0, 0))


class Retention(msgspec.Struct, kw_only=True):
    """Checkpoints that are kept, oldest first, and the bytes retained in the broker. requested: one was asked for.

    freed: rows of batches below its version, and the rounds log up to its cursor, are freed.
    """

    checkpoints: list[Checkpoint] = msgspec.field(default_factory=list[Checkpoint])
    freed: Checkpoint = BASE_MODEL
    retained_bytes: int = 0
    requested: bool = False
    force_checkpoint: bool = False
    over_budget: bool = False

    def save(self, checkpoint: Checkpoint, keep: int) -> bool:
        """Take note of a checkpoint. Returns False for one that is known or older."""
        if self.checkpoints and checkpoint <= self.checkpoints[-1]:
            return False
        if self.checkpoints and checkpoint.version == self.checkpoints[-1].version:
            self.checkpoints.pop()  # the same weights saved again, further along the log
        self.checkpoints.append(checkpoint)
        del self.checkpoints[: -max(1, keep)]
        return True

    def free(self, keep: int) -> Checkpoint | None:
        """Choose the oldest checkpoint that a trainer may go back to. Returns it if that frees older rows."""
        back = 1 if keep == 1 or self.over_budget else 2
        oldest = self.checkpoints[-back] if len(self.checkpoints) >= back else BASE_MODEL
        if oldest <= self.freed:
            return None
        self.freed = oldest
        return oldest

    def go_back(self, version: int) -> None:
        """The trainer went back to ``version``: later checkpoints are damaged, or gone."""
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint.version <= version]

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
