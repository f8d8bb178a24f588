"""Parts of the data with losses and estimators of their own, in a real run: a row is trained with its part's, once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.live_run import QUICK, LiveRun, check_whole

pytestmark = pytest.mark.chaos

MODULE = """
import json
import numpy as np
from pathlib import Path

def halving(rewards, responses):
    # 1 for all of a group, so that also one without a spread is seen; half of it at each later token
    return [0.5 ** np.arange(len(one.token_ids)) for one in responses]

halving.additive, halving.per_token = "responses", True

def told(logprobs, tokens, objective):
    with Path(__file__).with_name("told.jsonl").open("a") as file:
        rows, advantages = tokens.row_N.tolist(), tokens.advantages_N.tolist()
        file.write(json.dumps({"rows": rows, "advantages": advantages, "high": objective.clip_high}) + "\\n")
    return -tokens.advantages_N * logprobs

told.additive = "responses"
"""


def test_each_row_is_trained_with_what_its_part_has_also_after_kills(tmp_path: Path):
    """Part "own" has a loss and an estimator of tokens of the user's, "ours" another of ours and a KL. What the user's
    loss was given is its own part's rows alone."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "of_parts.py").write_text(MODULE)
    settings = (
        "algorithm.functions_path=mine",
        'data.mix.own={loss = "of_parts:told", advantage = "of_parts:halving", clip_high = 0.3}',
        'data.mix.ours={loss = "gspo", advantage = "rloo", clip_low = 0.003, clip_high = 0.004, kl_coef = 0.01}',
        "eval.problems=0",
    )
    with LiveRun(tmp_path, *QUICK, *settings) as run:
        run.wait_for_batch(1)
        run.kill("workers", "score")
        run.wait_for_batch(3)
        run.kill("workers", "train")
        check_whole(run)
        metrics = run.metrics()
    lines = [json.loads(line) for line in (tmp_path / "mine" / "told.jsonl").read_text().splitlines()]
    trained = [line for line in lines if any(_halves(line["rows"], line["advantages"]))]
    assert trained
    assert all(all(_halves(line["rows"], line["advantages"])) for line in trained)
    assert {line["high"] for line in lines} == {0.3}
    assert any(line.get("kl", 0.0) > 0 for line in metrics), metrics
    assert all(line["skipped_nonfinite"] == 0 for line in metrics)


def _halves(rows: Sequence[int], advantages: Sequence[float]) -> list[bool]:
    """Of each row: whether its tokens have 1, 1/2, 1/4, ..."""
    of_rows: dict[int, list[float]] = {}
    for row, advantage in zip(rows, advantages, strict=True):
        of_rows.setdefault(row, []).append(advantage)
    return [values == pytest.approx([0.5**token for token in range(len(values))]) for values in of_rows.values()]
