"""Whom a worker asks for a version, one after another."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Mapping

import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.core.broadcast import Links, Peer, Source, plan_broadcast, reattach, routes
from orchestrator.loop.routes import plan_of, plan_routes, route_weights
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import ZERO_ID, Entry, LogEntry
from transport.contracts.messages import (
    STARTING,
    WeightManifest,
    WeightPart,
    WeightRoutes,
    WorkerStatus,
    encode,
    routes_decoder,
)
from transport.contracts.types import RunName, WeightIdentity, WorkerId, WorkerKind
from transport.process.clock import MonotonicClock
from transport.tensors.manifest import plan_layout
from workers.weights.updates import WeightUpdates

peers = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=40).map(
    lambda places: [Peer(name=f"w{n}", host=f"h{host}-{site}", site=str(site)) for n, (host, site) in enumerate(places)]
)


@given(peers, st.integers(1, 64), st.data())
def test_a_route_begins_where_the_plan_says_ends_at_the_trainer_and_is_no_circle(
    receivers: list[Peer], pieces: int, data: st.DataObject
) -> None:
    links = Links(site_bytes_per_s=1e9, card_bytes_per_s=1e9, slow_bytes_per_s=1e8)
    parts = data.draw(st.integers(1, 3))
    trainer = [Source(name=f"t{n}", host=f"th{n}", site="0", parts=frozenset([n])) for n in range(parts)]
    sizes = [1 << 20] * parts
    plan = plan_broadcast(sizes, trainer, receivers, links, piece_bytes=(1 << 20) // pieces, most_trees=1)
    dead = set(data.draw(st.lists(st.sampled_from(sorted(plan.receivers)), max_size=3)))
    for part in range(parts):
        found = routes(plan, part)
        for name in plan.receivers:
            (source,) = {pull.source for pull in plan.pulls(name) if any(one.part == part for one in pull.ranges)}
            assert found[name][:1] == ((source,) if source != f"t{part}" else ())
            assert name not in found[name]
            assert len(set(found[name])) == len(found[name])
        waits_for = {name: next((one for one in found[name] if one not in dead), "t") for name in found}
        for name in found:
            seen = [name]
            while (at := waits_for[seen[-1]]) != "t":
                assert at not in seen, "they wait for each other"
                seen.append(at)


def test_the_first_child_of_a_dead_worker_takes_its_place() -> None:
    links = Links(site_bytes_per_s=1e9, card_bytes_per_s=1e9, slow_bytes_per_s=1e6, site_round_trip_s=1.0)
    receivers = [Peer(name=f"w{n}", host=f"h{n}", site="far") for n in range(6)]
    plan = plan_broadcast([1 << 20], [Source(name="t", host="th")], receivers, links, piece_bytes=1 << 20, most_trees=1)
    (tree,) = plan.trees
    after = reattach(plan, {tree.root}, {})
    (heir,) = [one.root for one in after.trees]
    orphans = [name for name, above in tree.parents.items() if above == tree.root]
    assert len(orphans) > 1
    assert heir in orphans
    for name in orphans:
        assert routes(plan, 0)[name] == ((tree.root,) if name == heir else (tree.root, heir))


def status(
    worker: str, host_id: str, relay: str = "", kind: WorkerKind = WorkerKind.GENERATE, site: str = ""
) -> WorkerStatus:
    return WorkerStatus(
        worker_id=WorkerId(worker),
        kind=kind,
        host=host_id,
        pid=1,
        protocol=1,
        host_id=host_id,
        relay=relay,
        site=site,
        doing="waiting",
    )


def way(manifest: WeightManifest, statuses: Mapping[WorkerId, WorkerStatus]) -> dict[WorkerId, tuple[str, ...]]:
    plan = plan_of(manifest, statuses)
    return plan_routes(plan, manifest, statuses).routes if plan is not None else {}


def test_workers_of_other_hosts_are_told_whom_to_ask_where_that_one_listens() -> None:
    specs = plan_layout([(f"t{n}", (1024,), "float32") for n in range(64)])
    weights = WeightIdentity(epoch=1, version=3, digest="ab")
    manifest = WeightManifest(weights=weights, tensors=specs, total_bytes=64 * 4096, sources=(), host="here")
    here = [status("generate-0.1", "here"), status("train-0.1", "here", kind=WorkerKind.TRAIN)]
    there = [status(f"generate-{n}.1", f"there-{n}", f"tcp://10.0.0.{n}:7000") for n in range(1, 5)]
    statuses = {one.worker_id: one for one in (*here, *there)}
    planned = way(manifest, statuses)
    assert planned.keys() == {one.worker_id for one in there}
    assert 1 <= sum(not sources for sources in planned.values()) < len(there)
    listening = {f"{one.relay}/1.3.ab" for one in there}
    assert {source for sources in planned.values() for source in sources} <= listening
    silent = {worker: replace(one, relay="") for worker, one in statuses.items()}
    assert not any(way(manifest, silent).values())
    assert way(manifest, {one.worker_id: one for one in here}) == {}
    deaf = {one.worker_id: replace(one, site="far") for one in (replace(there[0], relay=""), *there[1:])}
    assert sum(not sources for sources in way(manifest, deaf).values()) == 1, "one that does not listen feeds nobody"
    starting = {**statuses, there[0].worker_id: replace(there[0], doing=STARTING)}
    assert way(manifest, starting).keys() == {one.worker_id for one in there[1:]}


def test_ranks_of_several_hosts_root_a_tree_each_and_of_one_host_one_together() -> None:
    """All there are in a site of several trees are told for each part; behind a slow link one has it all, once."""
    specs = plan_layout([(f"t{n}", (1024,), "float32") for n in range(64)])
    weights = WeightIdentity(epoch=1, version=3, digest="ab")
    parts = tuple(WeightPart(pieces=(), total_bytes=32 * 4096, sources=(), host=host) for host in ("a", "b"))
    manifest = WeightManifest(weights=weights, tensors=specs, total_bytes=64 * 4096, sources=(), host="a", parts=parts)
    near = [status(f"generate-{n}.1", f"near-{n}", f"tcp://10.0.0.{n}:7000") for n in range(6)]
    far = [status(f"generate-{n}.1", f"far-{n}", f"tcp://10.0.0.{n}:7000", site="far") for n in range(6, 9)]
    statuses = {one.worker_id: one for one in (*near, *far)}
    plan = plan_of(manifest, statuses)
    assert plan is not None
    planned = plan_routes(plan, manifest, statuses)
    assert planned.parts.keys() == {one.worker_id for one in near}
    assert planned.routes.keys() == {one.worker_id for one in far}
    for part in (0, 1):
        ways = {worker: asked[part] for worker, asked in planned.parts.items()}
        assert 1 <= sum(not sources for sources in ways.values()) < len(near)
        assert {source for sources in ways.values() for source in sources} <= {
            f"{one.relay}/1.3.ab.{part}" for one in near
        }
    assert len({tuple(worker for worker, asked in planned.parts.items() if not asked[part]) for part in (0, 1)}) == 2
    assert sum(not sources for sources in planned.routes.values()) == 1
    together = replace(manifest, parts=tuple(replace(part, host="a") for part in parts))
    plan = plan_of(together, statuses)
    assert plan is not None
    assert not plan_routes(plan, together, statuses).parts


def test_the_nearest_worker_of_a_site_is_its_gateway() -> None:
    manifest = WeightManifest(
        weights=WeightIdentity(epoch=1, version=3), tensors=(), total_bytes=1 << 20, sources=(), host="here"
    )
    for nearest in range(4):
        far = [status(f"generate-{n}.1", f"far-{n}", f"tcp://10.0.0.{n}:7000", site="far") for n in range(4)]
        far = [replace(one, round_trip_s=0.01 if n == nearest else 0.02) for n, one in enumerate(far)]
        first = [
            worker for worker, sources in way(manifest, {one.worker_id: one for one in far}).items() if not sources
        ]
        assert first == [f"generate-{nearest}.1"]


@given(st.data())
def test_whoever_joins_gets_a_version_from_those_of_its_site_that_have_it(data: st.DataObject) -> None:
    """And whoever waits for a relay waits for one that is there, or was."""
    manifest = WeightManifest(
        weights=WeightIdentity(epoch=1, version=3), tensors=(), total_bytes=1 << 20, sources=(), host="here"
    )
    plan, there, told = None, dict[WorkerId, WorkerStatus](), dict[WorkerId, tuple[str, ...]]()
    for number in data.draw(st.permutations(range(12))):
        worker = WorkerId(f"generate-{number}.1")
        there[worker] = status(worker, f"host-{number // 2}", f"tcp://10.0.0.{number}:7000", site="far")
        if len(there) > 2 and data.draw(st.booleans()):
            del there[data.draw(st.sampled_from(sorted(there.keys() - {worker})))]
        plan = plan_of(manifest, there, plan)
        assert plan is not None
        planned = plan_routes(plan, manifest, there).routes
        assert planned.keys() == there.keys()
        assert sum(not sources for sources in planned.values()) == 1
        told |= {name: sources for name, sources in planned.items() if name not in told}
    assert sum(not sources for sources in told.values()) == 1, "the link between the sites carries it once"


class World:
    """An orchestrator that plans routes, over the in-memory broker; the test is trainer and worker."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(MemoryServer(), RunName("routed"))

    async def publish(self, version: int, *, total_bytes: int = 4096) -> WeightManifest:
        specs = plan_layout([("t", (1024,), "float32")])
        weights = WeightIdentity(epoch=1, version=version, digest="ab")
        manifest = WeightManifest(
            weights=weights, tensors=specs, total_bytes=total_bytes, sources=("trainer",), host="there"
        )
        await self.broker.append(keys.WEIGHTS, Entry(payload=encode(manifest)))
        return manifest

    async def beat(self, worker: str, relay: str) -> None:
        lease = encode(status(worker, f"host-of-{worker}", relay))
        await self.broker.beat(WorkerId(worker), lease, ttl_s=60)

    async def planned(self, count: int) -> list[WeightRoutes]:
        entries: list[LogEntry] = []
        async with asyncio.timeout(30):
            while len(entries) < count:
                cursor = entries[-1].entry_id if entries else ZERO_ID
                entries += await self.broker.read(keys.ROUTES, cursor, count=9, wait_s=1)
        return [routes_decoder.decode(entry.entry.payload) for entry in entries]


