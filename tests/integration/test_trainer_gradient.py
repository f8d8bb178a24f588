"""The gradient of a streamed, packed batch is that of the whole batch in the usual padded layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.trl_reference import pad_groups
from orchestrator.config.load import resolve
from orchestrator.core.model.groups import plan_phases
from orchestrator.core.model.settings import core_settings
from tests.fakes.tiny_models import tiny_model
from tests.fakes.training import make_groups
from transport.contracts.settings import Algorithm, GenerationSettings, Settings, TrainerSettings
from transport.tensors.base import Endpoint
from workers.algorithms.loss import Aggregation, Objective, OldLogprobs, PolicyLoss, loss_sum, loss_terms, normaliser
from workers.errors import AlgorithmError, ModelError, RowsChangedError
from workers.models import random_model
from workers.trainer.policy import attention
from workers.trainer.policy.gradients import global_norm
from workers.trainer.policy.model import PolicyModel, check_packing, load_module, packed_logprobs, reference_logprobs
from workers.trainer.policy.offload import OffloadedAdamW
from workers.trainer.policy.packing import PromptGroup, pack
from workers.trainer.policy.policy_learner import MAX_SKIPPED, PolicyLearner, TrainStep, objective_of
from workers.user_functions.loss import own_losses
from workers.weights.publish import WeightPublisher

CPU = torch.device("cpu")


def save_tiny(directory: Path, family: str = "qwen3", *, tied: bool = True) -> Path:
    random_model("qwen3-tiny")(directory)  # for its tokenizer
    tiny_model(family, tied=tied).save_pretrained(directory)
    return directory


def new_step(
    directory: Path, objective: Objective, dtype: torch.dtype = torch.float32, **settings: object
) -> TrainStep:
    policy = PolicyModel(load_module(directory, device=CPU), dtype=dtype, temperature=0.7)
    return TrainStep(policy, TrainerSettings(**settings), objective)  # type: ignore[arg-type]


def padded_gradient(directory: Path, groups: Sequence[PromptGroup], objective: Objective) -> torch.Tensor:
    """Autograd over the padded batch in one piece, at temperature 0.7: nothing of ours but the objective."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    padded = pad_groups(groups)
    ids = torch.cat([padded.prompt_ids, padded.completion_ids], dim=1)
    mask = torch.cat([padded.prompt_mask, padded.completion_mask], dim=1)
    width = padded.completion_ids.shape[1]
    logits = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    logprobs = (logits[:, -width - 1 : -1] / 0.7).log_softmax(-1).gather(2, padded.completion_ids[..., None])[..., 0]
    batch = pack(groups, objective.aggregation)
    loss_sum(logprobs[padded.loss_mask.bool()], batch.tokens, objective, loss_terms(objective)).backward()
    gradient = nn.utils.parameters_to_vector(p.grad for p in model.parameters() if p.grad is not None)
    return gradient / size_of(groups, objective)


def size_of(groups: Sequence[PromptGroup], objective: Objective) -> float:
    rows = [sample for group in groups for sample in group.samples]
    tokens = sum(sample.num_loss_tokens for sample in rows)
    squares = sum(sample.advantage**2 for sample in rows)
    return normaliser(objective, num_rows=len(rows), num_tokens=tokens, advantage_squares=squares)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("old_logprobs", ["rollout", "recomputed"])
@pytest.mark.parametrize("algorithm", [name for name in get_args(Algorithm) if name != "sft"])
def test_streamed_and_packed_equals_padded_and_whole(
    tmp_path: Path, algorithm: Algorithm, old_logprobs: OldLogprobs
) -> None:
    asked = [f"algorithm.name={algorithm}", f"algorithm.old_logprobs={old_logprobs}"]
    taught = ["algorithm.teacher=any"] if algorithm == "distill" else []
    chosen = resolve(None, [], [*asked, *taught], {}).settings
    objective = objective_of(chosen)
    if not objective.kl_coef and chosen.algorithm.advantage != "batch_std":
        objective = replace(objective, kl_coef=0.05)
    directory = save_tiny(tmp_path)
    groups = make_groups(masked=True, all_columns=True)
    if old_logprobs == "rollout":
        groups = [replace(g, samples=[replace(s, old_logprobs=None) for s in g.samples]) for g in groups]
    step = new_step(directory, objective, micro_batch_tokens=16, epochs=2)  # of one step no logprobs are recorded
    step._old_logprobs = {
        s.row_id: (s.response_ids, s.old_logprobs) for g in groups for s in g.samples if s.old_logprobs is not None
    }
    for piece in (groups[2:], groups[:1], groups[1:2]):  # rounds come in the order of generation
        step.accumulate(piece)
    streamed = step.policy.gradient / size_of(groups, objective)
    assert relative_error(streamed, padded_gradient(directory, groups, objective)) < 1e-5


