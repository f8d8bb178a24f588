"""The processes of a run: which there are, and their life, whoever starts them (``launchers``).

Invariant: no child on this machine outlives its supervisor; a process that dies, or lives and gives no sign of it, is
started again until it has used up its restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import structlog

from orchestrator.config.run_directory import RunDir
from orchestrator.core.model.groups import deaths_in_a_row
from orchestrator.errors import ChildFailedError, ExitCode
from orchestrator.launch.gpus import PlacedGpus
from orchestrator.launch.launchers.base import Launcher, ProcessSpec, Running, resources_of
from orchestrator.launch.launchers.local import LocalLauncher
from orchestrator.loop.intake import SilenceClock
from transport.broker import keys
from transport.broker.base import Broker
from transport.broker.events import read_statuses
from transport.contracts.messages import STARTING
from transport.contracts.settings import LivenessSettings, Settings
from transport.contracts.types import WorkerId, WorkerKind
from transport.errors import TransientError
from transport.process.clock import Clock, MonotonicClock
from transport.process.programs import LAUNCHED, end_children, python_module, versions

log = structlog.get_logger(__name__)

NO_USE = (ExitCode.BAD_CONFIG, ExitCode.STALLED, ExitCode.FATAL, ExitCode.UNWRITABLE)
"""A child that exits so says that starting it again is no use; its last line says why."""
ERROR_LINES = ("streamrl-orchestrator: ", "error: ")
"""How the line begins with which our programs end by an error of their own."""
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Pause before the n-th restart in a row: the first is free, because one kill is no pattern."""
LOOK_S = 1.0
PENDING_S = 2.0
"""Between two questions to an engine: squeue of a busy cluster answers in about a second."""
SILENCES = 6
"""Leases in a row that may run out: its work went to others after one, and a machine can be very busy."""
ORCHESTRATOR = "orchestrator"
MAX_LAST_LINES = 12
"""Of a traceback: its error, and where it was raised."""


# -- which there are


def workers_of(settings: Settings) -> list[tuple[WorkerKind, int]]:
    """How many workers of each kind a run begins with."""
    begun = [(WorkerKind.STORE, settings.rows.units)] if settings.rows.store == "units" else []
    generate = (WorkerKind.GENERATE, settings.generation.num_workers)
    if settings.trainer.engine == "none":
        return [*begun, (WorkerKind.PUBLISH, 1), generate]
    score = (WorkerKind.SCORE, sum(pool.workers for pool in settings.scorers.values()))
    critic = [(WorkerKind.CRITIC, 1)] if settings.has_critic else []
    return [*begun, (WorkerKind.TRAIN, settings.trainer.num_ranks), *critic, generate, score]


