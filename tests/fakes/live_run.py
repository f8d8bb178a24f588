"""A real run in real processes, for tests that kill some of them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import redis

from tests.fakes.command_line import environment, orchestrator
from transport.broker.redis_link import short_path

POLL_S = 0.05
NOTICE_S = 0.5
"""Between two looks for new processes while a test waits: each reads all processes of the machine, 3 ms of CPU."""
QUICK = ("liveness.lease_s=4.0", "scoring.lease_s=3.0", "pipeline.rollout_timeout_s=20.0", "liveness.stall_s=180.0")
"""Settings with which a run soon notices who is gone."""
EMULATED = ("generation.engine=emulated", "trainer.engine=emulated")
"""Settings of a run without a model: it starts in half the time, and its workers are otherwise the same."""
SUMS = ("data.source=jsonl", "data.path=preset:sums.jsonl")
"""Data of a file for a run that has no question about its data: two of its processes do not import reasoning_gym, which
takes 1.3 s of CPU each."""
PACED = (*EMULATED, "emulated.time_scale=0.1")
"""The same, slow enough that a batch lasts as long as one of the tiny model, so there is time to be killed in."""
BATCHES = 6
"""Where a test names no other number: enough to be killed in; the preset's own are as many as it needs to learn."""


class _SocketConnection(redis.UnixDomainSocketConnection):
    """Tests' directories have long names."""

    def _connect(self) -> Any:
        whole = self.path
        try:
            with short_path(whole) as self.path:
                return super()._connect()
        finally:
            self.path = whole


