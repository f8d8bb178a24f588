"""Groups become one row without padding: each prompt once, its responses behind it.

    input     p p p p | a a a | b b | q q q | c c c c | d        (groups p and q; their responses a, b and c, d)
    position  0 1 2 3 | 4 5 6 | 4 5 | 0 1 2 | 3 4 5 6 | 3
    attends   a sees p and itself, never b; nothing of q sees anything of p

Owns: which token stands where, what predicts it, what attends to what, as an attention function that transformers calls
(the prompt on itself; its responses, as a padded batch, on the prompt and on themselves). Never: the model. Invariants:
the logprob of every loss token equals that of its sample alone in a row (tests compare them); no dense [T, T] mask; a
group costs P^2 + S * R * (P + R), R = longest response.

The last token of a response predicts nothing and nothing attends to it, so it is a target but no input. The last prompt
token predicts the first token of every response.

A row may be padded to a fixed size behind its last group, down to a row of padding alone, for ranks that compute in
lockstep: pads attend to nothing, predict nothing, and get a zero gradient, which still reaches every parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from transport.contracts.types import RowId
from workers.algorithms.loss import Aggregation, TokenBatch, token_weight
from workers.errors import ModelError
from workers.trainer.learner import PromptGroup, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAttention:
    """How one group's slice of the row attends. P prompt tokens, then the inputs of S responses.

    num_tokens: of the slice.  query_index: [S, R] int64 into the slice's response part, R = longest; pads repeat 0.
    key_index: [S, P + R] int64 into the whole slice: the prompt, then the response's own tokens.
    mask: [S, 1, R, P + R] bool, True where a query may look.
    real: [num_tokens - P] int64: where in the flattened [S * R] each real response token is.
    """

    num_tokens: int
    prompt_tokens: int
    query_index: Tensor
    key_index: Tensor
    mask: Tensor
    real: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """T input tokens in one row, pads included, N loss tokens.

    input_ids, position_ids: [1, T] int64, 0 on pads.  attention: one entry a group, in row order.
    predictor_N: [N] int64, the input position whose hidden state predicts the token.  target_N: [N] int64.
    tokens: what the objective needs.  row_lengths: loss tokens of each row, in order of ``row_ids``.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention: tuple[GroupAttention, ...]
    predictor_N: Tensor
    target_N: Tensor
    tokens: TokenBatch
    row_ids: tuple[RowId, ...]
    row_lengths: tuple[int, ...]


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
            num_inputs = len(sample.response_ids) - 1
            inputs.append(sample.response_ids[:-1])
            positions.append(np.arange(prompt_tokens, prompt_tokens + num_inputs))
            predictors.append(_chosen(sample, np.concatenate([[last_prompt], np.arange(start, start + num_inputs)])))
            start += num_inputs
    if not max(start, pad_to) or 0 < pad_to < start:
        raise ValueError(f"a row of {start} tokens cannot be padded to {pad_to}")
    pads = np.zeros(max(pad_to - start, 0), dtype=np.int64)
    samples = [sample for group in groups for sample in group.samples]
    return PackedBatch(
        input_ids=_int64([*inputs, pads], device)[None],
        position_ids=_int64([*positions, pads], device)[None],
        attention=tuple(_group_attention(group, device) for group in groups),
        predictor_N=_int64(predictors, device),
        target_N=_int64([_chosen(sample, sample.response_ids) for sample in samples], device),
        tokens=_token_batch(samples, aggregation, device, dtype),
        row_ids=tuple(sample.row_id for sample in samples),
        row_lengths=tuple(sample.num_loss_tokens for sample in samples),
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
            size = len(part.prompt_ids) + sum(len(sample.response_ids) - 1 for sample in part.samples)
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
        size = len(sample.response_ids) - 1
        if parts[-1] and size > room:
            parts.append([])
            room = max_tokens - len(group.prompt_ids)
        parts[-1].append(sample)
        room -= size
    return [PromptGroup(group_id=group.group_id, prompt_ids=group.prompt_ids, samples=part) for part in parts if part]


def _check(group: PromptGroup) -> None:
    if not group.samples or len(group.prompt_ids) == 0:
        raise ValueError(f"group {group.group_id} has no samples or no prompt")
    for sample in group.samples:
        optional = (sample.loss_mask, sample.reference_logprobs, sample.old_logprobs)
        columns = (sample.response_ids, sample.rollout_logprobs, *optional)
        lengths = {len(column) for column in columns if column is not None}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"row {sample.row_id} has columns of {sorted(lengths)} tokens; they must be equal and > 0")