def names_of(settings: Settings) -> frozenset[str]:
    return frozenset(f"{kind.value}-{index}" for kind, count in workers_of(settings) for index in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The processes of a run and their command lines, on which no secret stands.

    url: of the broker, without its password.  env: what no command line may show.  gpus: of this machine, None where
    there are none, or an engine deals them out.  is_local: whether workers run on this machine.  worker_url: of the
    broker, as they reach it; "" as ``url``.  run_id: which run the workers are of.
    """

    settings: Settings
    run_dir: Path
    model_dir: Path
    url: str
    env: Mapping[str, str]
    gpus: PlacedGpus | None = None
    is_local: bool = True
    worker_url: str = ""
    run_id: str = ""

    def workers(self) -> list[ProcessSpec]:
        """Those that a run begins with. Ranks of a trainer that an engine starts are one of them."""
        return [
            self.worker(kind, index)
            for kind, count in workers_of(self.settings)
            for index in range(1 if kind is WorkerKind.TRAIN and not self.is_local else count)
        ]

    def orchestrator(self) -> ProcessSpec:
        return ProcessSpec(
            name=ORCHESTRATOR, argv=python_module("orchestrator", "serve", *self._common(self.url)), env=self.env
        )

    def worker(self, kind: WorkerKind, index: int) -> ProcessSpec:
        broker, ranks = self.settings.broker, 1
        number, env = ["--index", str(index)], dict(self.env)
        if not self.is_local:
            env |= launched_env(self.run_dir)
            if kind is WorkerKind.TRAIN and (ranks := self.settings.trainer.num_ranks) > 1:
                number = []  # the engine numbers them
        files = {"--tls-ca": broker.tls_ca, "--tls-cert": broker.tls_cert, "--tls-key": broker.tls_key}
        reach = [text for option, path in files.items() if path for text in (option, path)]
        reach += ["--outage-s", str(broker.outage_s)]
        reach += ["--run-id", self.run_id] if self.run_id else []
        common = self._common(self.worker_url or self.url, kind)
        argv = python_module("workers", kind.value, *number, *common, *reach)
        argv += self._local_arguments(kind, index) + (self.gpus.arguments(kind, index) if self.gpus else [])
        asks = resources_of(self.settings, kind, index)
        argv += ["--gpus-each", str(asks.gpus)] if asks.gpus > 1 and not self.is_local else []  # a server's ranks
        return ProcessSpec(
            name=f"{kind.value}-{index}",
            argv=argv,
            env=env,
            kind=kind,
            resources=asks,
            ranks=ranks,
        )

    def _local_arguments(self, kind: WorkerKind, index: int) -> list[str]:
        """What only this machine's owner may allow: code named here was named on the user's own command line."""
        if kind is WorkerKind.PUBLISH:
            weights_dir = self.settings.service.weights_dir
            return ["--weights-dir", weights_dir] if weights_dir else []
        if kind is WorkerKind.SCORE:
            return score_arguments(self.settings, self.settings.scorer(index)[0])
        arguments = ["--trust-remote-code"] if self.settings.model.trust_remote_code else []
        if kind is WorkerKind.TRAIN:
            arguments += train_arguments(self.settings)
        if kind is WorkerKind.GENERATE:
            engine = self.settings.generation
            server = {
                "--engine-url": engine.engine_url,
                "--server-command": shlex.join(engine.server_command),
                "--server-args": shlex.join(engine.server_args),
            }
            arguments += [part for option, value in server.items() if value for part in (option, value)]
            arguments += environment_arguments(self.settings)
        return arguments

    def _common(self, url: str, kind: WorkerKind | None = None) -> list[str]:
        run_dir = self.run_dir if self.is_local else self.run_dir.resolve()
        joined = ["--broker", url, "--run", self.settings.run.name, "--run-dir", str(run_dir)]
        if kind is WorkerKind.CRITIC and self.settings.critic.model:
            return joined  # it begins as another model, which it prepares itself
        if kind is not None and not self.is_local:
            return joined  # what is prepared here may not be there
        return [*joined, "--model-dir", str(self.model_dir)]


def launched_env(run_dir: Path) -> dict[str, str]:
    """What a worker on a node that is not this machine looks at first: is it of this version, does it see the run?"""
    marker = RunDir(run_dir).config
    return {LAUNCHED: f"{versions('streamrl').get('streamrl', '')} {marker.resolve()}"}


def environment_arguments(settings: Settings) -> list[str]:
    """What allows a generation worker the user's environments; those that are built in need no allowance."""
    path = ["--environment-path", settings.environment.path] if settings.environment.path else []
    names = settings.own_environments
    return ["--environment", ",".join(names), *path] if names else []


def score_arguments(settings: Settings, pool: str) -> list[str]:
    """What allows a scoring worker the user's functions, their names and directories, and the server of a teacher.

    pool: that it is of, whose tasks it is told where there are several.
    """
    scoring, algorithm = settings.scoring, settings.algorithm
    path = ["--reward-path", scoring.reward_path] if scoring.reward_path else []
    reward = ["--reward", scoring.reward, *path] if scoring.reward else []
    teacher = ["--teacher-url", algorithm.teacher_url] if algorithm.teacher_url else []
    tasks = ["--tasks", ",".join(settings.scorers[pool].tasks)] if settings.scoring.pools else []
    return reward + teacher + tasks + _function_arguments("--advantage", settings, "advantage")


def train_arguments(settings: Settings) -> list[str]:
    """The same of a trainer."""
    return _function_arguments("--loss", settings, "loss")


def _function_arguments(option: str, settings: Settings, kind: Literal["advantage", "loss"]) -> list[str]:
    """None where all are ours."""
    names, path = settings.own_functions(kind), settings.algorithm.functions_path
    return [option, ",".join(names), *(["--functions-path", path] if path else [])] if names else []


# -- their life


class Restarts:
    """How often one process may be started again: ``max_in_a_row`` times, see ``core/model/groups.py``."""

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
        self._started_s = self._clock.now_s()

    def died(self) -> bool:
        """Count its death. Returns whether it may be started again."""
        self.in_a_row = deaths_in_a_row(self.in_a_row, self._clock.now_s() - self._started_s)
        return self.in_a_row <= self._max_in_a_row


class Children:
    """Processes by name. launcher: starts the workers; the orchestrator is always a child on this machine."""

    def __init__(
        self, log_dir: Path, *, max_restarts: int, launcher: Launcher | None = None, clock: Clock | None = None
    ) -> None:
        self._log_dir = log_dir
        self._clock = clock or MonotonicClock()
        self._max_restarts = max_restarts
        self._local = LocalLauncher()
        self._launcher = launcher or self._local
        self._processes: dict[str, Running] = {}
        self._log_starts: dict[str, int] = {}
        self._waiting: Mapping[str, str] = {}
        self.restarts: dict[str, int] = {}

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items() if process.returncode is None}

    def here(self) -> Collection[str]:
        """Names of those that are, or were, children on this machine."""
        return self._processes.keys() if self._launcher.is_local else (ORCHESTRATOR,)

    def elsewhere(self) -> Collection[str]:
        return () if self._launcher.is_local else [name for name in self.pids() if name != ORCHESTRATOR]

    def pending(self) -> Mapping[str, str]:
        return self._waiting

    async def watch_pending(self, report: Callable[[Mapping[str, str]], Awaitable[None]]) -> None:
        """Ask the engine forever what has not begun; report all of it whenever it answers. Raises EngineLostError."""
        while True:
            self._waiting = await self._launcher.pending()
            await report(self._waiting)
            await asyncio.sleep(PENDING_S)

    def end(self, name: str) -> None:
        """SIGKILL: for one that hangs. ``keep`` starts it again."""
        process = self._processes.get(name)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def keep(self, spec: ProcessSpec, *, on_death: Callable[[int, str], Awaitable[None]] | None = None) -> None:
        """Run ``spec`` until it exits cleanly, starting it again whenever it dies.

        on_death: gets its pid, and what it ended by.

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
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
            log.warning("child ended, starting it again", child=spec.name, exit=how, in_a_row=restarts.in_a_row)
            if on_death is not None:
                await on_death(pid, how)

    async def _run_once(self, spec: ProcessSpec) -> tuple[int, int]:
        output = self._log_path(spec.name)
        self._log_starts[spec.name] = output.stat().st_size if output.exists() else 0
        launcher = self._local if spec.kind is None else self._launcher
        try:
            process = await launcher.start(spec, output)
        except TransientError as error:  # the engine is away: as if it had died at once
            with output.open("a", encoding="utf-8") as file:
                file.write(f"error: {error}\n")
            return 0, 1
        self._processes[spec.name] = process
        return process.pid, await process.wait()

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM to all, SIGKILL to those alive after ``grace_s``. Never raises on a child that is gone."""
        await end_children(self._processes.values(), grace_s=grace_s)

    def last_words(self, name: str, *, max_lines: int = MAX_LAST_LINES) -> str:
        """What a child said last, for the error that reports its death. Nothing of an earlier life of the child."""
        path = self._log_path(name)
        if not path.exists():
            return ""
        return last_words(path.read_bytes()[self._log_starts.get(name, 0) :].decode("utf-8", "replace"), max_lines)

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"


