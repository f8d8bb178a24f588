"""Which run is in a directory, and the claim of its name on the broker: before a start, while it lives, at its end.

``journal/run.json`` is made with the journal and kept for good: the run's id, and an id for each of its starts. A
directory of version 0.2 has none, and gets one at its first start with this version. ``transport/broker`` has the rest.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog

from orchestrator.config.run_directory import RunDir
from orchestrator.errors import ConfigError
from orchestrator.journal import is_new
from transport.broker import keys
from transport.broker.base import Broker, RunClaim
from transport.broker.ownership import may_take
from transport.errors import DECODE_ERRORS, OtherRunError, RunExistsError, StreamError
from transport.process.files import replace, writing
from transport.process.tasks import beside
from transport.tensors.base import host_id

log = structlog.get_logger(__name__)

MAX_STARTS = 1000
"""Starts that are remembered, the newest: a copy of the directory is known by the starts that it lacks."""
ID_BYTES = 8
RENEW_S = 3.0
"""Pause between two renewals of a claim: a tenth of its time to live."""
SETTLE_S = 3.0
"""Age of a server below which a free name may be that of a live run which has not come back to it: processes try again
at least once a second."""
LOOK_S = 0.2
LEAVE_S = 2.0


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """run_id: of the run, in every one of its starts.  starts: an id for each, the newest last."""

    run_id: str
    starts: list[str] = []


def read_identity(rundir: RunDir) -> RunIdentity | None:
    """None: the directory holds no run, or one of version 0.2. Raises ConfigError: the file is damaged."""
    try:
        return msgspec.json.decode(rundir.identity.read_bytes(), type=RunIdentity)
    except FileNotFoundError:
        return None
    except (*DECODE_ERRORS, OSError) as error:
        raise ConfigError(
            f"{rundir.identity} cannot be read ({error}): put a copy of it back, or remove it and the run gets a new id"
        ) from error


def note_start_id(rundir: RunDir) -> tuple[RunClaim, list[str]]:
    """Write down a new start of the run, whose directory is locked. Returns its claim, and the starts before it.

    Raises: DirectoryError; ConfigError: see ``read_identity``.
    """
    known = read_identity(rundir) or RunIdentity(run_id=secrets.token_hex(ID_BYTES))
    starts = [*known.starts, secrets.token_hex(ID_BYTES)][-MAX_STARTS:]
    with writing(rundir.journal):
        rundir.journal.mkdir(parents=True, exist_ok=True)
        replace(rundir.identity, msgspec.json.encode(msgspec.structs.replace(known, starts=starts)))
    return claim_of(rundir, known.run_id, starts[-1]), known.starts


def current_claim(rundir: RunDir) -> RunClaim | None:
    """The claim of the newest start; None: see ``read_identity``."""
    known = read_identity(rundir)
    return claim_of(rundir, known.run_id, known.starts[-1]) if known is not None and known.starts else None


def claim_of(rundir: RunDir, run_id: str, start: str) -> RunClaim:
    directory = Path(rundir.path).resolve()
    return RunClaim(
        run_id=run_id,
        start=start,
        directory=str(directory),
        host=socket.gethostname(),
        place=f"{host_id()} {directory}",
    )


# -- the name

Writing = Callable[[Callable[[], Awaitable[object]]], Awaitable[None]]


async def check_name(broker: Broker, rundir: RunDir) -> None:
    """Change nothing. Raises RunExistsError (OtherRunError): the next start would not get its name."""
    known = read_identity(rundir)
    run_id, former = (known.run_id, known.starts) if known is not None else ("", [])
    await _may_take(broker, rundir, claim_of(rundir, run_id, ""), former, exclusive=False)


async def take_name(
    broker: Broker, rundir: RunDir, *, exclusive: bool = False, written: Writing | None = None
) -> RunClaim:
    """Claim the name for a new start of the run in ``rundir``, which is locked. Of starts at one instant one gets it.

    exclusive: the broker is the run's own, and was started by this process.  written: calls what it is given until the
    broker takes it, as a run that goes on waits for room there.
    Raises RunExistsError (OtherRunError): whose name it is, and what to do. Nothing was changed on the broker.
    """
    claim, former = note_start_id(rundir)
    after = await _may_take(broker, rundir, claim, former, exclusive=exclusive)
    hold = partial(broker.hold_run, claim, after=after)
    await (written(hold) if written is not None else hold())
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
    try:
        async with beside(_renew(broker, claim), name="renew the run's claim"):
            yield
    finally:
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
