"""Attention over a packed row (packing.py), as an attention function that transformers calls.

Owns: the two attention calls that a group needs: the prompt on itself; its responses, as a padded batch, on the
prompt and on themselves. Invariant: no dense [T, T] mask; a group costs P^2 + S * R * (P + R), R = longest response.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workers.errors import ModelError
from workers.trainer.policy.packing import GroupAttention

NAME = "streamrl_shared_prompt"
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

    Args:    query: [1, H, T, D].  key, value: [1, K, T, D], H a multiple of K.  groups: their tokens sum to T.
    Returns: ([1, T, H, D], None), as transformers expects.
    Raises:  ModelError: the model asks for a sliding window shorter than a sample, or for soft-capped scores.
    """
    if kwargs.get("softcap") is not None or (sliding_window is not None and _longest(groups) > sliding_window):
        raise ModelError(f"{type(module).__name__} needs sliding-window or soft-capped attention; not supported here")
    sizes = [group.num_tokens for group in groups]
    outputs: list[Tensor] = []
    for group, q, k, v in zip(groups, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True):
        p = group.prompt_tokens
        outputs.append(_attend(q[:, :, :p], k[:, :, :p], v[:, :, :p], None, scaling))
        if group.num_tokens > p:
            outputs.append(_attend_responses(group, q[:, :, p:], k, v, scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _attend_responses(
    group: GroupAttention, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """query: [1, H, sum of response inputs, D] -> the same shape."""
    q = _gather(query, group.query_index)
    out = _attend(q, _gather(key, group.key_index), _gather(value, group.key_index), group.mask, scaling)
    num_heads, head_dim = query.shape[1], query.shape[3]
    return out.transpose(0, 1).reshape(1, num_heads, -1, head_dim).index_select(2, group.real)


def _gather(tensor: Tensor, index: Tensor) -> Tensor:
    """[1, H, L, D] at index [S, R] -> [S, H, R, D]."""
    picked = tensor.index_select(2, index.reshape(-1))
    return picked.view(tensor.shape[1], *index.shape, tensor.shape[3]).transpose(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """query: [S, H, R, D]; key, value: [S, K, L, D]; mask: [..., R, L] True where a query may look, None for causal."""
    num_heads, length = query.shape[1:3]
    if query.is_cuda or query.shape[0] * num_heads * length * key.shape[2] > MAX_SCORES:
        repeats = num_heads // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scaling)
    return _attend_small(query, key, value, _causal(length, query.device) if mask is None else mask, scaling)


def _attend_small(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Plain attention; the queries of the heads that share a key head are stacked, so that no key is repeated."""
    batch, num_heads, length, head_dim = query.shape
    shared = query.reshape(batch, key.shape[1], -1, head_dim)
    scores = (shared @ key.transpose(2, 3)).view(batch, num_heads, length, -1).float()
    bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    weights = (scores * (scaling or head_dim**-0.5) + bias).softmax(-1).to(query.dtype)
    return (weights.view(batch, key.shape[1], -1, key.shape[2]) @ value).view(batch, num_heads, length, head_dim)


def _causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _longest(groups: tuple[GroupAttention, ...]) -> int:
    return max((group.prompt_tokens + group.query_index.shape[1] for group in groups), default=0)


def register() -> None:
    """Make the function known to transformers under NAME. Idempotent."""
    ALL_ATTENTION_FUNCTIONS[NAME] = shared_prompt_attention
