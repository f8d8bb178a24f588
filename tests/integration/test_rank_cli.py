"""``streamrl-orchestrator rank``: a user's log in, a ranker and an order out; what is wrong with a log is one line."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.rank import rank
from orchestrator.errors import ConfigError, DataError, ExitCode, exit_code
from ranker.model import train
from tests.fakes.length_logs import synthetic_lengths

DATA = Path(os.environ.get("STREAMRL_LENGTH_DATA") or Path(__file__).parents[3] / "shared" / "data")


def call(*arguments: object) -> str:
    """Run one command in this process; errors of ours come out as they are."""
    result = CliRunner().invoke(rank, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.jsonl.gz"
    rows = [{"id": s.prompt_id, "prompt": s.text, "output_tokens": list(s.tokens)} for s in synthetic_lengths(400)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


@pytest.fixture(scope="module")
def ranker(log: Path) -> Path:
    path = log.with_name("ranker.bin")
    printed = call("train", log, "--out", path, "--seed", 3)
    assert "280 prompts trained on, 40 tested on" in printed
    return path


def test_fresh_rankers_are_measured_over_several_splits(log: Path):
    figures = json.loads(call("evaluate", log, "--splits", 2, "--json").splitlines()[-1])
    first, second = (train(synthetic_lengths(400), seed).quality for seed in (0, 1))
    assert figures["recall_20"] == pytest.approx((first.recall_20 + second.recall_20) / 2, abs=1e-3)
    assert figures["recall_20"] > 0.7
    assert figures["recall_20_sd"] == pytest.approx(abs(first.recall_20 - second.recall_20) / 2, abs=1e-3)


def test_a_trained_ranker_is_measured_on_another_log(ranker: Path, tmp_path: Path):
    other = tmp_path / "other.jsonl"
    rows = [{"prompt": s.text, "output_tokens": s.tokens[0]} for s in synthetic_lengths(100, seed=5)]
    other.write_text("\n".join(map(json.dumps, rows)))
    printed = call("evaluate", other, "--ranker", ranker)
    assert "ranker.bin" in printed
    assert float(printed.splitlines()[1].split()[2]) > 0.6


@pytest.mark.parametrize("name", ["scores.jsonl", "scores.jsonl.gz"])
def test_prompts_are_scored_the_longest_first(ranker: Path, log: Path, tmp_path: Path, name: str):
    call("score", log, "--ranker", ranker, "--out", tmp_path / name)
    content = (tmp_path / name).read_bytes()
    rows = [json.loads(line) for line in (gzip.decompress(content) if name.endswith("gz") else content).splitlines()]
    assert {row["id"] for row in rows} == {f"p{index}" for index in range(400)}
    means = [row["mean_tokens"] for row in rows]
    assert means == sorted(means, reverse=True)
    assert means[0] > 20 * means[-1]
    assert all(row["p50_tokens"] < row["p90_tokens"] and row["mean_tokens"] <= row["longest_of_group"] for row in rows)
    assert call("score", log, "--ranker", ranker).encode() == b"".join(
        line + b"\n" for line in (gzip.decompress(content) if name.endswith("gz") else content).splitlines()
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a", "output_tokens": 0}'], r"log\.jsonl:1: a length is a whole number of tokens, 1 or more"),
        (['{"prompt": "a", "output_tokens": 7}'] * 50, "1 different prompts; ranking needs 30"),
        ([json.dumps({"prompt": f"p{n}", "length": 2048}) for n in range(50)], "every response has 2048 tokens"),
        ([json.dumps({"question": f"p{n}", "n": 4}) for n in range(50)], "no column 'output_tokens'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_bad_log_is_bad_data(tmp_path: Path, command: str, lines: list[str], message: str):
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=message) as raised:
        call(command, tmp_path / "log.jsonl")
    assert exit_code(raised.value, is_child=False) == ExitCode.BAD_CONFIG


def test_a_bad_ranker_and_a_bad_place_to_write_are_said(log: Path, ranker: Path, tmp_path: Path):
    (tmp_path / "bad.bin").write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(DataError, match=r"bad\.bin is not a stored ranker"):
        call("score", log, "--ranker", tmp_path / "bad.bin")
    with pytest.raises(ConfigError, match="cannot be written"):
        call("train", log, "--out", tmp_path / "no" / "ranker.bin")
    with pytest.raises(ConfigError, match="cannot be written"):
        call("score", log, "--ranker", ranker, "--out", tmp_path / "no" / "scores.jsonl")


@pytest.mark.skipif(not (DATA / "lengths_matheval.jsonl.gz").is_file(), reason=f"no real lengths in {DATA}")
def test_real_lengths_of_an_rl_tuned_model_are_ranked(tmp_path: Path):
    """2,500 of them: seconds instead of half a minute. `make bench NAME=ranker` measures all."""
    model, log = "starzmustdie/Qwen-2.5-3B-rlft", tmp_path / "log.jsonl"
    with gzip.open(DATA / "lengths_matheval.jsonl.gz", "rt") as file:
        log.write_text("".join([line for line in file if model in line][::4]))
    printed = call(
        *("evaluate", log, "--prompts", DATA / "prompts_matheval.jsonl.gz", "--model", model, "--splits", 1, "--json")
    )
    assert json.loads(printed.splitlines()[-1])["recall_20"] > 0.6
