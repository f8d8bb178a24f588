"""The directory of one run: what lies where, and who owns it.

<dir>/<name>/
  config.toml       the resolved configuration, with where each value came from
  starts.jsonl      each start: when, on what machine, with which versions
  metrics.jsonl     one line a trained batch, and one an evaluation
  samples.jsonl     a few answers of each batch
  report.html       the run on one page, and trace.json for Perfetto: written when it ends
  ranker.bin        what the run learnt of response lengths
  journal/          every applied event, snapshots (recovery, replay, audit); run.json: the run's id
  broker/           the embedded broker's append-only file and password
  checkpoints/      step-<version>/ of the trainer
  model/            the final model, a plain Hugging Face directory
  logs/             one file a process
  api.address       host:port of the HTTP service
  ended.json        why it ended, where the journal does not say it
  loggers.json      the loggers that were left out, since when and why
  api.secret        the key that every HTTP request carries
  endpoint/         N.address: where generation worker N listens for agents
  endpoint.key      the key by which agents get their work
  rank-locks/       of trainer processes that number themselves (--index auto)
  lock              held while a supervisor lives
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from typing import IO, NoReturn

from orchestrator.config.load import resolve
from orchestrator.errors import ConfigError
from transport.contracts.settings import Settings
from transport.errors import DirectoryError, RunExistsError
from transport.process.files import (
    LockedError,
    check_own_tree,
    is_locked,
    locked,
    remove_remains,
    replace,
    run_directory,
    writing,
)
from transport.process.http import ENDPOINT_ADDRESSES, ENDPOINT_KEY
from transport.process.programs import command

OWN_LEVELS = 2
"""The run's files, and those of its directories."""
FOREIGN = ("wandb", "tensorboard", "mlruns")
"""Directories of loggers' own files, as their libraries like them: with links, where wandb makes them."""
WATCH_S = 1.0
"""Between two looks at whether the directory of a live run is still there."""


def journal_of(run_dir: Path) -> Path:
    """The journal of the run in ``run_dir``, for a command that reads it.

    Raises: ConfigError: there is none.  ForeignError: see ``RunDir.check_own``.
    """
    rundir = RunDir(run_dir)
    if not rundir.has_journal():
        raise ConfigError(f"{run_dir} holds no run (no journal); {_which(run_dir)}")
    rundir.check_own()
    return rundir.journal


def _which(run_dir: Path) -> str:
    """What to name instead of ``run_dir``."""
    within = [parent for parent in run_dir.absolute().parents if RunDir(parent).exists()]
    page = ", not the address of its page or its broker" if ":" in "".join(run_dir.parts[:1]) else ""
    return f"give {within[0]}, which it is part of" if within else f"give the directory <dir>/<name>{page}"


def existing_run(run_dir: Path) -> RunDir:
    """The run in ``run_dir``, for a command that reads its files.

    Raises: ConfigError: there is none.  ForeignError: see ``RunDir.check_own``.
    """
    rundir = RunDir(run_dir)
    if not rundir.exists():
        raise ConfigError(f"{run_dir} holds no run (no config.toml); {_which(run_dir)}")
    rundir.check_own()
    return rundir


def find_run(run_dir: Path, broker_url: str | None = None) -> tuple[RunDir, Settings]:
    """The run in ``run_dir``, for a command that talks to its broker.

    broker_url: as the user named it on the command line; a password goes to no address that the run alone names.
    Raises: ConfigError: there is none, or see above.  ForeignError: see ``RunDir.check_own``.
    """
    rundir = existing_run(run_dir)
    named = [] if broker_url is None else [f"broker.url={broker_url}"]
    return rundir, resolve(None, [], named, os.environ, stored=rundir.config).settings


def resume_command(run_dir: Path, settings: Settings, *changes: str) -> str:
    """How its user goes on with a run of this machine. A broker of the user's own is named again: its password goes to
    no address that only a file names.  changes: ``section.key=value``.
    """
    named = [f"broker.url={settings.broker.url}"] if settings.broker.url else []
    return _resuming("run", "--name", run_dir, named + list(changes))


def serve_command(run_dir: Path, settings: Settings, *changes: str) -> str:
    """How its user goes on with the control plane alone, which ``serve`` was."""
    return _resuming("serve", "--run", run_dir, changes, "--broker", settings.broker.url)


def _resuming(verb: str, named: str, run_dir: Path, changes: Iterable[str], *more: str) -> str:
    whole = Path(os.path.abspath(run_dir))  # also where "." was given
    elsewhere = [] if whole.parent == Path("runs").absolute() else ["--dir", whole.parent]
    sets = [word for change in changes for word in ("--set", change)]
    return command("streamrl-orchestrator", verb, "--resume", named, whole.name, *more, *elsewhere, *sets)