def last_words(said: str, max_lines: int = MAX_LAST_LINES) -> str:
    """What a program of ours said last in words (its log lines are JSON).

    An error of ours is one line; a bug's traceback is given from its end.
    """
    lines = [line for line in said[-8192:].splitlines() if not line.startswith("{")]
    for line in reversed(lines):
        if line.startswith(ERROR_LINES):
            return line.partition(": ")[2]
    return "\n".join(lines[-max_lines:])


class Processes(Protocol):
    """``Children``, as far as their liveness goes."""

    def pids(self) -> Mapping[str, int]: ...

    def elsewhere(self) -> Collection[str]:
        """Names of those that are not children on this machine: their leases are known by name alone."""
        ...

    def pending(self) -> Collection[str]:
        """Names of those that have not begun, which cannot give a sign."""
        ...

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
        pids, elsewhere, pending = self._processes.pids(), self._processes.elsewhere(), self._processes.pending()
        named = {WorkerId(f"{name} {pid}"): name for name, pid in pids.items() if name not in pending}
        living = {key for key, name in named.items() if (name if name in elsewhere else pids[name]) in alive}
        self._came = (self._came | living) & named.keys()
        silent = self._starting.poll(named.keys() - self._came, living, now_s)
        silent += self._started.poll(self._came, living, now_s)
        for key in silent:
            log.warning("no sign of life; ending it", process=named[key], came=key in self._came)
            self._processes.end(named[key])
        return [named[key] for key in silent]

    async def _alive(self) -> set[int | str]:
        """Who gave a sign of life: process ids of this host's children, names of all workers."""
        await self._broker.put_meta(keys.TAKES_WRITES, b"")
        leases = read_statuses(await self._broker.leases())
        started = {worker_id: status for worker_id, status in leases.items() if status.doing != STARTING}
        alive: set[int | str] = {worker_id.rpartition(".")[0] for worker_id in started}
        alive |= {status.pid for status in started.values() if status.host == socket.gethostname()}
        orchestrator = self._processes.pids().get(ORCHESTRATOR)
        if orchestrator is not None and await self._broker.get_meta(keys.STATUS) is not None:
            alive.add(orchestrator)
        return alive
