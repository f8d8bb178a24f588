"""What the trainer worker trains, and on what: one interface, behind which is torch (policy/), or an emulation.

The worker (worker.py) owns the log, the ledger, epochs, checkpoints and reports; a learner owns weights. All
methods but ``join`` and ``follow`` are synchronous, and called on one thread, in the order of the rounds log: all but
``retract``, and what ``publication`` returns, which runs on another beside the rounds that follow, and ends before the
next ``close``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from transport.broker.base import Broker
from transport.contracts.messages import TensorSpec, WeightManifest
from transport.contracts.settings import EMULATED_LOGPROB, EmulatedSettings
from transport.contracts.types import GroupId, RowId
from transport.process.storage import Place
from transport.tensors.manifest import checksum, plan_layout
from transport.tensors.shm import ShmWriter
from workers.models import MODEL_FILE
from workers.trainer.checkpoint import OPTIMIZER_FILE, Checkpoint, TensorFile
from workers.trainer.tensor_files import file_content
from workers.weights.publish import WeightPublisher

InThread = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
"""Runs a function on the learner's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One row as the trainer needs it.

    response_ids: [R] int32, R >= 1.  rollout_logprobs: [R] float32.  loss_mask: [R] uint8, None for all ones.
    reference_logprobs, old_logprobs: [R] float32 or None.  reward: None where no loss looks at it.
    advantages: [R] float32, of each token; None where its row's holds for all.
    branch_ends: [B] int32, of a row of several samples: each stands behind the prompt by itself; None: one.
    counts: [R] float32, what each token counts, beside what ``token_weight`` gives its row; None: all 1.
    values, returns: [R] float32, what the critic expected when it was asked, and should have; only the critic has them.
    """

    row_id: RowId
    response_ids: NDArray[np.int32]
    rollout_logprobs: NDArray[np.float32]
    advantage: float
    loss_mask: NDArray[np.uint8] | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    old_logprobs: NDArray[np.float32] | None = None
    reward: float | None = None
    advantages: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    branch_ends: NDArray[np.int32] | None = None
    counts: NDArray[np.float32] | None = None

    @property
    def branches(self) -> list[slice]:
        """Where each of its samples is in its columns."""
        ends = [len(self.response_ids)] if self.branch_ends is None else self.branch_ends.tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def num_inputs(self) -> int:
        """Tokens that a model reads: the last one of a branch predicts nothing."""
        return len(self.response_ids) - (1 if self.branch_ends is None else len(self.branch_ends))

    @property
    def has_advantage(self) -> bool:
        """Whether any of its tokens has one that is not zero."""
        return self.advantage != 0.0 if self.advantages is None else bool(self.advantages.any())

    @property
    def num_loss_tokens(self) -> int:
        return len(self.response_ids) if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """Samples of one prompt that are trained together.

    prompt_ids: [P] int32, P >= 1.  part: of ``[data.mix]``, where it has an objective of its own.
    """

    group_id: GroupId
    prompt_ids: NDArray[np.int32]
    samples: Sequence[TrainingSample]
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceDone:
    """num_rows, num_tokens: response rows and loss tokens of a round; computed_rows: those with a gradient at all."""

    num_rows: int
    num_tokens: int
    computed_rows: int


class Learner(Protocol):
    """One rank's weights, and how they learn."""

    @property
    def data_size(self) -> int:
        """Parts that a round is dealt into; known after ``join``."""
        ...

    @property
    def data_rank(self) -> int:
        """Which of them this rank trains; others may train the same part together with it."""
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

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, in their order, on all of them."""
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

    def close(self, *, batch: int, num_rows: int, num_tokens: int, num_batches: int = 0) -> dict[str, float]:
        """One optimizer step with the gradient of a mini-batch of this size. Returns its metrics.

        num_batches: those that the learning-rate schedule runs over, 0 where the rate is constant.
        """
        ...

    def publication(self, epoch: int, version: int) -> Callable[[], WeightManifest]:
        """What makes the present weights readable as this version. Only ``close`` changes them, and waits for it."""
        ...

    def tensor_files(self) -> Mapping[str, TensorFile]:
        """This rank's part of everything that ``load`` needs, as it is now, as files of a checkpoint.

        All ranks call it. Each name is written by one rank.
        """
        ...

    def save_final(self, checkpoint: Place, target: Path) -> None:
        """Write the model of a checkpoint to directory ``target``, on one rank. Raises CheckpointError."""
        ...

    def leave(self) -> None:
        """Leave the other ranks; hangs where one of them does."""
        ...

    def retract(self) -> None:
        """Take back what was published, for good; on any thread, whatever the learner's own is doing."""
        ...


