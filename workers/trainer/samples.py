"""Rows as the trainer needs them. Owns: two nouns. Never: torch, so that whoever only reads rows starts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transport.contracts.types import GroupId, RowId


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
