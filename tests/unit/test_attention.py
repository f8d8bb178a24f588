"""All kernels of attention over a packed row give what each sample alone gives, in outputs and gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.trainer.policy import attention
from workers.trainer.policy.attention import GroupAttention, group_attention, shared_prompt_attention

CPU = torch.device("cpu")
GROUPS = ((5, (3, 0, 6)), (1, (4, 4)), (9, (0, 0)), (3, (1,)), (40, (33, 50)))
"""(prompt tokens, inputs of each response): a response of one token has none."""
NUM_PADS = 3
HEADS, KEY_HEADS, HEAD_DIM = 6, 2, 8


def tensors(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value as transformers hands them over: views of [1, T, heads, D]."""
    chance = torch.Generator().manual_seed(0)
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    made = (torch.randn(1, num_tokens, one, HEAD_DIM, generator=chance, dtype=dtype) for one in heads)
    query, key, value = (one.transpose(1, 2).requires_grad_() for one in made)
    return query, key, value


def one_by_one(query: Tensor, key: Tensor, value: Tensor, groups: Sequence[GroupAttention]) -> Tensor:
    """[1, T, H, D]: each sample gathered into a square of its own, by torch's plain attention; 0 on pads."""
    out = torch.zeros(query.shape[2], query.shape[1], query.shape[3], dtype=query.dtype)
    start = 0
    for group in groups:
        prompt = list(range(start, start + group.prompt_tokens))
        start += len(prompt)
        for length in (0, *group.response_tokens):
            index = torch.tensor([*prompt, *range(start, start + length)])
            start += length
            square = (one.index_select(2, index) for one in (query, key, value))
            whole = F.scaled_dot_product_attention(*square, is_causal=True, scale=0.3, enable_gqa=True)[0]
            mine = slice(len(prompt), None) if length else slice(None)
            out = out.index_copy(0, index[mine], whole[:, mine].transpose(0, 1))
    return out[None]


def outputs_and_gradients(attend, *leaves: Tensor) -> list[Tensor]:
    out = attend(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


def varlen_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    *sizes: int,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """What torch.nn.attention.varlen.varlen_attn documents, written out: [tokens, H, D], causal at the lower right."""
    assert window_size == (-1, 0)
    assert query_ends.dtype == key_ends.dtype == torch.int32
    outputs: list[Tensor] = []
    ends = zip(query_ends.tolist(), query_ends.tolist()[1:], key_ends.tolist(), key_ends.tolist()[1:], strict=False)
    for q0, q1, k0, k1 in ends:
        assert (q1 - q0 <= sizes[0], k1 - k0 <= sizes[1]) == (True, True)
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - q1 + q0)
        parts = (one.transpose(0, 1) for one in (query[q0:q1], key[k0:k1], value[k0:k1]))
        out = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def varlen(query: Tensor, key: Tensor, *others: Any, enable_gqa: bool = False, **kwargs: Any) -> Tensor:
    """Of torch 2.12 and later, which refuse fewer key heads than query heads unless told."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    return varlen_2_11(query, key, *others, **kwargs)


def on_cpu(query: Tensor, key: Tensor, value: Tensor, groups: tuple[GroupAttention, ...]) -> Tensor:
    return shared_prompt_attention(nn.Identity(), query, key, value, None, scaling=0.3, groups=groups)[0]


def by_varlen(query: Tensor, key: Tensor, value: Tensor, groups: tuple[GroupAttention, ...]) -> Tensor:
    out = attention._attend_varlen(query, key, value, groups, 0.3).transpose(1, 2)
    return F.pad(out, (0, 0, 0, 0, 0, NUM_PADS))


def by_samples(query: Tensor, key: Tensor, value: Tensor, groups: tuple[GroupAttention, ...]) -> Tensor:
    sizes = [*(group.num_tokens for group in groups), NUM_PADS]
    parts = zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    outs = [attention._attend_samples(*part, group, 0.3) for group, part in zip(groups, parts, strict=False)]
    return F.pad(torch.cat(outs, 2).transpose(1, 2), (0, 0, 0, 0, 0, NUM_PADS))


@pytest.mark.parametrize(
    ("attend", "max_scores", "kernel"),
    [
        (on_cpu, 1 << 22, varlen),
        (on_cpu, 3000, varlen),
        (on_cpu, 0, varlen),
        (by_varlen, 0, varlen),
        (by_varlen, 0, varlen_2_11),
        (by_samples, 0, varlen),
    ],
    ids=["written out", "both", "blocks", "varlen", "varlen of torch 2.11", "samples"],
)
def test_every_kernel_gives_what_samples_alone_give(
    attend, max_scores: int, kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=kernel))
    groups = tuple(group_attention(*one) for one in GROUPS)
    leaves = tensors(sum(group.num_tokens for group in groups) + NUM_PADS)
    expected = outputs_and_gradients(lambda *some: one_by_one(*some, groups), *leaves)
    found = outputs_and_gradients(lambda *some: attend(*some, groups), *leaves)
    for ours, theirs in zip(found, expected, strict=True):
        assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_lose_nothing_in_lower_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = tuple(group_attention(*one) for one in GROUPS)
    exact = tensors(sum(group.num_tokens for group in groups))
    expected = outputs_and_gradients(lambda *some: one_by_one(*some, groups), *exact)
    errors: list[float] = []
    for max_scores in (1 << 22, 0):
        monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
        leaves = [one.detach().to(dtype).requires_grad_() for one in exact]
        found = outputs_and_gradients(lambda *some: on_cpu(*some, groups), *leaves)
        errors.append(max((((f - e).norm() / e.norm()).item()) for f, e in zip(found, expected, strict=True)))
    assert errors[1] < 1.5 * errors[0] < 1.5 * 16 * torch.finfo(dtype).eps


def test_a_padded_response_sees_the_prompt_and_itself_only() -> None:
    padded = group_attention(2, (2, 1)).padded
    assert padded is not None
    assert padded.mask.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert padded.key_index.tolist() == [[0, 1, 2, 3], [0, 1, 4, 2]]  # the second's pad points at token 2: not real
    assert padded.real.tolist() == [0, 1, 2]


def test_what_is_kept_for_backward_is_linear_in_a_sample() -> None:
    """Of one long sample, and of many on one long prompt, whose keys are not kept once more for each."""

    def kept(prompt_tokens: int, response_tokens: tuple[int, ...]) -> int:
        group = group_attention(prompt_tokens, response_tokens)
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            on_cpu(*tensors(group.num_tokens, torch.float32), (group,))
        return sum(storages.values())

    assert kept(1000, (6000,)) < 2.1 * kept(1000, (2500,))
    assert kept(4000, (1000,) * 3) < 1.1 * kept(4000, (3000,))


def test_the_longest_sample_of_a_group_is_its_prompt_and_its_longest_response():
    groups = [GroupAttention(prompt_tokens=prompt, response_tokens=responses, padded=0) for prompt, responses in GROUPS]
    assert [group.longest for group in groups] == [11, 5, 9, 4, 90]
