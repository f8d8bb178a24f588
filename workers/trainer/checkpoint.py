"""Checkpoints: everything that a trainer needs to go on exactly, in one directory that is there whole or not at all.

    checkpoints/step-<version>/     or step-<version>.<n>, of a version that was saved again
      model.safetensors      fp32 master weights: of the adapters alone, where there are any; of several ranks,
                             model-<rank>-of-<ranks>.safetensors each
      optimizer.safetensors  both moments and the step count of every parameter, and torch's random state; likewise
      ledger.msgpack         what was trained (transport/contracts/ledger.py)
      steps.msgpack          reports of the last steps that it contains
      meta.json              identity, cursor, prompt-source state, fingerprint, size and CRC-32 of every file

    begin   all ranks, between two batches: a place and a name, a copy of what each holds in host memory
    write   each rank its own files, while training goes on
    commit  rank 0, once it knows of all: the small files, then the final name

The directory is on a file system or in an object store (placing.py).

Owns: that directory. Never: when to save. Invariant: a directory that is in place was written completely and durably,
by all ranks, and is never replaced; whatever goes wrong while saving, and whenever a rank is killed, the checkpoints
before stay as they were. They go when a newer one is in place.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from transport.contracts.ledger import (
    FILE_NAME,
    META_FILE,
    MODEL_FILES,
    CheckpointMeta,
    FileMark,
    Ledger,
    Seal,
    checkpoint_dirs,
    checkpoint_name,
    parse_checkpoint_name,
)
from transport.contracts.messages import StepDone
from transport.contracts.settings import DataSettings, Settings
from transport.contracts.types import WeightIdentity
from transport.errors import DECODE_ERRORS, DirectoryError, MessageError
from transport.process import faults
from transport.process.files import replace
from transport.process.storage import Place, creating
from transport.tensors.manifest import checksum_of, file_checksum
from workers.errors import (
    CheckpointError,
    ModelError,
    NoCheckpointRoomError,
    ResumeMismatchError,
    RunFilesError,
    TensorFileError,
)
from workers.models import MODEL_FILE
from workers.trainer.placing import placing_in

log = structlog.get_logger(__name__)

T = TypeVar("T")

OPTIMIZER_FILE = "optimizer.safetensors"
STEPS_FILE = "steps.msgpack"
HEADROOM_BYTES = 1024 * 1024
"""For the small files and the headers."""
SHARED_FILE = ".seen-by-all-"
SEEN_S, SEEN_POLL_S = 10.0, 0.2
"""NFS shows a file that another host made within 3 s, as it is mounted by default (acregmin)."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file of tensors that is yet to be written. nbytes: of the tensors.  content: its bytes, from the first on."""

    nbytes: int
    content: Callable[[], Iterable[memoryview]]


Gather = Callable[[bytes], list[bytes]]
"""Called by all ranks: what every rank gave, in their order."""


def alone(data: bytes) -> list[bytes]:
    """Gather of a process that has no peers."""
    return [data]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint in place and verified."""

    path: Place
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
    marks |= _data_marks(settings.data)
    lora = settings.trainer.lora
    if lora.rank:  # their absence is that of all checkpoints before
        marks |= {f"trainer.lora.{name}": value for name, value in msgspec.to_builtins(lora).items()}
    return {name: json.dumps(value, sort_keys=True) for name, value in marks.items()}


def _data_marks(data: DataSettings) -> dict[str, Any]:
    return {f"data.{name}": value for name, value in msgspec.to_builtins(data).items()}


def _config_mark(model_dir: Path) -> str:
    return hashlib.blake2b((model_dir / "config.json").read_bytes(), digest_size=8).hexdigest()


def check_base_model(path: Place, meta: CheckpointMeta, model_dir: Path) -> None:
    """Raises ModelError: the checkpoint at ``path`` was not trained from the model in ``model_dir``."""
    if meta.fingerprint.get("model config") != json.dumps(_config_mark(model_dir)):
        raise ModelError(f"{path} was not trained from the model in {model_dir}: their config.json differ")


def check_fingerprint(checkpoint: Checkpoint, expected: Mapping[str, str]) -> None:
    """Raises ResumeMismatchError naming every setting that differs.

    A setting of the data that is newer than the checkpoint had its default then.
    """
    defaults = {name: json.dumps(value, sort_keys=True) for name, value in _data_marks(DataSettings()).items()}
    found = defaults | checkpoint.meta.fingerprint
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


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 says of a checkpoint that is about to be saved. name: of its directory.  token: of this attempt.

    again: the last one, with a later cursor: its tensors are taken again.  problem: why there will be none.
    """

    name: str = ""
    token: str = ""
    again: bool = False
    problem: str = ""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has to say of its part. problem: why it is not there; "" if it is."""

    files: dict[str, FileMark] = {}
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A checkpoint that is being saved, on one rank. needed_bytes: of all ranks.  files: of this one."""

    plan: Plan
    meta: CheckpointMeta
    ledger: Ledger
    steps: Sequence[StepDone]
    files: Mapping[str, TensorFile]
    num_ranks: int
    needed_bytes: int


