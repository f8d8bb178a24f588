"""The learner that learns: a torch policy, its optimizer, and the ranks that it shares gradients with.

Owns: which parts a rank's learner is made of; what of it is in a checkpoint, and in the final model, which transformers
and SGLang load. Never: the log, the broker beyond the ranks' rendezvous. Invariant: the final model's directory is
there whole or not at all, and a trainer that was killed in between writes it again when the run is resumed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from transport.broker.base import Broker
from transport.contracts.messages import WeightManifest
from transport.contracts.settings import AlgorithmSettings, Settings
from transport.process import faults
from workers.algorithms.loss import Objective
from workers.errors import CheckpointError
from workers.trainer.checkpoint import MODEL_FILE, OPTIMIZER_FILE, Checkpoint, TensorFile
from workers.trainer.learner import InThread, PieceDone, PromptGroup
from workers.trainer.meeting import Meeting
from workers.trainer.policy.load import choose_device, choose_dtype, load_module
from workers.trainer.policy.model import PolicyModel
from workers.trainer.policy.parallel import GradientReducer, SingleRank, meet_ranks
from workers.trainer.policy.step import TrainStep
from workers.weights.publish import WeightPublisher


class PolicyLearner:
    """A Learner (learner.py).

    model_dir: the base model.  rank: which of the ``trainer.ranks`` this is.  meeting_dir: where those of one machine
    meet; one rank needs none.
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


def objective_of(settings: AlgorithmSettings) -> Objective:
    """The objective that the algorithm section names."""
    return Objective(
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        kl_coef=settings.kl_coef,
        importance_cap=settings.importance_cap,
        aggregation=settings.aggregation,
        old_logprobs=settings.old_logprobs,
    )


def build_step(
    settings: Settings, model_dir: Path, *, reducer: GradientReducer | None = None, trust_remote_code: bool = False
) -> TrainStep:
    """Load the base model and make the step that trains it. Raises ModelError."""
    device = choose_device(settings.trainer.device)
    module = load_module(model_dir, device=device, trust_remote_code=trust_remote_code)
    policy = PolicyModel(
        module, dtype=choose_dtype(settings.trainer.dtype, device), temperature=settings.sampling.temperature
    )
    return TrainStep(policy, settings.trainer, objective_of(settings.algorithm), reducer)


# --- checkpoints ------------------------------------------------------------------------------------------------------

RANDOM_STATE = "torch_random_state"


def tensor_files(step: TrainStep) -> dict[str, TensorFile]:
    """The files that ``restore`` reads."""
    contents = {MODEL_FILE: dict(step.policy.masters), OPTIMIZER_FILE: optimizer_tensors(step)}
    return {
        name: TensorFile(sum(tensor.nbytes for tensor in tensors.values()), partial(_write, tensors))
        for name, tensors in contents.items()
    }


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def optimizer_tensors(step: TrainStep) -> dict[str, Tensor]:
    """The optimizer's state by parameter name, and the random state. Nothing of a parameter that never stepped."""
    state = step.optimizer.state
    tensors = {
        f"{key}.{name}": torch.as_tensor(value)
        for name, parameter in step.policy.masters.items()
        for key, value in state.get(parameter, {}).items()
    }
    return tensors | {RANDOM_STATE: torch.get_rng_state()}


def restore(step: TrainStep, checkpoint: Checkpoint) -> None:
    """Make ``step`` what it was when it was saved, bit for bit.

    Raises: CheckpointError: the tensors are not those of this model.
    """
    weights = load_file(checkpoint.path / MODEL_FILE)
    saved = load_file(checkpoint.path / OPTIMIZER_FILE)
    masters = step.policy.masters
    wrong = sorted(weights.keys() ^ masters.keys()) or [n for n, p in masters.items() if weights[n].shape != p.shape]
    if wrong:
        raise CheckpointError(checkpoint.path, 0, f"its tensors are not those of this model: {', '.join(wrong[:4])}")
    with torch.no_grad():
        for name, parameter in masters.items():
            parameter.copy_(weights[name])
    torch.set_rng_state(saved.pop(RANDOM_STATE))
    for key, tensor in saved.items():
        kind, _, name = key.partition(".")
        step.optimizer.state[masters[name]][kind] = tensor.to(masters[name].device)
    step.policy.refresh()


# --- the final model --------------------------------------------------------------------------------------------------


def save_final_model(policy: PolicyModel, model_dir: Path, target: Path, *, trust_remote_code: bool = False) -> None:
    """Write weights, configuration, tokenizer and chat template to ``target``, replacing what is there.

    model_dir: the base model's directory; configuration and tokenizer are its own.
    Raises: CheckpointError: the disk is full or refuses.
    """
    dtype = source_dtype(model_dir)
    weights = {name: parameter.detach().to(dtype) for name, parameter in policy.masters.items()}
    needed = sum(tensor.nbytes for tensor in weights.values())
    aside = target.with_name(f"{target.name}.writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        policy.module.save_pretrained(aside, state_dict=weights)
        shutil.copyfile(model_dir / "config.json", aside / "config.json")  # the module's names our attention
        AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code).save_pretrained(aside)
        shutil.rmtree(target, ignore_errors=True)
        faults.point("train.model_removed")
        aside.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(target, needed, str(error)) from error


def source_dtype(model_dir: Path) -> torch.dtype:
    """The dtype that the base model's configuration names; bf16 where it names none."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."))
