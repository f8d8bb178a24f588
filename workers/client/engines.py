"""What a client sees of a run's processes and queues: who can take work, and what a task waits for.

Owns: nothing. Never: starts or stops anything (the run's own supervisor does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from transport.broker import keys
from transport.broker.base import Broker
from transport.contracts.messages import STARTING, WorkerStatus, worker_status_decoder
from transport.contracts.types import WorkerKind
from workers.client import tasks
from workers.errors import ClientTimeoutError

POLL_S = 0.2


async def workers(broker: Broker) -> list[WorkerStatus]:
    """Every worker of the run that has started and whose lease is alive."""
    found = [worker_status_decoder.decode(raw) for raw in (await broker.leases()).values()]
    return [status for status in found if status.doing != STARTING]


async def has_trainer(broker: Broker) -> bool:
    return any(status.kind is WorkerKind.TRAIN for status in await workers(broker))


async def wait_ready(broker: Broker, wanted: Mapping[WorkerKind, int], timeout_s: float) -> list[WorkerStatus]:
    """As Client.init_engines."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while missing := await _missing(broker, wanted):
        if asyncio.get_running_loop().time() > deadline_s:
            raise ClientTimeoutError(f"run {broker.run!r} is not ready after {timeout_s:.0f} s: {missing}")
        await asyncio.sleep(POLL_S)  # a lease wakes no waiter
    return await workers(broker)


async def _missing(broker: Broker, wanted: Mapping[WorkerKind, int]) -> str:
    """What is not there yet, in words; "" when everything is."""
    state = await broker.get_meta(keys.STATE)
    if state != keys.STATE_RUNNING:
        return "its orchestrator has finished" if state == keys.STATE_FINISHED else "it has no orchestrator"
    kinds = [status.kind for status in await workers(broker)]
    short = {kind: num for kind, num in wanted.items() if kinds.count(kind) < num}
    return ", ".join(f"{kinds.count(kind)} of {num} {kind.value} workers" for kind, num in short.items())


async def describe_wait(broker: Broker, task: str) -> str:
    """What a task waits for, to say to a consumer that got nothing of it."""
    queue = keys.tasks(task)
    pending = await broker.pending(queue, count=1)
    if pending:
        oldest = pending[0]
        return f"{await broker.length(queue)} rows are left, the oldest held by {oldest.consumer}"
    ended = await tasks.has_ended(broker, task)
    return "its stream has ended" if ended else "no more rows were put, and its stream was not ended"
