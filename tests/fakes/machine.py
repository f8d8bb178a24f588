"""A machine on which a person starts processes by hand: serve, and workers that join it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.journal import read_records
from tests.fakes.command_line import ask_status, environment, orchestrator
from tests.fakes.redis_servers import ServerProcess, find_binary
from transport.contracts.messages import RolloutFinished


class Machine:
    """Processes that a person starts by hand, in one directory, against one broker."""

    def __init__(self, directory: Path, broker: str) -> None:
        self.directory = directory
        self.broker = broker
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, module: str, *arguments: str, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """environ: over what this process has."""
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--broker", self.broker],
                cwd=self.directory,
                stdout=log,
                stderr=log,
                env=environment(environ),
            )
        self.processes[name] = process
        return process

    def serve(self, run: str, *arguments: str, settings: Sequence[str]) -> subprocess.Popen[bytes]:
        """settings: ``section.key=value``."""
        changes = [part for setting in settings for part in ("--set", setting)]
        return self.start(f"serve-{run}", "orchestrator", "serve", "--run", run, *arguments, *changes)

    def join(
        self, run: str, kind: str, *arguments: str, index: int = 0, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A worker of a kind (generate, score, train, publish)."""
        place = ("--run", run, "--index", str(index))
        return self.start(f"{run}-{kind}-{index}", "workers", kind, *place, *arguments, environ=environ)

    def status(self, run: str) -> dict[str, Any]:
        """Empty before there is one."""
        directory = self.directory / "runs" / run
        try:
            return ask_status(directory)
        except OSError:  # no files yet, or nobody answers
            return {}

    def drain(self, run: str) -> None:
        """End a run from the command line; its orchestrator ends well."""
        drained = orchestrator("drain", f"runs/{run}", cwd=self.directory)
        assert drained.returncode == 0, drained.stderr + self.words()
        assert self.processes[f"serve-{run}"].wait(timeout=60) == 0, self.words()

    def wait_until(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 240.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            ended = {
                name: process.poll() for name, process in self.processes.items() if process.poll() not in (None, 143)
            }
            assert not ended, f"before {what}: {ended}\n{self.words()}"
            assert time.monotonic() < deadline_s, f"no {what} after {timeout_s:.0f} s\n{self.words()}"
            time.sleep(0.05)

    def words(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.directory.glob("*.log")))

    def finished(self, run: str) -> set[str]:
        """Generation workers that have finished a sample of the run, by name."""
        try:
            records = list(read_records(self.directory / "runs" / run / "journal", from_seq=1))
        except FileNotFoundError:
            return set()
        events = [record.event for record in records]
        return {event.worker_id for event in events if isinstance(event, RolloutFinished)}


@contextmanager
def machine(directory: Path) -> Iterator[Machine]:
    binary = find_binary("valkey")
    assert binary is not None
    server = ServerProcess(binary, directory / "broker", "--maxmemory-policy", "noeviction")
    server.wait_listening()
    place = Machine(directory, server.url)
    try:
        yield place
    finally:
        for process in place.processes.values():
            process.kill()
            process.wait()
        server.kill()
