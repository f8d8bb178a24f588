"""Figure ``rows``: put and get of rows through the row store, beside TransferQueue and ray.util.queue.

Two batches: 512 rows of 8,192 tokens (33.6 MB) and 1,024 of 1,024 (8.4 MB), each token an int32 id and a float32
logprob. Every store gets the same arrays and gives back the same arrays, checked once; stores take turns in every
round, and medians count. Ours is measured through ``workers.client.Client``, with columns in the
broker and with columns in two storage units (processes, as TransferQueue's two); the faster one is ours. The others are
installed beside this environment at the first call (Ray is 70 MB), because nothing else needs them.

    python -m benchmarks.rows [--rounds 7]

A run's own rows are measured beside them, written and read as its workers do, a group at a time, in one unit and in
eight: ``units_8_over_1`` is how many times the samples a second eight take, and ``*_bytes_a_sample`` what a sample of
``RUN_TOKENS`` tokens takes in the broker, without and with units, and in those.

Last line: JSON. ``rows_<tokens>_<put|get>_ratio`` = TransferQueue's seconds over ours; ``vs_ray_queue_<tokens>_*`` the
same for ray.util.queue, row by row as it is made for, and ``vs_ray_queue_batch_*`` with its batch calls.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from transport.broker.base import Broker, Commit, GroupWrite, RowWrite
from transport.broker.embedded import EmbeddedServer
from transport.broker.redis_streams import connect
from transport.contracts.settings import BrokerSettings
from transport.contracts.types import Column, RowId, RunName, group_id, row_id
from transport.rows.columns import RowStore, encode_array
from transport.rows.unit_rows import UnitRows
from transport.rows.units import StorageUnit
from workers.client import Client

OTHERS = ("TransferQueue==0.1.11", "ray>=2.50")
UNITS = 2
MORE_UNITS = 8
RUN_GROUPS, RUN_TOKENS = 32, 4096
GROUP_SIZE = 8
SHAPES = ((512, 8192), (1024, 1024))
SETTLE_S = 0.2
"""After a drop: a server may free 34 MB behind its answer, on a core that the next store needs."""


@dataclass(frozen=True, slots=True)
class Batch:
    """ids: [rows, tokens] int32.  logprobs: [rows, tokens] float32."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @staticmethod
    def random(rows: int, tokens: int) -> Batch:
        generator = np.random.default_rng(7)
        ids = generator.integers(0, 150_000, (rows, tokens), dtype=np.int32)
        return Batch(ids, -generator.random((rows, tokens), dtype=np.float32))


class Store(Protocol):
    """put and get are timed; drop is not."""

    def put(self, number: int, batch: Batch) -> None: ...

    def get(self, number: int, rows: int) -> Batch: ...

    def drop(self, number: int, rows: int) -> None: ...


class OurRows:
    """The client's calls. Arrays go in whole and come back whole."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._index: dict[int, list[RowId]] = {}

    def put(self, number: int, batch: Batch) -> None:
        data = {"x_ids": batch.ids, "x_logprobs": batch.logprobs}
        self._index[number] = self._client.put_experience_data(data, group_size=GROUP_SIZE)

    def get(self, number: int, rows: int) -> Batch:
        _, values = self._client.read_experience_data(self._index[number], ("x_ids", "x_logprobs"))
        return Batch(np.asarray(values["x_ids"]), np.asarray(values["x_logprobs"]))

    def drop(self, number: int, rows: int) -> None:
        self._client.clear(self._index.pop(number))


class TransferQueueRows:
    """TransferQueue's key-value calls, with its defaults."""

    def __init__(self) -> None:
        import transfer_queue

        self._queue = transfer_queue
        self._queue.init()

    def put(self, number: int, batch: Batch) -> None:
        from tensordict import TensorDict

        fields = {"ids": torch.from_numpy(batch.ids), "logprobs": torch.from_numpy(batch.logprobs)}
        keys = self._keys(number, len(batch.ids))
        self._queue.kv_batch_put(keys=keys, partition_id="bench", fields=TensorDict(fields, batch_size=len(keys)))

    def get(self, number: int, rows: int) -> Batch:
        found = self._queue.kv_batch_get(keys=self._keys(number, rows), partition_id="bench")
        ids, logprobs = (found[name].values().reshape(rows, -1).numpy() for name in ("ids", "logprobs"))
        return Batch(ids, logprobs)

    def drop(self, number: int, rows: int) -> None:
        self._queue.kv_clear(keys=self._keys(number, rows), partition_id="bench")

    def _keys(self, number: int, rows: int) -> list[str]:
        return [f"{number}-{row}" for row in range(rows)]


