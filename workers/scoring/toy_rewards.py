"""Rewards for runs that only try the pipeline out: dense enough for a model that cannot do anything yet.

Named in a configuration like a user's own function: ``scoring.reward = "workers.scoring.toy_rewards:digit_share"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def digit_share(prompt: str, response: str, entry: Mapping[str, Any]) -> dict[str, float]:
    """The share of digits among the response's characters, in [0, 1]; 0 for an empty one.

    Source: ours. A random model earns about 0.15 and can learn this in a few steps, unlike any sum.
    """
    share = sum(character.isdigit() for character in response) / max(1, len(response))
    return {"reward": share, "empty": float(not response)}
