"""Lines of ``metrics.jsonl`` to TensorBoard, Weights & Biases and MLflow: extras, chosen with ``run.loggers``.

Each logger is a process of its own, which gets the lines on its standard input and answers each. So none of them can
delay, end or outlive a run, or touch another, whatever its library does: one that fails, or does not answer within
``ANSWER_S``, is left out from then on. The terminal says so, and ``loggers.json`` of the run's directory, where
``/status``, the live page and the report read it. Sent are the numbers of a line, and the settings without secrets;
never samples.

    supervisor ── line ──► python -m orchestrator.observability.loggers NAME ──► the service
               ◄─ answer ─
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import structlog

from orchestrator.config.run_directory import RunDir
from orchestrator.config.schema import FIELDS, SECRET, value_of
from orchestrator.errors import ConfigError, printable
from orchestrator.observability.metrics import NewLines, grouped
from transport.contracts.settings import Settings
from transport.errors import DECODE_ERRORS, StreamError
from transport.process.files import replace
from transport.process.programs import command, ending_with_this_process, python_module
from transport.process.tasks import beside

log = structlog.get_logger(__name__)

POLL_S = 1.0
ANSWER_S = 60.0
"""Seconds that a logger may take to open, or for one line: a service that is away for longer has lost lines."""
LOGIN_S = 45.0
"""Seconds that a login may take at the start; Weights & Biases asks its server for about 30 before it gives up."""
CLOSE_S = 30.0
"""Seconds that all loggers may take for the last lines, at the end of a run."""
MAX_LINE_BYTES = 1024 * 1024
PROJECT = "streamrl"
MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}  # the module that its extra brings
LOGIN_HELP = {
    "tensorboard": "free the directory",
    "wandb": "log in with `wandb login` or WANDB_API_KEY, or keep the run on this machine with WANDB_MODE=offline",
    "mlflow": "name a server that answers with MLFLOW_TRACKING_URI, and what it wants to know of you",
}

Line = Mapping[str, Any]


class LoggerError(StreamError):
    """A logger cannot take lines any more."""


class MetricsLogger(Protocol):
    """Something that wants every line. Both methods may block, and raise anything."""

    def log(self, line: Line) -> None: ...

    def close(self) -> None: ...


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError for the first logger whose extra is not installed."""
    for name in names:
        if importlib.util.find_spec(MODULES[name]) is None:
            how = command("pip", "install", f"streamrl[{name}]")
            raise ConfigError(f"{name} is not installed: {how}", key="run.loggers")


async def check_loggers(names: Sequence[str], *, wait_s: float = LOGIN_S) -> None:
    """Whether each logger is installed, and its service lets this user in.

    Raises ConfigError for the first that is not, or does not answer within ``wait_s``; it says what to do.
    """
    check_installed(names)
    for name, problem in zip(names, await asyncio.gather(*(_try_login(name, wait_s) for name in names)), strict=True):
        if problem:
            raise ConfigError(
                f"run.loggers: {name} cannot be used: {problem}; {LOGIN_HELP[name]}, or leave it out",
                key="run.loggers",
            )


