"""The real libraries of loggers, each in its own process: what they keep can be read, and harms no command of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.config.run_directory import RunDir
from orchestrator.errors import ConfigError
from orchestrator.observability import loggers
from orchestrator.observability.loggers import LoggerFeed, check_loggers, read_left_out
from tests.fakes.command_line import orchestrator as cli
from transport.contracts.settings import LoggerName, Settings

LINES = [{"batch": batch, "reward": batch / 2, "loss": float("nan"), "note": "text"} for batch in range(3)]


async def feed_three(name: LoggerName, run_dir: Path) -> list[str]:
    """Three lines to the library ``name``. Returns what was said of a logger that is left out."""
    rundir = RunDir(run_dir)
    rundir.logs.mkdir(parents=True, exist_ok=True)
    feed = LoggerFeed([name], Settings(), rundir, lambda _: None)
    feed.put(LINES)
    await feed.close(wait_s=120.0)
    return [str(one) for one in read_left_out(run_dir)]


async def test_tensorboard_reads_what_was_written(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert await feed_three("tensorboard", tmp_path) == []
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(read.Tags()["tensors"]) == ["reward/reward", "run/batch"]
    points = [(point.step, point.tensor_proto.float_val[0]) for point in read.Tensors("reward/reward")]
    assert points == [(0, 0.0), (1, 0.5), (2, 1.0)]


async def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "tensorboard").write_text("in the way")
    (said,) = await feed_three("tensorboard", tmp_path)
    assert said.startswith("logger tensorboard is left out since 20")
    assert "File exists" in said


def test_wandb_keeps_an_offline_run_and_its_links_harm_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    asyncio.run(check_loggers(["wandb"]))
    assert asyncio.run(feed_three("wandb", tmp_path)) == []
    identity = (tmp_path / "wandb.id").read_text()
    assert list(tmp_path.rglob(f"run-{identity}.wandb"))
    assert any(path.is_symlink() for path in tmp_path.rglob("*")), "else this shows nothing"
    RunDir(tmp_path).check_own()


async def test_wandb_without_a_login_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"wandb cannot be used: .*; log in with `wandb login` or WANDB_API_KEY"):
        await check_loggers(["wandb"])


async def test_mlflow_takes_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow", reason="extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a server is what users have; its protocol is the client's
    assert await feed_three("mlflow", tmp_path) == []
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(loggers.PROJECT)
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/reward")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert run.info.status == "FINISHED"


@pytest.mark.long
def test_a_run_with_wandb_is_like_any_other(tmp_path: Path):
    """It is inspected, audited, reported, compared, listed, and goes on, with the links of wandb in its directory."""
    emulated = ("trainer.engine=emulated", "generation.engine=emulated", "ranker.kind=none", "run.batches=2")
    asked = [word for one in (*emulated, 'run.loggers=["wandb"]') for word in ("--set", one)]
    environ = {"WANDB_MODE": "offline"}
    done = cli("run", "--preset", "tiny", "--plain", "--name", "x", *asked, cwd=tmp_path, environ=environ)
    assert (done.returncode, "report" in done.stdout) == (0, True), done.stdout + done.stderr
    run_dir = tmp_path / "runs/x"
    assert any(path.is_symlink() for path in (run_dir / "wandb").iterdir())
    for command in (["inspect", "x"], ["inspect", "x", "--audit"], ["report", "x"], ["logs", "x"], ["timeline", "x"]):
        found = cli(*command, cwd=tmp_path)
        assert (found.returncode, found.stderr) == (0, ""), command
    assert "finished" in cli("list", cwd=tmp_path).stdout
    more = cli(*("run", "--resume", "--plain", "--name", "x", "--set", "run.batches=4"), cwd=tmp_path, environ=environ)
    assert more.returncode == 0, more.stdout + more.stderr
    assert "audit clean" in cli("inspect", "x", "--audit", cwd=tmp_path).stdout
    assert len([*run_dir.glob("wandb/offline-run-*")]) == 2
    assert cli("compare", "x", "x", "--out", "both.html", cwd=tmp_path).returncode == 0
