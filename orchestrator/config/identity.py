"""Which run is in a directory, and its starts: ``journal/run.json``, made with the journal and kept for good.

A directory of version 0.2 has none, and gets one at its first start with this version.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import msgspec

from orchestrator.config.run_directory import RunDir
from orchestrator.errors import ConfigError
from transport.broker.base import RunClaim
from transport.process.files import replace, writing
from transport.tensors.base import host_id

MAX_STARTS = 1000
"""Starts that are remembered, the newest: a copy of the directory is known by the starts that it lacks."""
ID_BYTES = 8


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
    except (msgspec.MsgspecError, OSError) as error:
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
