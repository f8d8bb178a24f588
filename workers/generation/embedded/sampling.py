"""Draws the next token of every sample, each from a random stream of its own.

Owns: temperature, top-k, top-p, greedy, and the uniform numbers. Never: stops, limits, slots.
Invariant: the number drawn for a token depends on (seed, sample, position) alone, so neither batch neighbours, slot
numbers nor a restart change it; what remains of a neighbour is the rounding of a GEMM of another shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 256
"""Vocabulary entries under one step of the coarse CDF: near the square root of 50k-150k tokens, so that the two
searches are about as long. Against one cumsum over the vocabulary this halves the time of a draw."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that passes BigCrush."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def stream_key(seed: int, sample: int) -> np.uint64:
    """The random stream of sample ``sample`` of a group seeded with ``seed`` (any int; taken modulo 2**64)."""
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF, sample], dtype=np.uint64)
    return _mix(_mix(words[:1] + _GOLDEN) + (words[1:] + np.uint64(1)) * _GOLDEN)[0]


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One uniform number in [0, 1) per stream. keys: [B] of stream_key.  positions: [B] index of the token, from 0.

    Source: ours; SplitMix64 with the position as its counter. torch's generators have one stream each, and one
    generator per sample costs a Python call per sample and step.
    """
    words = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How to draw one token per row of a batch; all [B].

    temperature: 0 is greedy.  top_p in (0, 1], 1 is off.  top_k: 0 is off.  uniforms: in [0, 1).
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    uniforms: NDArray[np.float64]


def sample_tokens(logits: torch.Tensor, draw: Draw) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Draw one token per row.

    Args:    logits: [B, V], any floating dtype.
    Returns: tokens [B] int32, and their logprobs [B] float32 under log_softmax(logits / temperature) over the whole
             vocabulary (temperature 0 counts as 1). A row whose logits are not finite has a logprob that is not finite;
             its token means nothing.
    Source:  order of the cuts as in transformers: top-k, renormalise, then top-p, keeping the token that crosses p.
    """
    probs = _probabilities(logits, draw.temperature)
    weights = probs
    cut = (draw.top_p < 1) | (draw.top_k > 0)
    if cut.any():
        rows = torch.from_numpy(np.flatnonzero(cut)).to(probs.device)
        kept = _truncate(probs[rows], draw.top_p[cut], draw.top_k[cut])
        weights = probs.index_copy(0, rows, kept)
    tokens = _inverse_cdf(weights, torch.from_numpy(draw.uniforms).to(probs.device))
    greedy = draw.temperature == 0
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(probs.device), logits.argmax(-1), tokens)
    logprobs = probs.gather(1, tokens[:, None]).log().squeeze(1)
    return tokens.to(torch.int32).cpu().numpy(), logprobs.cpu().numpy()


def _probabilities(logits: torch.Tensor, temperature: NDArray[np.float32]) -> torch.Tensor:
    """softmax(logits / temperature) in float32; [B, V]."""
    inverse = 1 / np.where(temperature == 0, np.float32(1), temperature)
    if (inverse != 1).any():
        # Times the inverse, not by the temperature: float32 comes out of one pass over bfloat16 logits.
        logits = logits * torch.from_numpy(inverse).to(logits.device)[:, None]
    return torch.softmax(logits, dim=-1, dtype=torch.float32)


def _truncate(probs: torch.Tensor, top_p: NDArray[np.float32], top_k: NDArray[np.int64]) -> torch.Tensor:
    """Zero what top-k and top-p cut off; [B, V]. Exactly k tokens stay; among equals the lower token id goes first."""
    vocabulary = probs.shape[1]
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    k = torch.from_numpy(np.where(top_k > 0, top_k, vocabulary)).to(probs.device)[:, None]
    p = torch.from_numpy(top_p).to(probs.device)[:, None].double()
    ranked = ranked.masked_fill(torch.arange(vocabulary, device=probs.device) >= k, 0)
    mass = ranked.double().cumsum(-1)
    before = mass - ranked
    outside = (before >= p * mass[:, -1:]) & (p < 1)
    return torch.zeros_like(probs).scatter_(1, order, ranked.masked_fill(outside, 0))


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token at quantile ``uniforms`` of each row. weights: [B, V] >= 0, not necessarily summing to 1.

    Two searches: for the block, then within it. A token of weight zero is never drawn.
    """
    size = weights.shape[1]
    if padding := -size % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(weights.shape[0], -1, BLOCK)
    block, rest = _search(blocks.sum(-1), uniforms[:, None], relative=True)
    inside = blocks[torch.arange(weights.shape[0], device=weights.device), block]
    offset, _ = _search(inside, rest[:, None], relative=False)
    return (block * BLOCK + offset).clamp_(max=size - 1)  # beyond the end only where no weight is a number


def _search(weights: torch.Tensor, target: torch.Tensor, *, relative: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """First index whose cumulative weight exceeds ``target`` [B, 1] (a share of the total when ``relative``).

    Returns: index [B], and what of the target lies inside that index [B]. The target is kept below the total, as the
    sum of a block and the sums inside it round differently.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(target * total if relative else target, below)
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)
    rest = target - (cumulative.gather(1, index) - weights.gather(1, index))
    return index.squeeze(1), rest.squeeze(1).clamp_(min=0)
