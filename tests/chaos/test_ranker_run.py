"""The ranker in real processes: it learns, is believed once it is right, and is still right after its process died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.sim.replay import recorded_commands
from tests.fakes.live_run import EMULATED, LiveRun
from transport.contracts.messages import PlanComputed, PromptsArrived, RankerJudged, RolloutFinished
from transport.contracts.types import is_evaluation, parse_row_id

pytestmark = pytest.mark.chaos

NUM_PROMPTS, GROUPS, SAMPLES = 16, 8, 2
FAST = (
    *EMULATED,
    "run.batches=4000",
    "data.source=jsonl",
    "eval.problems=0",  # or one of them would be held out
    "data.shuffle=false",  # so that every prompt has the same forced lengths on each of its visits
    f"pipeline.groups_per_batch={GROUPS}",
    f"pipeline.group_size={SAMPLES}",
    "pipeline.dispatch=slicing",
    "sampling.max_new_tokens=400",
    "generation.workers=2",
    "trainer.checkpoint_every=20",
    "emulated.time_scale=0.01",
    "ranker.kind=history",
)


def test_plans_are_even_until_predictions_are_right_and_stay_right_over_a_kill(tmp_path: Path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text(
        "\n".join(str(10 + 24 * (5 * n % NUM_PROMPTS)) for n in range(NUM_PROMPTS) for _ in range(SAMPLES))
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(f'{{"prompt": "Say {n} digits.", "answer": "{n}"}}' for n in range(NUM_PROMPTS)))
    with LiveRun(tmp_path, *FAST, f"data.path={prompts}", f"generation.lengths={lengths}") as run:
        run.wait_until(lambda: any(line.get("ranker_trusted") for line in run.metrics()), "a ranker that is trusted")
        run.kill("orchestrator", "serve")
        reached = len(run.metrics())
        run.wait_for_batch(reached + 8)
        client = run.redis()
        status = json.loads(client.get("streamrl:{tiny}:meta:status"))
        client.close()
        assert run.command("drain", str(run.run_dir)).returncode == 0
        assert run.wait_for_end() == 0, run.describe()
        assert run.command("replay", str(run.run_dir)).returncode == 0
        assert run.audit().returncode == 0
    assert "ranker" in status
    check_journal(run)
    assert run.metrics()[-1]["ranker_recall_20"] > 0.7
    assert "tail recall of predicted lengths" in (run.run_dir / "report.html").read_text()


def check_journal(run: LiveRun) -> None:
    """What was decided follows from events: verdicts, then plans; predictions came with the prompts."""
    events = [record.event for record, _ in recorded_commands(run.run_dir / "journal")]
    verdicts = [event.trusted for event in events if isinstance(event, RankerJudged)]
    assert verdicts[0] is False
    turned = verdicts.index(True)
    assert all(verdicts[turned:]), "the verdict was forgotten with the process"
    trusted, policies = False, {False: set[str](), True: set[str]()}
    for event in events:
        if isinstance(event, RankerJudged):
            trusted = event.trusted
        elif isinstance(event, PlanComputed):
            policies[trusted].add(event.policy)
    assert "slicing" not in policies[False]
    assert "slicing" in policies[True]
    arrivals = [event for event in events if isinstance(event, PromptsArrived) and event.prompts]
    assert {round(ref.predicted_tokens) for ref in arrivals[0].prompts} == {400}
    assert len({round(ref.predicted_tokens) for arrival in arrivals[-3:] for ref in arrival.prompts}) > 4


def test_an_oracle_knows_every_forced_length_also_after_a_kill(tmp_path: Path):
    """Shuffled prompts with two evaluations among them: what was predicted of a slot is what it took."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(str(5 + 37 * n % 301) for n in range(997)))
    shuffled = [one for one in EMULATED if not one.startswith("run.batches")]
    settings = (
        *shuffled,
        "run.batches=60",
        "pipeline.groups_per_batch=16",
        "pipeline.group_size=2",
        "pipeline.dispatch=scored",
        "sampling.max_new_tokens=400",
        "generation.workers=2",
        "emulated.time_scale=0.01",
        "eval.every=20",
        "ranker.kind=oracle",
        f"generation.lengths={lengths}",
    )
    with LiveRun(tmp_path, *settings) as run:
        run.wait_for_batch(10)
        run.kill("orchestrator", "serve")
        assert run.wait_for_end() == 0, run.describe()
        assert run.audit().returncode == 0
    events = [record.event for record, _ in recorded_commands(run.run_dir / "journal")]
    predicted = [ref.predicted_tokens for event in events if isinstance(event, PromptsArrived) for ref in event.prompts]
    took: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, RolloutFinished) and not is_evaluation(event.row_id):
            group, sample = parse_row_id(event.row_id)
            batch, slot = map(int, group.split("/"))
            took.setdefault(batch * 16 + slot, [0, 0])[sample] = event.response_tokens
    assert len(took) == 60 * 16
    assert all(predicted[place] == pytest.approx(sum(of) / 2) for place, of in took.items())
    verdicts = [event for event in events if isinstance(event, RankerJudged)]
    assert all(verdict.trusted for verdict in verdicts)
    assert max(verdict.num_groups for verdict in verdicts) > 256
    assert verdicts[-1].kendall_tau == pytest.approx(1.0), "(groups of equal length share the last place of a tail)"
