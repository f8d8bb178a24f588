"""Every trained batch reaches every logger; none of them can hold up or end a run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.config.run_directory import RunDir
from orchestrator.errors import ConfigError
from orchestrator.observability import loggers
from orchestrator.observability.loggers import Line, LoggerError, LoggerFeed, logging_metrics
from transport.contracts.settings import BrokerSettings, RunSettings, Settings

LINES = [{"batch": batch, "reward": batch / 2, "loss": float("nan"), "note": "text"} for batch in range(3)]


class Recorder:
    """Keeps what it is given. fails_at: the batch at which it cannot go on."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.lines: list[Line] = []
        self.fails_at = fails_at
        self.closed = False

    def log(self, line: Line) -> None:
        if line["batch"] == self.fails_at:
            raise LoggerError("the service is away")
        self.lines.append(line)

    def close(self) -> None:
        self.closed = True


def refused() -> Recorder:
    raise LoggerError("no such server")


def test_lines_arrive_in_order_and_a_logger_that_fails_is_left_out():
    whole, broken = Recorder(), Recorder(fails_at=1)
    feed = LoggerFeed([refused, lambda: broken, lambda: whole])
    feed.put(LINES)
    feed.close()
    assert [line["batch"] for line in whole.lines] == [0, 1, 2]
    assert [line["batch"] for line in broken.lines] == [0]
    assert (whole.closed, broken.closed) == (True, False)


def test_a_service_that_hangs_does_not_keep_the_run_from_ending():
    answers = threading.Event()

    class Hanging(Recorder):
        def log(self, line: Line) -> None:
            answers.wait(30.0)

    feed = LoggerFeed([Hanging])
    feed.put(LINES)
    feed.close(wait_s=0.01)
    assert not answers.is_set()
    answers.set()


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def chosen(*names: Any) -> Settings:
    return Settings(run=RunSettings(loggers=list(names)))


async def test_new_lines_are_passed_on_and_those_of_before_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arrived, loop = asyncio.Event(), asyncio.get_running_loop()

    class Announcing(Recorder):
        def log(self, line: Line) -> None:
            super().log(line)
            loop.call_soon_threadsafe(arrived.set)

    recorder = Announcing()
    monkeypatch.setattr(loggers, "opener", lambda *_: lambda: recorder)
    monkeypatch.setattr(loggers, "POLL_S", 0.001)
    rundir = RunDir(tmp_path)
    write(rundir.metrics, LINES[:1])
    async with asyncio.timeout(30), logging_metrics(chosen("tensorboard"), rundir):
        write(rundir.metrics, LINES[1:2])
        await arrived.wait()
        write(rundir.metrics, LINES[2:])
    assert [line["batch"] for line in recorder.lines] == [1, 2]
    assert recorder.closed


async def test_without_loggers_nothing_is_started(tmp_path: Path):
    before = threading.active_count()
    async with logging_metrics(Settings(), RunDir(tmp_path)):
        assert threading.active_count() == before


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(loggers.MODULES, "wandb", "no_such_module")
    monkeypatch.setenv("PATH", "/nowhere")  # or it is told as short as PATH allows
    loggers.check_installed([])
    with pytest.raises(ConfigError, match=r"/pip install 'streamrl\[wandb\]'"):
        loggers.check_installed(["wandb"])


def test_no_secret_is_sent():
    secret = "hunter2"
    settings = Settings(broker=BrokerSettings(url=f"redis://:{secret}@host", password=secret))
    api = {"api": msgspec.structs.replace(settings.api, secret=secret)} if hasattr(settings, "api") else {}
    shown = loggers.public_settings(msgspec.structs.replace(settings, **api))
    assert secret not in str(shown)
    assert shown["trainer.lr"] == settings.trainer.lr


def feed_three(name: str, run_dir: Path) -> None:
    logger: Callable[[], loggers.MetricsLogger] = loggers.opener(name, Settings(), run_dir)
    opened = logger()
    for line in LINES:
        opened.log(line)
    opened.close()


def test_tensorboard_reads_what_was_written(tmp_path: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    feed_three("tensorboard", tmp_path)
    read = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(read.Tags()["tensors"]) == ["reward/reward", "run/batch"]
    points = [(point.step, point.tensor_proto.float_val[0]) for point in read.Tensors("reward/reward")]
    assert points == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_an_evaluation_stands_where_its_version_begins():
    assert loggers.step_of({"batch": 7, "version": 8}) == 7
    assert loggers.step_of({"eval": 2, "version": 8}) == 8


def test_a_directory_that_cannot_be_written_is_a_named_error(tmp_path: Path):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(LoggerError, match="tensorboard"):
        feed_three("tensorboard", tmp_path)


def test_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    feed_three("wandb", tmp_path)
    identity = (tmp_path / "wandb.id").read_text()
    assert list(tmp_path.rglob(f"run-{identity}.wandb"))


def test_mlflow_takes_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow", reason="extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a server is what users have; its protocol is the client's
    feed_three("mlflow", tmp_path)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(loggers.PROJECT)
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/reward")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert run.info.status == "FINISHED"