def test_what_is_imitated_is_what_was_rewarded_and_the_rest_is_not_computed(tmp_path: Path) -> None:
    """A row of a reward at the bound counts in what the sum is divided by, and nowhere else."""
    directory, groups = save_tiny(tmp_path), make_groups(masked=True)
    objective = Objective(rl_coef=0.0, ce_coef=1.0, ce_above=0.5)
    step = new_step(directory, objective, micro_batch_tokens=16)
    done = [step.accumulate(piece) for piece in (groups[1:], groups[:1])]
    assert (sum(one.num_rows for one in done), sum(one.computed_rows for one in done)) == (9, 4)
    expected = padded_gradient(directory, groups, objective)
    assert relative_error(step.policy.gradient / size_of(groups, objective), expected) < 1e-5
    flipped = [replace(g, samples=[replace(s, reward=1.0 - (s.reward or 0.0)) for s in g.samples]) for g in groups]
    assert relative_error(padded_gradient(directory, flipped, objective), expected) > 0.5


def test_given_responses_are_imitated_and_compared_with_no_rollout(tmp_path: Path) -> None:
    step = new_step(save_tiny(tmp_path), Objective(rl_coef=0.0, ce_coef=1.0, given=True), lr=1e-2)
    groups = [replace(g, samples=[replace(s, advantage=0.0) for s in g.samples]) for g in make_groups()]
    losses: list[float] = []
    for batch in range(4):
        assert step.accumulate(groups).computed_rows == 9
        metrics = step.close(batch=batch, num_rows=9, num_tokens=34)
        losses.append(metrics["loss"])
    assert losses == sorted(losses, reverse=True)
    assert metrics.keys() == {"loss", "grad_norm", "lr", "skipped_nonfinite", "computed_tokens"}


@pytest.mark.parametrize(("function", "like"), [("clipped", "ppo_clip"), ("row_mean", "")])
def test_a_loss_of_the_users_is_streamed_as_one_of_ours(tmp_path: Path, function: str, like: str) -> None:
    directory, groups = save_tiny(tmp_path), make_groups(masked=True)
    (loss,) = own_losses([name := f"tests.fakes.algorithms:{function}"], name).values()
    objective = Objective(loss=loss.name, own_loss=loss, importance_cap=0.0)
    step = new_step(directory, objective, micro_batch_tokens=16)
    for piece in (groups[2:], groups[:1], groups[1:2]):
        step.accumulate(piece)
    streamed = step.policy.gradient / size_of(groups, objective)
    assert relative_error(streamed, padded_gradient(directory, groups, objective)) < 1e-5
    if like:
        ours = padded_gradient(directory, groups, Objective(loss=like, importance_cap=0.0))
        assert relative_error(streamed, ours) < 1e-5


def test_streams_add_up(tmp_path: Path) -> None:
    """The gradient of a weighted sum is the weighted sum of gradients."""
    directory = save_tiny(tmp_path)
    groups = make_groups(all_columns=True)
    groups = [replace(g, samples=[replace(s, old_logprobs=None) for s in g.samples]) for g in groups]
    alone = [Objective(), Objective(rl_coef=0, ce_coef=1), Objective(rl_coef=0, kl_coef=1, kl_estimator="reverse")]
    parts = [padded_gradient(directory, groups, objective) for objective in alone]
    step = new_step(directory, Objective(rl_coef=0.5, ce_coef=0.2, kl_coef=0.1, kl_estimator="reverse"))
    step.accumulate(groups)
    expected = 0.5 * parts[0] + 0.2 * parts[1] + 0.1 * parts[2]
    assert relative_error(step.policy.gradient / size_of(groups, Objective()), expected) < 1e-5


PARTS = ("words", "", "sums", "words", "given", "sums")
"""Of six groups: parts of the data, and one of none."""


