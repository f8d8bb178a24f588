"""Checkpoints: everything that a trainer needs to go on exactly, in one directory that is there whole or not at all.

    checkpoints/step-<version>/     or step-<version>.<n>, of a version that was saved again
      model.safetensors      fp32 master weights
      optimizer.safetensors  both moments and the step count of every parameter, and torch's random state
      ledger.msgpack         what was trained (transport/contracts/ledger.py)
      steps.msgpack          reports of the last steps that it contains
      meta.json              identity, cursor, prompt-source state, fingerprint, size and CRC-32 of every file

Owns: that directory. Never: when to save. Invariant: a directory with its final name was written completely and synced,
and is never replaced; whatever goes wrong while saving, and whenever it is killed, the checkpoints before stay as they
were. They go when a newer one is in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
from safetensors import SafetensorError

from transport.contracts.ledger import FILE_NAME, Ledger, Seal, checkpoint_dirs, checkpoint_name, parse_checkpoint_name
from transport.contracts.messages import StepDone
from transport.contracts.settings import Settings
from transport.contracts.types import WeightIdentity
from transport.errors import MessageError
from transport.process import faults
from transport.process.files import sync_directory
from transport.tensors.manifest import file_checksum
from workers.errors import CheckpointError, ModelError, ResumeMismatchError, RunFilesError

log = structlog.get_logger(__name__)

T = TypeVar("T")

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STEPS_FILE = "steps.msgpack"
META_FILE = "meta.json"
HEADROOM_BYTES = 1024 * 1024
"""For the small files and the headers."""


class FileMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file must be to be trusted."""

    nbytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file of tensors that is yet to be written. nbytes: of the tensors."""

    nbytes: int
    write: Callable[[Path], None]


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """meta.json. epoch, version, digest: identity of the published weights.  cursor: last rounds-log entry contained.

    fingerprint: setting -> value, of what a resumed run may not change.  format: of this file.
    """

    version: int
    epoch: int
    digest: str
    cursor: str
    source_position: str
    fingerprint: dict[str, str]
    files: dict[str, FileMark]
    format: int = 1


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in place and verified."""

    path: Path
    meta: CheckpointMeta
    ledger: Ledger
    steps: tuple[StepDone, ...] = ()


def fingerprint(settings: Settings, model_dir: Path) -> dict[str, str]:
    """What a run's weights, rows and prompt positions rest on: a resumed run has the same, or it is another run."""
    marks: dict[str, Any] = {
        "model.path": settings.model.path,
        "model config": _config_mark(model_dir),
        "run.seed": settings.run.seed,
        "pipeline.group_size": settings.pipeline.group_size,
    }
    marks |= {f"data.{name}": value for name, value in msgspec.to_builtins(settings.data).items()}
    return {name: json.dumps(value, sort_keys=True) for name, value in marks.items()}


def _config_mark(model_dir: Path) -> str:
    return hashlib.blake2b((model_dir / "config.json").read_bytes(), digest_size=8).hexdigest()


def check_base_model(path: Path, meta: CheckpointMeta, model_dir: Path) -> None:
    """Raises ModelError: the checkpoint at ``path`` was not trained from the model in ``model_dir``."""
    if meta.fingerprint.get("model config") != json.dumps(_config_mark(model_dir)):
        raise ModelError(f"{path} was not trained from the model in {model_dir}: their config.json differ")