def _group_attention(group: PromptGroup, device: torch.device | str) -> GroupAttention:
    """Index the responses as a padded [S, R] batch; only attention sees the padding."""
    prompt_tokens = len(group.prompt_ids)
    lengths = np.array([len(sample.response_ids) - 1 for sample in group.samples])
    longest = int(lengths.max())
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    column = np.arange(longest)
    valid = column[None] < lengths[:, None]
    query_index = np.where(valid, starts[:, None] + column[None], 0)
    prompt_index = np.broadcast_to(np.arange(prompt_tokens), (len(lengths), prompt_tokens))
    causal = column[None] <= column[:, None]
    mask = np.concatenate([np.ones((longest, prompt_tokens), dtype=bool), causal], axis=1)
    return GroupAttention(
        num_tokens=prompt_tokens + int(lengths.sum()),
        prompt_tokens=prompt_tokens,
        query_index=torch.from_numpy(query_index).to(device),
        key_index=torch.from_numpy(np.concatenate([prompt_index, prompt_tokens + query_index], axis=1)).to(device),
        mask=torch.from_numpy(mask).to(device),
        real=torch.from_numpy(np.flatnonzero(valid)).to(device),
    )


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

    return TokenBatch(
        rollout_logprobs_N=column("rollout_logprobs"),
        advantages_N=per_token([sample.advantage for sample in samples]),
        weights_N=per_token([token_weight(sample.num_loss_tokens, aggregation) for sample in samples]),
        old_logprobs_N=column("old_logprobs") if present("old_logprobs") else None,
        reference_logprobs_N=column("reference_logprobs") if present("reference_logprobs") else None,
    )


def _chosen(sample: TrainingSample, per_token: NDArray[Any]) -> NDArray[Any]:
    """Of a [R] array, the tokens that the policy chose."""
    return per_token if sample.loss_mask is None else per_token[sample.loss_mask.astype(bool)]


def _int64(parts: Sequence[NDArray[Any]], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)).to(device)


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a model that computes in ``dtype``, that of its logits, logprobs, objective and sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


# --- attention over a packed row --------------------------------------------------------------------------------------

ATTENTION = "streamrl_shared_prompt"
"""What ``config._attn_implementation`` is set to."""

MAX_SCORES = 4 * 1024 * 1024
"""Attention scores of one call up to which they are kept (16 MB in fp32). The CPU's flash kernel runs its backward pass
at 14 GFLOP/s on responses of 25 tokens: with it a step of SmolLM2 took 7.7 s instead of 5.5 (bf16, one thread)."""


def shared_prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    groups: tuple[GroupAttention, ...] = (),
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each group of a packed row.

    Args:    query: [1, H, T, D].  key, value: [1, K, T, D], H a multiple of K.  groups: in row order, then pads.
    Returns: ([1, T, H, D], None), as transformers expects; 0 on pads.
    Raises:  ModelError: the model asks for a sliding window shorter than a sample, or for soft-capped scores.
    """
    longest = max((group.prompt_tokens + group.query_index.shape[1] for group in groups), default=0)
    if kwargs.get("softcap") is not None or (sliding_window is not None and longest > sliding_window):
        raise ModelError(f"{type(module).__name__} needs sliding-window or soft-capped attention; not supported here")
    sizes = [group.num_tokens for group in groups]
    num_pads = query.shape[2] - sum(sizes)
    sizes.append(num_pads)
    outputs: list[Tensor] = []
    for group, q, k, v in zip(groups, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=False):
        p = group.prompt_tokens
        outputs.append(_attend(q[:, :, :p], k[:, :, :p], v[:, :, :p], None, scaling))
        if group.num_tokens > p:
            responses = _gather(q[:, :, p:], group.query_index)
            keys, values = _gather(k, group.key_index), _gather(v, group.key_index)
            out = _attend(responses, keys, values, group.mask, scaling).transpose(0, 1)
            outputs.append(out.reshape(1, q.shape[1], -1, q.shape[3]).index_select(2, group.real))
    if num_pads:
        outputs.append(_pads(query, key, value, num_pads))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _pads(query: Tensor, key: Tensor, value: Tensor, num_pads: int) -> Tensor:
    """[1, H, num_pads, D] zeros that depend on all three: a parameter that no gradient reaches has none, and a rank
    that has none leaves out the reduction in which the others wait for it (FSDP2)."""
    zero = query[:, :, :0].sum() + key[:, :, :0].sum() + value[:, :, :0].sum()
    return zero.expand(1, query.shape[1], num_pads, query.shape[3])


def _gather(tensor: Tensor, index: Tensor) -> Tensor:
    """[1, H, L, D] at index [S, R] -> [S, H, R, D]."""
    picked = tensor.index_select(2, index.reshape(-1))
    return picked.view(tensor.shape[1], *index.shape, tensor.shape[3]).transpose(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """query: [S, H, R, D]; key, value: [S, K, L, D]; mask: [..., R, L] True where a query may look, None for causal."""
    batch, num_heads, length, head_dim = query.shape
    if query.is_cuda or batch * num_heads * length * key.shape[2] > MAX_SCORES:
        repeats = num_heads // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scaling)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    # plain; the queries of the heads that share a key head are stacked, so that no key is repeated
    shared = query.reshape(batch, key.shape[1], -1, head_dim)
    scores = (shared @ key.transpose(2, 3)).view(batch, num_heads, length, -1)
    scores = scores.to(summing_dtype(scores.dtype))
    bias = torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    weights = (scores * (scaling or head_dim**-0.5) + bias).softmax(-1).to(query.dtype)
    return (weights.view(batch, key.shape[1], -1, key.shape[2]) @ value).view(batch, num_heads, length, head_dim)
