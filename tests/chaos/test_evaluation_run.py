"""Whole runs that evaluate while they train: every evaluation ends whole or by name, whoever dies meanwhile."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from orchestrator.sim.replay import recorded_commands
from tests.fakes.live_run import BATCHES, QUICK, LiveRun, check_whole
from transport.contracts.messages import EVALUATION, DispatchGroups, RolloutFinished
from transport.contracts.types import is_evaluation

pytestmark = pytest.mark.chaos

PROBLEMS = 16
"""Of the preset."""


def check_evaluations(run: LiveRun) -> list[dict[str, Any]]:
    """The lines of all evaluations, once they are known to be right by themselves and by the journal."""
    lines = run.evaluations()
    assert [line["eval"] for line in lines] == list(range(len(lines)))
    assert all(line["eval_answered"] == PROBLEMS or line["eval_short"] for line in lines), lines
    answers = [
        event
        for event in (record.event for record, _ in recorded_commands(run.run_dir / "journal"))
        if isinstance(event, RolloutFinished) and is_evaluation(event.row_id)
    ]
    for line in lines:
        pinned = [
            event
            for event in answers
            if event.row_id.startswith(f"eval{line['eval']}/")
            and event.oldest.version == event.newest.version == line["version"]
        ]
        assert len(pinned) >= line["eval_answered"], "an answer was counted that is not of the pinned weights"
    return lines


def test_a_run_evaluates_while_it_trains_and_trains_none_of_it(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, "eval.every=2", "eval.ends=true", "eval.budget=0.5") as run:
        check_whole(run)
        lines = check_evaluations(run)
        assert lines[0]["version"] == 0
        assert lines[1]["version"] in (2, 3), "of every second version, or the next where an evaluation took longer"
        assert [line["eval_short"] for line in lines][:2] == ["", ""]
        assert lines[-1]["version"] == BATCHES, "the last weights of all"
        assert "  held-out " in run.output
        assert {"eval_reward", "eval_seconds", "eval_tokens", "eval_share"} <= lines[0].keys()
        assert f"evaluation of version 0  reward {lines[0]['eval_reward']:.3f}" in run.output
        assert "Held-out problems" in (run.run_dir / "report.html").read_text()


@pytest.mark.long
def test_two_sets_are_asked_each_in_its_way_and_told_apart(tmp_path: Path):
    sets = ("plain.problems=8", "drawn.problems=4", "drawn.samples=4")
    with LiveRun(tmp_path, *QUICK, "eval.every=2", "eval.budget=1.0", *(f"eval.sets.{one}" for one in sets)) as run:
        check_whole(run)
        whole = [line for line in run.evaluations() if not line["eval_short"]]
        assert [line["version"] for line in whole][:2] == [0, 2]
        for line in whole:
            assert (line["eval_problems"], line["eval_answered"]) == (24, 24)
            counts = [(line[f"eval/{name}/problems"], line[f"eval/{name}/answered"]) for name in ("plain", "drawn")]
            assert counts == [(8, 8), (4, 16)]
            assert {f"eval/drawn/pass@{k}" for k in (1, 2, 4)} <= line.keys()
            assert not [key for key in line if key.startswith("eval/plain/pass")]
        asked = [
            plan
            for _, commands in recorded_commands(run.run_dir / "journal")
            for command in commands
            if isinstance(command, DispatchGroups)
            for plan in command.plans
            if plan.batch == EVALUATION
        ]
        temperatures = {plan.prompt_id.partition(":")[0]: plan.sampling.temperature for plan in asked if plan.sampling}
        assert temperatures == {"plain": 0.0, "drawn": 1.0}
        problems = [json.loads(line) for line in (run.run_dir / "eval.jsonl").read_text().splitlines()]
        assert Counter(problem["eval_set"] for problem in problems) == {"plain": 8, "drawn": 4}
        assert "  drawn  reward " in run.output
        assert "Held-out set drawn" in (run.run_dir / "report.html").read_text()


@pytest.mark.parametrize(
    "faults",
    [
        {"generate.row_ready": 3, "score.claimed": 2, "orchestrator.journaled": 30},
        pytest.param(
            {"generate.claimed": 4, "train.published": 2, "orchestrator.executed": 40}, marks=pytest.mark.long
        ),
    ],
    ids=lambda faults: "+".join(faults),
)
def test_deaths_in_an_evaluation_leave_it_and_the_run_right(tmp_path: Path, faults: dict[str, int]):
    with LiveRun(tmp_path, *QUICK, "eval.every=1", faults=faults) as run:
        check_whole(run)
        assert run.died_at() == set(faults)
        assert check_evaluations(run), "nothing was evaluated: the test proved nothing of it"
