"""Attention over a packed row (packing.py), as a function that transformers calls; memory is linear in its tokens.

    group p p p p | a a a | b b     p on itself: causal
                                    a and b on p: a whole rectangle, on the prompt's keys where they are
                                    a on itself, b on itself: causal; the two meet by their log-sum-exp

Owns: what attends to what, and by which kernel. Never: a [T, T] mask, or the prompt's keys once a response (on a CPU).
Invariant: every kernel gives the same (tests compare them in float64). On a CPU short responses are written out as a
padded batch, S * R * (P + R) scores; all else goes block by block through torch's fused CPU kernel. On a GPU the whole
row is one call of the variable-length kernel in half precision, and one of torch's plain attention a sample in float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from workers.errors import ModelError

ATTENTION = "streamrl_shared_prompt"
"""What ``config._attn_implementation`` is set to."""

MAX_SCORES = 4 * 1024 * 1024
"""Attention scores of one call up to which they are kept (16 MB in fp32). The CPU's flash kernel runs its backward pass
at 14 GFLOP/s on responses of 25 tokens: with it a step of SmolLM2 took 7.7 s instead of 5.5 (bf16, one thread)."""

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedResponses:
    """S responses of a group as a padded batch, R = longest; only attention sees the padding.

    query_index: [S, R] int64 into the slice's response part; pads repeat 0.
    key_index: [S, P + R] int64 into the whole slice: the prompt, then the response's own tokens.
    mask: [S, 1, R, P + R] bool, True where a query may look.
    real: [response tokens] int64: where in the flattened [S * R] each of them is.
    """

    query_index: Tensor
    key_index: Tensor
    mask: Tensor
    real: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAttention:
    """How one group's slice of the row attends: P prompt tokens, then the inputs of S responses.

    response_tokens: inputs of each response, may be 0.  padded: None without any, or where it would take more than
    ``MAX_SCORES`` scores of one head.
    """

    prompt_tokens: int
    response_tokens: tuple[int, ...]
    padded: PaddedResponses | None

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + sum(self.response_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt_tokens + max(self.response_tokens, default=0)


def group_attention(
    prompt_tokens: int, response_tokens: Sequence[int], device: torch.device | str = "cpu"
) -> GroupAttention:
    """response_tokens: inputs of each response."""
    longest = max(response_tokens, default=0)
    num_scores = len(response_tokens) * longest * (prompt_tokens + longest)
    small = torch.device(device).type == "cpu" and 0 < num_scores <= MAX_SCORES
    return GroupAttention(
        prompt_tokens=prompt_tokens,
        response_tokens=tuple(response_tokens),
        padded=_padded(prompt_tokens, np.array(response_tokens)) if small else None,
    )


def _padded(prompt_tokens: int, lengths: NDArray[np.int64]) -> PaddedResponses:
    longest = int(lengths.max())
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    column = np.arange(longest)
    valid = column[None] < lengths[:, None]
    query_index = np.where(valid, starts[:, None] + column[None], 0)
    prompt_index = np.broadcast_to(np.arange(prompt_tokens), (len(lengths), prompt_tokens))
    causal = column[None] <= column[:, None]
    mask = np.concatenate([np.ones((longest, prompt_tokens), dtype=bool), causal], axis=1)
    return PaddedResponses(
        query_index=torch.from_numpy(query_index),
        key_index=torch.from_numpy(np.concatenate([prompt_index, prompt_tokens + query_index], axis=1)),
        mask=torch.from_numpy(mask),
        real=torch.from_numpy(np.flatnonzero(valid)),
    )


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a model that computes in ``dtype``, that of its scores, logits, objective and sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


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
    longest = max((group.longest for group in groups), default=0)
    if kwargs.get("softcap") is not None or (sliding_window is not None and longest > sliding_window):
        raise ModelError(f"{type(module).__name__} needs sliding-window or soft-capped attention; not supported here")
    scale = scaling or query.shape[-1] ** -0.5
    sizes = [group.num_tokens for group in groups]
    num_pads = query.shape[2] - sum(sizes)
    if groups and query.is_cuda and _has_varlen(query):
        outputs = [_attend_varlen(query, key, value, groups, scale)]
    else:
        sizes.append(num_pads)
        parts = zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
        attend = _attend_samples if query.is_cuda else _attend_blocks
        outputs = [attend(*part, group, scale) for group, part in zip(groups, parts, strict=False)]
    if num_pads:
        outputs.append(_pads(query, key, value, num_pads))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _pads(query: Tensor, key: Tensor, value: Tensor, num_pads: int) -> Tensor:
    """[1, H, num_pads, D] zeros that depend on all three: a parameter that no gradient reaches has none, and a rank
    that has none leaves out the reduction in which the others wait for it (FSDP2)."""
    zero = query[:, :, :0].sum() + key[:, :, :0].sum() + value[:, :, :0].sum()
    return zero.expand(1, query.shape[1], num_pads, query.shape[3])


# --- on a CPU ---------------------------------------------------------------------------------------------------------


def _attend_blocks(query: Tensor, key: Tensor, value: Tensor, group: GroupAttention, scale: float) -> Tensor:
    """One group: [1, H, its tokens, D]."""
    p, heads = group.prompt_tokens, query.shape[1]
    prompt, responses = query[:, :, :p], query[:, :, p:]
    if heads * p * p <= MAX_SCORES:
        mask = torch.ones(p, p, dtype=torch.bool).tril()
        outputs = [_written_out(prompt, key[:, :, :p], value[:, :, :p], mask, scale)]
    else:
        outputs = [_Blocks.apply(prompt, key[:, :, :p], value[:, :, :p], _prompt_block(p), scale)]
    padded = group.padded
    if padded is not None and heads * padded.mask.numel() * len(group.response_tokens) <= MAX_SCORES:
        keys, values = _gather(key, padded.key_index), _gather(value, padded.key_index)
        out = _written_out(_gather(responses, padded.query_index), keys, values, padded.mask, scale).transpose(0, 1)
        outputs.append(out.reshape(1, heads, -1, query.shape[3]).index_select(2, padded.real))
    elif responses.shape[2]:
        outputs.append(_Blocks.apply(responses, key, value, _response_blocks(group), scale))
    return torch.cat(outputs, dim=2)


def _gather(tensor: Tensor, index: Tensor) -> Tensor:
    """[1, H, L, D] at index [S, R] -> [S, H, R, D]."""
    picked = tensor.index_select(2, index.reshape(-1))
    return picked.view(tensor.shape[1], *index.shape, tensor.shape[3]).transpose(0, 1)


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query: [S, H, R, D]; key, value: [S, K, L, D]; mask: [..., R, L] True where a query may look."""
    batch, num_heads, length, head_dim = query.shape
    # the queries of the heads that share a key head are stacked, so that no key is repeated
    shared = query.reshape(batch, key.shape[1], -1, head_dim)
    scores = (shared @ key.transpose(2, 3)).view(batch, num_heads, length, -1)
    scores = scores.to(summing_dtype(scores.dtype))
    bias = torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    weights = (scores * scale + bias).softmax(-1).to(query.dtype)
    return (weights.view(batch, key.shape[1], -1, key.shape[2]) @ value).view(batch, num_heads, length, head_dim)


