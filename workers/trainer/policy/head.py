"""The output embedding and the softmax over all words, without ever holding all logits.

The logits of one micro-batch are the largest tensor of training (4096 tokens x 49152 words are 800 MB in fp32). A loss
that is a sum over tokens needs them a few rows at a time: softmax, the token's own logprob, and, because the loss tells
d(loss)/d(logprob) at once, the gradient in the same buffer. Autograd over the whole made three more passes over fresh
memory and took 1.3 s of a 6.4 s step (SmolLM2, 1549 tokens, bf16, one thread). Where the words are split over tensor
ranks, each has the logits of its own, and three numbers a token are exchanged.

Invariant: the gradient equals autograd through log_softmax(logits / temperature) (a test compares them).

Legend: N loss tokens, D hidden size, V words of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from transport.contracts.training_memory import BLOCK_ROWS, CPU_SOFTMAX_ROWS, GPU_SOFTMAX_ROWS
from workers.trainer.policy.attention import summing_dtype

SOFTMAX_ROWS = {"cpu": CPU_SOFTMAX_ROWS, "cuda": GPU_SOFTMAX_ROWS}
"""By kind of device, rows of logits handled at once. On a CPU 25 MB of fp32 at 49152 words, so that its passes stay
near the cache; a GPU has computed as few before the host has asked for the next ones."""

TokenGradient = Callable[[Tensor, slice], Tensor]
"""(logprobs_n, which tokens) -> d(loss)/d(logprobs_n): what an additive objective can say piece by piece."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output embedding: [V, D] of all words, or this rank's of them.

    temperature: of the rollout, > 0.  group: of the ranks that have the other words.  first: of ours.
    """

    weight: Tensor
    temperature: float
    group: dist.ProcessGroup | None = None
    first: int = 0

    @classmethod
    def of(cls, weight: Tensor, temperature: float) -> Head:
        """weight: of the whole head, maybe split over tensor ranks."""
        if not isinstance(weight, DTensor):
            return cls(weight, temperature)
        local = weight.to_local()
        return cls(local, temperature, weight.device_mesh.get_group(), weight.device_mesh.get_local_rank() * len(local))


class HeadLoss(torch.autograd.Function):
    """A token-wise loss through the head, as a scalar that stands for it: its gradients are known when it is computed.

    hidden_ND: [N, D].  weight: the head's, for autograd.  head_gradient: where its gradient is added instead.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight: Tensor,
        target_N: Tensor,
        head: Head,
        token_gradient: TokenGradient,
        head_gradient: Tensor | None,
    ) -> Tensor:
        total = head_gradient
        if total is None and ctx.needs_input_grad[1]:
            total = torch.zeros(weight.shape, dtype=summing_dtype(weight.dtype), device=weight.device)
        hidden_gradient = backward_through_head(hidden_ND, target_N, head, token_gradient, total)
        ctx.gradients = hidden_gradient, total.to(weight.dtype) if total is not None and head_gradient is None else None
        return hidden_ND.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return (*ctx.gradients, None, None, None, None)


@torch.no_grad()
def target_logprobs(hidden_ND: Tensor, target_N: Tensor, head: Head) -> Tensor:
    """[N] float32 (or more): log_softmax(head(hidden) / temperature) of the targets."""
    if not len(target_N):
        return torch.zeros(0, dtype=summing_dtype(hidden_ND.dtype), device=hidden_ND.device)
    rows = SOFTMAX_ROWS[hidden_ND.device.type]
    pieces = zip(hidden_ND.split(rows), target_N.split(rows), strict=True)
    return torch.cat([Softmax(hidden, target, head).logprobs for hidden, target in pieces])


@torch.no_grad()
def backward_through_head(
    hidden_ND: Tensor, target_N: Tensor, head: Head, token_gradient: TokenGradient, weight_gradient: Tensor | None
) -> Tensor:
    """Gradient of a token-wise loss through the head.

    Args:    hidden_ND: [N, D], any floating dtype.  weight_gradient: [V, D] float32 or more, added to in place; None
             where the head is frozen.
    Returns: d(loss)/d(hidden), [N, D] in the dtype of ``hidden_ND``: of this rank's words.
    """
    hidden_gradient = torch.empty_like(hidden_ND)
    for start in range(0, hidden_ND.shape[0], BLOCK_ROWS):
        rows = slice(start, min(start + BLOCK_ROWS, hidden_ND.shape[0]))
        logit_gradient = _block_gradient(hidden_ND, target_N, head, token_gradient, rows)
        torch.mm(logit_gradient, head.weight, out=hidden_gradient[rows])
        if weight_gradient is None:
            continue
        if weight_gradient.dtype == logit_gradient.dtype:
            weight_gradient.addmm_(logit_gradient.T, hidden_ND[rows])
        else:
            weight_gradient += logit_gradient.T @ hidden_ND[rows]
    return hidden_gradient


def _block_gradient(
    hidden_ND: Tensor, target_N: Tensor, head: Head, token_gradient: TokenGradient, rows: slice
) -> Tensor:
    """d(loss)/d(head's output) of ``rows``, [rows, V] in the compute dtype."""
    block = torch.empty(rows.stop - rows.start, len(head.weight), dtype=hidden_ND.dtype, device=hidden_ND.device)
    size = SOFTMAX_ROWS[hidden_ND.device.type]
    for start in range(rows.start, rows.stop, size):
        part = slice(start, min(start + size, rows.stop))
        softmax = Softmax(hidden_ND[part], target_N[part], head)
        block[part.start - rows.start : part.stop - rows.start] = softmax.backward(
            token_gradient(softmax.logprobs, part)
        )
    return block


class Softmax:
    """Of a few rows of logits over all words, float32 or more, with one pass of exp. hidden: [n, D]; target: [n]."""

    def __init__(self, hidden: Tensor, target: Tensor, head: Head) -> None:
        logits = F.linear(hidden, head.weight)
        logits = logits.to(summing_dtype(logits.dtype))
        if head.temperature != 1.0:
            logits.div_(head.temperature)
        largest = logits.amax(dim=-1, keepdim=True)
        if head.group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=head.group)
        logits.sub_(largest)
        self._temperature = head.temperature
        self._index = target - head.first
        self._here: Tensor | None = None  # which targets are among our words; None: all
        if head.group is not None:
            self._here = (self._index >= 0) & (self._index < len(head.weight))
            self._index = self._index.where(self._here, 0)
        chosen = logits.gather(1, self._index[:, None])[:, 0]
        self._unnormalised = logits.exp_()
        self._total = self._unnormalised.sum(dim=-1)
        if self._here is not None:
            sums = torch.stack([chosen * self._here, self._total])
            dist.all_reduce(sums, group=head.group)
            chosen, self._total = sums
        self.logprobs = chosen - self._total.log()
        """[n] of the targets."""

    def backward(self, gradient: Tensor) -> Tensor:
        """d(loss)/d(logits) from d(loss)/d(logprobs), [n] -> [n, V], in the memory of the logits.

        d logprob / d logit = (onehot - softmax) / temperature
        """
        gradient = gradient / self._temperature
        self._unnormalised.mul_(-(gradient / self._total)[:, None])
        onehot = gradient if self._here is None else gradient * self._here
        return self._unnormalised.scatter_add_(1, self._index[:, None], onehot[:, None].to(self._unnormalised.dtype))


def whole_rows(hidden: Tensor) -> Tensor:
    """[1, T, D] of all tokens, where tensor ranks have each a part of them; each adds to its gradient."""
    if not isinstance(hidden, DTensor):
        return hidden
    return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
