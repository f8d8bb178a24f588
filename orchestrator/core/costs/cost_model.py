"""How long things take: decode steps, prefill, training, transfers, from a few coefficients each.

Owns: the formulas and their exact sums. Never: where coefficients come from (``analytic.py`` from specifications, a
profile from a live engine). Invariant: pure functions of numbers; the closed forms equal the step-by-step loop.

    decode step   fixed + max(weights, batch * gemm) + batch * sample + context * kv
                  memory-bound while the weights dominate, compute-bound beyond; every context token is read once a step
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of one generation instance, seconds.

    fixed_s: of every step (scheduling, launches, latency of collectives).  weights_s: reading the weights once.
    gemm_sample_s: arithmetic of one sample's token; hidden behind the weights until it outgrows them.
    sample_s: what a sample adds in any case (bytes of collectives, sampling).
    kv_token_s: reading the keys and values of one token of context.  prefill_token_s: arithmetic of a prompt token.
    kv_capacity_tokens: tokens of context that fit, all samples together; infinite where memory is no limit.
    padded: the context that is read is that of so many samples as long as the longest (the simulator alone heeds it).
    Source: StreamRL sec. 5.1 and fig. 6 (flat, then linear in the batch). Ours: the context, which it leaves out.
    """

    fixed_s: float
    weights_s: float = 0.0
    gemm_sample_s: float = 0.0
    sample_s: float = 0.0
    kv_token_s: float = 0.0
    prefill_token_s: float = 0.0
    kv_capacity_tokens: float = math.inf
    padded: bool = False

    def scaled(self, factor: float) -> DecodeCost:
        """Every second of it ``factor`` times as long."""
        return _scaled(self, factor)

    def step_s(self, batch: float, context_tokens: float) -> float:
        """One decode step of ``batch`` samples that hold ``context_tokens`` at its start."""
        arithmetic_s = batch * self.gemm_sample_s
        bound_s = arithmetic_s if arithmetic_s > self.weights_s else self.weights_s
        return self.fixed_s + bound_s + batch * self.sample_s + context_tokens * self.kv_token_s

    def steps_s(self, batch: float, context_tokens: float, steps: float) -> float:
        """``steps`` steps of a constant batch, whose context grows by ``batch`` tokens a step.

        For whole ``steps`` it is the sum of ``step_s(batch, context_tokens + i * batch)``, i = 0 .. steps-1; between
        them it interpolates.
        """
        grown = batch * steps * (steps - 1) * 0.5
        return steps * self.step_s(batch, context_tokens) + grown * self.kv_token_s

    def steps_in(self, batch: float, context_tokens: float, seconds: float) -> float:
        """How many steps of a constant batch pass in ``seconds``: the inverse of ``steps_s``."""
        quadratic = 0.5 * batch * self.kv_token_s
        linear = self.step_s(batch, context_tokens) - quadratic
        return 2.0 * seconds / (linear + math.sqrt(linear * linear + 4.0 * quadratic * seconds)) if seconds > 0 else 0.0

    def prefill_s(self, tokens: float) -> float:
        """One prefill of ``tokens`` prompt tokens, during which nothing is decoded."""
        if tokens <= 0:
            return 0.0
        return self.fixed_s + max(self.weights_s, tokens * self.prefill_token_s)


class TrainCost(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of one data-parallel rank of the trainer, seconds; all ranks work at once.

    round_s: of every micro-batch.  token_s: a token of the rank.  squared_token_s: attention, times the square of each
    sequence's tokens.  fill_s: filling the pipeline from empty, when the trainer had run out of micro-batches.
    mini_batch_s: reducing gradients and draining at the end of a mini-batch.  optimizer_s: the optimizer's step.
    padded: attention takes as long as if all samples were as long as the longest of their group.
    Source: StreamRL sec. 4.2 takes it from a profile; the form is ours.
    """

    token_s: float
    squared_token_s: float = 0.0
    round_s: float = 0.0
    fill_s: float = 0.0
    mini_batch_s: float = 0.0
    optimizer_s: float = 0.0
    padded: bool = False

    def scaled(self, factor: float) -> TrainCost:
        """Every second of it ``factor`` times as long."""
        return _scaled(self, factor)

    def micro_batch_s(self, tokens: float, squared_tokens: float = 0.0) -> float:
        """Forward and backward of one rank's part. squared_tokens: the sum of the squared sequence lengths."""
        return self.round_s + tokens * self.token_s + squared_tokens * self.squared_token_s

    def step_s(self) -> float:
        """The end of a mini-batch: gradients are reduced, the optimizer steps."""
        return self.mini_batch_s + self.optimizer_s


class TransferCost(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the weights on its way to the generation instances.

    num_bytes: of one copy.  bytes_per_s: of one edge of the distribution tree.  latency_s: of one edge.
    depth: edges from the root to the farthest leaf.  chunks: pieces that are forwarded while the next ones come in.
    load_s: putting the received bytes into the engine, between two decode steps.
    """

    num_bytes: float
    bytes_per_s: float
    latency_s: float = 0.0
    depth: int = 1
    chunks: int = 16
    load_s: float = 0.0

    def transfer_s(self) -> float:
        """From the root to the farthest leaf: the bytes once, and one chunk more for every further edge."""
        edges_behind = max(0, self.depth - 1) / self.chunks
        return self.depth * self.latency_s + self.num_bytes / self.bytes_per_s * (1.0 + edges_behind)


Cost = TypeVar("Cost", DecodeCost, TrainCost)


def _scaled(cost: Cost, factor: float) -> Cost:
    seconds = {name: factor * getattr(cost, name) for name in cost.__struct_fields__ if name.endswith("_s")}
    return msgspec.structs.replace(cost, **seconds)
