"""Groups become one row without padding: each prompt once, its responses behind it.

    input     p p p p | a a a | b b | q q q | c c c c | d        (groups p and q; their responses a, b and c, d)
    position  0 1 2 3 | 4 5 6 | 4 5 | 0 1 2 | 3 4 5 6 | 3
    attends   a sees p and itself, never b; nothing of q sees anything of p

Owns: which token stands where, and what predicts it. Never: the model, attention itself (attention.py). Invariant: the
logprob of every loss token equals that of its sample alone in a row (tests compare them).

The last token of a response predicts nothing and nothing attends to it, so it is a target but no input. The last prompt
token predicts the first token of every response. A row of several branches lies here as so many responses; they are
one row to the objective, with one advantage and one weight.

A row may be padded to a fixed size behind its last group, down to a row of padding alone, for ranks that compute in
lockstep: pads attend to nothing, predict nothing, and get a zero gradient, which still reaches every parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transport.contracts.types import RowId
from workers.algorithms.loss import Aggregation, TokenBatch, token_weight
from workers.trainer.learner import PromptGroup, TrainingSample
from workers.trainer.policy.attention import GroupAttention, group_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """T input tokens in one row, pads included, N loss tokens.

    input_ids, position_ids: [1, T] int64, 0 on pads.  attention: one entry a group, in row order.
    predictor_N: [N] int64, the input position whose hidden state predicts the token.  target_N: [N] int64.
    tokens: what the objective needs.  row_lengths, row_parts: loss tokens of each row, and the part of the data that
    it is of, in order of ``row_ids``.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention: tuple[GroupAttention, ...]
    predictor_N: Tensor
    target_N: Tensor
    tokens: TokenBatch
    row_ids: tuple[RowId, ...]
    row_lengths: tuple[int, ...]
    row_parts: tuple[str, ...]


def pack(
    groups: Sequence[PromptGroup],
    aggregation: Aggregation,
    device: torch.device | str = "cpu",
    *,
    pad_to: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PackedBatch:
    """Lay groups out in one row.

    Args:    groups: each with at least one sample; none only with ``pad_to``: a row of pads, without loss tokens.
             aggregation: decides the weight of each token.
             pad_to: T; 0: the tokens of the groups.
             dtype: of the objective's columns, see ``summing_dtype``.
    Raises:  ValueError: an empty group, or columns of one row that differ in length; it names the row. More tokens
             than ``pad_to``, or none at all.
    Source:  ours; the same sharing that Prefix Grouper (arXiv 2506.05433) has for GRPO.
    """
    inputs: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int64]] = []
    predictors: list[NDArray[np.int64]] = []
    start = 0
    for group in groups:
        _check(group)
        prompt_tokens = len(group.prompt_ids)
        inputs.append(group.prompt_ids)
        positions.append(np.arange(prompt_tokens))
        last_prompt, start = start + prompt_tokens - 1, start + prompt_tokens
        for sample in group.samples:
            before: list[NDArray[np.int64]] = []
            for branch in sample.branches:
                read = sample.response_ids[branch][:-1]
                inputs.append(read)
                positions.append(np.arange(prompt_tokens, prompt_tokens + len(read)))
                before.append(np.concatenate([[last_prompt], np.arange(start, start + len(read))]))
                start += len(read)
            predictors.append(_chosen(sample, np.concatenate(before)))
    if not max(start, pad_to) or 0 < pad_to < start:
        raise ValueError(f"a row of {start} tokens cannot be padded to {pad_to}")
    pads = np.zeros(max(pad_to - start, 0), dtype=np.int64)
    samples = [sample for group in groups for sample in group.samples]
    return PackedBatch(
        input_ids=_int64([*inputs, pads], device)[None],
        position_ids=_int64([*positions, pads], device)[None],
        attention=tuple(
            group_attention(
                len(group.prompt_ids),
                [branch.stop - branch.start - 1 for sample in group.samples for branch in sample.branches],
                device,
            )
            for group in groups
        ),
        predictor_N=_int64(predictors, device),
        target_N=_int64([_chosen(sample, sample.response_ids) for sample in samples], device),
        tokens=_token_batch(samples, aggregation, device, dtype),
        row_ids=tuple(sample.row_id for sample in samples),
        row_lengths=tuple(sample.num_loss_tokens for sample in samples),
        row_parts=tuple(group.part for group in groups for _ in group.samples),
    )


