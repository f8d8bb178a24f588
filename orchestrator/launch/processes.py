"""Local processes: start, watch, start again, stop. What they do is not known here.

Invariant: no child outlives its supervisor; a child that dies, or lives and gives no sign of it, is started again until
it has used up its restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from orchestrator.core.model.deaths import deaths_in_a_row
from orchestrator.errors import ChildFailedError, ConfigError, ExitCode
from orchestrator.loop.membership import SilenceClock, read_statuses
from transport.broker import keys
from transport.broker.base import Broker
from transport.contracts.messages import STARTING
from transport.contracts.settings import LivenessSettings
from transport.contracts.types import WorkerId
from transport.errors import TransientError
from transport.process.clock import Clock, MonotonicClock
from transport.process.spawn import ending_with_this_process, python_module

log = structlog.get_logger(__name__)

NO_USE = (ExitCode.BAD_CONFIG, ExitCode.STALLED, ExitCode.FATAL, ExitCode.UNWRITABLE)
"""A child that exits so says that starting it again is no use; its last line says why."""
ERROR_LINES = ("streamrl-orchestrator: ", "error: ")
"""How the line begins with which our programs end by an error of their own."""
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Pause before the n-th restart in a row: the first is free, because one kill is no pattern."""
PREPARING_S = 60.0
"""Between two words on a preparation that goes on."""
LOOK_S = 1.0
SILENCES = 6
"""Leases in a row that may run out: its work went to others after one, and a machine can be very busy."""
ORCHESTRATOR = "orchestrator"


class Restarts:
    """How often one process may be started again: ``max_in_a_row`` times, see ``core/model/deaths.py``."""

    def __init__(self, max_in_a_row: int, clock: Clock) -> None:
        self._max_in_a_row = max_in_a_row
        self._clock = clock
        self._started_s = clock.now_s()
        self.in_a_row = 0

    @property
    def pause_s(self) -> float:
        """Before the next start."""
        return BACKOFF_S[min(max(0, self.in_a_row - 1), len(BACKOFF_S) - 1)]

    def started(self) -> None:
        """The process was started now."""
        self._started_s = self._clock.now_s()

    def died(self) -> bool:
        """Count its death. Returns whether it may be started again."""
        self.in_a_row = deaths_in_a_row(self.in_a_row, self._clock.now_s() - self._started_s)
        return self.in_a_row <= self._max_in_a_row


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process to keep alive; its clean exit is the end of its work."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