class LoneLearner:
    """What a learner of one rank has to say of the others."""

    data_size, data_rank = 1, 0

    async def join(self, broker: Broker, in_thread: InThread) -> None:
        pass

    async def follow(self) -> None:
        pass

    def agree(self, value: int) -> int:
        return value

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def leave(self) -> None:
        pass


class EmulatedLearner(LoneLearner):
    """A learner of one rank that takes the time that training would take, and changes nothing. It imports no torch.

    With it the trainer worker does all else as it always does: it reads the rounds log with its rows, keeps the ledger,
    publishes versions (of one number), saves checkpoints, resumes, refuses. So what is measured is the system, and an
    audit of such a run means what it always means. sleep: lets that many of our seconds pass.
    Source: ours; costs as the simulator's (``orchestrator/sim/engine.py``).
    """

    def __init__(
        self,
        costs: EmulatedSettings,
        publisher: WeightPublisher | None,
        sleep: Callable[[float], None],
        *,
        compares: bool = False,
    ) -> None:
        """publisher: None where nothing is published.  compares: rows are of an emulated engine, whose logprobs are
        compared with what they should be."""
        self._costs = costs
        self._publisher = publisher
        self._sleep = sleep
        self._steps = 0
        self._compares = compares
        self._off, self._compared = 0.0, 0

    def load(self, checkpoint: Checkpoint | None) -> None:
        pass

    def accumulate(self, groups: Sequence[PromptGroup]) -> PieceDone:
        rows = [row for group in groups for row in group.samples]
        tokens = sum(row.num_loss_tokens for row in rows)
        if self._compares:
            self._off += sum(float(np.abs(_sampled(row) - EMULATED_LOGPROB).sum()) for row in rows)
            self._compared += tokens
        self._take(self._costs.round_s + tokens * self._costs.train_token_s)
        return PieceDone(num_rows=len(rows), num_tokens=tokens, computed_rows=len(rows))

    def record_logprobs(self, groups: Sequence[PromptGroup]) -> PieceDone:
        return self.accumulate(groups)

    def forget_logprobs(self) -> None:
        pass

    def close(self, *, batch: int, num_rows: int, num_tokens: int, num_batches: int = 0) -> dict[str, float]:
        self._take(self._costs.optimizer_s)
        self._steps += 1
        off, compared = self._off, self._compared
        self._off, self._compared = 0.0, 0
        return {"skipped_nonfinite": 0.0, **({"logprob_mismatch": off / compared} if compared else {})}

    def publication(self, epoch: int, version: int) -> Callable[[], WeightManifest]:
        def write(writer: ShmWriter, spec: TensorSpec) -> str:
            raw = memoryview(bytearray(struct.pack("<q", version)))
            writer.write(spec.offset, raw)
            return checksum(raw)

        assert self._publisher is not None
        layout = plan_layout([("version", (1,), "int64")])
        return partial(self._publisher.publish_layout, epoch, version, layout, write)

    def tensor_files(self) -> Mapping[str, TensorFile]:
        raw = memoryview(struct.pack("<q", self._steps))
        file = TensorFile(8, lambda: file_content({"steps": ("I64", (1,), lambda: raw)}))
        return dict.fromkeys((MODEL_FILE, OPTIMIZER_FILE), file)

    def save_final(self, checkpoint: Place, target: Path) -> None:
        """There is no model to save."""

    def retract(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _take(self, seconds: float) -> None:
        self._sleep(seconds * self._costs.time_scale)


def _sampled(row: TrainingSample) -> NDArray[np.float32]:
    """[N] float32: the engine's logprobs of the tokens that a loss looks at."""
    return row.rollout_logprobs if row.loss_mask is None else row.rollout_logprobs[row.loss_mask.astype(bool)]
