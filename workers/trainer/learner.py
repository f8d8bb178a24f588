"""What the trainer worker trains: one interface, behind which is torch, or an emulation that takes its time.

The worker (worker.py) owns the log, the ledger, epochs, checkpoints and what is told; a learner owns weights. All
methods but ``join`` and ``follow`` are synchronous, and all but ``retract`` called on one thread, in the order of the
rounds log.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transport.broker.base import Broker
from transport.contracts.messages import WeightManifest
from workers.trainer.checkpoint import Checkpoint, TensorFile
from workers.trainer.samples import PromptGroup

InThread = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
"""Runs a function on the learner's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceDone:
    """num_rows, num_tokens: response rows and loss tokens of a round; computed_rows: those with a gradient at all."""

    num_rows: int
    num_tokens: int
    computed_rows: int


class Learner(Protocol):
    """One rank's weights, and how they learn."""

    @property
    def world_size(self) -> int:
        """Ranks that train together; known after ``join``."""
        ...

    async def join(self, broker: Broker, in_thread: InThread) -> None:
        """Meet the other ranks. Raises RanksError."""
        ...

    async def follow(self) -> None:
        """Watch the other ranks, if this learner can. Raises RanksError when one was replaced by a new process."""
        ...

    def agree(self, value: int) -> int:
        """Rank 0's value."""
        ...

    def load(self, checkpoint: Checkpoint | None) -> None:
        """Become the base model, or what ``checkpoint`` holds. Raises ModelError, CheckpointError."""
        ...

    def accumulate(self, groups: Sequence[PromptGroup]) -> PieceDone:
        """Add the gradient of some rows' loss sum."""
        ...

    def record_logprobs(self, groups: Sequence[PromptGroup]) -> PieceDone:
        """Remember old-policy logprobs of some rows, until ``forget_logprobs``."""
        ...

    def forget_logprobs(self) -> None: ...

    def close(self, *, batch: int, num_rows: int, num_tokens: int) -> dict[str, float]:
        """One optimizer step with the gradient of a mini-batch of this size. Returns its metrics."""
        ...

    def publish(self, epoch: int, version: int) -> WeightManifest:
        """Make the weights readable as this version."""
        ...

    def tensor_files(self) -> Mapping[str, TensorFile]:
        """Everything that ``load`` needs, as files of a checkpoint."""
        ...

    def save_final(self, target: Path) -> None:
        """Write the trained model to directory ``target``. Raises CheckpointError."""
        ...

    def leave(self) -> None:
        """Leave the other ranks; hangs where one of them does."""
        ...

    def retract(self) -> None:
        """Take back what was published, for good; on any thread, whatever the learner's own is doing."""
        ...