class CheckpointStore:
    """The checkpoints of one run, as one rank sees them. keep: newest ones that stay, >= 1."""

    def __init__(self, directory: Place, *, keep: int, rank: int = 0) -> None:
        self._directory = directory
        self._placing = placing_in(directory)
        self._keep = max(keep, 1)
        self._rank = rank
        self._saved: tuple[int, int, Place, dict[str, FileMark]] | None = None
        self.damaged: dict[Place, str] = {}
        """Checkpoints that were passed over, and what is wrong with each."""

    @property
    def damage_lines(self) -> tuple[str, ...]:
        """``damaged``, newest first, for people."""
        return tuple(f"{path}: {reason}" for path, reason in self.damaged.items())

    def check_shared(self, gather: Gather = alone) -> None:
        """See that a file of rank 0 is there for every rank; all of several call it, before there is anything to lose.

        Ranks on two hosts may have directories of the same name, or stores of the same address, that are not the same.
        Raises CheckpointError, on all ranks: one does not see the file within ``SEEN_S``, or it cannot be written.
        """
        own, problem = self._directory / f"{SHARED_FILE}{secrets.token_hex(8)}", ""
        try:
            if self._rank == 0:
                problem = _put(own)
            name = gather(b"" if problem else own.name.encode())[0].decode()
            if name and not self._sees(self._directory / name):
                problem = f"on {socket.gethostname()} it is not the directory of rank 0"
            problems = {rank: raw.decode() for rank, raw in enumerate(gather(problem.encode())) if raw}
        finally:
            if self._rank == 0:
                with suppress(OSError):
                    own.unlink(missing_ok=True) if isinstance(own, Path) else own.remove()
        if problems:
            raise CheckpointError(
                self._directory,
                0,
                f"{_of_ranks(problems)}: all ranks need the same one; put trainer.checkpoint_dir on a file system that "
                "their hosts share, or into object storage (docs/parallel.md)",
            )

    def _sees(self, file: Place) -> bool:
        """Also on a file system that shows new files late."""
        deadline_s = time.monotonic() + SEEN_S
        while True:
            try:
                if file.is_file():
                    return True
            except OSError as error:
                log.warning("no look at the checkpoints", place=str(file), error=str(error))
            if time.monotonic() > deadline_s:
                return False
            time.sleep(SEEN_POLL_S)

    # -- saving

    def begin(
        self,
        files: Callable[[], Mapping[str, TensorFile]],
        ledger: Ledger,
        meta: CheckpointMeta,
        steps: Sequence[StepDone] = (),
        gather: Gather = alone,
    ) -> Saving:
        """Agree with all ranks on a checkpoint of the present state; each calls it at the same place.

        Args:    files: what this rank is to write, taken now; after a save of the same version those are taken again.
                 ledger: copied here.  meta: its ``files`` are filled in at the end.
        Raises:  CheckpointError, on all ranks: the directory cannot be made, or the disk of one is full.
        """
        own = self._plan(meta) if self._rank == 0 else Plan()
        plan = msgspec.msgpack.decode(gather(msgspec.msgpack.encode(own))[0], type=Plan)
        if plan.problem:
            raise CheckpointError(self._directory / plan.name, 0, plan.problem)
        taken = {} if plan.again else files()
        sizes = gather(str(sum(file.nbytes for file in taken.values())).encode())
        needed_bytes = sum(map(int, sizes)) + HEADROOM_BYTES
        room = {rank: raw.decode() for rank, raw in enumerate(gather(self._room(needed_bytes).encode())) if raw}
        if room:
            if self._rank == 0:
                self._placing.remove(self._placing.draft(plan.name))
            raise NoCheckpointRoomError(self._directory / plan.name, needed_bytes, _of_ranks(room))
        return Saving(
            plan=plan,
            meta=meta,
            ledger=Ledger.from_bytes(ledger.to_bytes()),
            steps=steps,
            files=taken,
            num_ranks=len(sizes),
            needed_bytes=needed_bytes,
        )

    def _plan(self, meta: CheckpointMeta) -> Plan:
        """Make room and a place. Says what is wrong rather than raise: the other ranks wait for it."""
        name = checkpoint_name(meta.version)
        try:
            names = map(parse_checkpoint_name, self._placing.taken())
            numbers = [name[1] for name in names if name is not None and name[0] == meta.version]
            name = checkpoint_name(meta.version, max(numbers, default=-1) + 1)
            self._placing.begin(name)
        except OSError as error:
            return Plan(name=name, problem=str(error))
        again = self._saved is not None and self._saved[:2] == (meta.epoch, meta.version)
        return Plan(name=name, token=secrets.token_hex(4), again=again)

    def _room(self, needed_bytes: int) -> str:
        """Why there is none; "" if there is. Asked first: a disk that fills up half-way also takes the broker's
        append-only file down."""
        try:
            free = self._placing.free_bytes()
        except OSError as error:
            return str(error)
        return f"only {free} bytes are free" if free is not None and free < needed_bytes else ""

    def write(self, saving: Saving) -> Written:
        """Write and sync this rank's files; on any thread."""
        draft = self._placing.draft(saving.plan.name)
        try:
            marks = {name: _write(draft / name, file.content()) for name, file in saving.files.items()}
        except OSError as error:
            return Written(problem=str(error))
        faults.point("train.shard_written")
        return Written(files=marks)

    def commit(self, saving: Saving, parts: Mapping[int, Written]) -> Place:
        """Put the checkpoint in place, on rank 0. parts: what the ranks said, by rank, as far as they did.

        Raises: CheckpointError: a rank has not written its part, or the disk is full or refuses; nothing of the attempt
        is left, older ones are untouched.
        """
        target, draft = self._directory / saving.plan.name, self._placing.draft(saving.plan.name)
        try:
            if unwritten := {rank: part.problem for rank, part in parts.items() if part.problem}:
                raise NoCheckpointRoomError(target, saving.needed_bytes, _of_ranks(unwritten))
            if problem := self._problem(saving, parts, draft):
                raise CheckpointError(target, saving.needed_bytes, problem)
            marks = {name: mark for part in parts.values() for name, mark in part.files.items()}
            if saving.plan.again and self._saved is not None:
                _, _, last, marks = self._saved
                self._placing.take(last, draft, marks)
            tensors = marks
            marks = marks | self._write_small(draft, saving, tensors)
            meta = msgspec.structs.replace(saving.meta, files=marks)
            _write(draft / META_FILE, [meta.to_bytes()])
            faults.point("train.checkpoint_written")
            self._placing.place(saving.plan.name)
        except (OSError, CheckpointError) as error:
            self._placing.remove(draft)
            if isinstance(error, CheckpointError):
                raise
            raise NoCheckpointRoomError(target, saving.needed_bytes, str(error)) from error
        faults.point("train.checkpoint_placed")
        self._saved = (saving.meta.epoch, saving.meta.version, target, tensors)
        self._prune()
        return target

    def _problem(self, saving: Saving, parts: Mapping[int, Written], draft: Place) -> str:
        """Why the parts are no checkpoint; "" if they are one."""
        if silent := sorted(set(range(saving.num_ranks)) - parts.keys()):
            return f"ranks {silent} have not written their parts in time"
        for rank, part in parts.items():
            for name, mark in part.files.items():
                if not (draft / name).is_file() or (draft / name).stat().st_size != mark.nbytes:
                    return f"{name} of rank {rank} is not there for rank 0: all ranks need the same directory"
        return ""

    def _write_small(self, draft: Place, saving: Saving, tensors: Mapping[str, FileMark]) -> dict[str, FileMark]:
        meta = saving.meta
        weights = WeightIdentity(epoch=meta.epoch, version=meta.version, digest=meta.digest)
        seal = Seal(weights=weights, files={name: mark.checksum for name, mark in tensors.items()})
        contents = {FILE_NAME: saving.ledger.to_bytes(seal), STEPS_FILE: msgspec.msgpack.encode(saving.steps)}
        return {name: _write(draft / name, [content]) for name, content in contents.items()}

    # -- loading

    def load_latest(self, gather: Gather = alone) -> Checkpoint | None:
        """The newest checkpoint that is whole; those before it are ``damaged``, and named in a warning.

        All ranks call it, and each checks the bytes of its share of the files; what one finds wrong, is.
        Raises DirectoryError, on all ranks: one of them cannot list an object store.
        """
        names, unlisted = list[str](), ""
        try:
            names = [path.name for path in checkpoint_dirs(self._directory)]
        except DirectoryError as error:
            unlisted = str(error)
        if problems := {rank: raw.decode() for rank, raw in enumerate(gather(unlisted.encode())) if raw}:
            raise DirectoryError(_of_ranks(problems))
        listed = gather(msgspec.msgpack.encode(names))
        for name in msgspec.msgpack.decode(listed[0], type=list[str]):
            path = self._directory / name
            found, problem = self._verified(path, len(listed))
            wrong = {rank: raw.decode() for rank, raw in enumerate(gather(problem.encode())) if raw}
            if not wrong:
                return found
            self.damaged[path] = _of_ranks(wrong)
            log.warning("damaged checkpoint, trying the one before it", path=str(path), error=_of_ranks(wrong))
        return None

    def _verified(self, path: Place, num_ranks: int) -> tuple[Checkpoint | None, str]:
        try:
            if isinstance(path, Path) and not path.is_dir():
                return None, "it is not there: all ranks need the same directory"
            return _verified(path, self._rank, num_ranks), ""
        except (OSError, MessageError, *DECODE_ERRORS, ValueError) as error:
            return None, str(error) or type(error).__name__

    def _prune(self) -> None:
        """Keep the newest versions that are whole, each once."""
        kept: set[int] = set()
        for path in self._in_place():
            name = parse_checkpoint_name(path.name)
            if name is None or name[0] in kept or path in self.damaged or len(kept) == self._keep:
                self._placing.remove(path)
            else:
                kept.add(name[0])

    def _in_place(self) -> Sequence[Place]:
        """None where the store is away just now: the next save prunes."""
        try:
            return checkpoint_dirs(self._directory)
        except DirectoryError as error:
            log.warning("old checkpoints stay for now", error=str(error))
            return ()


