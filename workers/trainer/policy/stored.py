"""Tensors in files, whole or in pieces: each rank writes what it holds, and any rank reads what it is to hold.

A file is plain safetensors; where it holds a piece of a tensor, its header says where that begins and how large the
whole is. So nobody needs all of a model, a checkpoint is read by other numbers of ranks than wrote it, and a model
directory of Hugging Face is the case that all pieces are whole. torch.distributed.checkpoint has the same idea, but its
index is a pickle, which runs what it holds when it is read, and it writes past our checksums.

Owns: which bytes of which file belong where. Never: when, or what the tensors mean. Invariant: what ``read`` returns
from is there in full; a piece that is missing raises TensorFileError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import IO

import msgspec
import torch
from torch import Tensor

from transport.errors import DECODE_ERRORS
from transport.process.storage import Place
from workers.errors import CheckpointError, TensorFileError
from workers.models import MODEL_FILE
from workers.trainer.checkpoint import (
    OPTIMIZER_FILE,
    Checkpoint,
    Gather,
    TensorFile,
    model_files,
    optimizer_files,
    shard_name,
)
from workers.trainer.tensor_files import TensorReader, file_content
from workers.weights.parts import Shard, holding_decoder, holding_of, plan_parts, shard_of

PIECES = "streamrl_pieces"
"""Key of a header's metadata: JSON, name -> PieceNote."""
NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
}
"""Of dtypes, in safetensors."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}

Index = tuple[int, ...]


class PieceNote(msgspec.Struct, frozen=True, kw_only=True):
    start: Index
    shape: Index


# --- out --------------------------------------------------------------------------------------------------------------


def own_shards(shards: Mapping[str, Shard], rank: int, gather: Gather) -> dict[str, Shard]:
    """Those that this rank is to write, of all that it holds: what several ranks hold alike, one of them writes.

    Every rank calls it.  Raises ValueError: together they do not hold all of a tensor.
    """
    dtypes = {name: str(shard.local.dtype).removeprefix("torch.") for name, shard in shards.items()}
    own = msgspec.msgpack.encode(holding_of(0, 0, shards, dtypes))
    plan = plan_parts([holding_decoder.decode(raw) for raw in gather(own)])
    names = (plan.tensors[piece.tensor].name for piece in plan.pieces[rank])
    return {name: shards[name] for name in names}


def tensor_file(shards: Mapping[str, Shard]) -> TensorFile:
    """A file of these pieces as they are now: they are copied to host memory at once, and written later."""
    copies = {name: shard.local.to("cpu", copy=True).contiguous() for name, shard in shards.items()}
    notes = {
        name: PieceNote(start=shard.start, shape=shard.shape) for name, shard in shards.items() if not shard.is_whole
    }
    metadata = {"format": "pt"} | ({PIECES: msgspec.json.encode(notes).decode()} if notes else {})
    tensors = {name: (NAMES[copy.dtype], tuple(copy.shape), partial(bytes_of, copy)) for name, copy in copies.items()}
    nbytes = sum(copy.nbytes for copy in copies.values())
    return TensorFile(nbytes, lambda: file_content(tensors, metadata))


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


# --- in ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A piece in a file. start, extent: in the whole."""

    reader: TensorReader
    start: Index
    extent: Index


class StoredTensors:
    """Tensors of several files as one set. Raises TensorFileError: a file is cut off, or none of tensors.

    files: (name for people, open file). They stay open: on a local disk they can be read to their end even if their
    names are removed meanwhile.
    """

    def __init__(self, files: Iterable[tuple[str, IO[bytes]]]) -> None:
        self._of_files: list[tuple[IO[bytes], dict[str, _Stored]]] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self.shapes: dict[str, Index] = {}
        """Name -> shape of the whole tensor."""
        with ExitStack() as opened:  # closed again where one of them is not what it should be
            for name, file in files:
                opened.callback(file.close)
                self._of_files.append((file, self._pieces_of(TensorReader(file, name=name), name)))
            opened.pop_all()

    @staticmethod
    def open(directory: Place, names: Iterable[str]) -> StoredTensors:
        """Raises OSError, TensorFileError."""
        return StoredTensors((str(directory / name), (directory / name).open("rb")) for name in names)

    def _pieces_of(self, reader: TensorReader, file: str) -> dict[str, _Stored]:
        try:
            notes = msgspec.json.decode(reader.metadata.get(PIECES, "{}"), type=dict[str, PieceNote])
        except DECODE_ERRORS as error:
            raise TensorFileError(file, f"it does not say which pieces it holds: {error}") from error
        found: dict[str, _Stored] = {}
        for name, place in reader.places.items():
            note = notes.get(name, PieceNote(start=(0,) * len(place.shape), shape=place.shape))
            if self.shapes.setdefault(name, note.shape) != note.shape or len(note.start) != len(place.shape):
                raise TensorFileError(file, f"its piece of {name!r} is of another tensor than that of the other files")
            self._dtypes[name] = DTYPES[place.dtype]
            found[name] = _Stored(reader=reader, start=note.start, extent=place.shape)
        return found

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[name]

    def whole(self, name: str) -> Tensor:
        """A tensor, put together in host memory. Raises TensorFileError: a piece is missing."""
        tensor = torch.empty(self.shapes[name], dtype=self.dtype(name))
        self.read({name: shard_of(tensor)})
        return tensor

    @torch.no_grad()
    def read(self, shards: Mapping[str, Shard]) -> None:
        """Fill ``local`` of each shard, file by file, cast to its dtype; their names and shapes are stored ones.

        Raises TensorFileError: a part of one is in no file.
        """
        missing = {name: shard.local.numel() for name, shard in shards.items()}
        for _, stored in self._of_files:
            for name in stored.keys() & shards.keys():
                missing[name] -= _copy_overlap(stored[name], shards[name], name)
        if gaps := sorted(name for name, elements in missing.items() if elements):
            raise TensorFileError("the set", f"{missing[gaps[0]]} elements of {gaps[0]} are in no file")

    def close(self) -> None:
        for file, _ in self._of_files:
            file.close()


