"""What a client sees of a run: a user's task, its options and its end; its workers, and what a task waits for.

Never: starts or stops anything (the run's own supervisor does). Invariant: all consumers of a task use one lease, or
the one with the shorter would take rows from the one with the longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from transport.broker import keys
from transport.broker.base import Broker
from transport.broker.events import read_statuses
from transport.contracts.messages import STARTING, MessageDecoder, WorkerStatus, encode
from transport.contracts.types import Column, Struct, TaskSpec, WorkerKind
from workers.errors import ClientError, ClientTimeoutError

POLL_S = 0.2


class TaskOptions(Struct, frozen=True, kw_only=True):
    lease_s: float = 30.0  # a consumer that is silent for so long loses its rows to another one
    max_deliveries: int = 3  # then a row goes to the dead letters: it may be what kills its consumers


_options_decoder = MessageDecoder(TaskOptions)
ENDED = b"ended"


def _options_key(task: str) -> str:
    return f"task:{task}"


def _end_key(task: str) -> str:
    return f"task-end:{task}"


async def declare(broker: Broker, task: str, columns: Collection[Column], options: TaskOptions) -> None:
    """Add the task. Idempotent: every program of a run may declare what it uses, also after a stream has ended."""
    if options.lease_s <= 0 or options.max_deliveries < 1:
        raise ValueError(f"task {task}: lease_s={options.lease_s}, max_deliveries={options.max_deliveries}")
    await broker.put_meta(_options_key(task), encode(options))
    await broker.add_user_task(TaskSpec(name=task, unit="sample", reads=frozenset(columns)))


async def find(broker: Broker, task: str) -> TaskOptions:
    """Raises ClientError for a task that was not declared, and for those of the run."""
    raw = await broker.get_meta(_options_key(task))
    if not raw:
        raise ClientError(
            f"run {broker.run!r} has no user's task {task!r}: declare it first (a run's own are for its workers)"
        )
    return _options_decoder.decode(raw)


async def remove(broker: Broker, task: str) -> None:
    """Forget the task; declared again, it begins anew."""
    await broker.put_meta(_options_key(task), b"")
    await broker.put_meta(_end_key(task), b"")
    await broker.remove_user_task(task)


async def end(broker: Broker, task: str) -> None:
    await find(broker, task)
    await broker.put_meta(_end_key(task), ENDED)


async def has_ended(broker: Broker, task: str) -> bool:
    """Whether no more rows will come; what came may still be waiting, or in work."""
    return await broker.get_meta(_end_key(task)) == ENDED


async def describe_wait(broker: Broker, task: str) -> str:
    queue = keys.tasks(task)
    if pending := await broker.pending(queue, count=1):
        return f"{await broker.length(queue)} rows are left, the oldest held by {pending[0].consumer}"
    ended = await has_ended(broker, task)
    return "its stream has ended" if ended else "no more rows were put, and its stream was not ended"


async def started_workers(broker: Broker) -> list[WorkerStatus]:
    """Every worker of the run that has started and whose lease is alive."""
    found = read_statuses(await broker.leases())
    return [status for status in found.values() if status.doing != STARTING]


async def wait_ready(broker: Broker, wanted: Mapping[WorkerKind, int], timeout_s: float) -> list[WorkerStatus]:
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while missing := await _missing(broker, wanted):
        if asyncio.get_running_loop().time() > deadline_s:
            raise ClientTimeoutError(f"run {broker.run!r} is not ready after {timeout_s:.0f} s: {missing}")
        await asyncio.sleep(POLL_S)  # a lease wakes no waiter
    return await started_workers(broker)


async def _missing(broker: Broker, wanted: Mapping[WorkerKind, int]) -> str:
    """What is not there yet, in words; "" when everything is."""
    state = await broker.get_meta(keys.STATE)
    if state != keys.STATE_RUNNING:
        return "its orchestrator has finished" if state == keys.STATE_FINISHED else "it has no orchestrator"
    kinds = [status.kind for status in await started_workers(broker)]
    short = {kind: num for kind, num in wanted.items() if kinds.count(kind) < num}
    return ", ".join(f"{kinds.count(kind)} of {num} {kind.value} workers" for kind, num in short.items())
