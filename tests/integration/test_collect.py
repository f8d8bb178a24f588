"""``streamrl-orchestrator collect``: lengths and rewards of a prompt set, and what reads the file."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import resolve
from orchestrator.loop.ranking import base_lengths
from orchestrator.prompts.dataset import load_problems
from ranker.logs import read_log
from tests.fakes.command_line import orchestrator

DATA = ("--set", "data.size=24", "--set", "eval.problems=0", "--set", "sampling.max_new_tokens=8")


def collect(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return orchestrator("collect", "--preset", "tiny", *DATA, "--out", str(out), *options, cwd=out.parent)


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_what_is_collected_is_what_rankers_and_parts_read(tmp_path: Path) -> None:
    out = tmp_path / "collected.jsonl"
    done = collect(out, "--samples", "3")
    assert done.returncode == 0, done.stderr
    assert "24 of 24 prompts" in done.stdout
    lines = lines_of(out)
    overrides = [one for one in DATA if one != "--set"]
    problems = load_problems(resolve("tiny", [], overrides, {}).settings).training
    assert {line["id"] for line in lines} == {problem.prompt_id for problem in problems}
    assert all(len(line["output_tokens"]) == len(line["rewards"]) == 3 for line in lines)
    lengths = sorted(tokens for line in lines for tokens in line["output_tokens"])
    assert sorted(tokens for sample in read_log(out) for tokens in sample.tokens) == lengths
    ranked = resolve("tiny", [], [*overrides, f"ranker.base_lengths={out}"], {}).settings
    assert base_lengths(ranked).keys() == {problem.prompt_id for problem in problems}
    mean = sorted(sum(line["rewards"]) / 3 for line in lines)[12]
    bounds = [f"data.mix.low.max_reward={mean}", f"data.mix.high.min_reward={mean}"]
    parts = load_problems(resolve("tiny", [], [*overrides, f"data.rewards={out}", *bounds], {}).settings).training
    assert len(parts) == 24
    assert len({problem.part for problem in parts}) == 2

    kept = out.read_text().splitlines(keepends=True)[:20]  # as after a kill
    out.write_text("".join(kept))
    again = collect(out, "--samples", "3")
    assert (again.returncode, "4 prompts of 24" in again.stdout) == (0, True), again.stdout + again.stderr
    assert out.read_text().splitlines(keepends=True)[:20] == kept
    assert sorted(map(str, (line["id"] for line in lines_of(out)))) == sorted(str(line["id"]) for line in lines)
    for options, words in (
        (("--samples", "2"), "has 3 answers a prompt"),
        (("--samples", "3", "--no-rewards"), "with rewards"),
        (("--samples", "3", "--set", "model.path=random:other"), "name another file"),
        (("--samples", "3", "--set", "sampling.temperature=0.7"), "sampling.temperature = 1.0, not 0.7"),
        (("--samples", "3", "--set", "scoring.answer_marker=So:"), 'scoring.answer_marker = "Answer:", not "So:"'),
        (("--samples", "3", "--answers", "./collected.jsonl"), "is the file of --out"),
    ):
        refused = collect(out, *options)
        assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    out.write_text(json.dumps(lines[0] | {"prompt": "as it was before the data changed"}) + "\n")
    refused = collect(out, "--samples", "3")
    assert f"has another prompt as {lines[0]['id']} than the data" in refused.stderr, refused.stderr


def test_answers_that_were_paid_for_are_rows_to_imitate(tmp_path: Path) -> None:
    out, rows = tmp_path / "collected.jsonl", tmp_path / "answers.jsonl"
    options = ("--samples", "3", "--answers", str(rows), "--above", "0.1", "--set", "data.suffix= Go.")
    done = collect(out, *options)
    assert done.returncode == 0, done.stderr
    answers, rewards = lines_of(rows), [reward for line in lines_of(out) for reward in line["rewards"]]
    assert answers
    assert 0 < len(answers) <= sum(reward > 0.1 for reward in rewards) < len(rewards)
    assert all(one["reward"] > 0.1 and isinstance(one["response"], str) for one in answers)
    given = ["data.source=jsonl", f"data.path={rows}", "data.response_column=response", "algorithm.name=sft"]
    settings = resolve("tiny", [], [*given, "eval.problems=0", "data.suffix= Go.", "data.task="], {}).settings
    problems = load_problems(settings).training
    assert len(problems) == len(answers)
    assert all(one.question.count(" Go.") == 1 for one in problems), "the suffix is the run's, and added once"

    out.write_text("".join(out.read_text().splitlines(keepends=True)[:20]))  # as after a kill
    again = collect(out, *options)
    assert again.returncode == 0, again.stderr
    known = {line["id"] for line in lines_of(out)[:20]}
    kept = [one for one in lines_of(rows) if one["id"] in known]
    assert kept == [one for one in answers if one["id"] in known], "neither lost nor written twice"
    assert max(Counter(one["id"] for one in lines_of(rows)).values()) <= 3
    rows.unlink()
    for given, words in (
        (options, "24 prompts of --out were collected without it"),
        (("--above", "0.1"), "it needs --answers FILE"),
        ((*options, "--set", "environment.name=calculator"), "talk to an environment"),
    ):
        refused = collect(out, *given)
        assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr


def test_an_answer_without_a_reward_says_why_and_earns_no_zero(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(prompt, response, entry):\n"
        "    if crc32(entry['question'].encode()) % 2: raise ValueError('not this one')\n    return 0.5\n"
        "from zlib import crc32\n"
    )
    out = tmp_path / "collected.jsonl"
    mine = ("--set", "scoring.reward=mine:reward", "--set", f"scoring.reward_path={tmp_path}")
    done = collect(out, "--samples", "2", *mine)
    assert done.returncode == 0, done.stderr
    lines = lines_of(out)
    assert {tuple(line["rewards"]) for line in lines} == {(), (0.5, 0.5)}
    assert all(len(line["rewards"]) + len(line["errors"]) == 2 for line in lines)
    assert "answers without a reward" in done.stdout


def test_lengths_alone_need_no_reward(tmp_path: Path) -> None:
    out = tmp_path / "collected.jsonl"
    done = collect(out, "--no-rewards", "--prompts", "5", "--samples", "1", "--set", "scoring.reward=no.such:reward")
    assert done.returncode == 0, done.stderr
    assert [(line["rewards"], line["errors"]) for line in lines_of(out)] == [([], [])] * 5


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("", ("--set", "generation.engine=emulated"), "writes no answers to collect"),
        ('{"prompt": "x", "output_tokens": 3}\n', (), "line 1 was not written by `collect`"),
        ("no JSON\n", (), "out.jsonl:1"),
        ("", ("--set", "scoring.reward=no.such:reward"), "cannot be imported"),
        ("", ("--set", "data.task=chain_sums"), "chain_sum?"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, content: str, options: tuple[str, ...], words: str) -> None:
    out = tmp_path / "out.jsonl"
    if content:
        out.write_text(content)
    refused = collect(out, *options)
    assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    assert out.read_text() == content if content else True


def test_answers_that_are_episodes_earn_what_their_environment_pays(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    named = ("environment.name=tests.fakes.environments:Echo", f"environment.path={root}", "environment.jail=off")
    short = ("environment.max_turn_tokens=6", "sampling.max_new_tokens=40", "data.size=6", "environment.processes=1")
    out = tmp_path / "collected.jsonl"
    done = collect(out, "--samples", "2", *(part for one in (*named, *short) for part in ("--set", one)))
    assert done.returncode == 0, done.stderr
    lines = lines_of(out)
    assert len(lines) == 6
    assert all(reward > 1 for line in lines for reward in line["rewards"])  # characters that it heard
    assert all(tokens > 12 for line in lines for tokens in line["output_tokens"])  # two turns, and an echo between
