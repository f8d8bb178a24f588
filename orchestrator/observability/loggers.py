"""Lines of ``metrics.jsonl`` to TensorBoard, Weights & Biases and MLflow: extras, chosen with ``run.loggers``.

Sent are the numbers of a line, and the settings without secrets; never samples. A thread of the supervisor feeds them,
so that they delay nothing; one that fails is reported once and left out.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import structlog

from orchestrator.config.run_directory import RunDir
from orchestrator.config.schema import FIELDS, SECRET, value_of
from orchestrator.errors import ConfigError
from orchestrator.observability.metrics import NewLines, grouped
from transport.contracts.settings import Settings
from transport.errors import StreamError
from transport.process.files import replace
from transport.process.programs import command

log = structlog.get_logger(__name__)

POLL_S = 1.0
CLOSE_S = 30.0  # at the end, how long the services may take for the last lines
PROJECT = "streamrl"
MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}  # the module that its extra brings

Line = Mapping[str, Any]


class LoggerError(StreamError):
    """A logger cannot take lines any more."""


class MetricsLogger(Protocol):
    """Something that wants every line. Both methods may block, and raise LoggerError."""

    def log(self, line: Line) -> None: ...

    def close(self) -> None: ...


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError for the first logger whose extra is not installed."""
    for name in names:
        if importlib.util.find_spec(MODULES[name]) is None:
            how = command("pip", "install", f"streamrl[{name}]")
            raise ConfigError(f"{name} is not installed: {how}", key="run.loggers")


@asynccontextmanager
async def logging_metrics(settings: Settings, rundir: RunDir) -> AsyncIterator[None]:
    """While the context is open, pass on each new line; at its end the rest, and close.

    Lines that are there at the start were passed on before the run was resumed; of those that a killed supervisor had
    not passed on yet (POLL_S at most) the services never hear.
    """
    if not settings.run.loggers:
        yield
        return
    feed = LoggerFeed([opener(name, settings, rundir.path) for name in settings.run.loggers])
    lines = NewLines(rundir.metrics, skip=True)

    async def follow() -> None:
        while True:
            feed.put(lines.read())
            await asyncio.sleep(POLL_S)

    follower = asyncio.create_task(follow(), name="loggers")
    try:
        yield
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        feed.put(lines.read())
        await asyncio.to_thread(feed.close)


class LoggerFeed:
    """A thread that opens loggers and hands them lines in order."""

    def __init__(self, openers: Sequence[Callable[[], MetricsLogger]]) -> None:
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        # A daemon: a service that hangs must not keep a finished run from ending.
        self._thread = threading.Thread(target=self._run, args=(openers,), name="loggers", daemon=True)
        self._thread.start()

    def put(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._lines.put(line)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Wait until everything is passed on, at most ``wait_s``."""
        self._lines.put(None)
        self._thread.join(wait_s)
        if self._thread.is_alive():
            log.warning("loggers did not take the last lines in time", waited_s=wait_s)

    def _run(self, openers: Sequence[Callable[[], MetricsLogger]]) -> None:
        loggers: list[MetricsLogger] = []
        for opened in openers:
            _or_warn(lambda opened=opened: loggers.append(opened()))
        while (line := self._lines.get()) is not None:
            loggers = [logger for logger in loggers if _or_warn(lambda logger=logger, line=line: logger.log(line))]
        for logger in loggers:
            _or_warn(logger.close)


def _or_warn(act: Callable[[], None]) -> bool:
    """Whether it went well; what did not is said."""
    try:
        act()
    except LoggerError as error:
        log.warning("a logger is left out from here on", error=str(error))
        return False
    return True


def opener(name: str, settings: Settings, run_dir: Path) -> Callable[[], MetricsLogger]:
    """How to open the logger ``name``; done in the feed's thread, since a service may take long to answer."""
    kind = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MlflowLogger}[name]
    return lambda: kind(settings.run.name, run_dir, public_settings(settings))


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
    """A Weights & Biases run, continued on ``--resume``; WANDB_MODE, WANDB_API_KEY, ... hold."""

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