async def _try_login(name: str, wait_s: float) -> str:
    """Why there is no login; "" where there is one. In a process: it may hang, and a library may ask a terminal."""
    process = await _start(name, "--login", output=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(wait_s):
            said, _ = await process.communicate()
    except TimeoutError:
        return f"it did not answer within {wait_s:.0f} s"
    finally:
        await _kill(process)
    try:
        return msgspec.json.decode(said, type=_Answer).error
    except DECODE_ERRORS:
        return f"its process ended with {process.returncode}"


async def _start(name: str, *arguments: str, output: int | IO[bytes]) -> asyncio.subprocess.Process:
    """The process of a logger. output: what its library prints goes there."""
    return await asyncio.create_subprocess_exec(
        *python_module(__name__, name, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        limit=MAX_LINE_BYTES,
        start_new_session=True,  # no terminal, hence no questions; and Ctrl-C is the supervisor's
        preexec_fn=ending_with_this_process(),
    )


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End a logger's process with those that its library started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


# --- what is left out -------------------------------------------------------------------------------------------------


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A logger that takes no more lines. since: local time, ISO 8601.  why: for people."""

    name: str
    since: str
    why: str

    def __str__(self) -> str:
        return f"logger {self.name} is left out since {self.since.replace('T', ' ')}: {self.why}"


def read_left_out(run_dir: Path) -> list[LeftOut]:
    """The loggers that a run goes on without; none where nothing is known of any."""
    with suppress(OSError, *DECODE_ERRORS):
        return msgspec.json.decode(RunDir(run_dir).loggers.read_bytes(), type=list[LeftOut])
    return []


# --- the supervisor's end ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def logging_metrics(
    settings: Settings, rundir: RunDir, note: Callable[[str], None] = lambda _: None
) -> AsyncIterator[None]:
    """While the context is open, pass on each new line; at its end the rest, and close.

    Lines that are there at the start were passed on before the run was resumed; of those that a killed supervisor had
    not passed on yet (POLL_S at most) the services never hear. note: hears of a logger that is left out.
    """
    with suppress(OSError):
        rundir.loggers.unlink(missing_ok=True)  # of an earlier start
    if not settings.run.loggers:
        yield
        return
    feed = LoggerFeed(settings.run.loggers, settings, rundir, note)
    lines = NewLines(rundir.metrics, skip=True)

    async def follow() -> None:
        while True:
            feed.put(lines.read())
            await asyncio.sleep(POLL_S)

    try:
        async with beside(follow(), name="loggers"):
            yield
    finally:
        feed.put(lines.read())
        await feed.close()


class LoggerFeed:
    """Hands lines to processes of loggers, each in order and at its own speed."""

    def __init__(self, names: Sequence[str], settings: Settings, rundir: RunDir, note: Callable[[str], None]) -> None:
        self._rundir = rundir
        self._note = note
        self.left_out: list[LeftOut] = []
        opening = _Opening(run=settings.run.name, run_dir=str(rundir.path), config=public_settings(settings))
        self._queues: dict[str, asyncio.Queue[bytes]] = {name: asyncio.Queue() for name in dict.fromkeys(names)}
        self._tasks = [
            asyncio.create_task(self._serve(name, msgspec.json.encode(opening), queue), name=f"logger {name}")
            for name, queue in self._queues.items()
        ]

    def put(self, lines: Sequence[Line]) -> None:
        for line in map(msgspec.json.encode, lines):
            for queue in self._queues.values():
                queue.put_nowait(line)

    async def close(self, wait_s: float = CLOSE_S) -> None:
        """Wait until everything is passed on, at most ``wait_s``; what is left then is said."""
        for queue in self._queues.values():
            queue.put_nowait(b"")
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=wait_s)
            for task in late:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, name: str, opening: bytes, queue: asyncio.Queue[bytes]) -> None:
        """Until the last line is taken and the logger closed, or it is left out."""
        try:
            with (self._rundir.logs / f"logger-{name}.log").open("ab") as output:
                process = await _start(name, output=output)
            try:
                await self._exchange(process, opening)
                while line := await queue.get():
                    await self._exchange(process, line)
                await self._exchange(process, b"")
            finally:
                await _kill(process)
        except (LoggerError, OSError) as error:
            self._leave_out(name, str(error))
        except asyncio.CancelledError:
            self._leave_out(name, "it did not take the last lines in time")
            raise
        del self._queues[name]

    async def _exchange(self, process: asyncio.subprocess.Process, line: bytes) -> None:
        """Raises LoggerError: it failed, ended, or did not answer within ANSWER_S."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                process.stdin.write(line + b"\n")
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            raise LoggerError(f"it took no line for {ANSWER_S:.0f} s") from None
        except (ConnectionError, ValueError) as error:
            raise LoggerError(f"its process broke off: {error}") from error
        if not answer:
            raise LoggerError(f"its process ended with {await process.wait()}; see logs/logger-*.log")
        if error := msgspec.json.decode(answer, type=_Answer).error:
            raise LoggerError(error)

    def _leave_out(self, name: str, why: str) -> None:
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        left_out = LeftOut(name=name, since=since, why=printable(" ".join(why.split()))[:500])
        self.left_out.append(left_out)
        log.warning("a logger is left out from here on", logger=name, error=left_out.why)
        self._note(f"warning: {left_out}; the run goes on without it")
        with suppress(OSError):
            replace(self._rundir.loggers, msgspec.json.encode(self.left_out))


# --- the logger's end -------------------------------------------------------------------------------------------------


class _Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that a logger gets; every further one is a line of metrics, and an empty one the end."""

    run: str
    run_dir: str
    config: dict[str, Any]


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """To one line. error: after which there are no more answers; "" where the line was taken."""

    error: str = ""


def main(name: str, *, login: bool = False) -> None:
    """The process of the logger ``name``: takes lines from standard input and answers each on standard output.

    login: look whether the service lets this user in, answer once, and end.
    """
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what its library prints is no answer
    lines = sys.stdin.buffer

    def answer(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            answers.write(msgspec.json.encode(_Answer(error=f"{error}" or type(error).__name__)) + b"\n")
            raise SystemExit(1) from error
        answers.write(msgspec.json.encode(_Answer()) + b"\n")

    kind = KINDS[name]
    if login:
        answer(kind.log_in)
        return
    opened: list[MetricsLogger] = []

    def open_logger() -> None:
        opening = msgspec.json.decode(lines.readline(), type=_Opening)
        opened.append(kind(opening.run, Path(opening.run_dir), opening.config))

    answer(open_logger)
    while line := lines.readline().strip():
        answer(lambda line=line: opened[0].log(msgspec.json.decode(line, type=dict[str, Any])))
    answer(opened[0].close)


def public_settings(settings: Settings) -> dict[str, Any]:
    """Dotted key -> value, without what may hold a secret."""
    return {key: value_of(settings, key) for key in FIELDS if key not in SECRET and not key.endswith(".secret")}


def step_of(line: Line) -> int:
    """Where a line stands on the axis of batches: an evaluation of version v where batch v begins."""
    return line["batch"] if "batch" in line else line["version"]


def numbers(line: Line) -> dict[str, float]:
    """What of a line can be plotted: finite numbers by group and key."""
    return {
        grouped(name): float(value)
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


# --- the three --------------------------------------------------------------------------------------------------------


@contextmanager
def _naming(service: str, *errors: type[Exception]) -> Generator[None]:
    """Turns what the service raises into LoggerError."""
    try:
        yield
    except (*errors, OSError) as error:
        raise LoggerError(f"{service}: {error}") from error


class TensorBoardLogger:
    """Event files in ``<run-dir>/tensorboard``."""

    @staticmethod
    def log_in() -> None:
        """It needs none."""

    def __init__(self, run: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        from tensorboard.summary import Writer

        with _naming("tensorboard"):
            self._writer = Writer(str(run_dir / "tensorboard"))

    def log(self, line: Line) -> None:
        with _naming("tensorboard"):
            for name, value in numbers(line).items():
                self._writer.add_scalar(name, value, step_of(line))
            self._writer.flush()

    def close(self) -> None:
        with _naming("tensorboard"):
            self._writer.close()


class WandbLogger:
    """A Weights & Biases run, continued on ``--resume``; WANDB_MODE, WANDB_API_KEY, ... hold.

    Its files are in ``<run-dir>/wandb``, with links among them, which readers of the run's directory pass over.
    """

    @staticmethod
    def log_in() -> None:
        """Raises what wandb does: there is no key, or its server refuses it. Offline no server is asked."""
        wandb: Any = importlib.import_module("wandb")
        wandb.login(verify=True)

    def __init__(self, run: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        identity = run_dir / "wandb.id"
        with _naming("wandb", self._wandb.Error):
            if not identity.exists():
                replace(identity, uuid.uuid4().hex[:12])
            self._run = self._wandb.init(
                project=PROJECT,
                name=run,
                id=identity.read_text(encoding="ascii"),
                resume="allow",
                dir=str(run_dir),
                config=dict(config),
                settings=self._wandb.Settings(silent=True, console="off"),  # the terminal is the run's, and is not sent
            )
            self._run.define_metric("*", step_metric="batch")  # a batch that is trained again goes back on this axis

    def log(self, line: Line) -> None:
        with _naming("wandb", self._wandb.Error):
            self._run.log({**numbers(line), "batch": step_of(line)})

    def close(self) -> None:
        with _naming("wandb", self._wandb.Error):
            self._run.finish()
            self._wandb.teardown()  # ends the process that it sends from


class MlflowLogger:
    """An MLflow run on the server that MLFLOW_TRACKING_URI names."""

    @staticmethod
    def log_in() -> None:
        """Raises what MLflow does: the server does not answer, or refuses this user."""
        mlflow: Any = importlib.import_module("mlflow")
        mlflow.MlflowClient().search_experiments(max_results=1)

    def __init__(self, run: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._error = mlflow.MlflowException
        with _naming("mlflow", self._error):
            self._client = mlflow.MlflowClient()
            known = self._client.get_experiment_by_name(PROJECT)
            experiment = known.experiment_id if known else self._client.create_experiment(PROJECT)
            self._run_id = self._client.create_run(experiment, run_name=run).info.run_id
            params = [self._entities.Param(key, str(value)[:500]) for key, value in config.items()]
            for start in range(0, len(params), 100):  # the server's limit for one request
                self._client.log_batch(self._run_id, params=params[start : start + 100])

    def log(self, line: Line) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(name.replace("@", "_at_"), value, now_ms, step_of(line))  # it refuses @ in a name
            for name, value in numbers(line).items()
        ]
        with _naming("mlflow", self._error):
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        with _naming("mlflow", self._error):
            self._client.set_terminated(self._run_id)


KINDS = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MlflowLogger}


if __name__ == "__main__":
    main(sys.argv[1], login="--login" in sys.argv[2:])
