"""How a run stands, as its directory tells: what ``list``, ``inspect``, ``stop`` and ``run --resume`` say of it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from orchestrator.cli import inspect, runs
from orchestrator.cli.control import open_run
from orchestrator.config.load import render, resolve
from orchestrator.config.run_directory import RunDir
from orchestrator.core.model.settings import CoreSettings
from orchestrator.errors import ConfigError, Interrupted, RunFailedError
from orchestrator.journal import Journal
from orchestrator.launch import app
from orchestrator.observability.standing import State, nothing_left, noting_end, read_standing
from tests.fakes.pipeline_world import PipelineWorld
from tests.fakes.small_disk import filled, small_disk
from transport.broker import keys
from transport.contracts.messages import JournalRecord, PauseRequested, RunResumed, StopRequested
from transport.contracts.settings import Settings
from transport.errors import DirectoryError

BATCHES = 2


def new_run(path: Path, *, name: str = "x") -> RunDir:
    """The directory of a run of two batches, as if a supervisor had claimed and left it."""
    rundir = RunDir(path / "runs" / name)
    overrides = [f"run.batches={BATCHES}", f"run.name={name}", f"run.dir={path / 'runs'}"]
    rundir.claim(render(resolve("tiny", [], overrides, {})), resume=False)
    rundir.unlock()
    return rundir


def train(rundir: RunDir, *, drained: bool = False, resumed: bool = False) -> None:
    """Write the journal and the metrics of a run that went to its end, or to a drain after its first batch."""
    world = PipelineWorld(CoreSettings(num_batches=BATCHES, groups_per_batch=2, group_size=2))
    world.start_trainer()
    world.join()
    if drained:
        world.tell(StopRequested(reason="drained by request"))
    world.run_to_end()
    journal, _ = Journal.open(rundir.journal, epoch=1)
    journal.snapshot(world.state.snapshot(), world.state.seq)
    rundir.metrics.write_text("".join(json.dumps({"batch": n, "reward": 0.5}) + "\n" for n in range(BATCHES)))
    events = [RunResumed()] if resumed else [PauseRequested()]  # a pause of a run that is over changes nothing
    journal = Journal(rundir.journal, world.state.seq + 1, 1)
    journal.append([JournalRecord(seq=world.state.seq + 1, now_s=9.0, event=each, cursor="0-0") for each in events])
    journal.close()


def fail(error: BaseException) -> Callable[[RunDir], None]:
    def ending(rundir: RunDir) -> None:
        with pytest.raises(type(error)), noting_end(rundir):
            raise error

    return ending


@pytest.mark.parametrize(
    ("ending", "state", "said"),
    [
        (train, State.FINISHED, ", 2/2 batches"),
        (lambda run: train(run, drained=True), State.STOPPED, ": drained by request, 2/2 batches"),
        (
            lambda run: train(run, resumed=True),
            State.CRASHED,
            ": its process was killed, or the machine went down, 2/2",
        ),
        (lambda run: None, State.NEW, ", 0/2 batches"),
        (fail(Interrupted("stopped", by="Ctrl-C")), State.STOPPED, " by Ctrl-C, 0/2 batches"),
        (fail(KeyboardInterrupt()), State.STOPPED, " by Ctrl-C, 0/2 batches"),
        (fail(RunFailedError("the \x1b[31mdisk")), State.FAILED, ": the [31mdisk, 0/2 batches"),
    ],
)
def test_a_run_is_one_thing_and_the_line_says_which(
    tmp_path: Path, ending: Callable[[RunDir], None], state: State, said: str
):
    rundir = new_run(tmp_path)
    ending(rundir)
    standing = read_standing(rundir.path)
    assert standing.state is state
    assert str(standing).startswith(f"{state} {standing.when}{said}")
    assert ("--resume" in standing.go_on) == (state in (State.STOPPED, State.FAILED, State.CRASHED))


def test_a_run_that_goes_on_is_live_whatever_an_earlier_end_left(tmp_path: Path):
    rundir = new_run(tmp_path)
    fail(RunFailedError("no"))(rundir)
    rundir.lock()
    assert str(read_standing(rundir.path)) == "live, 0/2 batches"
    with noting_end(rundir):
        before = (rundir.path / "ended.json").read_bytes()
        assert not before.strip(), "a kill from here on is a crash"
    rundir.unlock()


@pytest.mark.parametrize("trouble", ["full", "read-only"])
async def test_a_run_on_a_disk_that_takes_nothing_says_why_it_ended_and_can_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trouble: str
):
    with small_disk(tmp_path / "disk") as disk, ExitStack() as stack:
        rundir = new_run(disk)
        train(rundir, resumed=True)
        async with open_run(rundir.path) as (_, _, broker):
            await broker.put_meta("settings", b"kept")
        with suppress(DirectoryError), noting_end(rundir):
            if trouble == "full":
                stack.enter_context(filled(disk))
            raise DirectoryError("cannot write weights: No space left on device" + "\N{SNOWMAN}" * 5000)
        if trouble == "read-only":
            await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", str(disk)], check=True)
            with pytest.raises(DirectoryError, match="Read-only file system; mount it so that it can be written"):
                rundir.check_free(resume=True)
        before = files_of(rundir.broker / "aof")
        standing = read_standing(rundir.path)
        assert (standing.state, "weights: No space left" in standing.why) == (State.FAILED, True)
        await asyncio.to_thread(inspect.main, rundir.path, audit=False, follow=False)
        assert "failed" in capsys.readouterr().out.splitlines()[0]
        async with open_run(rundir.path, reads=True) as (_, _, broker):
            assert await broker.get_meta("settings") == b"kept"
        with pytest.raises(DirectoryError):
            async with open_run(rundir.path):
                pass
        assert files_of(rundir.broker / "aof") == before


def files_of(directory: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.rglob("*") if path.is_file()}


def test_a_finished_run_is_left_alone_until_more_is_asked_of_it(tmp_path: Path):
    rundir = new_run(tmp_path)
    train(rundir)
    before = files_of(rundir.path)
    standing = read_standing(rundir.path)
    said = nothing_left(standing, standing.settings)
    assert files_of(rundir.path) == before
    assert f"finished {standing.when}, 2/2 batches; nothing was changed" in said
    assert said.splitlines()[-1].endswith("--set run.batches=4")
    assert nothing_left(standing, asked(standing.settings, 3)) == ""
    with pytest.raises(ConfigError, match=r"run\.batches = 1 is below the 2 batches that are begun"):
        nothing_left(standing, asked(standing.settings, 1))


def asked(settings: Settings, batches: int) -> Settings:
    return msgspec.structs.replace(settings, run=msgspec.structs.replace(settings.run, batches=batches))


def test_serve_leaves_a_finished_run_alone_without_asking_for_its_broker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rundir = new_run(tmp_path)
    train(rundir)
    before = files_of(rundir.path)
    resolved = resolve(None, [], ["broker.url=redis://127.0.0.1:1"], {}, stored=rundir.config)
    assert app.main_alone(resolved, resume=True, reopen=True, model_dir=None) == 0
    assert files_of(rundir.path) == before
    said = capsys.readouterr().out
    assert "finished" in said
    assert "nothing was changed" in said
    assert "serve --resume --run x --broker redis://127.0.0.1:1" in said.splitlines()[-1]


async def test_what_a_status_says_that_outlived_its_run_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rundir = new_run(tmp_path)
    train(rundir, drained=True)
    async with open_run(rundir.path) as (_, _, broker):
        await broker.put_meta(keys.STATUS, json.dumps({"elapsed_s": 1.0}).encode(), ttl_s=60.0)
    await asyncio.to_thread(inspect.main, rundir.path, audit=False, follow=False)
    said = capsys.readouterr().out.splitlines()
    assert "stopped" in said[0]
    assert said[1].startswith("go on with: ")


def test_the_list_has_every_run_also_one_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(new_run(tmp_path))
    new_run(tmp_path, name="y").config.write_text("[run]\nbatches = 'no'\n")
    new_run(tmp_path, name="z").config.parent.rename(tmp_path / "runs" / "[bold]:smile:")
    assert runs.main_list(tmp_path / "runs", chosen=True, as_json=True) == 0
    found = {Path(row["run"]).name: row for row in json.loads(capsys.readouterr().out)}
    assert (found["x"]["state"], found["x"]["reward"], found["x"]["batches"]) == ("finished", 0.5, 2)
    assert found["y"]["state"] == "unreadable"
    assert "run.batches" in found["y"]["why"]
    assert runs.main_list(tmp_path / "runs", chosen=True, as_json=False) == 0
    said = capsys.readouterr().out
    assert "2/2" in said
    assert "[bold]:smile:" in said


HOLDER = """
import signal, sys, time
from pathlib import Path
from transport.process.files import locked
lock = locked(Path(sys.argv[1]) / "lock")
stubborn = len(sys.argv) > 2
signal.signal(signal.SIGTERM, lambda *_: None if stubborn else sys.exit(0))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def holding(rundir: RunDir, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(rundir.path), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_stop_asks_the_owner_of_the_run_and_waits_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rundir = new_run(tmp_path)
    with holding(rundir) as process:
        assert runs.main_stop(rundir.path, wait_s=60.0) == 0
        assert process.wait(timeout=60) == 0
    assert "not begun" in capsys.readouterr().out
    assert runs.main_stop(rundir.path, wait_s=60.0) == 0
    assert "is not running: not begun" in capsys.readouterr().out
    with holding(rundir, "stubborn") as process:
        with pytest.raises(RunFailedError, match=rf"not ended within 0 s.*kill -9 {process.pid}"):
            runs.main_stop(rundir.path, wait_s=0.0)
        process.send_signal(signal.SIGKILL)


def test_stop_signals_no_process_that_only_has_the_number(tmp_path: Path):
    """A lock that is seen from another container names a process of that one."""
    rundir = new_run(tmp_path)
    with holding(rundir) as process, subprocess.Popen(["sleep", "60"]) as other:
        (rundir.path / "lock").write_text(str(other.pid))
        with pytest.raises(RunFailedError, match="is none of this machine"):
            runs.main_stop(rundir.path, wait_s=0.0)
        assert other.poll() is None
        other.kill()
        process.kill()


def test_a_service_counts_no_batches(tmp_path: Path):
    rundir = new_run(tmp_path)
    rundir.config.write_text(render(resolve("service", [], [], {})))
    assert Settings().trainer.engine != "none"
    assert read_standing(rundir.path).batches == ""