@dataclass(frozen=True, slots=True)
class Block:
    """Queries that look at keys: all of them at all, or causal, for a square."""

    queries: slice
    keys: slice
    causal: bool


def _prompt_block(prompt_tokens: int) -> tuple[Block, ...]:
    return (Block(slice(0, prompt_tokens), slice(0, prompt_tokens), True),)


def _response_blocks(group: GroupAttention) -> tuple[Block, ...]:
    """Of the response part's queries with the whole slice's keys."""
    p, ends = group.prompt_tokens, list(accumulate(group.response_tokens))
    own = [
        Block(slice(end - length, end), slice(p + end - length, p + end), True)
        for length, end in zip(group.response_tokens, ends, strict=True)
        if length
    ]
    return (Block(slice(0, ends[-1]), slice(0, p), False), *own)


class _Blocks(torch.autograd.Function):
    """Attention of queries that look at several blocks of keys, each by torch's fused CPU kernel.

    Its backward of one block, given the output and the log-sum-exp over all blocks, is that block's share of the whole
    gradient: dS = P * (dO V' - sum(dO * O)) with P = exp(S - log-sum-exp), as in ring attention (arXiv 2310.01889).
    Kept for it: queries, keys, values, output, log-sum-exp. Every query is in at least one block.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Block, ...], scale: float) -> Tensor:
        """query: [1, H, N, D]; key, value: [1, K, L, D] -> [1, H, N, D]."""
        q, k, v = _by_key_head(query, key, value)
        wide = summing_dtype(q.dtype)
        out = torch.zeros(q.shape, dtype=wide)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide)
        for block in blocks:
            part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys], 0.0, block.causal, scale=scale
            )
            before = lse[:, :, block.queries]
            together = torch.logaddexp(before, part_lse)
            so_far = out[:, :, block.queries]
            so_far.mul_((before - together).exp_()[..., None]).add_(part * (part_lse - together).exp_()[..., None])
            before.copy_(together)
        result = out.to(q.dtype).view_as(query)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, result, lse = ctx.saved_tensors
        q, k, v = _by_key_head(query, key, value)
        out, grad = result.view(q.shape), grads[0].reshape(q.shape)
        wide = summing_dtype(q.dtype)
        grad_q = torch.zeros(q.shape, dtype=wide)
        grad_k, grad_v = (torch.zeros(one.shape[1:], dtype=wide) for one in (key, value))
        for block in ctx.blocks:
            queries, keys = block.queries, block.keys
            of_q, of_k, of_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, queries],
                q[:, :, queries],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries].transpose(1, 2).contiguous().transpose(1, 2),  # as the forward's lies in memory
                0.0,
                block.causal,
                scale=ctx.scale,
            )
            grad_q[:, :, queries] += of_q
            grad_k[:, keys] += of_k.sum(1, dtype=wide)
            grad_v[:, keys] += of_v.sum(1, dtype=wide)
        return (
            grad_q.to(q.dtype).view_as(query),
            grad_k.to(key.dtype)[None],
            grad_v.to(value.dtype)[None],
            None,
            None,
        )


def _by_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[1, H, N, D] -> [K, H / K, N, D]; [1, K, L, D] -> the same, each key once for all heads that share it."""
    shared = query[0].unflatten(0, (key.shape[1], -1))
    keys, values = (one[0, :, None].expand(-1, shared.shape[1], -1, -1) for one in (key, value))
    return shared, keys, values


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def _has_varlen(query: Tensor) -> bool:
    """Whether the variable-length flash kernel takes it: half precision, Ampere or newer, heads of at most 256."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The row as attention of N segments: prompts, and responses behind their prompt's keys.

    key_index: [keys] int64 into the row.  query_ends, key_ends: [N + 1] int32, from 0.  max_queries, max_keys: of one.
    """

    key_index: Tensor
    query_ends: Tensor
    key_ends: Tensor
    max_queries: int
    max_keys: int