def split_by_tokens(groups: Sequence[PromptGroup], max_tokens: int) -> list[list[PromptGroup]]:
    """Cut a round into pieces of at most ``max_tokens`` input tokens, so that memory is bounded by the setting.

    A group stays whole unless it alone is larger; then its samples are split and its prompt is computed once a piece.
    A single sample is never split.
    """
    pieces: list[list[PromptGroup]] = []
    room = 0
    for group in groups:
        for part in _split_group(group, max_tokens):
            size = len(part.prompt_ids) + sum(sample.num_inputs for sample in part.samples)
            if not pieces or size > room:
                pieces.append([])
                room = max_tokens
            pieces[-1].append(part)
            room -= size
    return pieces


def _split_group(group: PromptGroup, max_tokens: int) -> list[PromptGroup]:
    parts: list[list[TrainingSample]] = [[]]
    room = max_tokens - len(group.prompt_ids)
    for sample in group.samples:
        size = sample.num_inputs
        if parts[-1] and size > room:
            parts.append([])
            room = max_tokens - len(group.prompt_ids)
        parts[-1].append(sample)
        room -= size
    return [replace(group, samples=part) for part in parts if part]


def _check(group: PromptGroup) -> None:
    if not group.samples or len(group.prompt_ids) == 0:
        raise ValueError(f"group {group.group_id} has no samples or no prompt")
    for sample in group.samples:
        optional = (sample.loss_mask, sample.reference_logprobs, sample.old_logprobs)
        of_critic = (sample.advantages, sample.values, sample.returns)
        columns = (sample.response_ids, sample.rollout_logprobs, sample.counts, *optional, *of_critic)
        lengths = {len(column) for column in columns if column is not None}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"row {sample.row_id} has columns of {sorted(lengths)} tokens; they must be equal and > 0")
        branches = sample.branches
        if not branches or {branches[-1].stop} != lengths or any(one.start >= one.stop for one in branches):
            raise ValueError(f"the branches of row {sample.row_id} do not follow one another to its end")


def _token_batch(
    samples: Sequence[TrainingSample], aggregation: Aggregation, device: torch.device | str, dtype: torch.dtype
) -> TokenBatch:
    def per_token(values: Sequence[float]) -> Tensor:
        counts = [sample.num_loss_tokens for sample in samples]
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float64), counts)).to(device, dtype)

    def present(name: str) -> bool:
        missing = [sample.row_id for sample in samples if getattr(sample, name) is None]
        if missing and len(missing) < len(samples):
            raise ValueError(f"some rows have {name} and some do not: {missing}")
        return not missing

    def column(name: str) -> Tensor:
        parts = [_chosen(sample, getattr(sample, name)) for sample in samples]
        return torch.from_numpy(np.concatenate([np.zeros(0), *parts])).to(device, dtype)

    def own_or_row(name: str, of_rows: Sequence[float]) -> Tensor:
        """Of each token its own, or its row's where that has none."""
        parts = [
            np.full(sample.num_loss_tokens, of_row) if own is None else _chosen(sample, own)
            for sample, of_row in zip(samples, of_rows, strict=True)
            for own in [getattr(sample, name)]
        ]
        return torch.from_numpy(np.concatenate([np.zeros(0), *parts])).to(device, dtype)

    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return TokenBatch(
        rollout_logprobs_N=column("rollout_logprobs"),
        advantages_N=own_or_row("advantages", [sample.advantage for sample in samples]),
        weights_N=per_token([token_weight(sample.num_loss_tokens, aggregation) for sample in samples])
        * own_or_row("counts", [1.0] * len(samples)),
        old_logprobs_N=column("old_logprobs") if present("old_logprobs") else None,
        reference_logprobs_N=column("reference_logprobs") if present("reference_logprobs") else None,
        rewards_N=per_token(rewards) if len(rewards) == len(samples) else None,
        values_N=column("values") if samples and present("values") else None,
        returns_N=column("returns") if samples and present("returns") else None,
        row_N=torch.from_numpy(np.repeat(np.arange(len(samples)), [one.num_loss_tokens for one in samples])).to(device),
    )


def _chosen(sample: TrainingSample, per_token: NDArray[Any]) -> NDArray[Any]:
    """Of a [R] array, the tokens that the policy chose."""
    return per_token if sample.loss_mask is None else per_token[sample.loss_mask.astype(bool)]


def _int64(parts: Sequence[NDArray[Any]], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)).to(device)