@pytest.mark.parametrize("micro_batch_tokens", [16, 4096])
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_parts_with_losses_of_their_own_are_streamed_as_the_whole_batch(
    tmp_path: Path, aggregation: Aggregation, micro_batch_tokens: int
) -> None:
    """In one batch, and in one packed row: of tokens and of rows, ours and the user's, imitated, with a KL; one part is
    in none of its groups."""
    directory, shared = save_tiny(tmp_path), {"aggregation": aggregation, "max_length": 9}
    (own,) = own_losses([name := "tests.fakes.algorithms:row_mean"], name).values()
    of_parts = {
        "words": Objective(loss="gspo", clip_low=3e-4, clip_high=4e-4, kl_coef=0.1, **shared),
        "sums": Objective(loss=own.name, own_loss=own, **shared),
        "given": Objective(rl_coef=0.0, ce_coef=0.7, ce_above=0.5, **shared),
        "unused": Objective(loss="cispo", importance_cap=0.0, **shared),
    }
    objective = Objective(of_parts=of_parts, **shared)
    groups = make_groups(
        masked=True,
        all_columns=True,
        prompt_tokens=(5, 3, 9, 4, 6, 2),
        response_tokens=((4, 1, 7), (2, 2), (6, 3, 1, 8), (5, 2), (3, 4, 1), (6, 1)),
    )
    groups = [
        replace(g, part=part, samples=[replace(s, old_logprobs=None) for s in g.samples])
        for g, part in zip(groups, PARTS, strict=True)
    ]
    step = new_step(directory, objective, micro_batch_tokens=micro_batch_tokens)
    for piece in (groups[3:], groups[:2], groups[2:3]):
        step.accumulate(piece)
    size = size_of(groups, objective)
    whole = sum(padded_gradient(directory, [g], objective.of(g.part)) * size_of([g], objective) for g in groups) / size
    assert isinstance(whole, torch.Tensor)
    assert relative_error(step.policy.gradient / size, whole) < 1e-5
    assert relative_error(padded_gradient(directory, groups, replace(objective, of_parts={})), whole) > 0.1
    rows = [row for group in groups for row in group.samples]
    metrics = step.close(batch=0, num_rows=len(rows), num_tokens=sum(row.num_loss_tokens for row in rows))
    assert step._metrics.kl_tokens == 0, "the next batch begins with nothing"
    assert metrics["kl"] > 0


def test_a_batch_without_rows_of_a_part_is_that_of_the_others(tmp_path: Path) -> None:
    """Also one all of whose rows have nothing to be trained: no gradient, and no error."""
    directory, groups = save_tiny(tmp_path), make_groups()
    silent = [replace(g, part="a", samples=[replace(s, advantage=0.0) for s in g.samples]) for g in groups]
    step = new_step(
        directory, Objective(of_parts={"a": Objective(loss="gspo"), "b": Objective(loss="cispo", importance_cap=0.0)})
    )
    assert step.accumulate(silent).computed_rows == 0
    assert step.close(batch=0, num_rows=9, num_tokens=34)["grad_norm"] == 0
    step.accumulate(groups)
    alone = new_step(directory, Objective())
    alone.accumulate(groups)
    assert relative_error(step.policy.gradient, alone.policy.gradient) < 1e-6


def test_advantages_of_tokens_and_of_rows_lie_in_one_packed_row(tmp_path: Path) -> None:
    """A part whose estimator is of tokens, beside one whose is of samples."""
    directory, groups = save_tiny(tmp_path), make_groups(masked=True)
    even = [
        replace(
            g, samples=[replace(s, advantages=np.full(len(s.response_ids), s.advantage, np.float32)) for s in g.samples]
        )
        for g in groups
    ]
    steps = [new_step(directory, Objective()) for _ in range(3)]
    steps[0].accumulate(groups)
    steps[1].accumulate([even[0], groups[1], even[2]])
    assert relative_error(steps[1].policy.gradient, steps[0].policy.gradient) < 1e-6
    later = [replace(s, advantages=s.advantages * np.arange(len(s.response_ids))) for s in even[0].samples]
    steps[2].accumulate([replace(even[0], samples=later), *groups[1:]])
    assert relative_error(steps[2].policy.gradient, steps[0].policy.gradient) > 0.05


