"""How the ranks of a local trainer end together. No torch: the emulated trainer, which starts in a blink, asks too.

Owns: what rank 0 says on the broker of itself, and the wait for it. Invariants: no rank is gone while rank 0 may still
have to start over; a rank starts over as soon as there is another rank 0, which cannot start without it.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from transport.broker import keys
from transport.broker.base import Broker
from workers.errors import RanksError

META = "trainer-ranks"
"""Meta key: the port of rank 0's store."""
DONE = "trainer-done"
"""Meta key: id of the last command that rank 0 has carried out, everything saved."""
POLL_S = 0.2


async def present_rank_0(broker: Broker) -> bytes:
    """What tells the present rank 0 from one that was started after it."""
    return await broker.get_meta(META) or b""


async def heed_rank_0(broker: Broker, met: bytes) -> NoReturn:
    """Raise RanksError once another rank 0 was started than the one that was met, from ``present_rank_0``.

    Until then nothing comes that would tell: of what rank 0 was training when it died, no end goes onto the rounds log.
    """
    while await present_rank_0(broker) in (b"", met):  # noqa: ASYNC110 a key wakes nobody; after a loss there is none
        await asyncio.sleep(POLL_S)
    raise RanksError("rank 0 died, and was started again")


async def leave_together(broker: Broker, entry_id: str, *, limit_s: float) -> None:
    """Stay, as a rank other than 0, until rank 0 has saved all there is up to ``entry_id``, or the run is over.

    Rank 0 may die while it saves; ``heed_rank_0`` then has this rank start over.

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
