"""The directory of one run: what lies where, and who owns it.

<dir>/<name>/
  config.toml       the resolved configuration, with where each value came from
  metrics.jsonl     one line a trained batch, and one an evaluation
  samples.jsonl     a few answers of each batch
  report.html       the run on one page, and trace.json for Perfetto: written when it ends
  ranker.bin        what the run learnt of response lengths
  journal/          every applied event, snapshots (recovery, replay, audit)
  broker/           the embedded broker's append-only file and password
  checkpoints/      step-<version>/ of the trainer
  model/            the final model, a plain Hugging Face directory
  logs/             one file a process
  api.address       host:port of the HTTP service
  api.secret        the key that every HTTP request carries
  lock              held while a supervisor lives
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from orchestrator.config.load import resolve
from orchestrator.errors import ConfigError
from transport.contracts.settings import Settings
from transport.errors import RunExistsError
from transport.process.files import LockedError, check_own_tree, locked, remove_remains, replace, run_directory, writing

OWN_LEVELS = 2
"""The run's files, and those of its directories."""


def journal_of(run_dir: Path) -> Path:
    """The journal of the run in ``run_dir``, for a command that reads it.

    Raises: ConfigError: there is none.  ForeignError: see ``RunDir.check_own``.
    """
    rundir = RunDir(run_dir)
    if not rundir.journal.is_dir():
        raise ConfigError(f"{run_dir} holds no run (no journal); give the directory <dir>/<name>")
    rundir.check_own()
    return rundir.journal


def find_run(run_dir: Path, broker_url: str | None = None) -> tuple[RunDir, Settings]:
    """The run in ``run_dir``, for a command that talks to its broker.

    broker_url: as the user named it on the command line; a password goes to no address that the run alone names.
    Raises: ConfigError: there is none, or see above.  ForeignError: see ``RunDir.check_own``.
    """
    rundir = RunDir(run_dir)
    if not rundir.exists():
        raise ConfigError(f"{run_dir} holds no run (no config.toml); give the directory <dir>/<name>")
    rundir.check_own()
    named = [] if broker_url is None else [f"broker.url={broker_url}"]
    return rundir, resolve(None, [], named, os.environ, stored=rundir.config).settings


class RunDir:
    """Paths of a run and its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.held_out = path / "eval.jsonl"
        self.journal = path / "journal"
        self.ranker = path / "ranker.bin"
        self.broker = path / "broker"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.logs = path / "logs"
        self.api_address = path / "api.address"
        self.api_secret = path / "api.secret"
        self._lock: IO[bytes] | None = None

    def exists(self) -> bool:
        """Whether a run has been started here before."""
        return self.config.exists()

    def has_history(self) -> bool:
        """Whether its orchestrator ever began: a supervisor may have died before."""
        return any(self.journal.glob("snapshot-*"))

    def create(self) -> None:
        """Make the directories. Raises RunExistsError where the path is a file, DirectoryError where it may not be;
        ForeignError where it is another user's.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunExistsError(f"{self.path} is a file; choose another --name or --dir")
        with writing(self.path):
            run_directory(self.path)
            self.logs.mkdir(exist_ok=True)

    def claim(self, config: str, *, resume: bool) -> None:
        """Make the directory ours until ``unlock``, and write its configuration.

        Raises RunExistsError: it holds a run and ``resume`` is not asked for, or the other way round, or it is live.
        DirectoryError: it cannot be written.  ForeignError: see ``check_own``.
        """
        if self.exists() and not resume:
            raise RunExistsError(
                f"{self.path} already holds a run; go on with it: --resume --name {self.path.name}, "
                "or choose another --name"
            )
        if resume and not self.exists():
            raise RunExistsError(f"there is no run to resume in {self.path}")
        self.create()
        with writing(self.path):
            self.check_own()
            self.lock()
            try:
                replace(self.config, config)
                for directory in (self.path, self.journal, self.broker):
                    remove_remains(directory)
            except BaseException:
                self.unlock()
                raise

    def check_own(self) -> None:
        """Whether all that the run's processes open here is this user's own: a link in a copy of another's run would
        have them write elsewhere, and a pipe would have them wait for ever.

        Below the second level nothing is written that was there before.  Raises: ForeignError, naming it; OSError.
        """
        check_own_tree(self.path, levels=OWN_LEVELS)

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


def next_free_name(directory: Path, name: str) -> str:
    """``name``, or ``name-2``, ``name-3``, ... if runs of that name are there already."""
    number = 1
    while RunDir(directory / _numbered(name, number)).exists():
        number += 1
    return _numbered(name, number)


def newest_name(directory: Path, name: str) -> str:
    """The last started of ``name``, ``name-2``, ...; ``name`` where there is none."""
    number = 1
    while RunDir(directory / _numbered(name, number + 1)).exists():
        number += 1
    return _numbered(name, number)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"
