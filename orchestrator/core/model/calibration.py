"""What predictions were worth so far: a regression of lengths on what was predicted for them.

Owns: a few sums, and predictions corrected by them. Never: a prompt. Invariant: a ranker that knows nothing is found
out: its corrected predictions are nearly equal and as wide as the workload, and then no plan can be built on them.
"""

from __future__ import annotations

import math

import msgspec

ENOUGH = 64.0
"""Samples (after fading) before predictions are corrected; a correlation is then known to about 0.12."""
FADING = 0.8
"""Weight of what was known, when another batch is added: lengths drift as the policy learns (StreamRL sec. 5.2)."""


class Calibration(msgspec.Struct, kw_only=True):
    """Faded sums over finished samples of x = log predicted and y = log actual tokens.

    claimed: of the squared spreads that were predicted with them.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    claimed: float = 0.0

    @property
    def known(self) -> bool:
        """Whether there is enough to judge by."""
        return self.weight >= ENOUGH

    def fade(self) -> None:
        """What follows is newer than all that came before."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) * FADING)

    def add(self, predicted_tokens: float, sigma: float, tokens: int) -> None:
        """One finished sample. Without a usable prediction there is nothing to learn."""
        if not 0 < predicted_tokens < math.inf or tokens < 1:
            return
        x, y = math.log(predicted_tokens), math.log(tokens)
        self.weight += 1.0
        self.x, self.y = self.x + x, self.y + y
        self.xx, self.xy, self.yy = self.xx + x * x, self.xy + x * y, self.yy + y * y
        self.claimed += sigma * sigma if 0 < sigma < math.inf else 0.0

    def corrected(self, predicted_tokens: float, sigma: float) -> tuple[float, float]:
        """(expected tokens, spread of the log length) as experience has it.

        The regression shrinks predictions towards the mean by what they explain. The spread is what it leaves; where
        predictions said how sure they were, their own spreads, scaled so that they are right on average.
        """
        if not self.known or not 0 < predicted_tokens < math.inf:
            return predicted_tokens, sigma
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        var_x = max(0.0, self.xx / self.weight - mean_x * mean_x)
        var_y = max(0.0, self.yy / self.weight - mean_y * mean_y)
        covariance = self.xy / self.weight - mean_x * mean_y
        slope = max(0.0, covariance / var_x) if var_x > 1e-9 else 0.0
        left = math.sqrt(max(0.0, var_y - slope * (2 * covariance - slope * var_x)))
        claimed = math.sqrt(self.claimed / self.weight)
        spread = sigma * left / claimed if claimed > 0 and 0 < sigma < math.inf else left
        return math.exp(mean_y + slope * (math.log(predicted_tokens) - mean_x) + spread * spread / 2), spread
