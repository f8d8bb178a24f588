"""Where tokens stand in a packed row, and how rounds are cut to size."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.fakes.tiny_models import in_float64, tiny_model
from tests.fakes.training import make_groups
from workers.algorithms.loss import Objective, loss_sum, loss_terms
from workers.trainer.policy import attention
from workers.trainer.policy.head import Head, backward_through_head
from workers.trainer.policy.model import packed_logprobs, plain_head, predictor_hidden
from workers.trainer.policy.packing import PackedBatch, PromptGroup, pack, split_by_tokens


def row_count(groups: list[PromptGroup]) -> int:
    return sum(len(group.samples) for group in groups)


def test_the_prompt_stands_once_and_the_last_token_is_no_input() -> None:
    groups = make_groups(prompt_tokens=(3,), response_tokens=((4, 1, 2),))
    (group,) = groups
    batch = pack(groups, "token_mean")
    first, _, third = group.samples
    expected = [*group.prompt_ids, *first.response_ids[:3], *third.response_ids[:1]]
    assert batch.input_ids.tolist() == [expected]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 3]]
    assert batch.predictor_N.tolist() == [2, 3, 4, 5, 2, 2, 6]
    assert batch.target_N.tolist() == [token for sample in group.samples for token in sample.response_ids]
    assert batch.row_lengths == (4, 1, 2)


def test_masked_tokens_are_inputs_but_no_targets() -> None:
    (group,) = make_groups(prompt_tokens=(3,), response_tokens=((5,),))
    mask = np.array([1, 0, 1, 0, 1], dtype=np.uint8)
    batch = pack([replace(group, samples=[replace(group.samples[0], loss_mask=mask)])], "sequence_mean")
    assert batch.input_ids.shape == (1, 7)
    assert batch.predictor_N.tolist() == [2, 4, 6]
    assert batch.tokens.weights_N.tolist() == pytest.approx([1 / 3] * 3)
    assert sum(batch.row_lengths) == 3


def test_a_mask_of_ones_is_no_mask() -> None:
    (group,) = make_groups(prompt_tokens=(3,), response_tokens=((5, 2),), all_columns=True)
    masked = [replace(one, loss_mask=np.ones(len(one.response_ids), np.uint8)) for one in group.samples]
    without, with_ones = (pack([replace(group, samples=samples)], "token_mean") for samples in (group.samples, masked))
    assert without.row_lengths == with_ones.row_lengths
    for name in ("predictor_N", "target_N"):
        assert torch.equal(getattr(without, name), getattr(with_ones, name))
    for field in fields(without.tokens):
        one, other = (getattr(batch.tokens, field.name) for batch in (without, with_ones))
        assert (one is None and other is None) or torch.equal(one, other)


def test_columns_of_unequal_length_are_refused_by_row() -> None:
    (group,) = make_groups(prompt_tokens=(3,), response_tokens=((5,),))
    torn = replace(group.samples[0], rollout_logprobs=np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="0/0/0"):
        pack([replace(group, samples=[torn])], "token_mean")


def test_pieces_keep_all_rows_and_stay_within_the_cap() -> None:
    groups = make_groups(prompt_tokens=(5, 3, 9, 4), response_tokens=((4, 1, 7), (2, 2), (6, 3, 1, 8), (30,)))
    pieces = split_by_tokens(groups, 20)
    sizes = [int(pack(piece, "token_mean").input_ids.shape[1]) for piece in pieces]
    assert max(size for size, piece in zip(sizes, pieces, strict=True) if row_count(piece) > 1) <= 20
    rows = [sample.row_id for piece in pieces for group in piece for sample in group.samples]
    assert rows == [sample.row_id for group in groups for sample in group.samples]
    assert len(pieces[-1]) == 1  # larger than the cap: alone
    assert split_by_tokens(groups, 1000) == [groups]


def packed_model(family: str = "qwen3"):
    module = tiny_model(family)
    ALL_ATTENTION_FUNCTIONS[attention.ATTENTION] = attention.shared_prompt_attention
    module.set_attn_implementation(attention.ATTENTION)
    return module


def gradients(module, batch: PackedBatch) -> dict[str, torch.Tensor]:
    """Of the packed loss, by parameter; the head's part is in the tied embedding's."""
    objective, head = Objective(), plain_head(module)
    module.zero_grad(set_to_none=True)
    found: dict[str, torch.Tensor] = {}

    def token_gradient(logprobs: torch.Tensor, part: slice) -> torch.Tensor:
        with torch.enable_grad():
            leaf = logprobs.detach().requires_grad_()
            tokens = batch.tokens.slice(part.start, part.stop)
            loss = loss_sum(leaf, tokens, objective, loss_terms(objective))
            return torch.autograd.grad(loss, leaf)[0]

    hidden = predictor_hidden(module, batch)
    of_head = torch.zeros_like(head.weight)
    whole = Head.of(head.weight, 1.0)
    hidden.backward(backward_through_head(hidden.detach(), batch.target_N, whole, token_gradient, of_head))
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"no gradient reached {name}"
        found[name] = parameter.grad + of_head if parameter is head.weight else parameter.grad
    return found


def test_pads_change_nothing() -> None:
    groups, module = make_groups(), packed_model()
    plain, padded = pack(groups, "token_mean"), pack(groups, "token_mean", pad_to=64)
    assert padded.input_ids.shape == padded.position_ids.shape == (1, 64)
    assert padded.row_lengths == plain.row_lengths
    assert torch.equal(padded.predictor_N, plain.predictor_N)
    torch.testing.assert_close(packed_logprobs(module, padded, 1.0), packed_logprobs(module, plain, 1.0))
    expected = gradients(module, plain)
    for name, gradient in gradients(module, padded).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_a_row_of_pads_has_a_zero_gradient_of_every_parameter() -> None:
    module, batch = packed_model(), pack([], "token_mean", pad_to=5)
    assert (batch.input_ids.shape, batch.target_N.shape, batch.row_ids) == ((1, 5), (0,), ())
    assert packed_logprobs(module, batch, 1.0).shape == (0,)
    assert not any(gradient.any() for gradient in gradients(module, batch).values())


@pytest.mark.parametrize(("groups", "pad_to"), [([], 0), (make_groups(), 10)])
def test_a_row_that_does_not_fit_its_size_is_refused(groups: list[PromptGroup], pad_to: int) -> None:
    with pytest.raises(ValueError, match=f"cannot be padded to {pad_to}"):
        pack(groups, "token_mean", pad_to=pad_to)


def alone(module, groups: list[PromptGroup], batch: PackedBatch) -> torch.Tensor:
    """The loss of each sample in a row of its own, by the model's own forward pass and log_softmax."""
    logprobs: list[torch.Tensor] = []
    for group in groups:
        for sample in group.samples:
            row = torch.from_numpy(np.concatenate([group.prompt_ids, sample.response_ids]).astype(np.int64))[None]
            every = module(input_ids=row, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1].log_softmax(-1)
            logprobs.append(every.gather(1, row[0, len(group.prompt_ids) :, None])[:, 0])
    objective = Objective()
    return loss_sum(torch.cat(logprobs), batch.tokens, objective, loss_terms(objective))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("max_scores", [attention.MAX_SCORES, 0])
def test_a_float64_model_rounds_nothing_to_float32(
    family: str, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, groups = in_float64(packed_model(family)), make_groups()
    batch = pack(groups, "sequence_mean", dtype=torch.float64)
    assert batch.tokens.weights_N[5].item() == 1 / 7
    module.set_attn_implementation("sdpa")
    alone(module, groups, batch).backward()
    expected = nn.utils.parameters_to_vector([parameter.grad for parameter in module.parameters()])
    module.set_attn_implementation(attention.ATTENTION)
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    assert packed_logprobs(module, batch, 1.0).dtype == torch.float64
    ours = nn.utils.parameters_to_vector([*gradients(module, batch).values()])
    assert ((ours - expected).norm() / expected.norm()).item() < 1e-12
