"""``logs``: lines of all processes by time, and what comes while it follows."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from orchestrator.cli import logs
from orchestrator.config.run_directory import RunDir
from orchestrator.errors import ConfigError


def entry(second: int, event: str, **more: object) -> str:
    at = f"2026-01-31T12:00:{second:02d}.000000Z"
    return json.dumps({**more, "event": event, "process": "p", "level": "info", "timestamp": at}) + "\n"


def a_run(path: Path) -> RunDir:
    rundir = RunDir(path / "x")
    rundir.claim("", resume=False)
    rundir.unlock()
    (rundir.logs / "train-0.log").write_text(entry(1, "joined", worker="train-0.1") + entry(3, "bug") + "Traceback\n")
    (rundir.logs / "score-0.log").write_text(entry(2, "hostile", text="\x1b[31m a") + entry(4, "left") + '{"torn')
    return rundir


def words(text: str) -> list[list[str]]:
    """Of each line, without its time of day, which is local."""
    return [[word for word in line.split() if word.count(":") != 2] for line in text.splitlines()]


def test_lines_of_all_processes_are_merged_by_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rundir = a_run(tmp_path)
    logs.main(rundir.path, None, num_lines=10, follow=False)
    assert words(capsys.readouterr().out) == [
        ["train-0", "info", "joined", "worker=train-0.1"],
        ["score-0", "info", "hostile", 'text="\\u001b[31m', 'a"'],
        ["train-0", "info", "bug"],
        ["train-0", "Traceback"],
        ["score-0", "info", "left"],
    ]
    logs.main(rundir.path, "train-0", num_lines=1, follow=False)
    assert words(capsys.readouterr().out) == [["train-0", "Traceback"]]
    with pytest.raises(ConfigError, match="has no process train; it has: score-0, train-0"):
        logs.main(rundir.path, "train", num_lines=1, follow=False)


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "TAIL_BYTES", len(entry(1, "joined")) + 3)
    path = tmp_path / "a.log"
    path.write_text(entry(1, "joined") * 9)
    assert [line.text for line in logs.LogFile(path).read()] == ["joined"]


def test_following_shows_what_comes_also_of_a_new_process_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rundir = a_run(tmp_path)
    rundir.lock()
    slept = threading.Event()

    def sleep(_: float) -> None:
        """The world goes on between two looks: first a worker joins, then the run ends."""
        if slept.is_set():
            with (rundir.logs / "score-0.log").open("a") as file:
                file.write('": 1}\n' + entry(9, "last"))
            rundir.unlock()
        else:
            (rundir.logs / "train-1.log").write_text(entry(8, "new"))
            slept.set()

    monkeypatch.setattr(logs.time, "sleep", sleep)
    logs.main(rundir.path, None, num_lines=0, follow=True)
    assert words(capsys.readouterr().out) == [
        ["train-1", "info", "new"],
        ["score-0", '{"torn":', "1}"],
        ["score-0", "info", "last"],
    ]