def newest_model(
    directory: Place, version: int | None, load: Callable[[Place, list[str]], T]
) -> tuple[Place, CheckpointMeta, T]:
    """(checkpoint, what it is, what ``load`` makes of its weights) of the newest that is whole, or of ``version``.

    load: given the directory and the names of the files that hold weights.

    For a process beside the trainer, which may remove any checkpoint meanwhile: then the next one is taken.
    Raises RunFilesError: there is none; it says which there are, and what is wrong with those that were tried.
    """

    def of(path: Place) -> int:
        return (parse_checkpoint_name(path.name) or (-1, 0))[0]

    tried: dict[Place, str] = {}
    while wanted := [p for p in checkpoint_dirs(directory) if p not in tried and version in (None, of(p))]:
        path = wanted[0]
        try:
            meta = CheckpointMeta.from_bytes((path / META_FILE).read_bytes())
            for name in model_files(meta):
                _check_mark(path / name, meta.files[name])
            return path, meta, load(path, model_files(meta))
        except (OSError, *DECODE_ERRORS, ValueError, TensorFileError) as error:
            tried[path] = str(error)
            log.warning("damaged checkpoint", path=str(path), error=str(error))
    others = sorted({of(path) for path in checkpoint_dirs(directory) if path not in tried})
    problem = f"holds no whole checkpoint{'' if version is None else f' of version {version}'}"
    advice = "a run saves one every trainer.checkpoint_every batches, and where `streamrl-orchestrator checkpoint` asks"
    if others:
        advice = f"there are those of {', '.join(map(str, others))} (trainer.keep_checkpoints says how many stay)"
    damaged = [f"{path.name}: {reason}" for path, reason in tried.items()]
    raise RunFilesError("; ".join([f"{directory} {problem}", *damaged, advice]))