@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("qwen2", True), ("llama", True), ("olmo2", False)])
def test_other_families_and_a_head_of_its_own(tmp_path: Path, family: str, tied: bool) -> None:
    directory = save_tiny(tmp_path, family, tied=tied)
    groups, objective = make_groups(), Objective()
    step = new_step(directory, objective)
    step.accumulate(groups)
    tokens = sum(len(sample.response_ids) for group in groups for sample in group.samples)
    assert relative_error(step.policy.gradient / tokens, padded_gradient(directory, groups, objective)) < 1e-5


def test_attention_of_long_responses_takes_the_flash_path_to_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tiny(tmp_path)
    groups = make_groups()
    gradients: list[torch.Tensor] = []
    for limit in (attention.MAX_SCORES, 0):
        monkeypatch.setattr(attention, "MAX_SCORES", limit)
        step = new_step(directory, Objective())
        step.accumulate(groups)
        gradients.append(step.policy.gradient)
    assert relative_error(gradients[1], gradients[0]) < 1e-5


def test_bf16_sums_gradients_in_fp32_and_stays_near(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path)
    groups = make_groups()
    exact, rounded = (new_step(directory, Objective(), dtype) for dtype in (torch.float32, torch.bfloat16))
    exact.accumulate(groups)
    rounded.accumulate(groups)
    assert rounded.policy.gradient.dtype == torch.float32
    assert relative_error(rounded.policy.gradient, exact.policy.gradient) < 0.2
    once = rounded.policy.gradient.clone()
    rounded.accumulate(groups)
    assert relative_error(rounded.policy.gradient, 2 * once) < 1e-6
    before = {name: master.detach().clone() for name, master in rounded.policy.masters.items()}
    rounded.close(batch=0, num_rows=9, num_tokens=34)
    name, master = next(iter(rounded.policy.masters.items()))
    copy = dict(rounded.policy.module.named_parameters())[name]
    assert not torch.equal(master, before[name])
    assert torch.equal(copy, master.to(torch.bfloat16))


