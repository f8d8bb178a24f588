"""One generation worker with a fake engine on an in-memory broker, and what a test does to it."""

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager

import msgspec
import numpy as np
import pytest
import torch

from tests.fakes.engine import FakeEngine
from tests.fakes.explicit_ids import append_at
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import ZERO_ID, Commit, Entry, GroupWrite
from transport.contracts.messages import (
    GroupPlan,
    LoadWeights,
    RolloutFailed,
    RolloutFinished,
    WeightManifest,
    WeightsFailed,
    WeightsLoaded,
    WorkerReported,
    encode,
    event_decoder,
)
from transport.contracts.settings import Settings
from transport.contracts.types import (
    Column,
    PromptId,
    RunName,
    WeightIdentity,
    WorkerId,
    group_id,
)
from transport.errors import PeerUnavailableError
from transport.process.clock import MonotonicClock
from transport.rows.columns import encode_array
from workers.generation import worker as worker_module
from workers.generation.worker import GenerationWorker

ME = WorkerId("generate-0.1")
V1, V2, V3 = (WeightIdentity(epoch=1, version=version) for version in (1, 2, 3))
PROMPT = np.array([5, 6, 7], np.int32)
SETTINGS = msgspec.convert(
    {"pipeline": {"group_size": 2}, "sampling": {"max_new_tokens": 9, "temperature": 0.7}}, Settings
)
SETTINGS = msgspec.structs.replace(  # a lease that no user may have: tests wait for its end
    SETTINGS, liveness=msgspec.structs.replace(SETTINGS.liveness, lease_s=0.3)
)


class FakePuller:
    """Gives tensors, or fails; ``held`` says whose contexts are open.

    slow: version -> set when all its bytes came.  given_up: those that were not waited for.  hurried: a slow one was.
    """

    def __init__(self):
        self.pulled, self.held, self.error = [], [], None
        self.slow, self.coming, self.given_up, self.hurried = {}, [], [], False
        self._changed = threading.Condition()
        self.way = ""

    def wait_until(self, holds):
        with self._changed:
            assert self._changed.wait_for(holds, 30)

    @contextmanager
    def pull(self, manifest, *, given_up=None, hurry=None):
        if self.error:
            raise self.error
        if manifest.weights in self.slow:
            with self._changed:
                self.coming.append(manifest.weights)
                self.hurried |= hurry.is_set()
                self._changed.notify_all()
            while not self.slow[manifest.weights].wait(0.01):
                with self._changed:
                    self.hurried |= hurry.is_set()
                    self._changed.notify_all()
                if given_up.is_set():
                    self.given_up.append(manifest.weights)
                    raise PeerUnavailableError("slow", "not waited for")
        with self._changed:
            self.held.append(manifest.weights)
            self.pulled.append(manifest.weights)
            self._changed.notify_all()
        try:
            yield {"w": torch.full((2,), float(manifest.weights.version))}
        finally:
            with self._changed:
                self.held.remove(manifest.weights)
                self._changed.notify_all()


class RenewalCounter(MemoryBroker):
    """Remembers what was renewed."""

    def __init__(self, server, run):
        super().__init__(server, run)
        self.renewed = asyncio.Queue()

    async def renew(self, queue, consumer, entry_ids):
        kept = await super().renew(queue, consumer, entry_ids)
        self.renewed.put_nowait((queue, consumer, list(entry_ids), kept))
        return kept


