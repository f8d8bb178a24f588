"""The emulated learner: takes the time that training would take, and changes nothing.

With it the trainer worker does all else as it always does: it reads the rounds log with its rows, keeps the ledger,
publishes versions (of one number), saves checkpoints, resumes, refuses. So what is measured is the system, and an audit
of such a run means what it always means.

Owns: how long each thing takes. Never: torch; a process with it starts at once. Source: ours; costs as the simulator's
(``orchestrator/sim/engine.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from transport.broker.base import Broker
from transport.contracts.messages import TensorSpec, WeightManifest
from transport.contracts.settings import EmulatedSettings
from transport.tensors.base import SegmentWriter
from transport.tensors.manifest import checksum, plan_layout
from workers.trainer.checkpoint import MODEL_FILE, OPTIMIZER_FILE, Checkpoint, TensorFile
from workers.trainer.learner import InThread, PieceDone, PromptGroup
from workers.weights.publish import WeightPublisher

LAYOUT = plan_layout([("version", (1,), "int64")])

Sleep = Callable[[float], None]


class EmulatedLearner:
    """A Learner (learner.py) of one rank. sleep: lets that many of our seconds pass."""

    def __init__(self, costs: EmulatedSettings, publisher: WeightPublisher, sleep: Sleep) -> None:
        self._costs = costs
        self._publisher = publisher
        self._sleep = sleep
        self._steps = 0

    @property
    def world_size(self) -> int:
        return 1

    async def join(self, broker: Broker, in_thread: InThread) -> None:
        pass

    async def follow(self) -> None:
        pass

    def agree(self, value: int) -> int:
        return value

    def load(self, checkpoint: Checkpoint | None) -> None:
        pass

    def accumulate(self, groups: Sequence[PromptGroup]) -> PieceDone:
        return self._walk(groups)

    def record_logprobs(self, groups: Sequence[PromptGroup]) -> PieceDone:
        return self._walk(groups)

    def forget_logprobs(self) -> None:
        pass

    def close(self, *, batch: int, num_rows: int, num_tokens: int) -> dict[str, float]:
        self._take(self._costs.optimizer_s)
        self._steps += 1
        return {"skipped_nonfinite": 0.0}

    def publish(self, epoch: int, version: int) -> WeightManifest:
        return self._publisher.publish_layout(epoch, version, LAYOUT, partial(_write_version, version))

    def tensor_files(self) -> Mapping[str, TensorFile]:
        write = partial(_save_steps, self._steps)
        return {MODEL_FILE: TensorFile(8, write), OPTIMIZER_FILE: TensorFile(8, write)}

    def save_final(self, target: Path) -> None:
        """There is no model to save."""

    def leave(self) -> None:
        pass

    def retract(self) -> None:
        self._publisher.close()

    def _walk(self, groups: Sequence[PromptGroup]) -> PieceDone:
        rows = [row for group in groups for row in group.samples]
        tokens = sum(row.num_loss_tokens for row in rows)
        self._take(self._costs.round_s + tokens * self._costs.train_token_s)
        return PieceDone(num_rows=len(rows), num_tokens=tokens, computed_rows=len(rows))

    def _take(self, seconds: float) -> None:
        self._sleep(seconds * self._costs.time_scale)


def _write_version(version: int, writer: SegmentWriter, spec: TensorSpec) -> str:
    raw = memoryview(bytearray(struct.pack("<q", version)))
    writer.write(spec.offset, raw)
    return checksum(raw)


def _save_steps(steps: int, path: Path) -> None:
    save_file({"steps": np.array([steps], dtype=np.int64)}, path)
