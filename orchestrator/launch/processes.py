"""The processes of a run on one machine: what must hold before they start, which there are, their life.

Invariant: no child outlives its supervisor; a child that dies, or lives and gives no sign of it, is started again until
it has used up its restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import structlog

from orchestrator.config.run_directory import RunDir
from orchestrator.core.model.groups import deaths_in_a_row
from orchestrator.errors import ChildFailedError, ConfigError, DataError, ExitCode
from orchestrator.http import check_listening
from orchestrator.launch.gpus import PlacedGpus
from orchestrator.loop.intake import SilenceClock, read_statuses
from orchestrator.loop.ranking import open_ranker
from orchestrator.prompts.dataset import Problem, load_problems
from orchestrator.prompts.source import trial_rows
from ranker.protocol import RankerError
from transport.broker import keys
from transport.broker.base import Broker
from transport.broker.redis_streams import connect
from transport.contracts.gym_tasks import REFUSED, refusal
from transport.contracts.messages import STARTING
from transport.contracts.settings import SERVER_ENGINES, LivenessSettings, ScoringSettings, Settings, public
from transport.contracts.types import RunName, WorkerId, WorkerKind
from transport.contracts.user_files import read_lengths
from transport.errors import LengthFileError, ListenError, SecretError, TransientError
from transport.process.clock import Clock, MonotonicClock
from transport.process.programs import ending_with_this_process, python_module
from transport.tensors.base import Endpoint, parse_ports
from transport.tensors.wire import ChannelServer

log = structlog.get_logger(__name__)

NO_USE = (ExitCode.BAD_CONFIG, ExitCode.STALLED, ExitCode.FATAL, ExitCode.UNWRITABLE)
"""A child that exits so says that starting it again is no use; its last line says why."""
ERROR_LINES = ("streamrl-orchestrator: ", "error: ")
"""How the line begins with which our programs end by an error of their own."""
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Pause before the n-th restart in a row: the first is free, because one kill is no pattern."""
PREPARING_S = 60.0
"""Between two words on a preparation that goes on."""
FIRST_ANSWER_S = 5.0
"""A broker that does not answer its user's first call so soon is down or misspelt: say so, do not wait for it."""
LOOK_S = 1.0
SILENCES = 6
"""Leases in a row that may run out: its work went to others after one, and a machine can be very busy."""
ORCHESTRATOR = "orchestrator"
MAX_LAST_LINES = 12
"""Of a traceback: its error, and where it was raised."""


# -- before they start


def check_inputs(settings: Settings) -> Sequence[Problem]:
    """Read the files that settings name once before anything starts: a mistake in them is answered at once.

    A run without a trainer has neither data nor a ranker.
    Returns: what would be trained on.
    Raises: DataError naming the file; ConfigError for a task whose answers may not be graded.
    """
    if settings.trainer.engine == "none":
        return ()
    own_verifier = settings.data.source == "reasoning_gym" and not settings.scoring.reward
    reason = refusal(settings.data.task) if own_verifier else ""
    problems: Sequence[Problem] = ()
    if settings.data.task not in REFUSED or not reason:  # a misspelt name is said first, a refused task never loaded
        problems = load_problems(settings).training
    if reason:
        raise ConfigError(f"data.task: {reason}", key="data.task")
    if settings.ranker.model or settings.ranker.base_lengths:
        try:
            open_ranker(settings, RunDir(Path(settings.run.dir) / settings.run.name).ranker)
        except RankerError as error:
            raise DataError(str(error)) from error
    return problems


async def check_places(settings: Settings) -> None:
    """Whether what the processes of a run on this host listen on is free, and what they are to reach answers.

    Raises: ConfigError naming the setting; BrokerUnavailableError, BrokerRejectedError.
    """
    check_listening(settings.api)
    tensors, generation = settings.tensors, settings.generation
    try:
        endpoint = Endpoint(host=tensors.host, ports=parse_ports(tensors.ports), secret=settings.api.secret.encode())
        ChannelServer(lambda _: None, endpoint, request_s=FIRST_ANSWER_S).check()
    except ListenError as error:
        raise ConfigError(f"tensors.ports: {error}", key="tensors.ports") from error
    except SecretError as error:
        raise ConfigError(f"tensors.host: {error}", key="tensors.host") from error
    if generation.engine_url:
        try:
            await _connect_to(generation.engine_url)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"generation.engine_url: no server answers at {generation.engine_url} ({error}); start it first, or "
                "correct the address",
                key="generation.engine_url",
            ) from error
    if settings.broker.url:
        broker = await connect(settings.broker, RunName(settings.run.name), outage_s=FIRST_ANSWER_S)
        await broker.close()


