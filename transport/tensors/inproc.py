"""Segments within one process: who publishes and who reads are the same program, and nothing is opened by a name.

    store ── its own open file ──► a mapping of the reader's own: pages are the store's until one is written to

So a program that publishes and generates in turns (``streamrl-worker profile``, a client that reads back what it
published) reads what it wrote also where the file's name is gone or was never visible.
"""

from __future__ import annotations

from transport.errors import PeerUnavailableError
from transport.tensors.base import Address, Deadline
from transport.tensors.shm import ShmSegment, map_private, store_of_this_process


class InprocReader:
    def open(self, address: Address, nbytes: int, deadline: Deadline, reach: Deadline | None = None) -> ShmSegment:
        store = store_of_this_process(address.place)
        file = store.open_file(address.path) if store is not None else None
        if file is None:
            raise PeerUnavailableError(str(address), "no such segment in this process")
        with file:
            return map_private(file.fileno(), nbytes, address)
