"""Weights in: pull the version that a manifest names, from the nearest source that answers, and check every byte.

    manifest ─┬─ sources: one range of bytes ──────────► a tensor is a view of it
              └─ parts: one segment of each rank ──────► a tensor that a part holds whole is a view, any other is put
                                                         together when it is asked for, and gone when it was used

Owns: choice of source, verification, the views. Never: the engine (the worker hands it the views) or the decision
which version to load. Invariants: what is yielded has the manifest's checksums; nothing is yielded before the bytes of
all parts are there and verified; a worker never serves anything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transport.contracts.messages import Piece, WeightManifest, WeightPart
from transport.errors import ChecksumError, MessageError, PeerRejectedError, PeerUnavailableError, StreamError
from transport.tensors.base import Deadline, Segment, SegmentReader, choose_sources
from transport.tensors.manifest import check_manifest, piece_bytes, single_part, verify_piece
from transport.tensors.pieces import Box, box_of, whole
from transport.tensors.tcp import reader_for
from workers.errors import WeightsMismatchError

if TYPE_CHECKING:
    import torch

ROUNDS = 2  # how often each source is asked before giving up: once more after all have failed
UNREACHABLE = "none can be reached from this host: let the trainer listen off loopback (tensors.host, or --listen)"
SHOWN_NAMES = 4

PULL_FAILURES = (PeerUnavailableError, ChecksumError, MessageError, PeerRejectedError)


@dataclass(frozen=True, slots=True)
class OpenedPiece:
    """A piece, verified, at its offset in ``buffer``."""

    piece: Piece
    buffer: memoryview


class PulledTensors(Mapping[str, "torch.Tensor"]):
    """A version's tensors, or the boxes of them that were wanted.

    Each look at a tensor that came in several pieces puts it together anew, in memory of its own: a reader that takes
    one after another never holds two copies of the model. ``manifest`` says what they are.
    """

    def __init__(
        self, manifest: WeightManifest, opened: Sequence[OpenedPiece], wanted: Mapping[str, Box] | None = None
    ) -> None:
        self.manifest = manifest
        self.boxes: Mapping[str, Box] = wanted or {spec.name: whole(spec.shape) for spec in manifest.tensors}
        """Where each tensor here lies in the whole one."""
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._pieces: dict[str, list[OpenedPiece]] = {name: [] for name in self.boxes}
        for one in opened:
            name = manifest.tensors[one.piece.tensor].name
            if name in self._pieces:
                self._pieces[name].append(one)

    def __getitem__(self, name: str) -> torch.Tensor:
        import torch  # here, because an engine without a model has none

        box, pieces = self.boxes[name], self._pieces[name]
        dtype: torch.dtype = getattr(torch, self._specs[name].dtype)  # of ITEM_BYTES: the manifest was checked
        if len(pieces) == 1 and box_of(pieces[0].piece) == box:
            return _view(pieces[0], dtype)
        tensor = torch.empty(box.shape, dtype=dtype)
        for one in pieces:
            common = box_of(one.piece).common(box)
            if common.num_elements:
                tensor[common.slices(box.start)] = _view(one, dtype)[common.slices(one.piece.start)]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.boxes)

    def __len__(self) -> int:
        return len(self.boxes)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: box.shape for name, box in self.boxes.items()}

    def bytes_at(self) -> Iterator[tuple[int, memoryview]]:
        """(offset in the manifest's own range, bytes) of every tensor: together a version of one part again."""
        import torch

        for name, spec in self._specs.items():
            if spec.nbytes:
                yield spec.offset, self[name].reshape(-1).view(torch.uint8).numpy().data


class WeightPuller:
    """Pulls versions, one at a time, on the caller's thread (``asyncio.to_thread`` in a worker)."""

    def __init__(self, *, secret: bytes = b"", deadline_s: float = 120.0) -> None:
        self._secret = secret  # shared with the publisher
        self._deadline_s = deadline_s  # of one pull over all its sources and attempts
        self._readers: dict[str, SegmentReader] = {}

    @contextmanager
    def pull(
        self, manifest: WeightManifest, *, verify: bool = True, wanted: Mapping[str, Box] | None = None
    ) -> Iterator[PulledTensors]:
        """Give the tensors of ``manifest``, verified; they are valid inside the ``with`` and must be copied there.

        Shared memory is mapped, not copied: writing to a view changes no other process's bytes.  verify: False only for
        bytes that were verified on this host just now.  wanted: of each named tensor only this box; only the pieces
        that it lies in are pulled and verified. Others are not given. None: all tensors, whole.

        Raises: MessageError: the manifest contradicts itself.  PeerUnavailableError: no source answers (superseded by
                a newer version, its trainer died): wait for the next manifest.  ChecksumError: bytes came and were
                wrong.  PeerRejectedError: the shared secret differs.  ValueError: a wanted box lies outside of its
                tensor.
        """
        with self.opened(manifest, verify=verify, wanted=wanted) as pieces:
            yield PulledTensors(manifest, pieces, wanted)

    @contextmanager
    def opened(
        self, manifest: WeightManifest, *, verify: bool = True, wanted: Mapping[str, Box] | None = None
    ) -> Iterator[Sequence[OpenedPiece]]:
        """Give the bytes of ``manifest``, verified, as ``pull`` does; nothing here needs torch."""
        check_manifest(manifest)
        wish = _Wish(manifest, verify, _checked(manifest, wanted), Deadline(self._deadline_s))
        stack, pieces = self._open_any(wish)
        with stack:
            yield pieces

    def _open_any(self, wish: _Wish) -> tuple[ExitStack, Sequence[OpenedPiece]]:
        """From the manifest's own sources, or from those of its parts, of which all have to answer."""
        manifest = wish.manifest
        ways = [(single_part(manifest),)] if manifest.sources or not manifest.parts else []
        failures: list[StreamError] = []
        for parts in [*ways, manifest.parts] if manifest.parts else ways:
            try:
                return self._open_parts(wish, parts)
            except PULL_FAILURES as error:
                failures.append(error)
        raise _most_telling(failures)

    def _open_parts(self, wish: _Wish, parts: Sequence[WeightPart]) -> tuple[ExitStack, Sequence[OpenedPiece]]:
        opened: list[OpenedPiece] = []
        with ExitStack() as stack:
            for number, part in enumerate(parts, 1):
                pieces = [piece for piece in part.pieces if wish.has(piece)]
                if wish.wanted is None or pieces:
                    label = f"{wish.manifest.weights}" + (f", part {number} of {len(parts)}" if len(parts) > 1 else "")
                    segment = self._open_part(wish, part, pieces, label)
                    stack.callback(segment.close)
                    opened += [OpenedPiece(piece, segment.buffer) for piece in pieces]
            return stack.pop_all(), opened

    def _open_part(self, wish: _Wish, part: WeightPart, pieces: Sequence[Piece], label: str) -> Segment:
        failures: list[StreamError] = []
        ranges = None if wish.wanted is None else [(p.offset, piece_bytes(wish.manifest.tensors, p)) for p in pieces]
        for address in choose_sources(part.sources, part.host) * ROUNDS:
            if address.scheme not in self._readers:
                self._readers[address.scheme] = reader_for(address, self._secret)
            try:
                segment = self._readers[address.scheme].open(address, part.total_bytes, wish.deadline, ranges)
                try:
                    for piece in pieces if wish.verify else ():
                        verify_piece(wish.manifest, piece, segment.buffer)
                except ChecksumError:
                    segment.close()
                    raise
                return segment
            except PULL_FAILURES as error:
                failures.append(error)
        reasons = "; ".join(dict.fromkeys(str(failure) for failure in failures)) or UNREACHABLE
        silent = PeerUnavailableError(", ".join(part.sources) or "(no source)", f"{label}: {reasons}")
        raise _most_telling([*failures, silent])


@dataclass(frozen=True, slots=True)
class _Wish:
    """What one pull is to give. wanted: boxes by the index of their tensor, None for all."""

    manifest: WeightManifest
    verify: bool
    wanted: Mapping[int, Box] | None
    deadline: Deadline

    def has(self, piece: Piece) -> bool:
        if self.wanted is None:
            return True
        box = self.wanted.get(piece.tensor)
        return box is not None and bool(box.common(box_of(piece)).num_elements)


def _checked(manifest: WeightManifest, wanted: Mapping[str, Box] | None) -> Mapping[int, Box] | None:
    """``wanted`` by index. Raises ValueError: the version has no such tensor, or it is smaller."""
    if wanted is None:
        return None
    index = {spec.name: number for number, spec in enumerate(manifest.tensors)}
    for name, box in wanted.items():
        shape = manifest.tensors[index[name]].shape if name in index else None
        if shape is None or len(box.shape) != len(shape) or box.common(whole(shape)) != box:
            raise ValueError(f"{box} of tensor {name!r} is wanted, which has shape {shape}")
    return {index[name]: box for name, box in wanted.items()}


def _most_telling(failures: Sequence[StreamError]) -> StreamError:
    """A refusal or wrong bytes before silence; of silences the last, which sums up those before."""
    for kind in (PeerRejectedError, ChecksumError, MessageError):
        if said := next((failure for failure in failures if isinstance(failure, kind)), None):
            return said
    return failures[-1]


def _view(one: OpenedPiece, dtype: torch.dtype) -> torch.Tensor:
    """The piece's elements, without a copy."""
    import torch

    piece = one.piece
    nbytes = math.prod(piece.shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(piece.shape, dtype=dtype)
    return torch.frombuffer(one.buffer[piece.offset : piece.offset + nbytes], dtype=dtype).reshape(piece.shape)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Sequence[int]]:
    """Their shapes, for which no tensor is put together."""
    return tensors.shapes() if isinstance(tensors, PulledTensors) else {n: tuple(t.shape) for n, t in tensors.items()}


def check_tensors(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that ``tensors`` can replace all ``parameters``; a tied tensor may come under any or all of its names.

    Raises: WeightsMismatchError naming what is missing, unknown, or of another shape.
    """
    given = {id(parameters[name]) for name in tensors if name in parameters}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in given]
    unknown = [name for name in tensors if name not in parameters]
    misshaped = [
        f"{name} {tuple(shape)} instead of {tuple(parameters[name].shape)}"
        for name, shape in shapes_of(tensors).items()
        if name in parameters and tuple(shape) != tuple(parameters[name].shape)
    ]
    problems = {"missing": missing, "unknown": unknown, "of another shape": misshaped}
    if any(problems.values()):
        found = "; ".join(f"{kind}: {shown_names(names)}" for kind, names in problems.items() if names)
        raise WeightsMismatchError(f"the new weights do not fit the model: {found}")


def shown_names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
