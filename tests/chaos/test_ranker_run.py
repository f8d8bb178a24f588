"""The ranker in real processes: it learns, is believed once it is right, and is still right after its process died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.sim.replay import recorded_commands
from tests.fakes.live_run import EMULATED, LiveRun
from transport.contracts.messages import PlanComputed, PromptsArrived, RankerJudged

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