class LiveRun:
    """``streamrl-orchestrator run --preset tiny`` in ``directory``. Use as a context: it leaves no process behind."""

    def __init__(self, directory: Path, *settings: str, faults: Mapping[str, int] | None = None) -> None:
        """settings: ``section.key=value``.  faults: point -> pass at which its process dies
        (transport/process/faults.py).
        """
        self.run_dir = directory / "runs" / "tiny"
        self._directory = directory
        self._settings = settings
        self._faults = faults or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}
        self._noticed_s = 0.0

    def __enter__(self) -> LiveRun:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._notice()
        for process in (*self._seen.values(), *self._own()):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end between any look at it and the signal
                process.kill()
        if self._process is not None:
            self._process.wait(timeout=10)
        for pid in self._seen:  # a trainer killed above could not unlink its weights; the next one would have
            for segment in Path("/dev/shm").glob(f"streamrl-*@{pid}@*"):
                segment.unlink(missing_ok=True)

    def start(self, *arguments: str) -> None:
        """Start (or start again, with ``--resume``) the supervisor."""
        command = [sys.executable, "-m", "orchestrator", "run", "--preset", "tiny", "--plain"]
        for setting in (f"run.batches={BATCHES}", "eval.ends=false", *self._settings):
            command += ["--set", setting]
        command += arguments  # the last of two --set counts
        faults = [f"{point}:{count}:{self._marker(point)}" for point, count in self._faults.items()]
        with (self._directory / "out.log").open("ab") as out:
            self._process = subprocess.Popen(
                command,
                cwd=self._directory,
                stdout=out,
                stderr=out,
                env=environment({"STREAMRL_FAULTS": ",".join(faults)}),
                start_new_session=True,
            )

    def _marker(self, point: str) -> Path:
        return self._directory / f"died-at-{point}"

    def died_at(self) -> set[str]:
        """Fault points at which a process has died."""
        return {point for point in self._faults if self._marker(point).exists()}

    @property
    def is_emulated(self) -> bool:
        """Whether nothing is trained."""
        return set(EMULATED) <= set(self._settings)

    # -- looking

    @property
    def output(self) -> str:
        return (self._directory / "out.log").read_text(encoding="utf-8", errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of trained batches."""
        return [line for line in self._lines() if "batch" in line]

    def evaluations(self) -> list[dict[str, Any]]:
        """Lines of evaluations."""
        return [line for line in self._lines() if "eval" in line]

    def _lines(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_until(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 240.0) -> None:
        """Poll ``condition``. Fails with the run's output when it does not hold in time, or the run ended first."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"no {what} after {timeout_s:.0f} s:\n{self.describe()}"
            assert self._ended() is None, f"the run ended before {what}:\n{self.describe()}"
            self._wait()

    def pass_time(self, seconds: float) -> None:
        """Let the run go on for so long, where a length of time is a test's input. Fails when it ends."""
        end_s = time.monotonic() + seconds
        self.wait_until(lambda: time.monotonic() >= end_s, f"{seconds:.0f} s passed", timeout_s=seconds + 60.0)

    @property
    def is_running(self) -> bool:
        """Whether its supervisor lives. Looks for new processes of the run, too."""
        self._notice()
        return self._ended() is None

    def _ended(self) -> int | None:
        """The supervisor's exit code once it has ended."""
        assert self._process is not None
        return self._process.poll()

    def wait_for_batch(self, number: int) -> None:
        """Wait until ``number`` batches are trained."""
        self.wait_until(lambda: len(self.metrics()) >= number, f"batch {number}")

    def wait_for_end(self, *, timeout_s: float = 300.0) -> int:
        """Exit code of the supervisor."""
        deadline_s = time.monotonic() + timeout_s
        while (code := self._ended()) is None:
            assert time.monotonic() < deadline_s, f"the run did not end after {timeout_s:.0f} s:\n{self.describe()}"
            self._wait()
        return code

    def describe(self) -> str:
        """Output and the end of every log, for a failure's message."""
        logs = [
            f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted((self.run_dir / "logs").glob("*.log"))
        ]
        return "\n".join([self.output[-3000:], *logs])

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``streamrl-orchestrator`` with ``arguments`` in the same place."""
        return orchestrator(*arguments, cwd=self._directory)

    def follow(self) -> subprocess.Popen[str]:
        """``inspect --follow`` beside the run; it ends after it."""
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "inspect", str(self.run_dir), "--follow"],
            cwd=self._directory,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )

    def audit(self) -> subprocess.CompletedProcess[str]:
        return self.command("inspect", str(self.run_dir), "--audit")

    def redis(self) -> redis.Redis:
        """A plain client of the run's embedded broker, as its user's redis-cli would be."""
        broker = (self.run_dir / "broker").resolve()
        password = (broker / "broker.password").read_text().strip()
        pool = redis.ConnectionPool(_SocketConnection, path=str(broker / "broker.sock"), password=password)
        return redis.Redis.from_pool(pool)

    # -- killing

    def interrupt(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor itself."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self, *words: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal the child that was started with all of ``words``. Returns its pid."""
        child = self.child(*words)
        child.send_signal(number)
        return child.pid

    def child(self, *words: str) -> psutil.Process:
        """The living child of the run that was started with all of ``words``; of several the last one."""
        self._notice()
        found = [process for process in self._seen.values() if _matches(process, words)]
        assert found, f"no process {' '.join(words)}:\n{self.describe()}"
        return found[-1]

    def _wait(self) -> None:
        """Wait for a moment, and look for new processes now and then."""
        if time.monotonic() >= self._noticed_s + NOTICE_S:
            self._notice()
        time.sleep(POLL_S)

    def _notice(self) -> None:
        """Remember every process of the run, so that none can outlive the test unseen."""
        self._noticed_s = time.monotonic()
        for supervisor in self._own():
            try:
                for child in supervisor.children(recursive=True):
                    self._seen[child.pid] = child
            except psutil.NoSuchProcess:
                continue

    def _own(self) -> Sequence[psutil.Process]:
        try:
            return [psutil.Process(self._process.pid)] if self._process else []
        except psutil.NoSuchProcess:
            return []

    def wait_until_gone(self, *, timeout_s: float = 60.0) -> None:
        """Wait until no process of the run is left: of a process that was killed the kernel ends the children, in its
        own time."""
        deadline_s = time.monotonic() + timeout_s
        while self.survivors():
            assert time.monotonic() < deadline_s, f"still alive: {self.survivors()}"
            time.sleep(POLL_S)

    def resume_stopped(self, pid: int) -> None:
        """Let a process that was sent SIGSTOP go on, if it was not replaced meanwhile."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen[pid].send_signal(signal.SIGCONT)

    def survivors(self, *words: str) -> list[int]:
        """Processes of the run that are still alive and were started with all of ``words``."""
        return [pid for pid, process in self._seen.items() if _matches(process, words)]


def _matches(process: psutil.Process, words: Sequence[str]) -> bool:
    """Whether it lives, and each word is one of its arguments or the name of its program.

    Parts of arguments do not count: a path may contain any word.
    """
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        line = process.cmdline()
        return {*words} <= {*line, *(Path(part).name for part in line[:1])}
    except psutil.NoSuchProcess:
        return False


def check_whole(run: LiveRun, *, batches: int = BATCHES) -> None:
    """Wait for the end. The run ended well: all batches, a loadable model where there is one, a clean audit, no process
    left.
    """
    assert run.wait_for_end() == 0, run.describe()
    assert {line["batch"] for line in run.metrics()} == set(range(batches))
    assert run.is_emulated or (run.run_dir / "model" / "config.json").exists()
    audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
    run.wait_until_gone()