def check_fingerprint(checkpoint: Checkpoint, expected: Mapping[str, str]) -> None:
    """Raises ResumeMismatchError naming every setting that differs."""
    found = checkpoint.meta.fingerprint
    differing = [
        f"{name}: {found.get(name, 'not set')} in the checkpoint, {expected.get(name, 'not set')} now"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if differing:
        raise ResumeMismatchError(
            f"{checkpoint.path} belongs to another run ({'; '.join(differing)}): change it back, or start a run with "
            "another --name"
        )


class CheckpointStore:
    """The checkpoints of one run. keep: newest ones that stay, >= 1."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = directory
        self._keep = max(keep, 1)
        self._saved: tuple[int, int, Path] | None = None
        self.damaged: dict[Path, str] = {}
        """Checkpoints that were passed over, and what is wrong with each."""

    @property
    def damage_lines(self) -> tuple[str, ...]:
        """``damaged``, newest first, for people."""
        return tuple(f"{path}: {reason}" for path, reason in self.damaged.items())

    def save(
        self, files: Mapping[str, TensorFile], ledger: Ledger, meta: CheckpointMeta, steps: Sequence[StepDone] = ()
    ) -> Path:
        """Write a checkpoint and put it in place; ``meta.files`` is filled in here.

        files: by name, MODEL_FILE and OPTIMIZER_FILE; after a save of the same version theirs are taken again.

        Raises: CheckpointError: the disk is full or refuses; nothing of the attempt is left, older ones are untouched.
        """
        names = (parse_checkpoint_name(path.name) for path in checkpoint_dirs(self._directory))
        numbers = [name[1] for name in names if name is not None and name[0] == meta.version]
        target = self._directory / checkpoint_name(meta.version, max(numbers, default=-1) + 1)
        needed = sum(file.nbytes for file in files.values()) + HEADROOM_BYTES
        aside = self._directory / f"writing-{meta.version}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for left in self._directory.glob("writing-*"):  # by a killed trainer
                shutil.rmtree(left)
            # ask first: a disk that fills up half-way also takes the broker's append-only file down
            free = shutil.disk_usage(self._directory).free
            if free < needed:
                raise CheckpointError(target, needed, f"only {free} bytes are free")
            aside.mkdir()
            same = self._saved[2] if self._saved and self._saved[:2] == (meta.epoch, meta.version) else None
            for name, file in files.items():
                if same is not None:
                    os.link(same / name, aside / name)  # the last save again, with a later cursor
                else:
                    file.write(aside / name)
            marks = {name: _mark(aside / name) for name in files}
            weights = WeightIdentity(epoch=meta.epoch, version=meta.version, digest=meta.digest)
            seal = Seal(weights=weights, files={name: mark.checksum for name, mark in marks.items()})
            (aside / FILE_NAME).write_bytes(ledger.to_bytes(seal))
            (aside / STEPS_FILE).write_bytes(msgspec.msgpack.encode(steps))
            marks |= {name: _mark(aside / name) for name in (FILE_NAME, STEPS_FILE)}
            meta = msgspec.structs.replace(meta, files=marks)
            (aside / META_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(meta)))
            for path in aside.iterdir():
                with path.open("rb") as written:
                    os.fsync(written.fileno())
            sync_directory(aside)
            faults.point("train.checkpoint_written")
            aside.rename(target)
            sync_directory(self._directory)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(target, needed, str(error)) from error
        faults.point("train.checkpoint_placed")
        self._saved = (meta.epoch, meta.version, target)
        self._prune()
        return target

    def load_latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; those before it are ``damaged``, and named in a warning."""
        for path in checkpoint_dirs(self._directory):
            try:
                return _verified(path)
            except (OSError, MessageError, msgspec.MsgspecError, ValueError, RecursionError) as error:
                self.damaged[path] = str(error)
                log.warning("damaged checkpoint, trying the one before it", path=str(path), error=str(error))
        return None

    def _prune(self) -> None:
        """Keep the newest versions that are whole, each once."""
        kept: set[int] = set()
        for path in checkpoint_dirs(self._directory):
            name = parse_checkpoint_name(path.name)
            if name is None or name[0] in kept or path in self.damaged or len(kept) == self._keep:
                shutil.rmtree(path, ignore_errors=True)
            else:
                kept.add(name[0])


def newest_model(directory: Path, version: int | None, load: Callable[[Path], T]) -> tuple[Path, CheckpointMeta, T]:
    """(checkpoint, what it is, what ``load`` makes of its weights) of the newest that is whole, or of ``version``.

    For a process beside the trainer, which may remove any checkpoint meanwhile: then the next one is taken.
    Raises RunFilesError: there is none; it says which there are, and what is wrong with those that were tried.
    """

    def of(path: Path) -> int:
        return (parse_checkpoint_name(path.name) or (-1, 0))[0]

    tried: dict[Path, str] = {}
    while wanted := [p for p in checkpoint_dirs(directory) if p not in tried and version in (None, of(p))]:
        path = wanted[0]
        try:
            meta = msgspec.json.decode((path / META_FILE).read_bytes(), type=CheckpointMeta)
            if _mark(path / MODEL_FILE) != meta.files.get(MODEL_FILE):
                raise ValueError(f"{MODEL_FILE} is not what was written")
            return path, meta, load(path / MODEL_FILE)
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError, SafetensorError) as error:
            tried[path] = str(error)
            log.warning("damaged checkpoint", path=str(path), error=str(error))
    others = sorted({of(path) for path in checkpoint_dirs(directory) if path not in tried})
    problem = f"holds no whole checkpoint{'' if version is None else f' of version {version}'}"
    advice = "a run saves one every trainer.checkpoint_every batches, and where `streamrl-orchestrator checkpoint` asks"
    if others:
        advice = f"there are those of {', '.join(map(str, others))} (trainer.keep_checkpoints says how many stay)"
    damaged = [f"{path.name}: {reason}" for path, reason in tried.items()]
    raise RunFilesError("; ".join([f"{directory} {problem}", *damaged, advice]))


def _verified(path: Path) -> Checkpoint:
    """Read and check everything small; check the bytes of everything large. Raises ValueError for what differs."""
    meta = msgspec.json.decode((path / META_FILE).read_bytes(), type=CheckpointMeta)
    if {MODEL_FILE, OPTIMIZER_FILE, FILE_NAME} - meta.files.keys():
        raise ValueError("meta.json does not name all files")
    for name, mark in meta.files.items():
        if _mark(path / name) != mark:
            raise ValueError(f"{name} is not what was written")
    ledger = Ledger.from_bytes((path / FILE_NAME).read_bytes())
    steps = ()
    if STEPS_FILE in meta.files:  # there is none in checkpoints of earlier versions
        steps = msgspec.msgpack.decode((path / STEPS_FILE).read_bytes(), type=tuple[StepDone, ...])
    return Checkpoint(path=path, meta=meta, ledger=ledger, steps=steps)


def _mark(path: Path) -> FileMark:
    return FileMark(nbytes=path.stat().st_size, checksum=file_checksum(path))
