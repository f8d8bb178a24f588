"""Whose name it is: may a start of a run take the name that it has on its broker, and what is said where it may not.

Pure: the broker keeps the owner (``Broker.owner``) and changes it in one step (``Broker.hold_run``); ``may_take`` says
which start that step follows.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from transport.broker.base import RunClaim, RunOwner
from transport.errors import OtherRunError

_UNITS_S = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def may_take(
    run: str,
    claim: RunClaim,
    owner: RunOwner | None,
    *,
    former: Collection[str],
    exclusive: bool = False,
) -> str:
    """The start that ``claim`` follows, "" where the name is free.

    former: the earlier starts that the run's own directory knows.  exclusive: no other process can be on this broker,
    because this one has just started it on the run's directory.
    Raises OtherRunError: the name is another run's; or this directory is a copy, and the run is live in the other one,
    or went on there.
    """
    if owner is None or owner.claim.start == claim.start:
        return ""
    if owner.claim.run_id != claim.run_id:
        raise other_run(run, owner)
    if owner.claim.start not in former:
        raise OtherRunError(
            f"run {run!r} has gone on since {claim.directory} was copied from it: its newest start is that of "
            f"{describe(owner)}. Go on there; or give this copy another name: move it to a directory of that name, and "
            "resume it with that --name",
            owner_id=claim.run_id,
        )
    if owner.is_live and not exclusive and owner.claim.place != claim.place:
        raise OtherRunError(
            f"run {run!r} is live: {describe(owner)}. {claim.directory} is a copy of it, or the same directory seen "
            "from another host. Stop it there first (one that was killed counts as live for 30 s); or give this copy "
            "another name: move it to a directory of that name, and resume it with that --name",
            owner_id=claim.run_id,
        )
    return owner.claim.start


def other_run(run: str, owner: RunOwner) -> OtherRunError:
    """The error of a start whose name is another run's."""
    stop = "stop that run first, or " if owner.is_live else ""
    return OtherRunError(
        f"the broker already holds another run named {run!r}: {describe(owner)}. Choose another --name, or {stop}"
        "free that name (docs/broker.md says how), if nothing of that run is needed any more",
        owner_id=owner.claim.run_id,
    )


def of_another_run(run: str, owner: RunOwner | None, run_id: str) -> OtherRunError:
    """The error of a process of run ``run_id`` whose name has become another run's, or another start's."""
    if owner is None:
        return OtherRunError(f"another run named {run!r} took its name on the broker, and has gone again: start again")
    if owner.claim.run_id == run_id:
        return OtherRunError(
            f"another start of run {run!r} has taken over: that of {describe(owner)}. Go on there, or stop that one "
            "first and resume this one",
            owner_id=run_id,
        )
    return OtherRunError(
        f"the broker holds another run named {run!r} by now: {describe(owner)}. This process is of an earlier run (its "
        f"id: {run_id}) of that name, which the broker lost: it ends and changes nothing. Join the new run by starting "
        "this process again, without --run-id, or resume the earlier run on another broker, or once that name is free "
        "again (docs/broker.md)",
        owner_id=owner.claim.run_id,
    )


def describe(owner: RunOwner) -> str:
    """Directory, host, age and whether it is live: ``/data/runs/x on host a, on this broker for 3 min, live``."""
    since = "" if owner.age_s is None else f", on this broker for {_age(owner.age_s)}"
    state = "live" if owner.is_live else "not live"
    return f"{owner.claim.directory} on host {owner.claim.host}{since}, {state}"


def _age(seconds: float) -> str:
    size, unit = next((one for one in _UNITS_S if seconds >= one[0]), _UNITS_S[-1])
    return f"{max(0, int(seconds // size))} {unit}"


def not_here(run: str, directory: Path, owner: RunOwner) -> OtherRunError:
    """The error of a command about the run in ``directory``, whose name is another run's."""
    return OtherRunError(
        f"the run in {directory} is not on this broker: the name {run!r} is that of another run there, "
        f"{describe(owner)}. Name the broker that it has, with --broker",
        owner_id=owner.claim.run_id,
    )
