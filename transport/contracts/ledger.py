"""The trainer's ledger: which rows every version of the weights contains. Written by the trainer, read by the audit.

Owns: its in-memory form, its file inside a checkpoint. Never: decides what to train. Invariant: a row is in it at most
once for each pass over its batch, so whatever a replayed or damaged log says again is known and refused.

The file is MessagePack: batch -> pass -> slot -> samples as a bit set (8 samples are one byte), about 4 bytes a group.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from transport.contracts.messages import MessageDecoder, encode
from transport.contracts.settings import Settings
from transport.contracts.types import RowId, Struct, WeightIdentity, group_id, parse_row_id, row_id
from transport.errors import MessageError
from transport.process.storage import ObjectPath, Place, place_of, reaching

FILE_NAME = "ledger.msgpack"  # inside a checkpoint's directory
META_FILE = "meta.json"  # likewise, and written last
MODEL_FILES = "model.files.json"
"""Beside the final model, in the run's directory: a FileMark for each of its files of weights."""
_CHECKPOINT_NAME = re.compile(r"step-([0-9]{1,12})(?:\.([0-9]{1,6}))?")

_Passes = dict[int, dict[int, dict[int, int]]]  # batch -> pass -> slot -> bit set of samples


class Seal(Struct, frozen=True, kw_only=True):
    """Which weights a ledger was written beside. files: name in its directory -> checksum (tensors/manifest.py)."""

    weights: WeightIdentity
    files: dict[str, str] = msgspec.field(default_factory=dict[str, str])


EVALUATED = "evaluated.jsonl"
"""File of a run's directory: a line for each of its models that was evaluated by hand, with keys of metrics.jsonl."""


class FileMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file must be to be trusted."""

    nbytes: int
    checksum: str


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """meta.json. epoch, version, digest: identity of the published weights.  cursor: last rounds-log entry contained.

    fingerprint: setting -> value, of what a resumed run may not change.  format: of this file.  checksum: of all else
    in it, "" in checkpoints of earlier versions.
    """

    version: int
    epoch: int
    digest: str
    cursor: str
    source_position: str
    fingerprint: dict[str, str]
    files: dict[str, FileMark]
    format: int = 1
    checksum: str = ""

    def to_bytes(self) -> bytes:
        """The content of its file, with its checksum."""
        sealed = msgspec.structs.replace(self, checksum=_checksum(self))
        return msgspec.json.format(msgspec.json.encode(sealed))

    @staticmethod
    def from_bytes(raw: bytes) -> CheckpointMeta:
        """Raises ValueError (msgspec.MsgspecError) for anything that ``to_bytes`` did not write."""
        meta = msgspec.json.decode(raw, type=CheckpointMeta)
        if meta.checksum and meta.checksum != _checksum(meta):
            raise ValueError(f"{META_FILE} is not what was written")
        return meta


def _checksum(meta: CheckpointMeta) -> str:
    content = msgspec.json.encode(msgspec.structs.replace(meta, checksum=""), order="sorted")
    return f"crc32:{zlib.crc32(content):08x}"


class Ledger(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was trained; its content is that of its file."""

    version: int  # batches in the lineage of these weights
    cursor: str  # last entry of the rounds log that they contain
    passes: _Passes = msgspec.field(default_factory=dict[int, dict[int, dict[int, int]]])
    seal: Seal | None = None  # of the checkpoint that it was read from, if any

    def add(self, pass_index: int, rows: Iterable[RowId]) -> tuple[RowId, ...]:
        """Enter rows that are about to be trained in a pass over their batch.

        Returns: those that were known already: they are refused, and must not be trained.
        """
        refused: list[RowId] = []
        for row in rows:
            group, sample = parse_row_id(row)
            batch, slot = map(int, group.split("/"))
            samples = self.passes.setdefault(batch, {}).setdefault(pass_index, {})
            if samples.get(slot, 0) >> sample & 1:
                refused.append(row)
            samples[slot] = samples.get(slot, 0) | 1 << sample
        return tuple(refused)

    def rows(self) -> dict[tuple[int, int], list[RowId]]:
        """(batch, pass) -> its rows, in order of slot and sample."""
        return {
            (batch, pass_index): [
                row_id(group_id(batch, slot), sample)
                for slot, samples in sorted(slots.items())
                for sample in range(samples.bit_length())
                if samples >> sample & 1
            ]
            for batch, passes in self.passes.items()
            for pass_index, slots in passes.items()
        }

    def to_bytes(self, seal: Seal | None = None) -> bytes:
        """The content of its file, beside the weights of ``seal``."""
        return encode(msgspec.structs.replace(self, seal=seal))

    @staticmethod
    def from_bytes(raw: bytes) -> Ledger:
        """Raises MessageError for anything that ``to_bytes`` did not write."""
        return _decoder.decode(raw)


_decoder = MessageDecoder(Ledger)


def checkpoint_name(version: int, number: int = 0) -> str:
    """Of a checkpoint's directory; what is being written has another one. number: of those of a version, from 0."""
    return f"step-{version}.{number}" if number else f"step-{version}"


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """(version, number) of a checkpoint's directory; None for a name of anything else."""
    match = _CHECKPOINT_NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def checkpoints_place(settings: Settings, run_dir: Path) -> Place:
    """Where the trainer of the run in ``run_dir`` keeps its checkpoints. Raises DirectoryError: no such store."""
    if not settings.trainer.checkpoint_dir:
        return run_dir / "checkpoints"
    return place_of(settings.trainer.checkpoint_dir) / settings.run.name


def critic_checkpoints_place(settings: Settings, run_dir: Path) -> Place:
    """Likewise the critic. No run has a name with a tilde."""
    if not settings.trainer.checkpoint_dir:
        return run_dir / "critic" / "checkpoints"
    return place_of(settings.trainer.checkpoint_dir) / f"{settings.run.name}~critic"


def checkpoint_dirs(checkpoints: Place) -> list[Place]:
    """The directory of every checkpoint in place, newest first; empty where there is none.

    A version that is saved again (at the end of a run, or after the trainer went back) gets a directory of its own,
    because no directory can be replaced in one step. An object store cannot rename one either: there, a directory is in
    place once META_FILE is in it.  Raises DirectoryError: an object store does not answer, or refuses.
    """
    if isinstance(checkpoints, ObjectPath):
        with reaching(checkpoints):
            places: list[Place] = [file.parent for file in checkpoints.files() if file.name == META_FILE]
    else:
        places = [path for path in checkpoints.glob("step-*") if path.is_dir()]
    found = {key: place for place in places if (key := parse_checkpoint_name(place.name)) is not None}
    return [found[key] for key in sorted(found, reverse=True)]


def newest_checkpoint(checkpoints: Place) -> tuple[Place, Ledger] | None:
    """(directory, ledger) of the newest checkpoint whose ledger can be read; None where there is none.

    Raises DirectoryError: see ``checkpoint_dirs``.
    """
    for path in checkpoint_dirs(checkpoints):
        try:
            return path, Ledger.from_bytes((path / FILE_NAME).read_bytes())
        except (OSError, MessageError):
            continue  # a damaged checkpoint: the trainer falls back to the one before it, and says so
    return None