class RunDir:
    """Paths of a run and its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.starts = path / "starts.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.held_out = path / "eval.jsonl"
        self.journal = path / "journal"
        self.identity = self.journal / "run.json"
        self.ranker = path / "ranker.bin"
        self.broker = path / "broker"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.logs = path / "logs"
        self.api_address = path / "api.address"
        self.api_secret = path / "api.secret"
        self.endpoint_addresses = path / ENDPOINT_ADDRESSES
        self.endpoint_key = path / ENDPOINT_KEY
        self.ended = path / "ended.json"
        self.loggers = path / "loggers.json"
        self._lock: IO[bytes] | None = None
        self._before: set[str] | None = None  # what the directory held when it was claimed
        self._inode: int | None = None  # of the directory that was claimed

    def exists(self) -> bool:
        return self.config.exists()

    def has_journal(self) -> bool:
        """Whether there is a journal that holds more than the run's id, which a start writes first."""
        return self.journal.is_dir() and [path.name for path in self.journal.iterdir()] != [self.identity.name]

    def create(self) -> None:
        """Make the directories. Raises DirectoryError where it may not be; ForeignError where it is another user's."""
        with writing(self.path):
            run_directory(self.path)
            self.logs.mkdir(exist_ok=True)

    def claim(self, config: str, *, resume: bool) -> None:
        """Make the directory ours until ``unlock``, and write its configuration.

        Raises RunExistsError: it holds a run and ``resume`` is not asked for, or the other way round, or it is live.
        DirectoryError: it cannot be written.  ForeignError: see ``check_own``.
        """
        self.check_free(resume=resume)
        self._before = {path.name for path in self.path.iterdir()} if self.path.is_dir() else None
        self.create()
        with writing(self.path):
            self.check_own()
            self.lock()
            try:
                replace(self.config, config)
                for directory in (self.path, self.journal, self.broker):
                    remove_remains(directory)
                self._inode = self.path.stat().st_ino
            except BaseException:
                self.unlock()
                raise

    def check_free(self, *, resume: bool) -> None:
        """Raises RunExistsError and DirectoryError as ``claim`` does, and changes nothing."""
        if self.exists() and not resume:
            raise RunExistsError(
                f"{self.path} already holds a run; choose another --name, or add --resume to go on with it"
            )
        if resume and not self.exists():
            raise RunExistsError(f"there is no run to resume in {self.path}")
        if is_locked(self.path / "lock"):
            self.lock()  # names its holder
        there = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not there.is_dir():
            raise RunExistsError(f"{there} is a file; choose another --name or --dir")
        if not os.access(there, os.W_OK | os.X_OK):
            number = errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
            with writing(there):
                raise OSError(number, os.strerror(number), str(there))

    def check_there(self) -> None:
        """Raises DirectoryError: what was claimed was removed, or moved away, while the run was live."""
        if self._inode is None:
            return
        try:
            same = self.path.stat().st_ino == self._inode
            self.config.stat()
        except (FileNotFoundError, NotADirectoryError):
            self._is_gone()
        except OSError:
            return  # a file system that does not answer for now has lost nothing
        if not same:
            self._is_gone()

    def _is_gone(self) -> NoReturn:
        _remove_empty(self.path)  # made again by a process that had not noticed; in the way of what is moved back
        left = "; what its processes wrote after that is there" if self.path.exists() else ""
        raise DirectoryError(
            f"the directory of the run, {self.path}, was removed or moved away while the run was live{left}. "
            "If it was moved, move it back and add --resume; else start a new run"
        )

    async def watch(self) -> None:
        """Look every ``WATCH_S`` seconds, forever. Raises DirectoryError as ``check_there`` does."""
        while True:
            self.check_there()
            await asyncio.sleep(WATCH_S)

    def discard(self) -> None:
        """Remove what came here since ``claim``: no run began, and its name is free again."""
        for path in self.path.iterdir():
            if path.name in (self._before or ()):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if self._before is None:
            with suppress(OSError):
                self.path.rmdir()

    def check_own(self) -> None:
        """Whether all that the run's processes open here is this user's own: a link in a copy of another's run would
        have them write elsewhere, and a pipe would have them wait for ever.

        Below the second level nothing is written that was there before, and nothing of ours opens what loggers keep
        here (FOREIGN).  Raises: ForeignError, naming it; OSError.
        """
        check_own_tree(self.path, levels=OWN_LEVELS, unread=FOREIGN)

    def lock(self) -> None:
        """Own the directory until ``unlock`` or death. Raises RunExistsError naming the process that owns it."""
        try:
            self._lock = locked(self.path / "lock")
        except LockedError as error:
            raise RunExistsError(
                f"run {self.path} is live (process {error.holder}); stop it first, or choose another --name"
            ) from None

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _remove_empty(directory: Path) -> None:
    """Remove what holds no file, from the bottom up."""
    for path, _, _ in os.walk(directory, topdown=False):
        with suppress(OSError):
            os.rmdir(path)


def next_free_name(directory: Path, name: str) -> str:
    """``name``, or ``name-2``, ``name-3``, ... if runs of that name are there already."""
    if not RunDir(directory / name).exists():
        return name
    return next(f"{name}-{n}" for n in count(2) if not RunDir(directory / f"{name}-{n}").exists())


def newest_name(directory: Path, name: str) -> str:
    """The last started of ``name``, ``name-2``, ...; ``name`` where there is none."""
    numbered = (f"{name}-{n}" for n in count(2))
    return [name, *takewhile(lambda one: RunDir(directory / one).exists(), numbered)][-1]