async def _connect_to(url: str) -> None:
    """Raises OSError where nobody listens (TimeoutError: within FIRST_ANSWER_S), ValueError for no URL."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    async with asyncio.timeout(FIRST_ANSWER_S):
        _, writer = await asyncio.open_connection(parts.hostname, port)
    writer.close()


def check_workers_inputs(settings: Settings) -> None:
    """The same of what only workers read: for a run whose workers are all on this host."""
    scoring, generation = settings.scoring, settings.generation
    if scoring.reward_path and not Path(scoring.reward_path).is_dir():
        raise DataError(f"scoring.reward_path: there is no directory {scoring.reward_path}")
    if generation.lengths:
        try:
            read_lengths(Path(generation.lengths))
        except LengthFileError as error:
            raise DataError(f"generation.lengths: {error}") from error


async def check_workers(settings: Settings, problems: Sequence[Problem]) -> None:
    """Have a worker process look for what would end the workers of this host, where settings name anything of the kind.

    problems: the reward is tried on the first of them.  Raises: ConfigError, ChildFailedError.
    """
    scoring, generation = settings.scoring, settings.generation
    devices = (settings.trainer.device, generation.device)
    if not (scoring.reward or generation.engine in SERVER_ENGINES or any(name.startswith("cuda") for name in devices)):
        return
    asked = [public(settings), trial_rows(problems, scoring.answer_marker)]
    process = await asyncio.create_subprocess_exec(
        *python_module("workers", "check"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=ending_with_this_process(),
    )
    try:
        _, said = await process.communicate(b"\n".join(map(msgspec.json.encode, asked)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        words = last_words(said.decode(errors="replace"))
        if process.returncode == ExitCode.BAD_CONFIG:
            raise ConfigError(words)
        raise ChildFailedError("check", process.returncode, words)


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
    started_s = time.monotonic()
    said = asyncio.create_task(process.communicate(), name="prepare")
    try:
        while not (await asyncio.wait({said}, timeout=PREPARING_S))[0]:  # a download takes as long as it takes
            note(f"preparing the model for {time.monotonic() - started_s:.0f} s; see {log_path}")
        output = said.result()[0]
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    finally:
        said.cancel()
    if process.returncode != 0:
        said_last = Children(logs, max_restarts=0).last_words("prepare")
        if process.returncode == ExitCode.BAD_CONFIG:
            raise ConfigError(said_last, key="model.path", where="model.path")
        raise ChildFailedError("prepare", -1 if process.returncode is None else process.returncode, said_last)
    return Path(output.decode().strip().splitlines()[-1])


# -- which there are


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process to keep alive; its clean exit is the end of its work."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFleet:
    """The processes of a run and their command lines, on which no secret stands.

    url: of the broker, without its password.  env: what no command line may show.  gpus: None where there are none.
    """

    settings: Settings
    run_dir: Path
    model_dir: Path
    url: str
    env: Mapping[str, str]
    gpus: PlacedGpus | None = None

    def orchestrator(self) -> ChildSpec:
        return ChildSpec(name=ORCHESTRATOR, argv=python_module("orchestrator", "serve", *self._common()), env=self.env)

    def worker(self, kind: WorkerKind, index: int) -> ChildSpec:
        broker = self.settings.broker
        reach = ["--tls-ca", broker.tls_ca, "--outage-s", str(broker.outage_s)]
        argv = python_module("workers", kind.value, "--index", str(index), *self._common(), *reach)
        argv += self._local_arguments(kind) + (self.gpus.arguments(kind, index) if self.gpus else [])
        return ChildSpec(name=f"{kind.value}-{index}", argv=argv, env=self.env)

    def _local_arguments(self, kind: WorkerKind) -> list[str]:
        """What only this machine's owner may allow: code named here was named on the user's own command line."""
        if kind is WorkerKind.PUBLISH:
            weights_dir = self.settings.service.weights_dir
            return ["--weights-dir", weights_dir] if weights_dir else []
        if kind is WorkerKind.SCORE:
            return reward_arguments(self.settings.scoring)
        arguments = ["--trust-remote-code"] if self.settings.model.trust_remote_code else []
        if kind is WorkerKind.GENERATE:
            engine = self.settings.generation
            server = {
                "--engine-url": engine.engine_url,
                "--server-command": shlex.join(engine.server_command),
                "--server-args": shlex.join(engine.server_args),
            }
            arguments += [part for option, value in server.items() if value for part in (option, value)]
        return arguments

    def _common(self) -> list[str]:
        joined = ["--broker", self.url, "--run", self.settings.run.name]
        return [*joined, "--run-dir", str(self.run_dir), "--model-dir", str(self.model_dir)]


def reward_arguments(scoring: ScoringSettings) -> list[str]:
    """What allows a scoring worker the user's reward: its name, and the directory that it lies in."""
    path = ["--reward-path", scoring.reward_path] if scoring.reward_path else []
    return ["--reward", scoring.reward, *path] if scoring.reward else []


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
    def __init__(self, log_dir: Path, *, max_restarts: int, clock: Clock | None = None) -> None:
        self._log_dir = log_dir
        self._clock = clock or MonotonicClock()
        self._max_restarts = max_restarts
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._log_starts: dict[str, int] = {}
        self.restarts: dict[str, int] = {}

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items() if process.returncode is None}

    def end(self, name: str) -> None:
        """SIGKILL: for one that hangs. ``keep`` starts it again."""
        process = self._processes.get(name)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def keep(self, spec: ChildSpec, *, on_death: Callable[[int, str], Awaitable[None]] | None = None) -> None:
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(process.wait() for process in living))
        for name in self.pids():
            self.end(name)
        await asyncio.gather(*(process.wait() for process in self._processes.values()))

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
