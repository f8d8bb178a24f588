"""How a run stands: live, finished, or stopped and why; how far it came; told from its directory alone.

Finished is what the journal says. Why a run ended otherwise stands in ``ended.json``, which the process that holds the
run's lock leaves behind; one that was killed leaves none, so a run that is neither live nor finished and has no such
file crashed. Reading changes nothing, and needs no broker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.config.load import resolve
from orchestrator.config.run_directory import RunDir, existing_run, resume_command
from orchestrator.core.state import PipelineState
from orchestrator.core.view import PipelineView
from orchestrator.errors import ConfigError, Interrupted, printable
from orchestrator.journal import is_written, newest_snapshot, read_whole_records
from orchestrator.observability.metrics import read_metrics
from transport.contracts.settings import Settings
from transport.errors import InputFileError, first_error
from transport.process.files import read_json, replace
from transport.process.programs import process_age_s, shown

REPORT = "report.html"
ROOM_BYTES = 16 * 1024
"""Of ``ended.json``, from the start."""


class State(StrEnum):
    LIVE = "live"
    FINISHED = "finished"  # all batches are trained, or the data ended
    STOPPED = "stopped"  # a signal or a request asked for it
    FAILED = "failed"  # an error that was said ended it
    CRASHED = "crashed"  # its process was killed, or the machine went down
    NEW = "not begun"


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """``ended.json``. why: for people, "" where the journal knows.  seconds: since its command, 0: unknown."""

    why: str
    failed: bool
    seconds: float = 0.0


class Stopwatch:
    """Seconds since this process was started, until ``stop``: what terminal, report and comparison say a run took."""

    def __init__(self) -> None:
        self._stopped_s: float | None = None

    def stop(self) -> float:
        """The first call stops it."""
        if self._stopped_s is None:
            self._stopped_s = process_age_s()
        return self._stopped_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """state: see above, and why, "" where that says all.  num_batches: that are to be trained, None for a service.

    at_s: wall clock of the last event.  lines: of metrics.jsonl, one a trained batch.
    seconds: that its last start took, with all that came before the first event; 0: unknown.
    begun: batches, trained ones too; 0 while it is live.
    """

    rundir: RunDir
    settings: Settings
    state: State
    why: str
    at_s: float
    num_batches: int | None
    lines: Sequence[Mapping[str, Any]]
    seconds: float = 0.0
    begun: int = 0

    @property
    def trained(self) -> int:
        """Batches."""
        return max((line["batch"] + 1 for line in self.lines), default=0)

    @property
    def when(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.at_s))

    @property
    def batches(self) -> str:
        """``9/40``; "" for a service."""
        return "" if self.num_batches is None else f"{self.trained}/{self.num_batches}"

    def __str__(self) -> str:
        """One line: ``stopped 2026-01-31 12:00 by Ctrl-C, 9/40 batches``."""
        when = "" if self.state is State.LIVE else f" {self.when}"
        why = f" {self.why}" if self.why.startswith("by ") else f": {self.why}" if self.why else ""
        return printable(f"{self.state}{when}{why}" + (f", {self.batches} batches" if self.batches else ""))

    @property
    def go_on(self) -> str:
        """The command that goes on with it; "" where there is nothing to go on with, or it goes on."""
        resumable = self.state in (State.STOPPED, State.FAILED, State.CRASHED)
        return resume_command(self.rundir.path, self.settings) if resumable else ""


def read_standing(run_dir: Path, *, over: bool = False) -> Standing:
    """over: the caller holds the run's lock, and its run has ended.

    Raises: ConfigError: there is no run, or its configuration is damaged; JournalError; ForeignError."""
    rundir = existing_run(run_dir)
    settings = resolve(None, [], [], {}, stored=rundir.config).settings
    live = not over and is_written(rundir.path)
    view = None if live else _last_view(rundir.journal)
    ended = None if live else _ended(rundir)
    state, why = (State.LIVE, "") if live else _how_it_ended(ended, view)
    num_batches = settings.run.batches if view is None else view.num_batches
    times = [path.stat().st_mtime for path in (rundir.config, *rundir.journal.glob("*.e*"))]
    return Standing(
        rundir=rundir,
        settings=settings,
        state=state,
        why=why,
        at_s=max(times),
        num_batches=None if settings.trainer.engine == "none" else num_batches,
        lines=read_metrics(rundir.metrics),
        seconds=ended.seconds if ended is not None else 0.0,
        begun=0 if view is None else view.num_admitted,
    )


def last_state(journal: Path) -> PipelineState | None:
    """The run's state at its last event, None before the first. Raises JournalError."""
    seq, snapshot = newest_snapshot(journal)
    if snapshot is None:
        return None
    state = PipelineState.restore(snapshot)
    for record in read_whole_records(journal, from_seq=seq + 1):
        state.handle(record.event, record.now_s)
    return state


