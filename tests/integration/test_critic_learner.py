"""The critic: values are those of a plain forward pass, the streamed gradient that of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.trl_reference import pad_groups
from tests.fakes.tiny_models import tiny_model
from tests.fakes.training import make_groups
from transport.contracts.settings import AlgorithmSettings, CriticSettings, Settings, TrainerSettings
from transport.contracts.types import RowId
from workers.algorithms.value_loss import value_loss_N
from workers.critic.learner import CriticLearner, ValueModel, ValueStep, with_value_head
from workers.models import random_model
from workers.trainer.learner import PromptGroup
from workers.trainer.policy.model import load_module
from workers.trainer.policy.packing import pack

CLIP = 0.2


@pytest.fixture(params=[True, False], ids=["tied", "own-head"])
def model_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    random_model("qwen3-tiny")(tmp_path)  # for its tokenizer
    tiny_model("qwen3", tied=request.param).save_pretrained(tmp_path)
    return tmp_path


def valued_groups(*, masked: bool = True) -> list[PromptGroup]:
    random = np.random.default_rng(5)

    def valued(tokens: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return random.normal(size=tokens).astype(np.float32)

    return [
        replace(
            group,
            samples=[
                replace(one, values=valued(len(one.response_ids)), returns=valued(len(one.response_ids)), advantage=0.0)
                for one in group.samples
            ],
        )
        for group in make_groups(masked=masked)
    ]


def new_step(directory: Path, dtype: torch.dtype = torch.float32, **settings: object) -> ValueStep:
    """With a head that is not zero, so that the trunk has a gradient."""
    module = with_value_head(load_module(directory, device=torch.device("cpu")))
    head = module.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1)) / 4)
    return ValueStep(ValueModel(module, dtype=dtype, temperature=1.0), TrainerSettings(**settings), clip=CLIP)  # type: ignore[arg-type]


def padded_values(trunk: nn.Module, weight: torch.Tensor, groups: Sequence[PromptGroup]) -> torch.Tensor:
    """[rows, width] of the states before each response token, in the usual layout: nothing of ours."""
    padded = pad_groups(groups)
    ids = torch.cat([padded.prompt_ids, padded.completion_ids], dim=1)
    mask = torch.cat([padded.prompt_mask, padded.completion_mask], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = trunk(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
    width = padded.completion_ids.shape[1]
    return (hidden[:, -width - 1 : -1] @ weight.T)[..., 0]


def test_values_are_those_of_a_plain_forward_pass(model_dir: Path):
    step, groups = new_step(model_dir, micro_batch_tokens=16), make_groups()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        expected = padded_values(model.base_model, step.policy.masters["lm_head.weight"], groups)
    found = step.values(groups)
    rows = [sample for group in groups for sample in group.samples]
    assert found.keys() == {row.row_id for row in rows}
    for row, values in zip(rows, expected, strict=True):
        assert found[row.row_id] == pytest.approx(values[: len(row.response_ids)].numpy(), abs=1e-5)


def test_the_streamed_gradient_is_that_of_the_whole_batch(model_dir: Path):
    groups = valued_groups()
    step = new_step(model_dir, micro_batch_tokens=16)
    for piece in (groups[2:], groups[:1], groups[1:2]):  # rounds come in the order of generation
        done = step.accumulate(piece)
        assert done.computed_rows == done.num_rows == len([s for g in piece for s in g.samples])
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    weight = step.policy.masters["lm_head.weight"].detach().clone().requires_grad_()
    values = padded_values(model.base_model, weight, groups)
    tokens = pack(groups, "token_mean").tokens
    assert tokens.values_N is not None
    assert tokens.returns_N is not None
    chosen = pad_groups(groups).loss_mask.bool()
    value_loss_N(values[chosen], tokens.values_N, tokens.returns_N, CLIP).sum().backward()
    trunk = dict(model.base_model.named_parameters())
    for name, local in step.policy.locals.items():
        expected = weight.grad if name == "lm_head.weight" else trunk[name.removeprefix("model.")].grad
        assert expected is not None
        assert local.grad is not None
        error = (local.grad - expected).norm() / expected.norm()
        assert error < 1e-5, name


def test_a_step_brings_values_nearer_to_returns(model_dir: Path):
    step, groups = new_step(model_dir, lr=3e-3), valued_groups(masked=False)
    losses = list[float]()
    for batch in range(8):
        # as recorded just before, so that the clip is around where it stands
        now = step.values(groups)
        groups = [replace(g, samples=[replace(s, values=now[s.row_id]) for s in g.samples]) for g in groups]
        step.accumulate(groups)
        metrics = step.close(batch=batch, num_rows=9, num_tokens=34)
        losses.append(metrics["value_loss"])
        assert metrics["skipped_nonfinite"] == 0.0
        assert metrics["loss"] == pytest.approx(metrics["value_loss"])
    assert losses[-1] < 0.8 * losses[0]


def test_a_return_that_is_not_finite_never_reaches_the_weights(model_dir: Path):
    step, (group, *_) = new_step(model_dir), valued_groups()
    bad = replace(group.samples[0], returns=np.full(len(group.samples[0].response_ids), np.inf, np.float32))
    before = {name: master.clone() for name, master in step.policy.masters.items()}
    step.accumulate([replace(group, samples=[bad])])
    assert step.close(batch=0, num_rows=1, num_tokens=1)["skipped_nonfinite"] == 1.0
    assert all(torch.equal(master, before[name]) for name, master in step.policy.masters.items())


def test_rows_without_values_are_refused_by_name(model_dir: Path):
    with pytest.raises(ValueError, match=r"rows \('0/0/0', .* without its values"):
        new_step(model_dir).accumulate(make_groups())


def test_a_critic_that_never_learnt_expects_nothing(model_dir: Path):
    settings = Settings(
        algorithm=AlgorithmSettings(advantage="gae"),
        trainer=TrainerSettings(dtype="float32"),
        critic=CriticSettings(lr=3e-4),
    )
    learner = CriticLearner(settings, model_dir)
    learner.load(None)
    groups = make_groups()
    assert all(not values.any() for values in learner.values(groups).values())
    learner.accumulate(valued_groups())
    assert learner.close(batch=0, num_rows=9, num_tokens=34)["lr"] == 3e-4
    found = learner.values(groups)
    assert found[RowId("0/0/0")].dtype == np.float32
    assert any(values.any() for values in found.values())