@contextlib.asynccontextmanager
async def planning(world: World) -> AsyncIterator[None]:
    task = asyncio.create_task(route_weights(world.broker))
    await asyncio.sleep(0)  # it plans what comes from here on
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_worker_that_joins_is_told_and_the_way_of_the_others_stays() -> None:
    world = World()
    async with planning(world):
        for index in range(3):
            await world.beat(f"generate-{index}.1", f"tcp://10.0.0.{index}:7000")
        await world.publish(4)
        (first,) = await world.planned(1)
        assert first.routes.keys() == {"generate-0.1", "generate-1.1", "generate-2.1"}
        await world.beat("generate-3.1", "tcp://10.0.0.3:7000")
        assert (await world.planned(2))[0] == first
        second = (await world.planned(2))[1]
        assert (second.weights, second.routes.keys()) == (first.weights, {"generate-3.1"})
        assert second.routes[WorkerId("generate-3.1")], "it is at this site by now"


async def test_of_a_version_that_is_there_before_its_workers_each_is_told_as_it_comes() -> None:
    world = World()
    await world.publish(0)
    async with planning(world):  # as after a restart: nobody publishes it once more
        for number in (2, 0, 1):
            await world.beat(f"generate-{number}.1", f"tcp://10.0.0.{number}:7000")
            told = (await world.planned({2: 1, 0: 2, 1: 3}[number]))[-1].routes
            assert told.keys() == {f"generate-{number}.1"}
            assert bool(told[WorkerId(f"generate-{number}.1")]) == (number != 2)


