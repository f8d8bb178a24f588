"""A trainer's rank that torchrun or srun starts, among others on its host: the GPU that it computes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.fakes.gpu_driver import FakeDriver
from transport.process import gpus
from transport.process.programs import LAUNCHED, versions
from workers import __main__ as commands


def start(monkeypatch: pytest.MonkeyPatch, directory: Path, *options: str, **environ: str) -> tuple[int, str | None]:
    """(rank, GPU) of a rank that is started and goes on to live. environ: of its launcher."""
    ranks: list[int] = []
    monkeypatch.setattr(commands.Joining, "serve", lambda _self, _kind, rank, *_, **__: ranks.append(rank))
    with monkeypatch.context() as own:
        own.delenv(gpus.VISIBLE, raising=False)
        for name in commands.RANK_VARIABLES:
            own.delenv(name, raising=False)
        for name, value in environ.items():
            own.setenv(name, value)
        where = ["--broker", "redis://127.0.0.1:1", "--run", "run", "--run-dir", str(directory)]
        done = CliRunner().invoke(commands.app, ["train", *where, *options])
        if done.exception is not None:
            raise done.exception
        gpu = os.environ.get(gpus.VISIBLE)
    return ranks[0], gpu


@pytest.mark.parametrize("variable", commands.RANK_VARIABLES)
def test_each_rank_takes_a_gpu_of_its_own(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
):
    driver(2)
    found = [start(monkeypatch, tmp_path, **{variable: str(rank)}) for rank in (4, 5)]
    assert found == [(4, "GPU-0000"), (5, "GPU-0001")]
    with pytest.raises(gpus.GpuError, match="another worker holds each of them"):
        start(monkeypatch, tmp_path, **{variable: "6"})


def test_of_those_that_were_named_and_of_none_where_there_is_none(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    driver(3)
    assert start(monkeypatch, tmp_path, "--gpus", "2", RANK="0") == (0, "GPU-0002")
    driver(0)
    assert start(monkeypatch, tmp_path, RANK="0") == (0, None)


def test_a_node_with_another_version_or_without_the_runs_directory_is_refused(tmp_path: Path):
    """By a worker that an engine starts there; one that joins by hand may be of a compatible version."""
    own = versions("streamrl")["streamrl"]
    (tmp_path / "config.toml").touch()
    commands.check_node({LAUNCHED: f"{own} {tmp_path}/config.toml"})
    commands.check_node({})
    with pytest.raises(typer.BadParameter, match=r"and the run is of 9\.9: install it"):
        commands.check_node({LAUNCHED: f"9.9 {tmp_path}/config.toml"})
    with pytest.raises(typer.BadParameter, match=r"does not see .*elsewhere.*put --dir on a file system"):
        commands.check_node({LAUNCHED: f"{own} {tmp_path}/elsewhere/config.toml"})


def test_a_rank_that_is_numbered_by_hand_sees_what_its_owner_shows_it(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """As those of `run`, which may itself be a process of srun, with a device that names its GPU."""
    driver(2)
    assert start(monkeypatch, tmp_path, "--index", "0", SLURM_PROCID="0") == (0, None)
    assert start(monkeypatch, tmp_path) == (0, None)