def _copy_overlap(stored: _Stored, shard: Shard, name: str) -> int:
    """Copy what ``stored`` has of ``shard``. Returns: elements."""
    target, first = shard.local, list[int]()
    for axis, (begin, extent) in enumerate(zip(stored.start, stored.extent, strict=True)):
        low = max(begin, shard.start[axis])
        count = min(begin + extent, shard.start[axis] + shard.local.shape[axis]) - low
        if count <= 0:
            return 0
        target = target.narrow(axis, low - shard.start[axis], count)
        first.append(low - begin)
    _fill(target, tuple(first), stored.reader, name)
    return target.numel()


def _fill(target: Tensor, start: Index, reader: TensorReader, name: str) -> None:
    """Copy a region of a file's tensor, which begins at ``start``, a few megabytes at a time."""
    place = reader.places[name]
    if target.numel() == 0:
        return
    rows = target.view(1) if target.ndim == 0 else target
    for row, count, raw in reader.blocks(name, start[0] if start else 0, len(rows)):
        block = torch.frombuffer(raw, dtype=DTYPES[place.dtype]).view(count, *place.shape[1:])
        for axis in range(1, rows.ndim):
            block = block.narrow(axis, start[axis], rows.shape[axis])
        at = row - (start[0] if start else 0)
        rows[at : at + count].copy_(block)


# --- what a trainer goes on from --------------------------------------------------------------------------------------

RANDOM_STATE = "torch_random_state"


def state_files(
    masters: Mapping[str, Tensor], optimizer: Mapping[str, Mapping[str, Tensor]], *, rank: int, gather: Gather
) -> dict[str, TensorFile]:
    """This rank's part of a learner's state, as it is now; every rank calls it.

    Args:    masters: by name in the whole model, what this rank has of it.  optimizer: name -> kind -> state of all of
             that parameter (a scalar), or of what is held of it: a DTensor like the master, or a local part.
    """
    model = {name: shard_of(master) for name, master in masters.items()}
    kept = {
        f"{kind}.{name}": _beside(model[name], torch.as_tensor(value))
        for name, state in optimizer.items()
        for kind, value in state.items()
    }
    kept[RANDOM_STATE] = shard_of(torch.get_rng_state())
    num_ranks = len(gather(b""))
    files: dict[str, TensorFile] = {}
    for file, shards in ((MODEL_FILE, model), (OPTIMIZER_FILE, kept)):
        own = own_shards(shards, rank, gather)
        if own:
            files[shard_name(file, rank, num_ranks)] = tensor_file(own)
    return files


def _beside(shard: Shard, tensor: Tensor) -> Shard:
    """``tensor`` belongs to a shard of a parameter, to each of its elements (as a moment does) or to all of it."""
    local = shard_of(tensor).local
    return replace(shard, local=local) if tensor.ndim else shard_of(tensor)


def read_state(
    checkpoint: Checkpoint, masters: Mapping[str, Tensor], *, gather: Gather
) -> dict[str, dict[str, Tensor]]:
    """Make the masters what they were when they were saved, bit for bit, by whatever ranks; every rank calls it.

    Returns: the optimizer's state, name -> kind -> state of what is held here (or a scalar).
    Raises:  CheckpointError, on all ranks: tensors of another model, or a file cannot be read.
    """
    problem, state = "", dict[str, dict[str, Tensor]]()
    try:
        state = _read_state(checkpoint, masters)
    except (OSError, TensorFileError) as error:
        problem = str(error)
    if problems := [raw.decode() for raw in gather(problem.encode()) if raw]:
        raise CheckpointError(checkpoint.path, 0, problems[0])
    return state


def _read_state(checkpoint: Checkpoint, masters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    model = {name: shard_of(master) for name, master in masters.items()}
    with closing(StoredTensors.open(checkpoint.path, model_files(checkpoint.meta))) as stored:
        check_shapes(stored, model)
        stored.read(model)
    with closing(StoredTensors.open(checkpoint.path, optimizer_files(checkpoint.meta))) as stored:
        found: dict[str, dict[str, Tensor]] = {}
        shards: dict[str, Shard] = {}
        for key, shape in stored.shapes.items():
            kind, _, name = key.partition(".")
            if name in model:
                local = model[name].local
                like = torch.empty(local.shape if shape else (), dtype=stored.dtype(key), device=local.device)
                shards[key] = _beside(model[name], like)
                found.setdefault(name, {})[kind] = like
        stored.read(shards)
        if RANDOM_STATE in stored.shapes:
            torch.set_rng_state(stored.whole(RANDOM_STATE))
    return found


def check_shapes(stored: StoredTensors, shards: Mapping[str, Shard]) -> None:
    """Raises TensorFileError: one is of no stored tensor, or of one of another shape."""
    wrong = sorted(name for name, shard in shards.items() if stored.shapes.get(name) != shard.shape)
    if wrong:
        raise TensorFileError("the set", f"its tensors are not those of this model: {', '.join(wrong[:4])}")