async def test_a_version_that_cannot_be_planned_is_left_to_the_trainer_and_the_next_is_planned() -> None:
    world = World()
    async with planning(world):
        await world.beat("generate-0.1", "tcp://10.0.0.1:7000")
        await world.publish(1, total_bytes=0)
        await world.publish(2)
        assert [one.weights.version for one in await world.planned(1)] == [2]


class Pulls:
    """Keeps whom it was told to ask."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.way = ""

    @contextlib.contextmanager
    def pull(
        self, manifest: WeightManifest, *, given_up: threading.Event | None = None, hurry: threading.Event | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        self._loop.call_soon_threadsafe(self.asked.put_nowait, manifest.sources)
        yield {}


class NoEngine:
    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None: ...


async def test_a_worker_asks_along_its_route_and_the_trainer_where_none_is_planned() -> None:
    me = WorkerId("generate-1.1")
    world, puller = World(), Pulls()
    updates = WeightUpdates(world.broker, NoEngine(), puller, me, MonotonicClock(), route_wait_s=30.0)
    ahead = asyncio.create_task(updates.prefetch())

    async def tell(manifest: WeightManifest, worker: WorkerId, source: str) -> None:
        routes = WeightRoutes(weights=manifest.weights, routes={worker: (source,)})
        await world.broker.append(keys.ROUTES, Entry(payload=encode(routes)))

    try:
        async with asyncio.timeout(30):
            first = await world.publish(1)
            await tell(first, me, "a mate")
            await tell(first, WorkerId("generate-2.1"), "me")  # of one that joined: says nothing of this one
            assert await puller.asked.get() == ("a mate", "trainer")
            second = await world.publish(2)
            await world.broker.append(keys.ROUTES, Entry(payload=b"\xc1"))
            await tell(second, me, "another mate")
            assert await puller.asked.get() == ("another mate", "trainer")
            updates._route_wait_s = 0.05
            await world.publish(3)
            assert await puller.asked.get() == ("trainer",)
    finally:
        ahead.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ahead
