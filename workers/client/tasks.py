"""A user's task as every client of the run sees it, and its end.

Owns: what is stored of a task beside its columns, and the marks of ended streams. Invariant: all consumers of a task
use one lease, or the one with the shorter would take rows from the one with the longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from transport.broker.base import Broker
from transport.contracts.messages import MessageDecoder, encode
from transport.contracts.types import Column, Struct, TaskSpec
from workers.errors import ClientError


class TaskOptions(Struct, frozen=True, kw_only=True):
    """How a task is consumed.

    lease_s: a consumer that is silent for so long loses its rows to another one.  max_deliveries: how often a row is
    handed out before it goes to the dead letters: it may be what kills its consumers.
    """

    lease_s: float = 30.0
    max_deliveries: int = 3


_options_decoder = MessageDecoder(TaskOptions)
ENDED = b"ended"


def _options_key(task: str) -> str:
    return f"task:{task}"


def _end_key(task: str) -> str:
    return f"task-end:{task}"


async def declare(broker: Broker, task: str, columns: Iterable[str], options: TaskOptions) -> None:
    """Add the task. Idempotent: every program of a run may declare what it uses, also after a stream has ended."""
    if options.lease_s <= 0 or options.max_deliveries < 1:
        raise ValueError(f"task {task}: lease_s={options.lease_s}, max_deliveries={options.max_deliveries}")
    reads = frozenset(Column(name) for name in columns)
    await broker.put_meta(_options_key(task), encode(options))
    await broker.add_user_task(TaskSpec(name=task, unit="sample", reads=reads))


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
    """Say that no more rows will come."""
    await find(broker, task)
    await broker.put_meta(_end_key(task), ENDED)


async def has_ended(broker: Broker, task: str) -> bool:
    """Whether no more rows will come; what came may still be waiting, or in work."""
    return await broker.get_meta(_end_key(task)) == ENDED
