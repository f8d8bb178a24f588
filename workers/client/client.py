"""The service interface for programs that are not ours: plain blocking calls over a broker and its rows.

Source: AsyncFlow sec. 3.4 and 5.1; what each call means here is in docs/client.md. A client needs no orchestrator: on a
bare broker it is a dataflow service. Beside a run it reads the run's rows and writes rows of its own; it never writes
into the run's rows, tasks or streams.

Owns: the connection, the consumers, the thread. Invariants: every call has a deadline, also when it was interrupted; a
row is acknowledged only when its batch is done, so that others get what a client held that died.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from functools import partial
from itertools import count as numbers
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from transport.broker.base import Broker, Commit
from transport.broker.redis_streams import connect as connect_broker
from transport.contracts.messages import WeightManifest, WorkerStatus
from transport.contracts.settings import BrokerSettings
from transport.contracts.types import Column, RowId, RunName, WorkerKind
from transport.process.clock import MonotonicClock
from transport.rows.columns import RowStore, Value, Values
from transport.rows.unit_rows import UnitRows
from transport.tensors.base import Endpoint
from workers.client import tasks
from workers.client.batch import ExperienceBatch, TensorBatch, known_columns, read_tables, stream_loader
from workers.client.consumption import Consumption, FirstCome, Policy, Source, TaskLeases, TokenBalanced
from workers.client.tasks import TaskOptions
from workers.client.weights import WeightChannel
from workers.client.writer import Writer
from workers.errors import ClientTimeoutError

if TYPE_CHECKING:  # torch takes seconds to import, and who only puts rows needs none
    import torch
    from torch.utils.data import DataLoader

T = TypeVar("T")

GRACE_S = 5.0  # what a call may take beyond what it waits for and beyond the broker's outage
PUBLISH_S = 120.0  # writing a version of the weights: some .5 s a GB in shared memory, more on a disk
CLOSE_S = 5.0


class LoopThread:
    """An event loop in a daemon thread: a program that ends without closing it is not held up."""

    def __init__(self, name: str, limit_s: float) -> None:
        self._limit_s = limit_s  # what a call may take beyond what it waits for
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def call(self, work: Coroutine[Any, Any, T], *, what: str, wait_s: float = 0.0) -> T:
        """The result of ``work``. Raises ClientTimeoutError, which names ``what``, when it takes too long."""
        future = asyncio.run_coroutine_threadsafe(_limited(work, what, wait_s + self._limit_s), self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C too: the caller is gone, so its work ends
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel every task and end the thread. Doing so twice is no error."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._loop.close()


async def _limited(work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await work
    except TimeoutError:
        if not deadline.expired():
            raise
        raise ClientTimeoutError(f"{what}: not done after {timeout_s:.1f} s") from None


async def _cancel_all() -> None:
    running = asyncio.all_tasks() - {asyncio.current_task()}
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


class Client:
    """One program's connection to one run. Made by ``connect``, used from one thread, closed by ``close``."""

    def __init__(self, loop: LoopThread, broker: Broker, rows: RowStore, name: str, endpoint: Endpoint) -> None:
        self._loop = loop
        self._broker = broker
        self._rows = rows
        self._name = name
        self._clock = MonotonicClock()
        self._writer = Writer(rows, name)
        self._numbers = numbers()
        self._consumptions: dict[str, Consumption] = {}
        self._weights = WeightChannel(broker, self._clock, endpoint)

    @classmethod
    def connect(
        cls,
        url: str,
        run: str,
        *,
        password: str = "",
        name: str = "client",
        units: Sequence[str] = (),
        secret: bytes = b"",
        endpoint: Endpoint | None = None,
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        outage_s: float = 30.0,
    ) -> Client:
        """Connect to ``run`` on the broker at ``url``. A run that does not exist begins with its first row.

        name: how this program appears in queues.  units, secret: storage units for the columns; none: they live in the
        broker.  endpoint: where other hosts pull the weights that this program publishes; None: this host alone.
        tls_ca, tls_cert, tls_key: as in [broker].  outage_s: how long each call waits for a broker that went away.
        Raises: BrokerUnavailableError; BrokerRejectedError, whose message says what to change.
        """
        loop = LoopThread(f"streamrl-{name}", outage_s + GRACE_S)
        loop.start()
        settings = BrokerSettings(
            url=url, password=password, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, outage_s=outage_s
        )
        try:
            broker = loop.call(connect_broker(settings, RunName(run)), what="connect")
            loop.call(broker.join_run(), what="connect")
            number = loop.call(broker.next_incarnation(f"client-{name}"), what="connect")
        except BaseException:
            loop.close()
            raise
        rows = UnitRows(broker, units, secret=secret) if units else RowStore(broker)
        return cls(loop, broker, rows, f"{name}.{number}", endpoint or Endpoint(secret=secret))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- the run's engines
    def init_engines(
        self, *, generate: int = 1, score: int = 0, train: int = 0, timeout_s: float
    ) -> list[WorkerStatus]:
        """Wait until the run has an orchestrator and so many workers that can take work. Starts nothing.

        Returns: the status of every worker that has started.
        Raises:  ClientTimeoutError that says what is missing.
        """
        wanted = {WorkerKind.GENERATE: generate, WorkerKind.SCORE: score, WorkerKind.TRAIN: train}
        work = tasks.wait_ready(self._broker, wanted, timeout_s)
        return self._loop.call(work, what="init_engines", wait_s=timeout_s)

    def weight_sync_notify(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> WeightManifest:
        """Publish a version of the weights and notify all that wait for one.

        The bytes are in shared memory, and pulled over TCP from this process, which must stay; the newest three
        versions are kept. The first call takes the trainer's role: an earlier publisher is fenced off.
        Raises: ClientError: a trainer of the run is alive, and the weights are its.  FencedError: a later publisher.
        """
        work = self._weights.publish(tensors, version)
        return self._loop.call(work, what="weight_sync_notify", wait_s=PUBLISH_S)

    def wait_weights(self, *, newer_than: int = -1, timeout_s: float) -> WeightManifest | None:
        """The newest manifest of a version above ``newer_than``; None when none came for ``timeout_s``.

        ``workers.weights.pull.WeightPuller().pull(manifest)`` gives its tensors.
        """
        work = self._weights.wait(newer_than, timeout_s)
        return self._loop.call(work, what="wait_weights", wait_s=timeout_s)

    # -- tasks
    def declare_task(
        self, task: str, columns: Sequence[str], *, lease_s: float = 30.0, max_deliveries: int = 3
    ) -> None:
        """Add a task (``x_...``): each row that gets all ``columns`` from now on goes to one of its consumers.

        Every program of a run may declare what it uses: doing so again changes nothing but the options.
        lease_s, max_deliveries: see TaskOptions.
        """
        options = TaskOptions(lease_s=lease_s, max_deliveries=max_deliveries)
        self._loop.call(tasks.declare(self._broker, task, known_columns(columns), options), what="declare_task")

    def remove_task(self, task: str) -> None:
        """Forget a task, what waits for it, and its end. A task without a consumer grows for as long as rows come."""
        self._loop.call(tasks.remove(self._broker, task), what="remove_task")

    def end_stream(self, task: str) -> None:
        """Say that no more rows will come for ``task``: its consumers end once all are consumed."""
        self._loop.call(tasks.end(self._broker, task), what="end_stream")

    # -- rows
    def put_prompts_data(self, prompts: Sequence[object], *, samples: int = 1) -> list[RowId]:
        """Add ``samples`` rows for each prompt, with it in column ``x_prompt`` (a text, or an array of token ids).

        They go to the consumers of tasks that read ``x_prompt``. Returns: [len(prompts) * samples] row ids, in order.
        """
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        return self.put_experience_data({"x_prompt": repeated}, group_size=samples)

    def put_experience_data(
        self,
        data: Mapping[str, Values],
        *,
        index: Sequence[RowId] | None = None,
        group_size: int = 1,
        done: ExperienceBatch | None = None,
    ) -> list[RowId]:
        """Write columns of rows.

        Args:    data: column (``x_...``) -> [N] values, each a text or an array of any shape; or one array [N, ...].
                 index: [N] rows to add these columns to, as they came in a batch; None: new rows.
                 group_size: so many new rows, one after another, are cleared together.
                 done: the batch that these results were made from: acknowledged in the same atomic step.
        Returns: [N] row ids.
        Raises:  ValueError: columns of different lengths, or values that cannot be stored.  ClientError: a column that
                 is not a client's, or rows that have one of these columns or were cleared.  LeaseLostError: ``done``
                 went to another consumer; nothing is written.
        """
        if index is None:
            block = self._writer.new_rows(data, group_size)
            row_ids, commit = block.row_ids(), Commit(blocks=[block])
        else:
            row_ids, commit = list(index), Commit(rows=self._writer.further_columns(data, index))
        writing = self._writer.write(commit) if done is None else self._consumptions[done.consumer].done(commit)
        self._loop.call(writing, what="put_experience_data")
        return row_ids

    def get_experience_data(
        self, task: str, columns: Sequence[str], count: int, *, timeout_s: float
    ) -> ExperienceBatch:
        """The next ``count`` rows of ``task``. The batch that this client got of it before is done with this call.

        Returns: ``count`` rows as soon as they are there; fewer when ``timeout_s`` passes or the stream ends; none,
                 and ``ended``, when everything was consumed.
        Raises:  ClientError: no such task.  LeaseLostError: the batch before went to another consumer (this process
                 stood still for longer than the task's lease); calling again goes on.
        """
        if count < 1:
            raise ValueError(f"count={count}: a batch has at least one row")
        known = known_columns(columns)
        if task not in self._consumptions:
            self._consumptions[task] = Consumption(self._rows, task, self._source(task))
        work = self._consumptions[task].next(known, count, timeout_s)
        return self._loop.call(work, what="get_experience_data", wait_s=timeout_s)

    def read_experience_data(
        self, index: Sequence[RowId], columns: Sequence[str]
    ) -> tuple[list[RowId], dict[str, NDArray[Any] | list[Value]]]:
        """Columns of rows whose ids are known, of any task or none; this consumes nothing.

        Returns: ids of the rows that have all ``columns``, in order, and by column their values: one array [N, ...]
                 of a column of yours whose values have one type and shape, else one value each. Arrays are read-only.
        """
        known = known_columns(columns)
        return self._loop.call(read_tables(self._rows, index, known), what="read_experience_data")

    def done(self, batch: ExperienceBatch) -> None:
        """Acknowledge a batch now. Raises LeaseLostError as ``get_experience_data``."""
        self._loop.call(self._consumptions[batch.consumer].done(), what="done")

    def clear(self, index: Sequence[RowId]) -> int:
        """Free these rows and the rest of their groups, and return the bytes freed. Raises ClientError for a run's."""
        return self._loop.call(self._writer.clear(index), what="clear")

    def create_stream_data_loader(
        self,
        task: str,
        columns: Sequence[str],
        count: int,
        *,
        policy: Policy = "first_come",
        balance_by: str = "",
        rank: int = 0,
        world: int = 1,
        timeout_s: float = 600.0,
    ) -> DataLoader[TensorBatch]:
        """Stream a task as ``(batch_data, index)`` until it ends. A batch is done when the next one is asked for.

        count: rows of a batch.  policy: "first_come", or "token_balanced" over ``world`` ranks by the lengths of column
        ``balance_by`` (the first of ``columns``), ``count`` rows a rank on average.
        timeout_s: for the next batch; then ClientTimeoutError that says what the task waits for.
        """
        if count < 1 or not 0 <= rank < world:
            raise ValueError(f"count={count}, rank={rank}, world={world}")
        known = known_columns(columns)
        key = f"{task}#{next(self._numbers)}"
        balanced = policy == "token_balanced"
        source = self._source(task, (balance_by or columns[0], rank, world) if balanced else None)
        self._consumptions[key] = Consumption(self._rows, key, source)
        return stream_loader(partial(self._batches, key, known, count, timeout_s, in_step=balanced))

    def _source(self, task: str, balanced: tuple[str, int, int] | None = None) -> Source:
        """balanced: the column to balance by, rank, world."""
        options = self._loop.call(tasks.find(self._broker, task), what=f"looking for task {task}")
        consumer = f"{self._name}-{next(self._numbers)}"
        leases = TaskLeases(self._broker, task, consumer, options, self._clock)
        if balanced is None:
            return FirstCome(leases)
        (column,), rank, world = known_columns(balanced[:1]), *balanced[1:]
        of_rank = TaskLeases(self._broker, task, consumer, options, self._clock, rank=rank)
        return TokenBalanced(leases, of_rank, self._rows, balance_by=column, rank=rank, world=world)

    def _batches(
        self, key: str, columns: Sequence[Column], count: int, timeout_s: float, *, in_step: bool
    ) -> Iterator[ExperienceBatch]:
        """A consumption's batches until its stream ends; leaving the loop early hands the last one back."""
        consumption = self._consumptions[key]
        try:
            while True:
                work = consumption.next(columns, count, timeout_s)
                batch = self._loop.call(work, what="the next batch", wait_s=timeout_s)
                if batch.ended:
                    return
                if batch.waited_out:
                    why = self._loop.call(tasks.describe_wait(self._broker, batch.task), what="looking at the queue")
                    raise ClientTimeoutError(f"task {batch.task}: no batch for {timeout_s:.1f} s: {why}")
                if batch.index or in_step:  # an empty one too: other ranks make a step with theirs
                    yield batch
        finally:
            if not self._loop.is_closed():
                self._loop.call(consumption.close(), what="leaving a stream")

    def close(self) -> None:
        """Hand back what is held, withdraw published weights, disconnect. Doing so twice is no error."""
        if self._loop.is_closed():
            return
        for consumption in self._consumptions.values():
            self._loop.call(consumption.close(), what="close")
        self._loop.call(self._weights.close(), what="close")
        self._rows.close()
        self._loop.call(self._broker.close(), what="close")
        self._loop.close()
