"""What a tensor backend is: somewhere to write a segment once, and somewhere to read it from.

A **segment** is one immutable range of bytes with a name, e.g. one version of the weights. Its owner creates it, writes
it, seals it and later drops it; readers open it by an address. A reader that holds a dropped segment keeps its bytes.

One contract (``tests/contract/test_tensors.py``) over shared memory and TCP:

- ``open`` gives exactly the sealed bytes, or raises;
- a segment that does not exist, was dropped, or whose owner went away: PeerUnavailableError (try another source);
- one of another size than the caller expects: ChecksumError, before anything is allocated on the peer's word;
- a peer that talks nonsense: MessageError; one that does not know the secret: PeerRejectedError;
- nothing waits longer than the deadline.

What the bytes mean is the manifest's business (``manifest.py``).
"""

from __future__ import annotations

import time
from typing import Protocol

from transport.tensors.address import Address


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds
        self.seconds = seconds

    def remaining_s(self) -> float:
        """Seconds left, >= 0."""
        return max(0.0, self._end_s - time.monotonic())


class Segment(Protocol):
    """An opened segment. Views of ``buffer`` are valid until ``close``."""

    @property
    def buffer(self) -> memoryview:
        """[nbytes] uint8; writing to it, where it can be written to, changes it for no other reader."""
        ...

    def close(self) -> None: ...


class SegmentReader(Protocol):
    """The reading side of one backend."""

    def open(self, address: Address, nbytes: int, deadline: Deadline) -> Segment:
        """Get the segment at ``address``, which must have ``nbytes`` bytes."""
        ...


class SegmentWriter(Protocol):
    """One segment that is being written by its owner."""

    def write(self, offset: int, data: memoryview) -> None: ...

    def seal(self) -> tuple[str, ...]:
        """Make it readable. Returns its addresses, best first."""
        ...

    def abort(self) -> None:
        """Forget it, written or not."""
        ...


class SegmentStore(Protocol):
    """The owner's side of one backend."""

    def create(self, name: str, nbytes: int) -> SegmentWriter:
        """Start a segment. Raises SegmentSpaceError where it cannot fit, ValueError for a name in use."""
        ...

    def drop(self, name: str) -> None:
        """Stop serving ``name`` and free it after its last reader. Dropping what is not there is no error."""
        ...

    def close(self) -> None:
        """Drop everything."""
        ...
