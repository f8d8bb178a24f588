"""A reward of your own, here for GSM8K: named as ``scoring.reward = "gsm8k_reward:reward"``.

A scoring worker imports it only because its own command line names it and its directory (``streamrl-worker score
--reward ... --reward-path ...``; ``streamrl-orchestrator run`` passes on ``scoring.reward_path``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANSWER = re.compile(r"answer:\s*\$?(-?[\d,]*\.?\d+)", re.IGNORECASE)


def reward(prompt: str, response: str, entry: Mapping[str, Any]) -> dict[str, float]:
    """1 for the right number after the last "Answer:", 0.1 for another number there, 0 for none.

    entry: question, answer (the row's ``data.answer_column``) and metadata (its other columns).
    Returns: "reward", and any other numbers that should appear in the metrics.
    """
    expected = float(str(entry["answer"]).rsplit("####", 1)[-1].strip().replace(",", ""))
    found = _ANSWER.findall(response)
    right = bool(found) and float(found[-1].replace(",", "")) == expected
    return {"reward": 1.0 if right else 0.1 if found else 0.0, "well_formed": float(bool(found)), "right": float(right)}
