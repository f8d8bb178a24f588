"""Which processes are the ranks of a local trainer now, and how they end together. Imports no torch, because the
emulated trainer, which must start fast, uses it too.

Rank 0 opens a meeting: a file of its own in a private directory of this machine, locked for as long as it lives, whose
id it reports over the broker. The other ranks join by that id; nothing listens on a port. A rank that was replaced
takes its seat again, which rank 0 sees, or opens another meeting, which the others see: then all start over together.

Owns: the meeting's files, what stands about it on the broker, and the wait for rank 0's last save. Never: collectives
(parallel.py). Invariants: no rank joins a meeting whose rank 0 is gone; a rank starts over as soon as another one was
replaced; no rank is gone while rank 0 may still have to start over.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import NoReturn

from transport.broker import keys
from transport.broker.base import Broker
from transport.process.files import is_locked
from workers.errors import RanksError

MEETING = "trainer-ranks"
"""Meta key: id of the meeting that was opened last."""
SEAT = "trainer-rank-{}"
"""Meta key of a rank but 0: ``<meeting id> <token of its process>``."""
DONE = "trainer-done"
"""Meta key: id of the last command that rank 0 has carried out, everything saved."""
POLL_S = 0.2
_ID = re.compile(r"[0-9a-f]{16}")


class Meeting:
    """The ranks that train together, as one of them sees it. rank, world_size: of this process."""

    def __init__(self, broker: Broker, rank: int, world_size: int, directory: Path) -> None:
        """directory: of this machine, the same for all ranks, of this user alone."""
        self._broker = broker
        self._rank = rank
        self._world_size = world_size
        self._directory = directory
        self._lock: int | None = None
        self._seats: dict[str, bytes] = {}
        self._id = ""

    @property
    def store(self) -> Path:
        """The file over which the ranks exchange their addresses."""
        return self._directory / f"{self._id}.store"

    async def open(self) -> None:
        """As rank 0: open a meeting that no other rank has joined yet."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._directory.iterdir():  # of rank 0s that are gone; the others of theirs start over
            left.unlink(missing_ok=True)
        self._id = secrets.token_hex(8)
        self._lock = os.open(self._lock_file(self._id), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        await self._broker.put_meta(MEETING, self._id.encode())

    async def join(self, *, limit_s: float) -> None:
        """As another rank: join the meeting of the present rank 0.

        One that an earlier process of this rank had joined is not joined again: rank 0 starts over when it sees us.
        Raises: RanksError: no rank 0 within ``limit_s``.
        """
        own, over = secrets.token_hex(8).encode(), b""
        seat = SEAT.format(self._rank)
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    meeting = await self._broker.get_meta(MEETING) or b""
                    if meeting != over and self._is_open(meeting):
                        before = await self._broker.get_meta(seat) or b""
                        await self._broker.put_meta(seat, meeting + b" " + own)
                        if not before.startswith(meeting):
                            self._id = meeting.decode()
                            return
                        over = meeting
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise RanksError(
                f"rank {self._rank} found no rank 0 within {limit_s:.0f} s; the ranks of one machine need the same "
                f"--run-dir (this one's is {self._directory.parent}), ranks of several machines torchrun"
            ) from None

    async def follow(self) -> NoReturn:
        """Raise RanksError once another rank was replaced by a new process.

        Until the next reduction nothing else shows it: the round that a rank was training when it died never ends.
        """
        while True:
            replaced = await (self._replaced_rank() if self._rank == 0 else self._replaced_rank_0())
            if replaced is not None:
                raise RanksError(f"rank {replaced} died, and was started again")
            await asyncio.sleep(POLL_S)

    async def _replaced_rank_0(self) -> int | None:
        """None also where the broker lost the key."""
        return 0 if (await self._broker.get_meta(MEETING) or self._id.encode()) != self._id.encode() else None

    async def _replaced_rank(self) -> int | None:
        for rank in range(1, self._world_size):
            seat = SEAT.format(rank)
            taken = await self._broker.get_meta(seat) or b""
            if taken.startswith(self._id.encode()) and self._seats.setdefault(seat, taken) != taken:
                return rank
        return None

    def close(self) -> None:
        """Let no rank join any more."""
        if self._lock is not None:
            self._lock_file(self._id).unlink(missing_ok=True)
            self.store.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _is_open(self, meeting: bytes) -> bool:
        """Whether its rank 0 lives. What the broker says becomes part of a path only in the form of an id."""
        name = meeting.decode("ascii", "replace")
        return _ID.fullmatch(name) is not None and is_locked(self._lock_file(name))

    def _lock_file(self, meeting: str) -> Path:
        return self._directory / f"{meeting}.open"


async def leave_after_rank_0(broker: Broker, entry_id: str, *, limit_s: float) -> None:
    """Stay, as a rank other than 0, until rank 0 has saved all there is up to ``entry_id``, or the run is over.

    Rank 0 may die while it saves; ``Meeting.follow`` then has this rank start over.

    Raises: RanksError: it takes longer than ``limit_s``.
    """
    try:
        async with asyncio.timeout(limit_s):
            while await broker.get_meta(DONE) != entry_id.encode():
                if await broker.get_meta(keys.STATE) == keys.STATE_FINISHED:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise RanksError(f"rank 0 has not saved everything after {limit_s:.0f} s") from None