def _put(file: Place) -> str:
    """Why it cannot be written; "" if it is."""
    try:
        if isinstance(file, Path):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with creating(file) as writer:
            writer.write(b"whether all ranks see this")
    except OSError as error:
        return str(error)
    return ""


def _of_ranks(problems: Mapping[int, str]) -> str:
    """Of rank 0, which speaks for all, just what it is."""
    return "; ".join(problem if rank == 0 else f"rank {rank}: {problem}" for rank, problem in problems.items())


def model_files(meta: CheckpointMeta) -> list[str]:
    """Names of the files that hold weights. Raises ValueError: there is none."""
    return _tensor_files(meta, MODEL_FILE)


def optimizer_files(meta: CheckpointMeta) -> list[str]:
    """Likewise of the optimizer's state."""
    return _tensor_files(meta, OPTIMIZER_FILE)


def shard_name(name: str, rank: int, num_ranks: int) -> str:
    """Of the file that a rank writes for ``name``, which is that of one rank alone."""
    return name if num_ranks == 1 else f"{Path(name).stem}-{rank + 1:05}-of-{num_ranks:05}{Path(name).suffix}"


def _tensor_files(meta: CheckpointMeta, name: str) -> list[str]:
    stem, suffix = Path(name).stem, Path(name).suffix
    names = sorted(file for file in meta.files if file == name or re.fullmatch(rf"{stem}-\d+-of-\d+\{suffix}", file))
    if not names:
        raise ValueError(f"{META_FILE} names no {name}")
    return names


