"""The critic's learner: the policy's trunk under a head of one number, trained towards returns.

    accumulate(groups)  gradient += d(value loss sum)   the rounds that the policy is trained on, streamed like there
    close(...)          gradient / loss tokens, clip, AdamW
    values(groups)      expected returns of new samples, under the present weights

Owns: the value head, the sum of the value loss. Never: which rows, when (the log says that), advantages. Invariants:
the value of a token is that of the state before it, whose hidden state also predicts the token; the head begins as
zero, so a critic that never learnt expects nothing, whatever its trunk.

One rank, which computes packed rows as the policy does. The trunk, the gradient sum, the optimizer and the files of a
checkpoint are the policy's (workers/trainer/policy).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from transport.contracts.messages import WeightManifest
from transport.contracts.settings import LoraSettings, Settings, TrainerSettings
from transport.contracts.types import RowId
from transport.process.storage import Place
from workers.algorithms.loss import Objective
from workers.algorithms.value_loss import ValueMetrics, value_loss_N, value_metrics
from workers.critic.worker import unpublished
from workers.models import choose_device
from workers.trainer.checkpoint import Checkpoint, TensorFile
from workers.trainer.learner import LoneLearner, PieceDone, PromptGroup
from workers.trainer.policy.model import (
    LossCall,
    PolicyModel,
    PolicyStage,
    by_row,
    check_window,
    choose_dtype,
    load_module,
    plain_head,
)
from workers.trainer.policy.packing import PackedBatch, pack, split_by_tokens
from workers.trainer.policy.policy_learner import TrainStep
from workers.trainer.policy.recompute import recompute_activations
from workers.trainer.policy.stored import read_state, state_files


class CriticLearner(LoneLearner):
    """A ValueLearner (worker.py). model_dir: what the critic begins as."""

    def __init__(self, settings: Settings, model_dir: Path, *, trust_remote_code: bool = False) -> None:
        self._settings = settings
        self._model_dir = model_dir
        self._trust_remote_code = trust_remote_code
        self._loaded: ValueStep | None = None

    @property
    def _step(self) -> ValueStep:
        if self._loaded is None:
            raise ValueError("the learner was not loaded")
        return self._loaded

    def load(self, checkpoint: Checkpoint | None) -> None:
        settings = self._settings
        torch.set_num_threads(settings.trainer.threads)
        device = choose_device(settings.critic.device, "critic.device")
        module = load_module(self._model_dir, device=device, trust_remote_code=self._trust_remote_code)
        check_window(module.config, settings.generation.max_context)
        recompute_activations(module, settings.trainer.recompute)
        model = ValueModel(with_value_head(module), dtype=choose_dtype(settings.trainer.dtype, device), temperature=1.0)
        step = ValueStep(model, of_critic(settings), clip=settings.critic.value_clip)
        if checkpoint is not None:
            step.restore(read_state(checkpoint, model.masters, gather=self.gather))
        self._loaded = step

    def accumulate(self, groups: Sequence[PromptGroup]) -> PieceDone:
        return self._step.accumulate(groups)

    def record_logprobs(self, groups: Sequence[PromptGroup]) -> PieceDone:
        """It has no policy whose logprobs could be old: recorded values are in the rows."""
        return PieceDone(num_rows=0, num_tokens=0, computed_rows=0)

    def forget_logprobs(self) -> None:
        pass

    def close(self, *, batch: int, num_rows: int, num_tokens: int, num_batches: int = 0) -> dict[str, float]:
        return self._step.close(batch=batch, num_rows=num_rows, num_tokens=num_tokens, num_batches=num_batches)

    def values(self, groups: Sequence[PromptGroup]) -> dict[RowId, NDArray[np.float32]]:
        return self._step.values(groups)

    def publication(self, epoch: int, version: int) -> Callable[[], WeightManifest]:
        return unpublished(epoch, version)

    def tensor_files(self) -> Mapping[str, TensorFile]:
        step = self._step
        return state_files(step.policy.masters, step.optimizer_state(), rank=0, gather=self.gather)

    def save_final(self, checkpoint: Place, target: Path) -> None:
        """Its last checkpoint is all that is left of it."""

    def retract(self) -> None:
        pass


def of_critic(settings: Settings) -> TrainerSettings:
    """How the critic is stepped: as the policy, at a rate of its own, and without adapters."""
    return msgspec.structs.replace(settings.trainer, lr=settings.critic.lr, lora=LoraSettings())


def with_value_head(module: PreTrainedModel) -> PreTrainedModel:
    """``module`` with one zero row in place of its output embedding, in place."""
    head = plain_head(module)
    value = nn.Linear(head.in_features, 1, bias=False, device=head.weight.device, dtype=head.weight.dtype)
    nn.init.zeros_(value.weight)
    module.set_output_embeddings(value)
    return module


class ValueModel(PolicyModel):
    """Values of packed rows, and their gradients."""

    def _stage_of(self, module: PreTrainedModel, has_head: bool) -> PolicyStage:
        return ValueStage(module, self.temperature, has_head=has_head)

    def add_gradient(self, batches: Sequence[PackedBatch], clip: float) -> ValueMetrics:
        """Add the gradient of the value loss sum of some rows. Raises ValueError: they have no values or returns."""
        total = ValueMetrics()
        for batch in batches:
            call = ValueCall(batch, clip)
            self._stage(None, call).backward()
            total += call.found
        return total

    def values(self, batch: PackedBatch) -> Tensor:
        """[N] float32 (or more), of the state before each loss token."""
        return self.logprobs(batch)


class ValueCall(LossCall):
    """One micro-batch of the value loss, and what its forward pass finds out."""

    def __init__(self, batch: PackedBatch, clip: float) -> None:
        super().__init__(batch)
        self._clip = clip
        self.found = ValueMetrics()

    def loss(self, values_N: Tensor) -> Tensor:
        old_N, returns_N = self.batch.tokens.values_N, self.batch.tokens.returns_N
        if old_N is None or returns_N is None:
            raise ValueError(f"rows {self.batch.row_ids[:3]} came to be trained by the critic without its values")
        loss = value_loss_N(values_N, old_N, returns_N, self._clip).sum()
        num_rows = len(self.batch.row_ids)
        self.found = value_metrics(loss, values_N, old_N, returns_N, self._clip, num_rows=num_rows)
        return loss


class ValueStage(PolicyStage):
    def forward(self, hidden: Tensor | None, call: LossCall) -> Tensor:
        """[N] values; of a ValueCall the sum of their loss, with its gradient."""
        batch = call.batch
        trunk = cast(nn.Module, self.module.base_model)
        out = trunk(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, groups=batch.attention)
        states_ND = out.last_hidden_state[0].index_select(0, batch.predictor_N)
        weight = plain_head(self.module).weight
        dtype = torch.promote_types(states_ND.dtype, torch.float32)  # three digits of bf16 are too few for a regression
        values_N = F.linear(states_ND.to(dtype), weight.to(dtype))[:, 0]
        return call.loss(values_N) if isinstance(call, ValueCall) else values_N


class ValueStep(TrainStep):
    """The critic's arithmetic. clip: see ``value_loss_N``."""

    def __init__(self, model: ValueModel, settings: TrainerSettings, *, clip: float) -> None:
        super().__init__(model, settings, Objective())
        self._model = model
        self._clip = clip
        self._sums = ValueMetrics()

    def accumulate(self, groups: Sequence[PromptGroup]) -> PieceDone:
        """Add the gradient of some rows' loss sum. All of them: a value can be wrong where no advantage is left."""
        rows = [sample for group in groups for sample in group.samples]
        for batches in self._in_lockstep(rows, split_by_tokens(groups, self._settings.micro_batch_tokens)):
            self._sums += self._model.add_gradient(batches, self._clip)
        num_tokens = sum(row.num_loss_tokens for row in rows)
        return PieceDone(num_rows=len(rows), num_tokens=num_tokens, computed_rows=len(rows))

    def close(self, *, batch: int, num_rows: int, num_tokens: int, num_batches: int = 0) -> dict[str, float]:
        """As TrainStep, every token weighing alike; the metrics are ValueMetrics' beside the step's."""
        found, self._sums = self._sums, ValueMetrics()
        self._model.close()
        held = round(found.tokens)
        stepped = self._take_step(found.loss, 1.0 / max(held, 1), held, batch=batch, num_batches=num_batches)
        return stepped | found.means()

    def values(self, groups: Sequence[PromptGroup]) -> dict[RowId, NDArray[np.float32]]:
        """Of each row, [its loss tokens] float32, under the present weights."""
        found: dict[RowId, NDArray[np.float32]] = {}
        for piece in split_by_tokens(groups, self._settings.micro_batch_tokens):
            batch = pack(piece, "token_mean", self._model.device, dtype=self._model.sum_dtype)
            found |= by_row(batch, self._model.values(batch).float())
        return found
