"""A client's numbered slots, which make its writes safe to send again (see ``once`` in scripts/prelude.lua).

Owns: which slot a request uses and its number in it. Invariant: one request at a time in a slot, numbers ascend.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

NUM_SLOTS = 32
"""Writes of one process that may be under way at once; each slot costs the server one small key."""


@dataclass(slots=True)
class Slot:
    """One place in the session. number: of its last request."""

    index: int
    number: int = 0


class Session:
    """All slots of one client; ``client`` is unique to this object, so a restarted process starts a new session."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self.client = uuid.uuid4().hex[:12]
        self._free = [Slot(index) for index in reversed(range(num_slots))]
        self._available = asyncio.Semaphore(num_slots)

    @asynccontextmanager
    async def request(self) -> AsyncGenerator[Slot]:
        """A slot with a number that was never used; it is taken until the block ends."""
        async with self._available:
            slot = self._free.pop()
            slot.number += 1
            try:
                yield slot
            finally:
                self._free.append(slot)
