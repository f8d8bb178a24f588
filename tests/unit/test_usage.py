"""Advice for words of a command line that no command takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.__main__ import app as orchestrator
from orchestrator.cli.usage import WORKER_COMMANDS
from orchestrator.config.load import resolve
from orchestrator.errors import ConfigError
from workers.__main__ import ORCHESTRATOR_COMMANDS
from workers.__main__ import app as worker


def commands(app: object) -> set[str]:
    import typer.main

    found = typer.main.get_group(app).commands  # type: ignore[arg-type]
    return {name for name, one in found.items() if not one.hidden}


def test_each_program_knows_the_commands_of_the_other() -> None:
    here, there = commands(orchestrator), commands(worker)
    assert set(WORKER_COMMANDS) == there - here
    assert set(ORCHESTRATOR_COMMANDS) == here - there


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("evaluate runs/x", "streamrl-worker evaluate"),
        ("run trainer.lr=1", "--set SECTION.KEY=VALUE"),
        ("run --set trainer.lr = 1", "without blanks"),
        ("run --config a.toml b.toml", "--config b.toml"),
        ("run --num-generations 8", "--set pipeline.group_size=VALUE"),
        ("set runs/x run.batches 8", "run.batches=8"),
        ("plan --preset tiny", "takes no settings"),
        ("run --presett tiny", "(Possible options: --preset"),
    ],
)
def test_what_no_command_takes_is_answered_with_what_to_type(
    typed: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["streamrl-orchestrator", *typed.split()])
    said = CliRunner().invoke(orchestrator, typed.split())
    assert said.exit_code == 2
    assert answer in said.output


def test_a_run_by_its_path_is_answered_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "done").mkdir()
    (tmp_path / "done/config.toml").touch()
    typed = ["run", "--resume", str(tmp_path / "done")]
    monkeypatch.setattr("sys.argv", ["streamrl-orchestrator", *typed])
    assert f"--name done --dir {tmp_path}" in CliRunner().invoke(orchestrator, typed).output


@pytest.mark.parametrize(
    ("assignment", "answer"),
    [
        ("sampling.temperature=0,7", "did you mean 0.7"),
        ("trainer.lr=1e\u22125", "did you mean 1e-5"),
        ("run.batches=1e3", "did you mean 1000"),
        ("data.shuffle=False", "did you mean false"),
        ("data.system=None", "leave it out"),
        ("api.host=::1:x", ""),
        ("api.host=host:8080", "without a port"),
        ("sampling.n=8", "did you mean pipeline.group_size"),
    ],
)
def test_values_as_other_systems_write_them(assignment: str, answer: str) -> None:
    if not answer:
        resolve("tiny", [], [assignment], {})
        return
    with pytest.raises(ConfigError, match=answer):
        resolve("tiny", [], [assignment], {})