@lru_cache(maxsize=4)
def segments(groups: tuple[GroupAttention, ...], device: torch.device) -> Segments:
    """The same in every layer, hence kept."""
    keys: list[NDArray[np.int64]] = []
    num_queries: list[int] = []
    start = 0
    for group in groups:
        prompt = np.arange(start, start + group.prompt_tokens)
        keys.append(prompt)
        num_queries.append(len(prompt))
        start += len(prompt)
        for length in group.response_tokens:
            if length:
                keys.append(np.concatenate([prompt, np.arange(start, start + length)]))
                num_queries.append(length)
                start += length
    num_keys = [len(one) for one in keys]
    return Segments(
        key_index=torch.from_numpy(np.concatenate(keys)).to(device),
        query_ends=torch.tensor([0, *accumulate(num_queries)], dtype=torch.int32, device=device),
        key_ends=torch.tensor([0, *accumulate(num_keys)], dtype=torch.int32, device=device),
        max_queries=max(num_queries),
        max_keys=max(num_keys),
    )


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, groups: tuple[GroupAttention, ...], scale: float
) -> Tensor:
    """The whole row without its pads, in one call: [1, H, tokens, D]. Half precision.

    The kernel aligns a causal rectangle at its lower right, so that a response sees its whole prompt.
    """
    from torch.nn.attention.varlen import varlen_attn  # takes seconds to import

    row = segments(groups, query.device)
    fewer: dict[str, Any] = {"enable_gqa": True} if _asks_for_gqa(varlen_attn) else {}
    out = varlen_attn(
        query[0, :, : sum(group.num_tokens for group in groups)].transpose(0, 1),
        key[0].transpose(0, 1).index_select(0, row.key_index),
        value[0].transpose(0, 1).index_select(0, row.key_index),
        row.query_ends,
        row.key_ends,
        row.max_queries,
        row.max_keys,
        scale=scale,
        window_size=(-1, 0),  # causal
        **fewer,
    )
    return cast(Tensor, out).transpose(0, 1)[None]


@lru_cache
def _asks_for_gqa(kernel: Callable[..., Any]) -> bool:
    """Whether ``kernel`` wants to be told that key heads are fewer than query heads; torch 2.11's takes them so."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _attend_samples(query: Tensor, key: Tensor, value: Tensor, group: GroupAttention, scale: float) -> Tensor:
    """One group in any precision: [1, H, its tokens, D].

    The check at loading is in float32, which the kernel above does not take. Each response is computed behind its
    prompt, whose own queries are computed again with it.
    """
    p, repeats = group.prompt_tokens, query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    whole = torch.arange(group.num_tokens, device=query.device)
    own = [part for part in whole[p:].split(group.response_tokens) if len(part)]
    outputs: list[Tensor] = []
    for index in (whole[:p], *(torch.cat([whole[:p], part]) for part in own)):
        q, k, v = (one.index_select(2, index) for one in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        outputs.append(out[:, :, p:] if outputs else out)
    return torch.cat(outputs, dim=2)
