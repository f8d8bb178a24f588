"""How long training and transfers of weights take, from a few coefficients each; pure functions of numbers.

What decoding costs is in ``transport/contracts/continuous_batching.py``. Where coefficients come from: ``analytic.py``
from specifications, a profile from a live engine.
"""

from __future__ import annotations

import msgspec


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
