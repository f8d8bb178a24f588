"""A version in one memory, laid out as its manifest says, and where the pieces of its tensors lie in it. No I/O.

Bytes of a piece travel in a row. Rows of a tensor lie so in the whole, too, and need no copy; columns do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transport.contracts.messages import Piece, TensorSpec
from transport.tensors.manifest import ITEM_BYTES, piece_bytes
from transport.tensors.pieces import box_of, runs
from transport.tensors.receive import Memory


class Assembled:
    """tensors: as in a manifest that was checked.  memory: of all of them."""

    def __init__(self, tensors: Sequence[TensorSpec], memory: Memory) -> None:
        self._tensors = tensors
        self._memory = memory

    def tensor(self, index: int) -> memoryview:
        """All of its bytes."""
        spec = self._tensors[index]
        return self._memory.buffer[spec.offset : spec.offset + spec.nbytes]

    def is_row(self, piece: Piece) -> bool:
        """Whether its bytes lie in a row here."""
        return self._first(piece) is not None

    def row(self, piece: Piece) -> memoryview:
        """Its bytes in a row: those here, or a copy."""
        if (first := self._first(piece)) is not None:
            return self.tensor(piece.tensor)[first : first + piece_bytes(self._tensors, piece)]
        return np.ascontiguousarray(self._elements(piece)).reshape(-1).data

    def put(self, piece: Piece, row: memoryview) -> None:
        """Make ``row``, bytes in a row, those of the piece."""
        place = self._elements(piece)
        place[...] = np.frombuffer(row, np.uint8).reshape(place.shape)

    def _first(self, piece: Piece) -> int | None:
        """The byte of its tensor at which its own begin, if they lie in a row there."""
        spec, box = self._tensors[piece.tensor], box_of(piece)
        elements, starts = runs(box, spec.shape)
        return next(starts, 0) * ITEM_BYTES[spec.dtype] if elements == box.num_elements else None

    def _elements(self, piece: Piece) -> NDArray[np.uint8]:
        """[shape of the piece, bytes of an element], a view."""
        spec, box = self._tensors[piece.tensor], box_of(piece)
        elements = np.frombuffer(self.tensor(piece.tensor), np.uint8).reshape(*spec.shape, ITEM_BYTES[spec.dtype])
        return elements[box.slices((0,) * len(box.start))]
