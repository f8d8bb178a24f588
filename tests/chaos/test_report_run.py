"""What a real run leaves for its reader, also after one of its processes was killed, and while it still goes on."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from orchestrator.observability.report import pages
from orchestrator.observability.report.bubbles import Cause
from orchestrator.observability.standing import State, read_standing
from tests.fakes.command_line import start_in_terminal
from tests.fakes.live_run import QUICK, LiveRun, check_whole
from transport.tensors.shm import SHARED_MEMORY

pytestmark = pytest.mark.chaos


def test_a_run_leaves_a_report_a_trace_and_its_idle_seconds(tmp_path: Path):
    pytest.importorskip("tensorboard")
    with LiveRun(tmp_path, "run.batches=20", "liveness.lease_s=4.0", 'run.loggers=["tensorboard"]') as run:
        run.wait_for_batch(3)
        run.kill("workers", "generate")
        before = (run.run_dir / "metrics.jsonl").read_bytes()
        assert pages.timeline(run.run_dir, svg=True, png=False, out=tmp_path / "live") == 0
        assert (run.run_dir / "metrics.jsonl").read_bytes().startswith(before), "a look at a live run changed it"
        ElementTree.parse(tmp_path / "live" / "timeline.svg")
        assert run.wait_for_end() == 0, run.describe()
        check_metrics(run)
        check_trace(run)
        page = (run.run_dir / "report.html").read_text()
        for expected in ("generate-0.1 lost", "generate-0.2", "skew", "20 batches"):
            assert expected in page
        assert "report   runs/tiny/report.html" in run.output
        assert len(list((run.run_dir / "tensorboard").iterdir())) == 1
        assert (run.run_dir / "samples.jsonl").read_text().count("\n") >= 1


def check_metrics(run: LiveRun) -> None:
    """Of no stage more seconds are idle than there were, and all of them together are no more than the run's."""
    lines = run.metrics()
    assert len(lines) == 20
    for line in lines:
        for stage in ("generation", "trainer"):
            idle_s = sum(line[f"bubble_{stage}_{cause}_s"] for cause in Cause)
            assert -0.001 <= idle_s <= line[f"{stage}_present_s"] + 0.001
    assert sum(line["trainer_present_s"] for line in lines) <= lines[-1]["time_s"]
    assert sum(line["train_s"] for line in lines) == pytest.approx(
        sum(line["trainer_present_s"] - sum(line[f"bubble_trainer_{cause}_s"] for cause in Cause) for line in lines),
        rel=0.2,
    )


def check_trace(run: LiveRun) -> None:
    """Every row that was trained has a span, and so has every step."""
    events = json.loads((run.run_dir / "trace.json").read_text())["traceEvents"]
    kinds = [event.get("cat") for event in events]
    trained = sum(line["samples_trained"] for line in run.metrics())
    assert kinds.count("sample") >= trained
    assert kinds.count("step") == 20
    assert {"round", "publish", "load", "scoring", "checkpoint", "wait", "trouble"} <= set(kinds)


def test_a_run_whose_terminal_is_closed_is_stopped_and_not_crashed(tmp_path: Path):
    command = [sys.executable, "-m", "orchestrator", "run", "--preset", "tiny", *(f"--set={one}" for one in QUICK)]
    done, master = start_in_terminal(command, cwd=tmp_path)
    shown = b""
    while b"live page" not in shown:
        shown += os.read(master, 65536)
    os.close(master)
    done.send_signal(signal.SIGHUP)  # as its shell does
    assert done.wait(timeout=60) == 130
    standing = read_standing(tmp_path / "runs" / "tiny")
    assert (standing.state, standing.why) == (State.STOPPED, "by SIGHUP, as a terminal that is closed sends")
    assert standing.go_on


def test_ctrl_c_says_how_to_go_on_and_leaves_a_report_and_resume_finishes(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, "run.batches=12") as run:
        run.wait_for_batch(3)
        left_behind = SHARED_MEMORY / f"streamrl-tiny@{run.kill('workers', 'generate', '--index')}@e9v9"
        left_behind.touch()
        run.interrupt(signal.SIGINT)
        assert run.wait_for_end() == 130
        assert not left_behind.exists(), "the supervisor sweeps after its children"
        assert "--resume --name tiny" in run.output
        run.wait_until_gone()
        assert "bubble_trainer_pipeline_s" in run.metrics()[-1]
        assert (run.run_dir / "report.html").exists()
        run.start("--resume", "--name", "tiny")
        check_whole(run, batches=12)
        assert all("bubble_trainer_pipeline_s" in line for line in run.metrics())
        assert "run resumed" in (run.run_dir / "trace.json").read_text()
