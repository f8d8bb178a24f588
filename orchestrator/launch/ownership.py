"""The name of a run on its broker: looked at before anything starts, then claimed, renewed, and given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import structlog

from orchestrator.config.identity import claim_of, note_start_id, read_identity
from orchestrator.config.run_directory import RunDir
from orchestrator.journal import is_new
from transport.broker import keys
from transport.broker.base import Broker, RunClaim
from transport.broker.ownership import may_take
from transport.errors import OtherRunError, RunExistsError, StreamError

log = structlog.get_logger(__name__)

RENEW_S = 3.0
"""Pause between two renewals of a claim: a tenth of its time to live."""
SETTLE_S = 3.0
"""Age of a server below which a free name may be that of a live run which has not come back to it: processes try again
at least once a second."""
LOOK_S = 0.2
LEAVE_S = 2.0


async def check_name(broker: Broker, rundir: RunDir) -> None:
    """Change nothing. Raises RunExistsError (OtherRunError): the next start would not get its name."""
    known = read_identity(rundir)
    run_id, former = (known.run_id, known.starts) if known is not None else ("", [])
    await _may_take(broker, rundir, claim_of(rundir, run_id, ""), former, exclusive=False)


async def take_name(broker: Broker, rundir: RunDir, *, exclusive: bool = False) -> RunClaim:
    """Claim the name for a new start of the run in ``rundir``, which is locked. Of starts at one instant one gets it.

    exclusive: the broker is the run's own, and was started by this process.
    Raises RunExistsError (OtherRunError): whose name it is, and what to do. Nothing was changed on the broker.
    """
    claim, former = note_start_id(rundir)
    after = await _may_take(broker, rundir, claim, former, exclusive=exclusive)
    await broker.hold_run(claim, after=after)
    return claim


async def _may_take(broker: Broker, rundir: RunDir, claim: RunClaim, former: list[str], *, exclusive: bool) -> str:
    """The start that ``claim`` follows, "" for none."""
    owner = await broker.owner()
    while owner is None and not exclusive and (await broker.info()).uptime_s < SETTLE_S:
        await asyncio.sleep(LOOK_S)
        owner = await broker.owner()
    if owner is None and await broker.get_meta(keys.STATE) is not None:
        where = f"the broker already holds a run named {broker.run!r} that has no id (of version 0.2)"
        if is_new(rundir.journal):
            raise RunExistsError(f"{where}, and it is not the one in {rundir.path}: choose another --name")
        if await broker.get_meta(keys.STATUS) is not None and not exclusive:
            raise RunExistsError(f"{where}, and it is live: stop it first, or choose another --name")
    return may_take(broker.run, claim, owner, former=former, exclusive=exclusive)


@asynccontextmanager
async def holding(broker: Broker, claim: RunClaim) -> AsyncGenerator[None]:
    """Keep ``claim`` live within the block.

    A broker that is away, or a name that is another run's by now, ends no block: whatever else is asked of that broker
    says so.
    """
    renewing = asyncio.create_task(_renew(broker, claim), name="renew the run's claim")
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        with suppress(StreamError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await broker.leave_run()


async def _renew(broker: Broker, claim: RunClaim) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            await broker.hold_run(claim)
        except OtherRunError as error:
            log.warning("the run's name is lost", error=str(error))
            return
        except StreamError as error:
            log.warning("the run's claim is not renewed", error=str(error))
