"""Every trained batch reaches every logger; none of them can hold up or end a run, or touch another."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.config.run_directory import RunDir
from orchestrator.errors import ConfigError
from orchestrator.observability import loggers
from orchestrator.observability.loggers import LoggerFeed, check_loggers, logging_metrics, read_left_out
from transport.contracts.settings import BrokerSettings, RunSettings, Settings
from transport.errors import ForeignError

LINES = [{"batch": batch, "reward": batch / 2, "loss": float("nan"), "note": "text"} for batch in range(3)]

STAND_IN = """
import json, os, sys, time
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
print("a library that is chatty")
name, kept = sys.argv[1], open(os.environ["KEPT"] + "/" + sys.argv[1], "w", buffering=1)
for line in sys.stdin:
    if '"batch":1' in line and name == "wandb":
        time.sleep(600)
    if '"batch":1' in line and name == "mlflow":
        answers.write(json.dumps({"error": "503\\nthe server is away"}) + "\\n")
        time.sleep(600)
    kept.write(line)
    answers.write("{}\\n")
"""
"""The process of a logger: "wandb" hangs at batch 1, "mlflow" fails there and does not end, "tensorboard" is well."""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("KEPT", str(tmp_path))
    monkeypatch.setattr(
        loggers, "python_module", lambda _, *arguments: [sys.executable, "-S", "-c", STAND_IN, *arguments]
    )
    rundir = RunDir(tmp_path / "run")
    rundir.logs.mkdir(parents=True)
    return rundir


def chosen(*names: Any) -> Settings:
    return Settings(run=RunSettings(loggers=list(names)))


def kept(rundir: RunDir, name: str) -> list[int]:
    lines = (rundir.path.parent / name).read_text().splitlines()
    return [json.loads(line)["batch"] for line in lines[1:] if line]


async def test_one_that_hangs_and_one_that_fails_are_left_out_alone_and_it_is_said(
    stand_in: RunDir, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loggers, "ANSWER_S", 1.0)
    notes: list[str] = []
    names = ["wandb", "mlflow", "tensorboard"]
    feed = LoggerFeed(names, Settings(), stand_in, notes.append)  # type: ignore[arg-type]
    feed.put(LINES)
    await feed.close(wait_s=20.0)
    assert kept(stand_in, "tensorboard") == [0, 1, 2]
    assert kept(stand_in, "wandb") == kept(stand_in, "mlflow") == [0]
    reasons = {one.name: one.why for one in read_left_out(stand_in.path)}
    assert reasons == {"mlflow": "503 the server is away", "wandb": "it took no line for 1 s"}
    assert len(notes) == 2
    assert all(note.startswith("warning: logger ") and "is left out since 20" in note for note in notes)


async def test_a_service_that_hangs_does_not_keep_the_run_from_ending(stand_in: RunDir):
    feed = LoggerFeed(["wandb"], Settings(), stand_in, lambda _: None)
    feed.put(LINES)
    await feed.close(wait_s=0.1)
    assert [one.why for one in read_left_out(stand_in.path)] == ["it did not take the last lines in time"]


async def test_new_lines_are_passed_on_and_those_of_before_are_not(stand_in: RunDir, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loggers, "POLL_S", 0.001)

    def write(lines: list[dict[str, Any]]) -> None:
        with stand_in.metrics.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    write(LINES[:1])
    stand_in.loggers.write_text("of an earlier start")
    async with asyncio.timeout(30), logging_metrics(chosen("tensorboard"), stand_in):
        write(LINES[1:2])
        await asyncio.sleep(0.01)
        write(LINES[2:])
    assert kept(stand_in, "tensorboard") == [1, 2]
    assert read_left_out(stand_in.path) == []


async def test_a_service_that_lets_nobody_in_is_said_before_the_run_begins(
    stand_in: RunDir, monkeypatch: pytest.MonkeyPatch
):
    said = 'print(\'{"error": "no API key"}\') if "wandb" in sys.argv else time.sleep(60)'
    monkeypatch.setattr(
        loggers,
        "python_module",
        lambda _, *arguments: [sys.executable, "-S", "-c", f"import sys, time; {said}", *arguments],
    )
    monkeypatch.setattr(loggers, "check_installed", lambda _: None)
    with pytest.raises(ConfigError, match=r"wandb cannot be used: no API key; log in with `wandb login` .*=offline"):
        await check_loggers(["wandb"])
    with pytest.raises(
        ConfigError, match=r"mlflow cannot be used: it did not answer within 0 s; .*MLFLOW_TRACKING_URI"
    ):
        await check_loggers(["mlflow"], wait_s=0.1)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(loggers.MODULES, "wandb", "no_such_module")
    monkeypatch.setenv("PATH", "/nowhere")  # or it is told as short as PATH allows
    loggers.check_installed([])
    with pytest.raises(ConfigError, match=r"/pip install 'streamrl\[wandb\]'"):
        loggers.check_installed(["wandb"])


def test_no_secret_is_sent():
    secret = "hunter2"
    settings = Settings(broker=BrokerSettings(url=f"redis://:{secret}@host", password=secret))
    api = msgspec.structs.replace(settings.api, secret=secret)
    shown = loggers.public_settings(msgspec.structs.replace(settings, api=api))
    assert secret not in str(shown)
    assert shown["trainer.lr"] == settings.trainer.lr


def test_an_evaluation_stands_where_its_version_begins():
    assert loggers.step_of({"batch": 7, "version": 8}) == 7
    assert loggers.step_of({"eval": 2, "version": 8}) == 8


def test_links_of_a_logger_make_no_run_foreign_and_others_do(tmp_path: Path):
    """As wandb has made them in every run's directory since its first version."""
    inside = tmp_path / "wandb"
    inside.mkdir()
    (inside / "latest-run").symlink_to("offline-run-1")
    (inside / "debug.log").symlink_to("/nowhere")
    RunDir(tmp_path).check_own()
    (tmp_path / "logs").symlink_to(inside)
    with pytest.raises(ForeignError, match="logs is not a plain file or directory"):
        RunDir(tmp_path).check_own()
    (tmp_path / "logs").unlink()
    os.rename(inside, tmp_path / "elsewhere")
    inside.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ForeignError, match="wandb is not a plain file or directory"):
        RunDir(tmp_path).check_own()
