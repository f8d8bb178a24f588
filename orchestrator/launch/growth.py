"""Workers that the run asks for while it goes on, and those that it loses: what ``run`` and ``serve`` both see to.

SpawnWorkers (total) ──► add_workers ──► start, under a number that none had ──► WorkerStarted
a process that ended ──► report_loss ──► WorkerLost, at once
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
import structlog

from orchestrator.launch.launchers.base import ProcessSpec
from orchestrator.loop.intake import append_event
from transport.broker import keys
from transport.broker.base import Broker
from transport.broker.events import read_statuses
from transport.contracts.messages import SpawnWorkers, WorkerLost, WorkerStarted, spawn_decoder
from transport.contracts.types import WorkerKind
from transport.errors import TransientError

log = structlog.get_logger(__name__)

POLL_S = 0.5
REPORT_S = 1.0
STOP_GRACE_S = 15.0
"""Between SIGTERM and SIGKILL of workers that are to leave."""
PENDING_TTL_S = 30.0


async def add_workers(broker: Broker, start: Callable[[int], ProcessSpec], *, first: int) -> None:
    """Start generation workers as the run asks for them, forever, each under a number that none had before.

    What it asked for before it was resumed is not started again: it begins with ``generation.workers``, and counts anew
    what it asks for. first: the lowest number for one that is added; those who joined by hand keep theirs.
    """
    started, number = 0, first
    while True:
        asked = await _spawn_asked(broker)
        while asked is not None and started < asked.total:
            number = await _free_number(broker, number)
            spec = start(number)
            started, number = started + 1, number + 1
            log.info("worker added", worker=spec.name, reason=asked.reason)
            await append_event(broker, WorkerStarted(name=spec.name, reason=asked.reason), worker=spec.name)
        await asyncio.sleep(POLL_S)


async def _spawn_asked(broker: Broker) -> SpawnWorkers | None:
    """How many more workers the run wants; None while it never wanted any, or its broker is away."""
    with suppress(TransientError):
        raw = await broker.get_meta(keys.SPAWN)
        return None if raw is None else spawn_decoder.decode(raw)
    return None


async def _free_number(broker: Broker, number: int) -> int:
    """``number``, or the next that no live worker has."""
    with suppress(TransientError):
        taken = {worker_id.rpartition(".")[0] for worker_id in await broker.leases()}
        while f"{WorkerKind.GENERATE.value}-{number}" in taken:
            number += 1
    return number


async def tell_pending(broker: Broker, pending: Mapping[str, str]) -> None:
    """Tell the orchestrator's watchdog what the engine has not started, and why; for as long as it is told again."""
    with suppress(TransientError):
        await broker.put_meta(keys.PENDING, msgspec.json.encode(pending), ttl_s=PENDING_TTL_S)


async def report_loss(broker: Broker, spec: ProcessSpec, pid: int | None) -> None:
    """Report at once that a worker is gone, instead of waiting for its lease to run out.

    pid: of a child on this machine; None for a process elsewhere, which is known by its name.
    """
    assert spec.kind is not None or pid is not None
    names = {f"{spec.kind.value}-{rank}" for rank in range(spec.ranks)} if spec.kind and spec.ranks > 1 else {spec.name}
    with suppress(TransientError, TimeoutError):
        async with asyncio.timeout(REPORT_S):
            for worker_id, status in read_statuses(await broker.leases()).items():
                is_child = status.pid == pid and status.host == socket.gethostname()
                if is_child if pid is not None else worker_id.rpartition(".")[0] in names:
                    lost = WorkerLost(worker_id=worker_id, reason="its process ended")
                    await append_event(broker, lost, worker=worker_id)
                    await broker.end_lease(worker_id)
