"""The learner that learns: a torch policy, its optimizer, and the ranks that it shares gradients with.

Owns: which parts a rank's learner is made of. Never: the log, the broker beyond the ranks' rendezvous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from transport.broker.base import Broker
from transport.contracts.messages import WeightManifest
from transport.contracts.settings import Settings
from workers.trainer.checkpoint import Checkpoint, TensorFile
from workers.trainer.learner import InThread, PieceDone
from workers.trainer.meeting import Meeting
from workers.trainer.policy.checkpoint_tensors import restore, tensor_files
from workers.trainer.policy.final_model import save_final_model
from workers.trainer.policy.load import choose_device
from workers.trainer.policy.parallel import GradientReducer, SingleRank
from workers.trainer.policy.ranks import meet_ranks
from workers.trainer.policy.setup import build_step
from workers.trainer.policy.step import TrainStep
from workers.trainer.samples import PromptGroup


class Publisher(Protocol):
    """Makes a version of the weights readable (publish.WeightPublisher)."""

    def publish(
        self, epoch: int, version: int, tensors: Mapping[str, torch.Tensor], cast: torch.dtype
    ) -> WeightManifest: ...

    def close(self) -> None: ...


class PolicyLearner:
    """A Learner (learner.py).

    model_dir: the base model.  rank: which of the ``trainer.ranks`` this is.  meeting_dir: where those of one machine
    meet; one rank needs none.
    """

    def __init__(
        self,
        settings: Settings,
        model_dir: Path,
        publisher: Publisher,
        *,
        rank: int = 0,
        meeting_dir: Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._settings = settings
        self._model_dir = model_dir
        self._publisher = publisher
        self._rank = rank
        self._meeting_dir = meeting_dir
        self._meeting: Meeting | None = None
        self._trust_remote_code = trust_remote_code
        self._reducer: GradientReducer = SingleRank()
        self._loaded: TrainStep | None = None

    @property
    def world_size(self) -> int:
        return self._reducer.world_size

    @property
    def _step(self) -> TrainStep:
        if self._loaded is None:
            raise ValueError("the learner was not loaded")
        return self._loaded

    async def join(self, broker: Broker, in_thread: InThread) -> None:
        liveness, ranks = self._settings.liveness, self._settings.trainer.ranks
        if ranks == 1:
            return
        if self._meeting_dir is None:
            raise ValueError(f"{ranks} ranks need a directory to meet in")
        self._reducer, self._meeting = await meet_ranks(
            broker,
            self._rank,
            ranks,
            in_thread,
            directory=self._meeting_dir,
            device=choose_device(self._settings.trainer.device),
            join_timeout_s=liveness.startup_s,
            reduce_timeout_s=liveness.stall_s,
        )

    async def follow(self) -> None:
        if self._meeting is not None:
            await self._meeting.follow()

    def agree(self, value: int) -> int:
        return self._reducer.agree(value)

    def load(self, checkpoint: Checkpoint | None) -> None:
        torch.set_num_threads(self._settings.trainer.threads)
        step = build_step(
            self._settings, self._model_dir, reducer=self._reducer, trust_remote_code=self._trust_remote_code
        )
        if checkpoint is not None:
            restore(step, checkpoint)
        self._loaded = step

    def accumulate(self, groups: Sequence[PromptGroup]) -> PieceDone:
        return self._step.accumulate(groups)

    def record_logprobs(self, groups: Sequence[PromptGroup]) -> PieceDone:
        return self._step.record_logprobs(groups)

    def forget_logprobs(self) -> None:
        self._step.forget_logprobs()

    def close(self, *, batch: int, num_rows: int, num_tokens: int) -> dict[str, float]:
        return self._step.close(batch=batch, num_rows=num_rows, num_tokens=num_tokens)

    def publish(self, epoch: int, version: int) -> WeightManifest:
        cast = getattr(torch, self._settings.generation.dtype)
        return self._publisher.publish(epoch, version, self._step.policy.masters, cast)

    def tensor_files(self) -> Mapping[str, TensorFile]:
        return tensor_files(self._step)

    def save_final(self, target: Path) -> None:
        save_final_model(self._step.policy, self._model_dir, target, trust_remote_code=self._trust_remote_code)

    def leave(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
        self._reducer.close()

    def retract(self) -> None:
        self._publisher.close()