class World:
    """One worker on one in-memory broker, and what a test does to it."""

    def __init__(self, capacity, lengths=None, relay=None, given=None, partial_s=0.0):
        self.broker = RenewalCounter(MemoryServer(), RunName("test"))
        self.engine = FakeEngine(capacity)
        self.puller = FakePuller()
        self.worker = GenerationWorker(
            self.broker,
            self.engine,
            msgspec.structs.replace(
                SETTINGS, generation=msgspec.structs.replace(SETTINGS.generation, partial_s=partial_s)
            ),
            ME,
            self.puller,
            MonotonicClock(),
            stop_token_ids=(2, 4),
            lengths=lengths,
            relay=relay,
            given=given,
        )
        self._cursor, self._unread = ZERO_ID, []
        self._plans = 0

    async def plan(
        self,
        slot,
        *,
        samples=(0, 1),
        attempt=0,
        prompt=True,
        priority=1.0,
        group=None,
        sampling=None,
        entry=b"",
        partial=(),
    ):
        group = group or group_id(3, slot)
        columns = {Column.PROMPT_IDS: encode_array(Column.PROMPT_IDS, PROMPT), Column.TASK_ENTRY: entry}
        if prompt and attempt == 0:
            await self.broker.commit(Commit(groups=[GroupWrite(group_id=group, size=2, columns=columns)]))
        plan = GroupPlan(
            group_id=group,
            batch=3,
            prompt_id=PromptId("p"),
            samples=samples,
            group_size=2,
            predicted_tokens=20,
            priority=priority,
            attempt=attempt,
            sampling=sampling,
            partial=partial,
        )
        self._plans += 1
        entry_id = f"{self._plans}-0"
        await append_at(self.broker, keys.plans(ME), Entry(payload=encode(plan)), entry_id, is_queue=True)
        return entry_id

    async def asked(self, slot, **changes):
        """The one request that the engine has got, which is of the plan that is given out here."""
        await self.plan(slot, **changes)
        (request,) = await self.engine.wait_submitted(1)
        return request

    async def command(self, command):
        await self.broker.append(keys.control(ME), Entry(payload=encode(command)))

    async def manifest(self, weights, *, load=False):
        """Announce a version. load: and command the worker to load it."""
        manifest = WeightManifest(weights=weights, tensors=(), total_bytes=0, sources=(), host="here")
        await self.broker.append(keys.WEIGHTS, Entry(payload=encode(manifest)))
        if load:
            await self.command(LoadWeights(worker_id=ME, weights=weights))

    async def until_held(self, *weights):
        """Wait until these versions, and no other, are brought in."""
        await asyncio.to_thread(self.puller.wait_until, lambda: self.puller.held == list(weights))

    async def until(self, holds):
        """Wait until something holds."""
        async with asyncio.timeout(30):
            while not holds():  # noqa: ASYNC110 nobody tells
                await asyncio.sleep(0.005)

    async def until_log(self, log, length):
        """Wait until a log has so many entries."""
        async with asyncio.timeout(30):
            while await self.broker.length(log) != length:  # noqa: ASYNC110 nobody tells
                await asyncio.sleep(0.005)

    async def until_coming(self, weights):
        """Wait until a slow version is on its way."""
        await asyncio.to_thread(self.puller.wait_until, lambda: weights in self.puller.coming)

    async def events(self, count, *, of=(RolloutFinished, RolloutFailed, WeightsLoaded, WeightsFailed)):
        """The next ``count`` events of these kinds; others before them are skipped."""
        found = []
        async with asyncio.timeout(30):
            while len(found) < count:
                if not self._unread:
                    self._unread += await self.broker.read(keys.EVENTS, self._cursor, count=100, wait_s=1)
                    continue
                entry = self._unread.pop(0)
                self._cursor = entry.entry_id
                event = event_decoder.decode(entry.entry.payload)
                assert entry.entry.fields["event"] == type(event).__name__
                found += [event] if isinstance(event, of) else []
        return found

    async def unacknowledged(self):
        return [pending.entry_id for pending in await self.broker.pending(keys.plans(ME))]

    async def until_acknowledged(self):
        """Wait for the worker to release what it held: its next report says so."""
        while (await self.events(1, of=WorkerReported))[-1].held:
            pass
        assert await self.unacknowledged() == []


@asynccontextmanager
async def running(capacity=4, lengths=None, relay=None, given=None, partial_s=0.0):
    world = World(capacity, lengths, relay, given, partial_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "REPORT_S", 0.01)
        task = asyncio.create_task(world.worker.run())
        try:
            yield world
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert world.engine.closed
