"""Metrics that the documents name are metrics that there are."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from orchestrator.observability.metrics import GROUPS, OF_CRITIC, PREFIXES, MetricsLog, grouped, ranker_numbers
from orchestrator.observability.report.bubbles import Cause
from tests.unit.test_metrics import ended, outcome, scored, step, training
from transport.contracts.messages import CriticReported, DispatchGroups, GroupPlan, RankerJudged
from transport.contracts.types import GroupId, PromptId, WorkerId
from workers.algorithms.loss import LossMetrics
from workers.algorithms.value_loss import ValueMetrics
from workers.trainer.worker import BatchTally

ROOT = Path(__file__).parents[2]
KEYS = {f"bubble_{stage}_{cause}_s" for stage in ("generation", "trainer") for cause in Cause}


ENDS = ("filtered", "stale", "dead")


def test_idle_seconds_are_called_what_they_are():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    named = {key for text in texts for key in re.findall(r"bubble_[a-z_]+_s\b", text)}
    assert named
    assert named <= KEYS


def test_every_key_of_a_batch_is_explained_and_none_that_is_not_there(tmp_path: Path):
    compared = {"delta_s": 0.5, "saved_s": 0.1}
    log = MetricsLog(tmp_path / "metrics.jsonl", no_fp8_since=lambda: 0, stages=lambda batch: compared)
    groups = [(scored(f"0/{number}", (1.0, 0.0)), outcome(f"0/{number}", how)) for number, how in enumerate(ENDS, 1)]
    for score, end in groups:
        log.observe(score, [end], 0.5)
    probe = GroupPlan(
        group_id=GroupId("0/0"),
        batch=0,
        prompt_id=PromptId("p"),
        samples=(0,),
        group_size=2,
        predicted_tokens=5.0,
        priority=5.0,
    )
    others = msgspec.structs.replace(probe, samples=(1,), attempt=1, predicted_tokens=9.0)
    sent = [DispatchGroups(worker_id=WorkerId("generate-0.1"), plans=(plan,)) for plan in (probe, others)]
    log.observe(ended("0/0/0"), sent, 1.0)
    valued = msgspec.structs.replace(scored("0/0", (1.0, 0.0)), value_versions=(0, 0), environment_tokens=1)
    log.observe(valued, [training(0, "0/0")], 1.5)
    found = ValueMetrics(tokens=2.0, returns=1.0, return_squares=1.0).means()
    of_critic = msgspec.structs.replace(step(0), metrics=found | dict.fromkeys(OF_CRITIC, 0.0))
    log.observe(CriticReported(worker_id=WorkerId("critic-0.1"), report=of_critic), [], 1.6)
    assert found.keys() < {*OF_CRITIC}
    log.observe(step(0), [], 2.0)
    first_line = log.last_line
    log.observe(scored("0/4", (1.0, 0.0)), [training(1, "0/4")], 2.5)  # left over by batch 0
    log.observe(step(1), [], 3.0)
    assert log.last_line["groups_deferred"] == 1
    assert "groups_deferred" not in first_line
    of_step = {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0, "skipped_nonfinite": 0.0}
    tally = BatchTally(started_s=0.0, steps=[of_step | LossMetrics(tokens=1.0, kl_tokens=1.0, loss_tokens=1.0).means()])
    judged = ranker_numbers(RankerJudged(trusted=True, num_groups=1))
    told = {*first_line, *log.last_line, *tally.metrics(1.0, publish_s=0.0), *judged, "well_formed"}
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    explained = {key for row in rows for key in re.findall(r"`(\w+)`", row)} | set(re.findall(r"`(ranker_\w+)`", text))
    assert explained == told
    components = {"right", "well_formed", "right_with_filtered"}
    assert not {key for key in told - components - {*GROUPS["reward"].split()} if "reward/" in grouped(key)}
    assert grouped("well_formed") == "reward/well_formed", "a component of the reward has any name"
    assert (grouped("reward_std"), grouped("eval_right")) == ("reward/reward_std", "eval/right")
    assert all(f"`{group}/`" in text for group in (*GROUPS, *PREFIXES))