class Children:
    """The supervised processes of one run."""

    def __init__(self, log_dir: Path, *, max_restarts: int, clock: Clock | None = None) -> None:
        self._log_dir = log_dir
        self._clock = clock or MonotonicClock()
        self._max_restarts = max_restarts
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._log_starts: dict[str, int] = {}
        self.restarts: dict[str, int] = {}

    def pid(self, name: str) -> int | None:
        """The living process of ``name``, if there is one."""
        process = self._processes.get(name)
        return process.pid if process and process.returncode is None else None

    def pids(self) -> dict[str, int]:
        """Every living process by name."""
        return {name: process.pid for name, process in self._processes.items() if process.returncode is None}

    def end(self, name: str) -> None:
        """SIGKILL: for one that hangs. ``keep`` starts it again."""
        process = self._processes.get(name)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def keep(self, spec: ChildSpec, *, on_death: Callable[[int], Awaitable[None]] | None = None) -> None:
        """Run ``spec`` until it exits cleanly, starting it again whenever it dies; ``on_death`` gets its pid.

        Raises: ChildFailedError when it exits with one of NO_USE, or has died too often in a row.
        """
        restarts = Restarts(self._max_restarts, self._clock)
        while True:
            await asyncio.sleep(restarts.pause_s)
            restarts.started()
            pid, code = await self._run_once(spec)
            if code == 0:
                return
            if code in NO_USE:
                raise ChildFailedError(spec.name, code, self.last_words(spec.name))
            self.restarts[spec.name] = self.restarts.get(spec.name, 0) + 1
            if not restarts.died():
                raise ChildFailedError(spec.name, code, self.last_words(spec.name))
            log.warning(
                "child ended, starting it again", child=spec.name, exit=_describe(code), in_a_row=restarts.in_a_row
            )
            if on_death is not None:
                await on_death(pid)

    async def _run_once(self, spec: ChildSpec) -> tuple[int, int]:
        with self._log_path(spec.name).open("ab") as output:
            self._log_starts[spec.name] = output.tell()
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.env},
                start_new_session=True,  # Ctrl-C in the terminal is the supervisor's to pass on
                preexec_fn=ending_with_this_process(),
            )
        self._processes[spec.name] = process
        return process.pid, await process.wait()

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM to all, SIGKILL to those alive after ``grace_s``. Never raises on a child that is gone."""
        living = [process for process in self._processes.values() if process.returncode is None]
        for process in living:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(process.wait() for process in living))
        except TimeoutError:
            for process in living:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*(process.wait() for process in living))

    def last_words(self, name: str, *, max_lines: int = 12) -> str:
        """What a child said last in words (its log lines are JSON), for the error that reports its death.

        An error of ours is one line; a bug's traceback is given from its end. Nothing of an earlier life of the child.
        """
        path = self._log_path(name)
        if not path.exists():
            return ""
        text = path.read_bytes()[self._log_starts.get(name, 0) :][-8192:].decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if not line.startswith("{")]
        for line in reversed(lines):
            if line.startswith(ERROR_LINES):
                return line.partition(": ")[2]
        return "\n".join(lines[-max_lines:])

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"


class Processes(Protocol):
    """``Children``, as far as their liveness goes."""

    def pids(self) -> Mapping[str, int]: ...

    def end(self, name: str) -> None: ...


class Liveness:
    """Ends processes that live and do nothing, so that they are started again like any that died.

    A process that is stopped, deadlocked or never ends its start cannot report itself, and the orchestrator, which
    everyone waits for, has only the supervisor above it. A sign of life is, of a worker, a lease that says more than
    "starting"; of the orchestrator, a status that is not stale. Silence counts only while the broker answers and takes
    writes, and anew for every process.

    deadlines: ``startup_s`` to the first sign of a process, then SILENCES times ``lease_s`` between two.
    """

    def __init__(self, broker: Broker, processes: Processes, clock: Clock, deadlines: LivenessSettings) -> None:
        self._broker = broker
        self._processes = processes
        self._clock = clock
        self._starting = SilenceClock(deadlines.startup_s)
        self._started = SilenceClock(SILENCES * deadlines.lease_s)
        self._came: set[WorkerId] = set()

    async def watch(self, report: Callable[[str], None]) -> None:
        """Look forever; report every process that is ended."""
        while True:
            with contextlib.suppress(TransientError):
                for name in await self.look():
                    report(f"{name} gave no sign of life for too long; starting it again")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> list[str]:
        """One look. Returns the names of the processes that were ended. Raises what the broker raises."""
        alive, now_s = await self._alive(), self._clock.now_s()
        pids = self._processes.pids()
        named = {WorkerId(f"{name} {pid}"): name for name, pid in pids.items()}
        living = {key for key, name in named.items() if pids[name] in alive}
        self._came = (self._came | living) & named.keys()
        silent = self._starting.poll(named.keys() - self._came, living, now_s)
        silent += self._started.poll(self._came, living, now_s)
        for key in silent:
            log.warning("no sign of life; ending it", process=named[key], came=key in self._came)
            self._processes.end(named[key])
        return [named[key] for key in silent]

    async def _alive(self) -> set[int]:
        """Process ids of this host's children that gave a sign of life."""
        await self._broker.put_meta(keys.TAKES_WRITES, b"")
        here = [one for one in read_statuses(await self._broker.leases()).values() if one.host == socket.gethostname()]
        alive = {status.pid for status in here if status.doing != STARTING}
        orchestrator = self._processes.pids().get(ORCHESTRATOR)
        if orchestrator is not None and await self._broker.get_meta(keys.STATUS) is not None:
            alive.add(orchestrator)
        return alive


async def prepare_model(path: str, logs: Path, note: Callable[[str], None]) -> Path:
    """Have a worker turn ``model.path`` into a local Hugging Face directory (torch stays out of this process).

    note: reports what is prepared, and that it still is.  Raises ConfigError for a model that cannot be used, else
    ChildFailedError with its last words, see ``logs``.
    """
    note(f"model {path}")
    log_path = logs / "prepare.log"
    with log_path.open("ab") as words:
        process = await asyncio.create_subprocess_exec(
            *python_module("workers", "prepare", "--model", path),
            stdout=asyncio.subprocess.PIPE,
            stderr=words,
            preexec_fn=ending_with_this_process(),
        )
    try:
        output = await _said(
            process, lambda waited_s: note(f"preparing the model for {waited_s:.0f} s; see {log_path}")
        )
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode != 0:
        code = process.returncode if process.returncode is not None else -1
        last_words = Children(logs, max_restarts=0).last_words("prepare")
        if code == ExitCode.FATAL:
            raise ConfigError(last_words, key="model.path", where="model.path")
        raise ChildFailedError("prepare", code, last_words)
    return Path(output.decode().strip().splitlines()[-1])


async def _said(process: asyncio.subprocess.Process, still: Callable[[float], None]) -> bytes:
    """What the preparation prints. It may download for as long as it takes: its user is kept informed."""
    started_s = time.monotonic()
    said = asyncio.create_task(process.communicate(), name="prepare")
    try:
        while not (await asyncio.wait({said}, timeout=PREPARING_S))[0]:
            still(time.monotonic() - started_s)
        return said.result()[0]
    finally:
        said.cancel()


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
