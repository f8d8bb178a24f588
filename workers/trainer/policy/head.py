"""Log-probabilities of the sampled tokens, and their gradient, without ever holding all logits.

The logits of one micro-batch are the largest tensor of training (4096 tokens x 49152 words are 800 MB in fp32). A loss
that is a sum over tokens needs them a few rows at a time: softmax, the token's own logprob, and, because the loss tells
d(loss)/d(logprob) at once, the gradient in the same buffer. Autograd over the whole made three more passes over fresh
memory and took 1.3 s of a 6.4 s step (SmolLM2, 1549 tokens, bf16, one thread).

Owns: that arithmetic. Invariant: equal to autograd through log_softmax(logits / temperature) (a test compares them).

Legend: N loss tokens, D hidden size, V words.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SOFTMAX_ROWS = 128
"""Rows of logits handled at once: 25 MB of fp32 at 49152 words, so that its passes stay near the cache."""
BLOCK_ROWS = 2048
"""Rows whose gradient is kept (in the compute dtype) for one matrix product into the weight's gradient."""

TokenGradient = Callable[[Tensor, slice], Tensor]
"""(logprobs_n, which tokens) -> d(loss)/d(logprobs_n): what an additive objective can say piece by piece."""


@torch.no_grad()
def target_logprobs(hidden_ND: Tensor, target_N: Tensor, head: nn.Linear, temperature: float) -> Tensor:
    """[N] float32: log_softmax(head(hidden) / temperature) of the targets."""
    pieces = zip(hidden_ND.split(SOFTMAX_ROWS), target_N.split(SOFTMAX_ROWS), strict=True)
    return torch.cat([_softmax(hidden, target, head, temperature)[0] for hidden, target in pieces])


@torch.no_grad()
def backward_through_head(
    hidden_ND: Tensor,
    target_N: Tensor,
    head: nn.Linear,
    temperature: float,
    token_gradient: TokenGradient,
    weight_gradient: Tensor,
) -> Tensor:
    """Gradient of a token-wise loss through the head.

    Args:    hidden_ND: [N, D], any floating dtype.  weight_gradient: [V, D] float32, added to in place.
    Returns: d(loss)/d(hidden), [N, D] in the dtype of ``hidden_ND``.
    """
    hidden_gradient = torch.empty_like(hidden_ND)
    for start in range(0, hidden_ND.shape[0], BLOCK_ROWS):
        rows = slice(start, min(start + BLOCK_ROWS, hidden_ND.shape[0]))
        logit_gradient = _block_gradient(hidden_ND, target_N, head, temperature, token_gradient, rows)
        torch.mm(logit_gradient, head.weight, out=hidden_gradient[rows])
        if weight_gradient.dtype == logit_gradient.dtype:
            weight_gradient.addmm_(logit_gradient.T, hidden_ND[rows])
        else:
            weight_gradient += logit_gradient.T @ hidden_ND[rows]
    return hidden_gradient


def _block_gradient(
    hidden_ND: Tensor,
    target_N: Tensor,
    head: nn.Linear,
    temperature: float,
    token_gradient: TokenGradient,
    rows: slice,
) -> Tensor:
    """d(loss)/d(head's output) of ``rows``, [rows, V] in the compute dtype."""
    block = torch.empty(rows.stop - rows.start, head.out_features, dtype=hidden_ND.dtype, device=hidden_ND.device)
    for start in range(rows.start, rows.stop, SOFTMAX_ROWS):
        part = slice(start, min(start + SOFTMAX_ROWS, rows.stop))
        target = target_N[part, None]
        logprobs, unnormalised, total = _softmax(hidden_ND[part], target_N[part], head, temperature)
        # d logprob / d logit = (onehot - softmax) / temperature
        gradient = token_gradient(logprobs, part)[:, None] / temperature
        unnormalised.mul_(-gradient / total[:, None]).scatter_add_(1, target, gradient)
        block[part.start - rows.start : part.stop - rows.start] = unnormalised
    return block


def _softmax(hidden: Tensor, target: Tensor, head: nn.Linear, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob of the target [n], exp(logits - max) [n, V], its sum [n]), all float32, with one pass of exp."""
    logits = F.linear(hidden, head.weight, head.bias).float()
    if temperature != 1.0:
        logits.div_(temperature)
    largest = logits.amax(dim=-1, keepdim=True)
    logits.sub_(largest)
    chosen = logits.gather(1, target[:, None])[:, 0]
    unnormalised = logits.exp_()
    total = unnormalised.sum(dim=-1)
    return chosen - total.log(), unnormalised, total
