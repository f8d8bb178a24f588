"""The critic's loss: how far values are from the returns, and not further from the recorded ones than a clip allows.

    1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)      a sum over tokens, so it can be streamed

Owns: the arithmetic on values. Never: a model, padding, I/O.

Legend: N = loss tokens of one packed piece, as in loss.py. ``values_N`` carry the gradient; all else is data.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


def value_loss_N(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float) -> Tensor:
    """[N] loss of each token.

    Args:    old_values_N: recorded when the sample was scored.  clip: how far from them a value counts; 0: off.
    Source:  PPO as openai/baselines has it; TRL's ``cliprange_value``, verl's ``compute_value_loss``. A value that
             moved beyond the clip has no gradient where that would bring it nearer to the return.
    """
    error_N = (values_N - returns_N).square()
    if clip > 0:
        clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (clipped_N - returns_N).square())
    return 0.5 * error_N


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueMetrics:
    """Sums over tokens, so that pieces add up to what the whole mini-batch would have said. rows: of them.

    clipped: tokens whose gradient the clip removed.  The others are of values v and returns R.
    """

    loss: float = 0.0
    tokens: float = 0.0
    rows: float = 0.0
    clipped: float = 0.0
    values: float = 0.0
    returns: float = 0.0
    return_squares: float = 0.0
    errors: float = 0.0
    error_squares: float = 0.0

    def __add__(self, other: ValueMetrics) -> ValueMetrics:
        return ValueMetrics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def means(self) -> dict[str, float]:
        """Under the names that metrics.jsonl uses (docs/ppo.md), of the values before the step."""
        if not self.tokens:
            return {}
        mean_return, mean_error = self.returns / self.tokens, self.errors / self.tokens
        spread = self.return_squares / self.tokens - mean_return**2
        left = self.error_squares / self.tokens - mean_error**2
        return {
            "value_loss": self.loss / self.tokens,
            "value_mean": self.values / self.tokens,
            "return_mean": mean_return,
            "value_clip_fraction": self.clipped / self.tokens,
            **({"explained_variance": 1.0 - left / spread} if spread > 1e-12 else {}),
        }


@torch.no_grad()
def value_metrics(
    loss: Tensor, values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float, *, num_rows: int
) -> ValueMetrics:
    """What one piece adds to the metrics. loss: its sum."""
    errors_N = returns_N - values_N
    beyond_N = (values_N - old_values_N).abs() > clip
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    removed_N = beyond_N & ((clipped_N - returns_N).square() > errors_N.square())
    return ValueMetrics(
        loss=loss.item(),
        tokens=float(values_N.numel()),
        rows=float(num_rows),
        clipped=removed_N.sum().item() if clip > 0 else 0.0,
        values=values_N.sum().item(),
        returns=returns_N.sum().item(),
        return_squares=returns_N.square().sum().item(),
        errors=errors_N.sum().item(),
        error_squares=errors_N.square().sum().item(),
    )