def _verified(path: Place, rank: int, num_ranks: int) -> Checkpoint:
    """Check what is small, the sizes of all files, and the bytes of this rank's share. Raises ValueError."""
    meta = CheckpointMeta.from_bytes((path / META_FILE).read_bytes())
    if FILE_NAME not in meta.files or not (model_files(meta) and optimizer_files(meta)):
        raise ValueError(f"{META_FILE} does not name all files")
    for number, (name, mark) in enumerate(meta.files.items()):
        if not (path / name).is_file():
            raise ValueError(f"{name} is not there")
        if number % num_ranks == rank:
            _check_mark(path / name, mark)
        elif (path / name).stat().st_size != mark.nbytes:
            raise ValueError(f"{name} is not what was written")
    ledger = Ledger.from_bytes((path / FILE_NAME).read_bytes())
    steps = ()
    if STEPS_FILE in meta.files:  # there is none in checkpoints of earlier versions
        steps = msgspec.msgpack.decode((path / STEPS_FILE).read_bytes(), type=tuple[StepDone, ...])
    return Checkpoint(path=path, meta=meta, ledger=ledger, steps=steps)


def _check_mark(path: Place, mark: FileMark) -> None:
    if _mark(path) != mark:
        raise ValueError(f"{path.name} is not what was written")


def mark_model(model: Path) -> None:
    """Note beside the final model what its files of weights are, for the audit. Raises OSError."""
    marks = {file.name: _mark(file) for file in sorted(model.glob("*.safetensors"))}
    replace(model.parent / MODEL_FILES, msgspec.json.format(msgspec.json.encode(marks)))


def _mark(path: Place) -> FileMark:
    return FileMark(nbytes=path.stat().st_size, checksum=file_checksum(path))


def _write(path: Place, content: Iterable[memoryview | bytes]) -> FileMark:
    """Write a new file, durably. Returns what it has to be from now on. Raises OSError."""
    nbytes = 0
    with creating(path) as file:

        def writing() -> Iterator[memoryview | bytes]:
            nonlocal nbytes
            for part in content:
                file.write(part)
                nbytes += len(part)
                yield part

        checksum = checksum_of(writing())
    return FileMark(nbytes=nbytes, checksum=checksum)