def _last_view(journal: Path) -> PipelineView | None:
    state = last_state(journal)
    return None if state is None else state.view()


def _ended(rundir: RunDir) -> Ended | None:
    """None where nothing was left, or a torn word."""
    with suppress(InputFileError):
        return read_json(rundir.ended, Ended)
    return None


def _how_it_ended(ended: Ended | None, view: PipelineView | None) -> tuple[State, str]:
    trained_all = view is not None and view.trained_version >= view.num_batches
    if view is not None and view.finish_reason and not view.stop_reason and (trained_all or view.exhausted):
        return State.FINISHED, "" if trained_all else view.finish_reason
    if ended is not None and ended.why:
        return (State.FAILED if ended.failed else State.STOPPED), ended.why
    if view is not None and view.finish_reason:
        return State.STOPPED, view.finish_reason
    return (State.NEW, "") if view is None else (State.CRASHED, "its process was killed, or the machine went down")


@contextmanager
def noting_end(rundir: RunDir) -> Generator[Stopwatch]:
    """Leave word of how the run ends, whichever way the block does; what an earlier end left goes at once.

    Yields the stopwatch of what the run took. Room for the word is taken at the start: it may be a full disk that ends
    the run.
    """
    path, ended, stopwatch = rundir.ended, Ended(why="", failed=False), Stopwatch()
    path.unlink(missing_ok=True)
    with suppress(OSError):
        replace(path, b" " * ROOM_BYTES)
    try:
        yield stopwatch
    except Interrupted as error:
        ended = Ended(why=f"by {error.by}", failed=False)
        raise
    except (asyncio.CancelledError, KeyboardInterrupt):
        ended = Ended(why="by Ctrl-C", failed=False)
        raise
    except BaseException as error:
        cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        ended = Ended(why=str(cause) or type(cause).__name__, failed=True)
        raise
    finally:
        with suppress(OSError):  # whatever is wrong here must not hide what the run ended by
            if rundir.exists():
                _leave_word(path, msgspec.structs.replace(ended, seconds=round(stopwatch.stop(), 1)))


def _leave_word(path: Path, ended: Ended) -> None:
    """In place of what is there; on a full disk, in its room. Raises OSError."""
    try:
        replace(path, msgspec.json.encode(ended))
    except OSError:
        short = msgspec.structs.replace(ended, why=ended.why[: ROOM_BYTES // 16])  # an escape has 6 bytes
        with path.open("r+b") as file:
            file.write(msgspec.json.encode(short).ljust(ROOM_BYTES))


def result_lines(rundir: RunDir) -> list[str]:
    """Where the results of a run lie, a line each."""
    results = {"model": rundir.model, "metrics": rundir.metrics, "report": rundir.path / REPORT}
    return [f"  {name:8} {shown(path)}" for name, path in results.items() if path.exists()]


def nothing_left(standing: Standing, wanted: Settings, go_on: Callable[..., str] = resume_command) -> str:
    """What to say to ``--resume`` of a finished run that ``wanted`` asks no more of; "" where there is more to do.

    go_on: the command for it, of the directory, the settings and what is changed.
    Raises: ConfigError: fewer batches are asked for than the run has begun, all of which it trains.
    """
    before, batches = standing.settings, wanted.run.batches
    if standing.num_batches is not None and batches != before.run.batches and batches < standing.begun:
        problem = f"run.batches = {batches} is below the {standing.begun} batches that are begun"
        raise ConfigError(f"{problem}, and what is begun is trained: ask for more of them", key="run.batches")
    if standing.state is not State.FINISHED or wanted.run.batches > (standing.num_batches or 0):
        return ""
    if wanted.data.passes != before.data.passes and standing.trained < wanted.run.batches:
        return ""
    rundir = standing.rundir
    more = f"run.batches={2 * standing.trained}"
    if standing.trained < wanted.run.batches:
        more = f"data.passes={2 * before.data.passes}"
    return "\n".join(
        [
            f"{rundir.path} {standing}; nothing was changed",
            *result_lines(rundir),
            f"go on with: {go_on(rundir.path, wanted, more)}",
        ]
    )
