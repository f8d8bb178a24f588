"""How the ranks of a local trainer end together. No torch: the emulated trainer, which starts in a blink, asks too.

Owns: what rank 0 says on the broker of itself, and the wait for it. Invariant: no rank is gone while rank 0 may still
have to start over.
"""

from __future__ import annotations

import asyncio

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


async def leave_together(broker: Broker, entry_id: str, met: bytes, *, limit_s: float) -> None:
    """Stay, as a rank other than 0, until rank 0 has saved all there is up to ``entry_id``, or the run is over.

    Rank 0 may die while it saves. Its successor cannot start without the others, so they must be there to start over.

    met: from ``present_rank_0``, of when this rank joined.
    Raises: RanksError: another rank 0 was started, or it takes longer than ``limit_s``.
    """
    try:
        async with asyncio.timeout(limit_s):
            while await broker.get_meta(DONE) != entry_id.encode():
                if await broker.get_meta(keys.STATE) == keys.STATE_FINISHED:
                    return
                if await present_rank_0(broker) != met:
                    raise RanksError("rank 0 died before everything was saved, and was started again")
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise RanksError(f"rank 0 has not saved everything after {limit_s:.0f} s") from None
