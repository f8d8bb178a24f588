"""A service run inside one test: the real orchestrator, HTTP service, generation workers and publisher, on one loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.launch.app import serve
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.contracts.messages import WorkerStatus, encode
from transport.contracts.settings import Settings
from transport.contracts.types import PROTOCOL_VERSION, RunName, WorkerId, WorkerKind
from transport.process.clock import Clock, MonotonicClock
from workers.commands.build import publishing_worker
from workers.generation.emulated import EmulatedEngine, EmulatedLink
from workers.generation.engine import GenerationEngine
from workers.generation.worker import GenerationWorker
from workers.leases.lifecycle import Worker

NAME = RunName("service")
BEAT_S = 0.2


def settings_of(**sections: Mapping[str, Any]) -> Settings:
    """A service of emulated answers at full speed, changed by ``sections``."""
    chosen: dict[str, dict[str, Any]] = {
        "run": {"name": NAME},
        "trainer": {"engine": "none"},
        "generation": {"engine": "emulated", "slots": 64},
        "sampling": {"max_new_tokens": 8},
        "emulated": {"time_scale": 1e-4},
    }
    for name, section in sections.items():
        chosen.setdefault(name, {}).update(section)
    return msgspec.convert(chosen, Settings)


class ServiceRun:
    """``url`` answers while it is open. Brokers are many clients of one server in memory."""

    def __init__(self, settings: Settings, directory: Path, model_dir: Path) -> None:
        self.settings = settings
        self.directory = directory
        self.model_dir = model_dir
        self.server = MemoryServer()
        self._serving: asyncio.Task[bool] | None = None
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    def broker(self) -> MemoryBroker:
        return MemoryBroker(self.server, NAME)

    # -- the orchestrator

    async def start(self) -> None:
        self._serving = asyncio.create_task(serve(self.settings, self.broker(), self.directory, self.model_dir))
        while not (self.directory / "api.secret").exists():
            assert not self._serving.done(), self._serving.result()
            await asyncio.sleep(0.01)
        await self.until_listening()

    async def until_listening(self) -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return

    async def stop(self) -> bool:
        """End the orchestrator as SIGTERM does. Returns whether the run was over."""
        assert self._serving is not None
        if not self._serving.done():
            os.kill(os.getpid(), signal.SIGTERM)
        return await self._serving

    @property
    def port(self) -> int:
        return int((self.directory / "api.address").read_text().rpartition(":")[2])

    @property
    def secret(self) -> str:
        return (self.directory / "api.secret").read_text().strip()

    # -- workers

    def generate(
        self, name: str = "generate-0.1", clock: Clock | None = None, engine: GenerationEngine | None = None
    ) -> None:
        """Let a worker join."""
        clock = clock or MonotonicClock()
        engine = engine or EmulatedEngine(self.settings.emulated, 64, clock)
        broker, worker_id = self.broker(), WorkerId(name)
        link = EmulatedLink(0.0)
        self._run(
            worker_id, WorkerKind.GENERATE, GenerationWorker(broker, engine, self.settings, worker_id, link, clock)
        )

    async def publish(self, weights_dir: Path | None = None, name: str = "publish-0.1") -> None:
        """Let the publisher join."""
        worker_id = WorkerId(name)
        worker = await publishing_worker(
            self.broker(),
            self.settings,
            worker_id,
            self.model_dir,
            run_dir=self.directory,
            weights_dir=weights_dir,
            own_address={},
            secret=b"",
        )
        self._run(worker_id, WorkerKind.PUBLISH, worker)

    def _run(self, worker_id: WorkerId, kind: WorkerKind, worker: Worker) -> None:
        beating = asyncio.create_task(self._beat(worker_id, kind, worker))
        self._tasks[worker_id] = [beating, asyncio.create_task(worker.run())]

    async def _beat(self, worker_id: WorkerId, kind: WorkerKind, worker: Worker) -> None:
        broker = self.broker()
        while True:
            doing = worker.activity()
            status = WorkerStatus(
                worker_id=worker_id,
                kind=kind,
                host="here",
                pid=os.getpid(),
                protocol=PROTOCOL_VERSION,
                doing=doing.doing,
                capacity=doing.capacity,
                weights=doing.weights,
            )
            await broker.beat(worker_id, encode(status), ttl_s=10.0)
            await asyncio.sleep(BEAT_S)

    async def leave(self, name: str) -> None:
        """Cancel a worker, as a kill would."""
        tasks = self._tasks.pop(name)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.broker().end_lease(WorkerId(name))

    async def until_serving(self, count: int) -> None:
        """Wait until so many generation workers have weights."""
        while await self._num_serving() < count:  # noqa: ASYNC110 a status wakes nobody
            await asyncio.sleep(0.05)

    async def _num_serving(self) -> int:
        code, (status,) = await self.ask("/status")
        return sum(worker["loaded"] is not None for worker in status["generation"]) if code == 200 else 0

    # -- asking

    async def ask(
        self, path: str, body: object = None, *, method: str = "", secret: str | None = None
    ) -> tuple[int, list[Any]]:
        """One request: status, and its lines of JSON."""
        async with self.asking(path, body, method=method, secret=secret) as (status, lines):
            return status, [line async for line in lines]

    @asynccontextmanager
    async def asking(
        self, path: str, body: object = None, *, method: str = "", secret: str | None = None
    ) -> AsyncIterator[tuple[int, AsyncIterator[Any]]]:
        """The same, read as fast as the caller reads."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.0",
            f"Host: 127.0.0.1:{self.port}",
            f"Authorization: Bearer {self.secret if secret is None else secret}",
            f"Content-Length: {len(raw)}",
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=64 * 1024)
        try:
            writer.write("\r\n".join([*head, "", ""]).encode() + raw)
            status = int((await reader.readline()).split()[1])
            while await reader.readline() not in (b"\r\n", b""):
                pass
            yield status, _lines(reader)
        finally:
            writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    while line := await reader.readline():
        yield json.loads(line)


@asynccontextmanager
async def service_run(
    directory: Path,
    model_dir: Path,
    *,
    workers: int = 1,
    weights_dir: Path | None = None,
    **sections: Mapping[str, Any],
) -> AsyncIterator[ServiceRun]:
    """A service with a publisher and so many generation workers."""
    run = ServiceRun(settings_of(**sections), directory, model_dir)
    async with AsyncExitStack() as stack:
        await run.start()
        stack.push_async_callback(run.stop)
        stack.push_async_callback(_leave_all, run)
        await run.publish(weights_dir)
        for number in range(workers):
            run.generate(f"generate-{number}.1")
        yield run


async def _leave_all(run: ServiceRun) -> None:
    for name in list(run._tasks):
        await run.leave(name)