class RayQueueRows:
    """ray.util.queue, one row a call, or all rows in one call."""

    def __init__(self, *, at_once: bool) -> None:
        from ray.util.queue import Queue

        self._queue = Queue()
        self._at_once = at_once

    def put(self, number: int, batch: Batch) -> None:
        rows = list(zip(batch.ids, batch.logprobs, strict=True))
        if self._at_once:
            self._queue.put_nowait_batch(rows)
        else:
            for row in rows:
                self._queue.put(row)

    def get(self, number: int, rows: int) -> Batch:
        found = self._queue.get_nowait_batch(rows) if self._at_once else [self._queue.get() for _ in range(rows)]
        return Batch(np.stack([ids for ids, _ in found]), np.stack([logprobs for _, logprobs in found]))

    def drop(self, number: int, rows: int) -> None:
        """What was got is gone."""


def serve_unit(pipe: Connection) -> None:
    """A storage unit in a process of its own, until the pipe closes."""
    unit = StorageUnit(max_bytes=4 << 30)
    pipe.send(unit.start())
    try:
        pipe.recv()
    except EOFError:
        unit.close()


@contextmanager
def unit_process() -> Iterator[str]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_unit, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


@contextmanager
def our_stores(directory: Path) -> Iterator[dict[str, Store]]:
    """One embedded broker; rows in it, and rows beside it."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        server = EmbeddedServer(directory / "broker")
        runner.run(server.start())
        stack.callback(lambda: runner.run(server.stop()))

        def connect(name: str, units: Sequence[str]) -> OurRows:
            client = Client.connect(server.url, name, password=server.password, units=units)
            return OurRows(stack.enter_context(client))

        units = [stack.enter_context(unit_process()) for _ in range(UNITS)]
        yield {"broker": connect("in-broker", []), "units": connect("in-units", units)}


@contextmanager
def other_stores() -> Iterator[dict[str, Store]]:
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield {
            "transfer_queue": TransferQueueRows(),
            "ray_queue": RayQueueRows(at_once=False),
            "ray_queue_batch": RayQueueRows(at_once=True),
        }
    finally:
        ray.shutdown()


def measure(stores: dict[str, Store], batch: Batch, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of put and get by store; one round more goes first and is not counted."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in stores}
    for number in range(rounds + 1):
        for name, store in stores.items():
            started_s = time.perf_counter()
            store.put(number, batch)
            put_s = time.perf_counter() - started_s
            got = store.get(number, len(batch.ids))
            get_s = time.perf_counter() - started_s - put_s
            store.drop(number, len(batch.ids))
            time.sleep(SETTLE_S)
            if number == 0:
                assert np.array_equal(got.ids, batch.ids), name
                assert np.array_equal(got.logprobs, batch.logprobs), name
            else:
                seconds[name].append((put_s, get_s))
    return {
        name: (statistics.median(put for put, _ in pairs), statistics.median(get for _, get in pairs))
        for name, pairs in seconds.items()
    }


def group_commits() -> list[tuple[Commit, Commit]]:
    """Per group what its admission writes, and what a generation worker writes of its samples."""
    ids = encode_array(Column.RESPONSE_IDS, np.arange(RUN_TOKENS, dtype=np.int32))
    logprobs = encode_array(Column.ROLLOUT_LOGPROBS, np.full(RUN_TOKENS, -0.5, np.float32))
    columns = {Column.RESPONSE_IDS: ids, Column.ROLLOUT_LOGPROBS: logprobs}
    groups = [group_id(0, slot) for slot in range(RUN_GROUPS)]
    return [
        (
            Commit(groups=[GroupWrite(group_id=group, size=GROUP_SIZE, columns={})]),
            Commit(rows=[RowWrite(row_id=row_id(group, n), columns=columns) for n in range(GROUP_SIZE)]),
        )
        for group in groups
    ]


async def write_and_read(
    broker: Broker, store: RowStore, commits: Sequence[tuple[Commit, Commit]]
) -> tuple[float, int]:
    """(samples a second, bytes of each in the broker); all groups at once, as those of several workers."""

    async def one(admission: Commit, samples: Commit) -> None:
        await store.commit(admission)
        await store.commit(samples)
        read = await store.read_rows([row.row_id for row in samples.rows], [*samples.rows[0].columns])
        assert all(len(row) == 2 for row in read)

    started_s = time.perf_counter()
    await asyncio.gather(*(one(*each) for each in commits))
    seconds, samples = time.perf_counter() - started_s, len(commits) * GROUP_SIZE
    held = await broker.retained_bytes() // samples
    await store.drop_groups([group.group_id for admission, _ in commits for group in admission.groups])
    await asyncio.sleep(SETTLE_S)
    return samples / seconds, held


async def run_figure(server: EmbeddedServer, units: Sequence[str], rounds: int) -> dict[str, Any]:
    broker = await connect(BrokerSettings(url=server.url, password=server.password), RunName("run-rows"))
    one, eight = UnitRows(broker, units[:1]), UnitRows(broker, units)
    stores: dict[str, RowStore] = {"broker": RowStore(broker), "1 unit": one, f"{len(units)} units": eight}
    measured: dict[str, list[tuple[float, int]]] = {name: [] for name in stores}
    commits = group_commits()
    for number in range(rounds + 1):
        for name, store in stores.items():
            found = await write_and_read(broker, store, commits)
            if number:
                measured[name].append(found)
    rates = {name: statistics.median(rate for rate, _ in found) for name, found in measured.items()}
    for name, rate in rates.items():
        print(f"{RUN_TOKENS} tokens a sample  {name:8} {rate:8.0f} samples/s written and read", flush=True)
    one.close()
    eight.close()
    await broker.close()
    return {
        "units_8_over_1": round(rates[f"{len(units)} units"] / rates["1 unit"], 2),
        "units_1_over_broker": round(rates["1 unit"] / rates["broker"], 2),
        "broker_bytes_a_sample": measured["broker"][0][1],
        "broker_bytes_a_sample_with_units": measured["1 unit"][0][1],
        "unit_bytes_a_sample": RUN_TOKENS * 8,
    }


def run_rows(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner, ExitStack() as stack:
        server = EmbeddedServer(Path(directory) / "broker")
        runner.run(server.start())
        stack.callback(lambda: runner.run(server.stop()))
        units = [stack.enter_context(unit_process()) for _ in range(MORE_UNITS)]
        return runner.run(run_figure(server, units, rounds))


def figure(rounds: int) -> dict[str, Any]:
    result = run_rows(rounds)
    with tempfile.TemporaryDirectory() as directory, our_stores(Path(directory)) as ours, other_stores() as others:
        for rows, tokens in SHAPES:
            medians = measure({**ours, **others}, Batch.random(rows, tokens), rounds)
            for name, (put_s, get_s) in medians.items():
                print(
                    f"{rows} x {tokens}  {name:16} put {1000 * put_s:8.1f} ms   get {1000 * get_s:8.1f} ms", flush=True
                )
            best = min(ours, key=lambda name: sum(medians[name]))
            result |= {f"rows_{tokens}_ours": best} | ratios(tokens, medians[best], medians)
    return result


def ratios(tokens: int, ours: tuple[float, float], medians: dict[str, tuple[float, float]]) -> dict[str, float]:
    """How many times ours the others take, put and get apart."""
    names = {"transfer_queue": f"rows_{tokens}_{{}}_ratio"} | {
        name: f"vs_{name}_{tokens}_{{}}" for name in ("ray_queue", "ray_queue_batch")
    }
    return {
        key.format(side): round(medians[name][place] / ours[place], 2)
        for name, key in names.items()
        for place, side in enumerate(("put", "get"))
    }


def other_python() -> Path:
    """The interpreter of an environment inside this one that sees all of it, and the others' packages."""
    venv = Path(sys.prefix) / "rows-others"
    python = venv / "bin" / "python"
    if not (venv / "ready").exists():
        print("installing", *OTHERS, "into", venv, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        (site,) = venv.glob("lib/*/site-packages")
        (site / "_streamrl.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # so torch is not installed again
        subprocess.run([str(python), "-m", "pip", "install", "-q", *OTHERS], check=True)
        (venv / "ready").touch()
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if importlib.util.find_spec("transfer_queue") is None:
        python = str(other_python())
        os.execv(python, [python, "-m", "benchmarks.rows", *sys.argv[1:]])
    print(json.dumps(figure(options.rounds)))


if __name__ == "__main__":
    main()
