"""What the trainer worker trains, and on what: one interface, behind which is torch, or an emulation.

The worker (worker.py) owns the log, the ledger, epochs, checkpoints and reports; a learner owns weights. All
methods but ``join`` and ``follow`` are synchronous, and all but ``retract`` called on one thread, in the order of the
rounds log.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from transport.broker.base import Broker
from transport.contracts.messages import WeightManifest
from transport.contracts.types import GroupId, RowId
from workers.trainer.checkpoint import Checkpoint, TensorFile

InThread = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
"""Runs a function on the learner's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One row as the trainer needs it.

    response_ids: [R] int32, R >= 1.  rollout_logprobs: [R] float32.  loss_mask: [R] uint8, None for all ones.
    reference_logprobs, old_logprobs: [R] float32 or None.
    """

    row_id: RowId
    response_ids: NDArray[np.int32]
    rollout_logprobs: NDArray[np.float32]
    advantage: float
    loss_mask: NDArray[np.uint8] | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    old_logprobs: NDArray[np.float32] | None = None

    @property
    def num_loss_tokens(self) -> int:
        return len(self.response_ids) if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """Samples of one prompt that are trained together. prompt_ids: [P] int32, P >= 1."""

    group_id: GroupId
    prompt_ids: NDArray[np.int32]
    samples: Sequence[TrainingSample]


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
