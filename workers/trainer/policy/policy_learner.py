"""The learner that learns: a torch policy, its optimizer, and the ranks that it shares gradients with.

    accumulate(groups)  any number of times   gradient += d(loss sum)       the batch may still be generated
    close(rows, tokens) once a mini-batch     gradient / normaliser, clip, AdamW, fresh compute weights

Owns: which parts a rank's learner is made of; the optimizer and the old-policy logprobs of the open batch; what is in a
checkpoint. Never: which rows, when, the log. Invariants: whatever the pieces and their order, the gradient at the close
is that of the whole mini-batch (to rounding), and a gradient that is not finite never reaches the weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from transport.broker.base import Broker
from transport.contracts.messages import WeightManifest, encode
from transport.contracts.settings import AlgorithmSettings, Settings, TrainerSettings, records_logprobs
from transport.contracts.types import RowId
from transport.process.storage import Place
from workers.algorithms.loss import LossMetrics, Objective, OwnLoss, normaliser, rollout_entropy
from workers.errors import AlgorithmError, RowsChangedError
from workers.models import choose_device
from workers.trainer.checkpoint import Checkpoint, TensorFile
from workers.trainer.learner import InThread, PieceDone, PromptGroup, TrainingSample
from workers.trainer.policy.export import Exporter
from workers.trainer.policy.fit import fit_layout
from workers.trainer.policy.loading import load_weights
from workers.trainer.policy.model import PolicyModel, by_row, check_window, choose_dtype, empty_policy
from workers.trainer.policy.offload import OffloadedAdamW
from workers.trainer.policy.packing import PackedBatch, pack, split_by_tokens
from workers.trainer.policy.parallel import Ranks, RoundShape, SingleRank, place_of
from workers.trainer.policy.pipeline import bucket
from workers.trainer.policy.ranks import Meeting, lost_ranks, meet_ranks
from workers.trainer.policy.recompute import recompute_activations
from workers.trainer.policy.stored import read_state, state_files
from workers.weights.publish import WeightPublisher

log = structlog.get_logger(__name__)

ADAM_EPSILON = 1e-8
MAX_SKIPPED = 8
"""Steps in a row whose gradient is not finite: one comes now and then, and so many are a loss or weights gone wrong."""
HUNG = 0.5
"""Share of ``liveness.stall_s`` after which a rank that hangs is given up: ranks that start over need the rest."""


class PolicyLearner:
    """A Learner (workers/trainer/learner.py).

    model_dir: the base model.  rank: which of the ``trainer.ranks`` this is.  meeting_dir: where those of one machine
    meet; one rank needs none.  objective: what is trained; None: what the settings name.
    """

    def __init__(
        self,
        settings: Settings,
        model_dir: Path,
        publisher: WeightPublisher,
        *,
        rank: int = 0,
        meeting_dir: Path | None = None,
        trust_remote_code: bool = False,
        objective: Objective | None = None,
    ) -> None:
        self._settings = settings
        self._objective = objective or objective_of(settings)
        self._model_dir = model_dir
        self._publisher = publisher
        self._rank = rank
        self._meeting_dir = meeting_dir
        self._meeting: Meeting | None = None
        self._trust_remote_code = trust_remote_code
        self._ranks: Ranks = SingleRank()
        self._loaded: TrainStep | None = None

    @property
    def data_rank(self) -> int:
        return place_of(self._ranks.layout, self._ranks.rank).data

    @property
    def data_size(self) -> int:
        return self._ranks.layout.data

    @property
    def _step(self) -> TrainStep:
        if self._loaded is None:
            raise ValueError("the learner was not loaded")
        return self._loaded

    async def join(self, broker: Broker, in_thread: InThread) -> None:
        liveness, device = self._settings.liveness, choose_device(self._settings.trainer.device, "trainer.device")
        layout = fit_layout(self._model_dir, self._settings, device)
        if layout.num_ranks == 1:
            return
        if self._meeting_dir is None:
            raise ValueError(f"{layout.num_ranks} ranks need a directory to meet in")
        self._ranks, self._meeting = await meet_ranks(
            broker,
            self._rank,
            layout,
            in_thread,
            directory=self._meeting_dir,
            device=device,
            join_timeout_s=liveness.startup_s,
            collective_timeout_s=HUNG * liveness.stall_s,
            alike=f"{choose_dtype(self._settings.trainer.dtype, device)}, settings {self._settings_mark()}",
        )

    def _settings_mark(self) -> str:
        """The same for equal settings."""
        return hashlib.blake2b(encode(self._settings), digest_size=4).hexdigest()

    async def follow(self) -> None:
        if self._meeting is not None:
            await self._meeting.follow()

    def agree(self, value: int) -> int:
        return self._ranks.agree(value)

    def gather(self, data: bytes) -> list[bytes]:
        return self._ranks.gather(data)

    def load(self, checkpoint: Checkpoint | None) -> None:
        settings = self._settings
        torch.set_num_threads(settings.trainer.threads)
        device = choose_device(settings.trainer.device, "trainer.device")
        module = empty_policy(self._model_dir, trust_remote_code=self._trust_remote_code)
        check_window(module.config, settings.generation.max_context)
        recompute_activations(module, settings.trainer.recompute)
        policy = PolicyModel(
            module,
            dtype=choose_dtype(settings.trainer.dtype, device),
            temperature=settings.sampling.temperature,
            ranks=self._ranks,
            fill=partial(load_weights, model_dir=self._model_dir, device=device),
            lora=settings.trainer.lora,
            seed=settings.run.seed,
        )
        step = TrainStep(policy, settings.trainer, self._objective)
        if checkpoint is not None:
            step.restore(read_state(checkpoint, policy.masters, gather=self._ranks.gather))
        self._loaded = step

    def accumulate(self, groups: Sequence[PromptGroup]) -> PieceDone:
        with lost_ranks(self._rank):
            return self._step.accumulate(groups)

    def record_logprobs(self, groups: Sequence[PromptGroup]) -> PieceDone:
        with lost_ranks(self._rank):
            return self._step.record_logprobs(groups)

    def forget_logprobs(self) -> None:
        self._step.forget_logprobs()

    def close(self, *, batch: int, num_rows: int, num_tokens: int, num_batches: int = 0) -> dict[str, float]:
        with lost_ranks(self._rank):
            return self._step.close(batch=batch, num_rows=num_rows, num_tokens=num_tokens, num_batches=num_batches)

    def publication(self, epoch: int, version: int) -> Callable[[], WeightManifest]:
        cast = getattr(torch, self._settings.generation.dtype)
        ranks = self._ranks.beside if self._ranks.layout.num_ranks > 1 else None
        policy = self._step.policy
        if policy.lora.publish == "adapters":
            publish = partial(self._publisher.publish, epoch, version, policy.masters, policy.sum_dtype, ranks)
        else:
            merged = partial(self._publisher.publish, content=policy.merging())
            publish = partial(merged, epoch, version, policy.published, cast, ranks)

        def beside() -> WeightManifest:
            with _beside_compute(policy.device):
                return publish()

        return beside

    def tensor_files(self) -> Mapping[str, TensorFile]:
        """The masters; the optimizer's state by parameter name, nothing of one that never stepped; the random state."""
        return state_files(
            self._step.policy.masters, self._step.optimizer_state(), rank=self._rank, gather=self._ranks.gather
        )

    def save_final(self, checkpoint: Place, target: Path) -> None:
        """A trainer that is killed in between writes it again when the run is resumed."""
        exporter = Exporter(
            model_dir=self._model_dir,
            dtype=self._settings.trainer.save_dtype,
            lora=self._settings.trainer.lora,
            trust_remote_code=self._trust_remote_code,
        )
        exporter.write_checkpoint(checkpoint, target)

    def leave(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
        self._ranks.close()

    def retract(self) -> None:
        self._publisher.close()


@contextmanager
def _beside_compute(device: torch.device) -> Iterator[None]:
    """Copies of this thread wait for what was computed before, and for nothing that is computed after."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield


def objective_of(settings: Settings, own_losses: Mapping[str, OwnLoss] = MappingProxyType({})) -> Objective:
    """Of a run, with those of its parts. own_losses: by name, what its settings name of the user's."""
    named = {one.name for one in fields(Objective)} - {"max_length", "given", "own_loss", "of_parts"}
    given, max_length = bool(settings.data.response_column), settings.sampling.max_new_tokens

    def of(algorithm: AlgorithmSettings) -> Objective:
        chosen = {name: getattr(algorithm, name) for name in named}
        if not algorithm.selects_by_reward:
            chosen["ce_above"] = -math.inf  # rows need no reward
        own_loss = own_losses.get(algorithm.loss)
        return Objective(**chosen, max_length=max_length, given=given, own_loss=own_loss)

    of_parts = {part: of(algorithm) for part, algorithm in settings.algorithms.items() if part}
    return replace(of(settings.algorithm), of_parts=of_parts)


class TrainStep:
    """The trainer's arithmetic for one rank: sum, sum, sum, then scale once and step. Synchronous torch, no I/O."""

    def __init__(self, policy: PolicyModel, settings: TrainerSettings, objective: Objective) -> None:
        self.policy = policy
        self._ranks = policy.ranks
        self._settings = settings
        self._objective = objective
        self._old_logprobs: dict[RowId, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
        self._metrics = LossMetrics()
        self._skipped_in_a_row = 0
        # Matrices decay, vectors (norms, biases) do not, as everywhere in the field.
        decays = {True: settings.weight_decay, False: 0.0}
        groups = [
            {"params": [p for p in policy.locals.values() if (p.ndim >= 2) is matrix], "weight_decay": decay}
            for matrix, decay in decays.items()
        ]
        # fused: .065 s instead of .30 s for 135M parameters on one CPU core
        adamw = OffloadedAdamW if settings.offload == "optimizer" else partial(torch.optim.AdamW, fused=True)
        self.optimizer = adamw(
            [group for group in groups if group["params"]], lr=settings.lr, betas=settings.betas, eps=ADAM_EPSILON
        )

    def optimizer_state(self) -> dict[str, Mapping[str, Tensor]]:
        """By parameter name; nothing of one that never stepped."""
        held, state = self.policy.locals.items(), self.optimizer.state
        return {name: state[parameter] for name, parameter in held if parameter in state}

    def restore(self, optimizer_state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from new masters. optimizer_state: as ``optimizer_state`` gave it."""
        for name, state in optimizer_state.items():
            self.optimizer.state[self.policy.locals[name]].update(state)
        self.policy.refresh()

    def accumulate(self, groups: Sequence[PromptGroup]) -> PieceDone:
        """Add the gradient of some rows' loss sum.

        A row whose advantage is exactly zero has a zero gradient unless there is a KL term, or it is imitated: it
        counts, but is not computed (groups whose rewards are all equal become common as the policy improves).
        """
        rows = [sample for group in groups for sample in group.samples]
        computed = [
            replace(group, samples=[self._with_old(sample) for sample in self._computed(group)])
            for group in sorted(groups, key=lambda group: group.part)  # those of one objective lie together
        ]
        computed = [group for group in computed if group.samples]
        for batches in self._in_lockstep(rows, split_by_tokens(computed, self._settings.micro_batch_tokens)):
            metrics = self.policy.backward(batches, self._objective)
            self._metrics += metrics if self.policy.is_first_peer else LossMetrics()
        num_tokens = sum(row.num_loss_tokens for row in rows)
        if self.policy.reads_rows:
            entropy = sum(rollout_entropy(row.rollout_logprobs, row.loss_mask) for row in rows)
            squares = sum(row.advantage**2 for row in rows)
            self._metrics += LossMetrics(
                rows=len(rows), loss_tokens=num_tokens, entropy=entropy, advantage_squares=squares
            )
        num_computed = sum(len(group.samples) for group in computed)
        return PieceDone(num_rows=len(rows), num_tokens=num_tokens, computed_rows=num_computed)

    def _computed(self, group: PromptGroup) -> list[TrainingSample]:
        """Its rows that have a gradient."""
        objective = self._objective.of(group.part)
        return [sample for sample in group.samples if objective.trains(sample.has_advantage, sample.reward)]

    def _in_lockstep(
        self, rows: Sequence[TrainingSample], pieces: Sequence[Sequence[PromptGroup]]
    ) -> Iterator[list[PackedBatch]]:
        """Micro-batches of a round, in the numbers and sizes that all ranks agree on: a forward pass is a collective.

        rows: of the round, by which peers see that they have the same.  Yields what is computed in one go.
        """
        layout = self._ranks.layout
        if layout.num_ranks == 1:
            yield from ([self._pack(piece)] for piece in pieces)
            return
        sizes = [num_inputs(piece) for piece in pieces]
        found = RoundShape(mark=_mark(rows), micro_batches=len(pieces), tokens=max(sizes, default=1))
        agreed = self._ranks.agree_round(found)
        count = max(agreed.micro_batches, layout.pipeline) if agreed.micro_batches else 0
        padded = [*pieces, *((),) * (count - len(pieces))]
        if layout.pipeline > 1 and padded:
            size = bucket(agreed.tokens, self._buckets())
            yield [self._pack(piece, -(-size // layout.tensor) * layout.tensor) for piece in padded]
            return
        for piece in padded:
            yield [self._pack(piece, -(-max(1, num_inputs(piece)) // layout.tensor) * layout.tensor)]

    def _pack(self, piece: Sequence[PromptGroup], pad_to: int = 0) -> PackedBatch:
        return pack(piece, self._objective.aggregation, self.policy.device, pad_to=pad_to, dtype=self.policy.sum_dtype)

    def _buckets(self) -> Sequence[int]:
        """Sizes of a pipeline's micro-batches, tokens."""
        most = self._settings.micro_batch_tokens
        return self._settings.parallel.buckets or [max(1, most // part) for part in (8, 4, 2, 1)]

    def _with_old(self, sample: TrainingSample) -> TrainingSample:
        """The row with its recorded old-policy logprobs, where they are recorded. Raises ValueError: they were not."""
        if not records_logprobs(self._objective.old_logprobs, self._settings):
            return sample
        if sample.row_id not in self._old_logprobs:
            raise ValueError(f"row {sample.row_id} came to be trained before its old-policy logprobs were recorded")
        response_ids, logprobs = self._old_logprobs[sample.row_id]
        if not np.array_equal(response_ids, sample.response_ids):
            raise RowsChangedError(sample.row_id)
        return replace(sample, old_logprobs=logprobs)

    def record_logprobs(self, groups: Sequence[PromptGroup]) -> PieceDone:
        """Remember old-policy logprobs of some rows, by row id, until ``forget_logprobs``."""
        rows = [sample for group in groups for sample in group.samples]
        found: dict[RowId, NDArray[np.float32]] = {}
        for batches in self._in_lockstep(rows, split_by_tokens(groups, self._settings.micro_batch_tokens)):
            for batch in batches:
                found |= by_row(batch, self.policy.logprobs(batch))
        for row in rows:
            logprobs = found[row.row_id]
            if row.loss_mask is not None:  # at their places in the response; 0 where the policy chose nothing
                logprobs = np.zeros(len(row.response_ids), dtype=logprobs.dtype)
                logprobs[row.loss_mask.astype(bool)] = found[row.row_id]
            self._old_logprobs[row.row_id] = row.response_ids, logprobs
        return PieceDone(num_rows=len(rows), num_tokens=sum(r.num_loss_tokens for r in rows), computed_rows=len(rows))

    def forget_logprobs(self) -> None:
        """The batch is over: its old-policy logprobs mean nothing to the next."""
        self._old_logprobs.clear()

    def close(self, *, batch: int, num_rows: int, num_tokens: int, num_batches: int = 0) -> dict[str, float]:
        """Scale the gradient sum by the mini-batch's size, clip it, step, and start the next sum.

        The size is what was accumulated here, on all ranks: rows that were generated again have other lengths than the
        log says.

        Args:    batch, num_batches: see ``learning_rate``.  num_rows, num_tokens: what the log says.
        Returns: metrics: loss, grad_norm (before clipping), lr, skipped_nonfinite, and LossMetrics.means.
        """
        metrics = self._ranks.reduce(self._metrics)
        self.policy.close()
        held_rows, held_tokens = round(metrics.rows), round(metrics.loss_tokens)
        if (held_rows, held_tokens) != (num_rows, num_tokens):
            log.warning(
                "a mini-batch held other rows than the log says; normalised by what it held",
                batch=batch,
                rows=held_rows,
                tokens=held_tokens,
                said_rows=num_rows,
                said_tokens=num_tokens,
            )
        squares = metrics.advantage_squares
        scale = 1.0 / normaliser(self._objective, num_rows=held_rows, num_tokens=held_tokens, advantage_squares=squares)
        stepped = self._take_step(metrics.loss, scale, held_tokens, batch=batch, num_batches=num_batches)
        self._metrics = LossMetrics()
        return {**stepped, **metrics.means(given=self._objective.given)}

    def _take_step(
        self, loss: float, scale: float, num_tokens: int, *, batch: int, num_batches: int
    ) -> dict[str, float]:
        """Step with the scaled sum, unless it is not finite or is of nothing, and start the next one.

        loss: its sum.  num_tokens: that it is of.
        """
        settings, policy = self._settings, self.policy
        policy.scale(scale)
        grad_norm = policy.gradient_norm()
        rate = learning_rate(
            batch,
            num_batches,
            lr=settings.lr,
            schedule=settings.lr_schedule,
            min_share=settings.lr_min_share,
            warmup=settings.warmup_batches,
        )
        finite = bool(np.isfinite(grad_norm) and np.isfinite(loss))
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MAX_SKIPPED:
            raise AlgorithmError(
                f"{MAX_SKIPPED} steps in a row were not taken, as loss ({loss * scale:.3g}) or gradient (norm "
                f"{grad_norm:.3g}) was not finite: look at algorithm.loss for a division by zero or an overflow, at "
                "the rewards, and for a trainer.lr that broke the weights"
            )
        if finite and num_tokens:
            if 0 < settings.grad_clip < grad_norm:
                policy.scale(settings.grad_clip / (grad_norm + 1e-6))
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = rate
            self.optimizer.step()
            policy.refresh()
        policy.start_sum()
        return {"loss": loss * scale, "grad_norm": grad_norm, "lr": rate, "skipped_nonfinite": 0.0 if finite else 1.0}


def num_inputs(piece: Sequence[PromptGroup]) -> int:
    """Tokens of its row."""
    return sum(len(group.prompt_ids) + sum(one.num_inputs for one in group.samples) for group in piece)


def _mark(rows: Sequence[TrainingSample]) -> int:
    """Of which rows a round has, as a number that peers can compare."""
    text = "\n".join(row.row_id for row in rows)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def learning_rate(
    batch: int,
    num_batches: int,
    *,
    lr: float,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
    min_share: float = 0.0,
    warmup: int = 0,
) -> float:
    """The rate of all optimizer steps of a batch: a linear rise over the warm-up, then constant, linear or cosine.

    A pure function of its number, so that it needs no state and survives every restart.

    Args:    batch: from 0.  num_batches: those of the run as it is planned when the batch is closed, which may change
             while it goes on: the rate is then that of a schedule that was so long from the start. 0: it never falls.
             lr: the highest.  min_share: of it, left at the end, in [0, 1].  warmup: batches.
    Returns: in (0, lr] during the warm-up: its first batch moves, its last has the whole rate, as has the one after it.
             Then in [min_share * lr, lr]; the last batch is one step above the least, so that it moves, too.
    Source:  transformers' get_linear_schedule_with_warmup and get_cosine_with_min_lr_schedule_with_warmup at step
             ``batch``; in the warm-up at ``batch + 1``, because their first step has rate 0.
    """
    if batch < warmup:
        return lr * (batch + 1) / warmup
    if schedule == "constant" or num_batches <= 0:
        return lr
    progress = min(1.0, (batch - warmup) / max(1, num_batches - warmup))
    left = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * (min_share + (1.0 - min_share) * left)