def test_what_nothing_was_computed_of_is_not_told_and_entropy_is_that_of_all_tokens(tmp_path: Path) -> None:
    step = new_step(save_tiny(tmp_path), Objective())
    groups = make_groups(masked=True)
    rows = [row for group in groups for row in group.samples]
    chosen = [row.rollout_logprobs[row.loss_mask == 1] for row in rows]
    entropy = -float(np.concatenate(chosen).mean())
    without = [replace(group, samples=[replace(row, advantage=0.0) for row in group.samples]) for group in groups]
    tokens = sum(row.num_loss_tokens for row in rows)
    step.accumulate(without)
    none = step.close(batch=0, num_rows=len(rows), num_tokens=tokens)
    assert none.keys() == {"loss", "grad_norm", "lr", "skipped_nonfinite", "entropy", "computed_tokens"}
    assert none["computed_tokens"] == 0
    assert none["entropy"] == pytest.approx(entropy, rel=1e-5)
    step.accumulate([*groups[:1], *without[1:]])
    some = step.close(batch=1, num_rows=len(rows), num_tokens=tokens)
    assert some["computed_tokens"] == sum(row.num_loss_tokens for row in groups[0].samples)
    assert some["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert {"clip_fraction_low", "logprob_mismatch", "mismatch_tv"} <= some.keys()
    assert "kl" not in some, "there is no reference"


def test_logprobs_are_recorded_where_they_belong(tmp_path: Path) -> None:
    """The logprobs that a pass records are those that its first training step finds: every ratio is one."""
    step = new_step(save_tiny(tmp_path), Objective(old_logprobs="recomputed", importance_cap=0.0), epochs=2)
    groups = make_groups(masked=True)
    with pytest.raises(ValueError, match="0/0/0"):
        step.accumulate(groups)
    step.record_logprobs(groups)
    step.accumulate(groups)
    metrics = step.close(batch=0, num_rows=9, num_tokens=34)
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (0, 0)
    rows = [s for g in groups for s in g.samples]
    expected = -sum(s.advantage * s.num_loss_tokens for s in rows) / sum(s.num_loss_tokens for s in rows)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("mini_batches", "epochs"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_what_the_core_orders_is_what_the_learner_needs(
    tmp_path: Path, mini_batches: int, epochs: int, loss: PolicyLoss
) -> None:
    """The passes over a batch that the core plans train it, and the gradient is that of recorded logprobs."""
    settings = resolve(
        None,
        [],
        [
            "algorithm.old_logprobs=recomputed",
            f"algorithm.loss={loss}",
            f"trainer.mini_batches={mini_batches}",
            f"trainer.epochs={epochs}",
        ],
        {},
    ).settings
    core, directory, groups = core_settings(settings), save_tiny(tmp_path), make_groups(masked=True)
    step = new_step(directory, objective_of(settings), mini_batches=mini_batches, epochs=epochs)
    for phase in plan_phases(core.mini_batches, core.epochs, core.record_logprobs)[: 1 + core.record_logprobs]:
        (step.record_logprobs if phase.kind == "logprobs" else step.accumulate)(groups)
    recorded = new_step(directory, objective_of(settings), epochs=2)
    recorded.record_logprobs(groups)
    recorded.accumulate(groups)
    assert relative_error(step.policy.gradient, recorded.policy.gradient) < 1e-5
    found, expected = (one.close(batch=0, num_rows=9, num_tokens=34) for one in (step, recorded))
    assert found == pytest.approx(expected, rel=1e-5)
    assert found["clip_fraction_low"] == found["clip_fraction_high"] == 0.0


def test_rows_that_changed_since_their_logprobs_were_recorded_are_named(tmp_path: Path) -> None:
    step = new_step(save_tiny(tmp_path), Objective(old_logprobs="recomputed", importance_cap=0.0), epochs=2)
    step.record_logprobs(make_groups(seed=1))
    with pytest.raises(RowsChangedError, match="0/0/0"):
        step.accumulate(make_groups(seed=2))


def test_rows_without_advantage_count_but_are_not_computed(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path)
    groups = make_groups()
    flat = replace(groups[0], samples=[replace(sample, advantage=0.0) for sample in groups[0].samples])
    step = new_step(directory, Objective())
    done = step.accumulate([flat, *groups[1:]])
    assert (done.num_rows, done.num_tokens, done.computed_rows) == (9, 34, 6)
    expected = padded_gradient(directory, [flat, *groups[1:]], Objective())
    assert relative_error(step.policy.gradient / 34, expected) < 1e-5
    with_kl = new_step(directory, Objective(kl_coef=0.1))
    kept = make_groups(all_columns=True)
    kept = [replace(g, samples=[replace(s, advantage=0.0, old_logprobs=None) for s in g.samples]) for g in kept]
    assert with_kl.accumulate(kept).computed_rows == 9


def test_clipping_warm_up_and_decay(tmp_path: Path) -> None:
    step = new_step(save_tiny(tmp_path), Objective(), lr=1e-2, warmup_batches=4, grad_clip=0.5, weight_decay=0.1)
    rates: list[float] = []
    for batch in range(6):
        step.accumulate(make_groups(seed=batch))
        metrics = step.close(batch=batch, num_rows=9, num_tokens=34)
        rates.append(metrics["lr"])
        assert metrics["grad_norm"] > 0.5
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    assert not step.policy.gradient.any()
    decays = {g["weight_decay"]: {p.ndim for p in g["params"]} for g in step.optimizer.param_groups}
    assert decays == {0.1: {2}, 0.0: {1}}


def test_the_clipped_gradient_has_the_norm_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = new_step(save_tiny(tmp_path), Objective(), grad_clip=0.5)
    norms: list[float] = []
    monkeypatch.setattr(step.optimizer, "step", lambda: norms.append(step.policy.gradient.norm().item()))
    step.accumulate(make_groups())
    step.close(batch=0, num_rows=9, num_tokens=34)
    assert norms == pytest.approx([0.5], rel=1e-4)


def test_the_norm_of_many_elements_is_exact() -> None:
    gradient = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    assert global_norm([gradient]) == pytest.approx(gradient.norm(dtype=torch.float64).item(), rel=1e-6)
    gradient[5] = float("inf")
    assert not np.isfinite(global_norm([gradient]))


def test_a_gradient_that_is_not_finite_is_skipped_and_said(tmp_path: Path) -> None:
    step = new_step(save_tiny(tmp_path), Objective())
    groups = make_groups()
    step.accumulate([replace(groups[0], samples=[replace(groups[0].samples[0], advantage=float("nan"))])])
    before = [master.detach().clone() for master in step.policy.masters.values()]
    assert step.close(batch=0, num_rows=1, num_tokens=4)["skipped_nonfinite"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, step.policy.masters.values(), strict=True))
    step.accumulate(groups)
    assert step.close(batch=0, num_rows=9, num_tokens=34)["skipped_nonfinite"] == 0


def test_gradients_that_are_never_finite_end_the_run_by_name(tmp_path: Path) -> None:
    step = new_step(save_tiny(tmp_path), Objective())
    sample = make_groups()[0].samples[0]
    broken = [replace(make_groups()[0], samples=[replace(sample, advantage=float("nan"))])]

    def skip() -> float:
        step.accumulate(broken)
        return step.close(batch=0, num_rows=1, num_tokens=4)["skipped_nonfinite"]

    assert [skip() for _ in range(MAX_SKIPPED - 1)] == [1] * (MAX_SKIPPED - 1)
    step.accumulate(make_groups())
    step.close(batch=0, num_rows=9, num_tokens=34)
    assert [skip() for _ in range(MAX_SKIPPED - 1)] == [1] * (MAX_SKIPPED - 1), "counted from the last that was taken"
    with pytest.raises(AlgorithmError, match=r"8 steps in a row were not taken, as loss \(nan\)"):
        skip()


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_module(save_tiny(tmp_path), device=CPU)
    own_forward = type(module).forward

    def scaling(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own_forward(self, *args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(type(module), "forward", scaling)
    with pytest.raises(ModelError, match="cannot be trained packed"):
        check_packing(module)


@pytest.mark.parametrize(
    ("changes", "max_context", "refused"),
    [
        ({}, 0, False),
        ({"sliding_window": 40}, 0, False),  # which use_sliding_window has to say
        ({"use_sliding_window": True, "sliding_window": 40}, 0, True),
        ({"use_sliding_window": True, "sliding_window": 40}, 41, True),
        ({"use_sliding_window": True, "sliding_window": 40}, 40, False),
        ({"use_sliding_window": True, "sliding_window": 256}, 0, False),
        ({"use_sliding_window": True, "sliding_window": 40, "layer_types": ["full_attention"] * 2}, 0, False),
    ],
)
def test_a_model_whose_samples_outgrow_its_window_is_refused_before_the_first_of_them(
    tmp_path: Path, changes: dict[str, object], max_context: int, refused: bool
) -> None:
    """The trainer died at it, in the middle of a run; so did the reference model."""
    directory = save_tiny(tmp_path, "qwen2")
    config = json.loads((directory / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * 2 if changes.get("use_sliding_window") else None
    (directory / "config.json").write_text(json.dumps(config | changes))
    settings = Settings(generation=GenerationSettings(max_context=max_context))
    publisher = WeightPublisher("run", tmp_path, endpoint=Endpoint())
    for load in (
        lambda: PolicyLearner(settings, directory, publisher).load(None),
        lambda: reference_logprobs(directory, settings),
    ):
        if refused:
            with pytest.raises(
                ModelError, match=r"qwen2 model see 40 tokens .* set generation\.max_context = 40 or less"
            ):
                load()
        else:
            load()


def test_prompts_of_one_token_and_responses_of_one_token(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path)
    groups = make_groups(prompt_tokens=(1, 2), response_tokens=((1, 1), (1, 3)))
    step = new_step(directory, Objective())
    step.accumulate(groups)
    assert relative_error(step.policy.gradient / 6, padded_gradient(directory, groups, Objective())) < 1e-5
    assert np.isfinite(packed_logprobs(step.policy.module, pack(groups, "token_mean"), 1.0).numpy()).all()


def test_a_step_with_offload_is_the_same_step(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path)
    steps = [new_step(directory, Objective(), offload=offload) for offload in ("none", "optimizer")]
    for step in steps:
        for batch in range(2):
            step.accumulate(make_groups(seed=batch))
            step.close(batch=batch, num_rows=9, num_tokens=34)
    assert isinstance(steps[1].optimizer, OffloadedAdamW)
    for one, other in zip(*(step.policy.masters.values() for step in steps), strict=True):
        assert torch.equal(one, other)
        states = (steps[0].optimizer.state[one], steps[1].optimizer.state[other])
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
