"""A broker that outlives its server: real primaries, replicas, sentinels, nodes of a cluster, some of them killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.fakes.redis_servers import Servers, Watched, free_port, until
from transport.broker.base import ZERO_ID, Entry
from transport.broker.primary import watchers_of
from transport.broker.redis_link import RedisLink
from transport.broker.redis_streams import RedisBroker, connect
from transport.contracts.settings import BrokerSettings
from transport.contracts.types import RunName
from transport.errors import BrokerRejectedError, BrokerUnavailableError

RUN = RunName("moved")
WAIT_S = 90.0


def entry(number: int) -> Entry:
    return Entry(fields={"number": str(number)})


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path)
    yield made
    made.kill()


async def test_after_its_primary_died_the_broker_is_the_replica_that_sentinels_promote(servers: Servers) -> None:
    watched = Watched(servers)
    primary, replica, sentinels = watched.primary, watched.replica, watched.sentinels
    url = f"redis+sentinel://127.0.0.1:{free_port()},{','.join(f'127.0.0.1:{one.port}' for one in sentinels)}/runs"
    broker = await connect(BrokerSettings(url=url, outage_s=WAIT_S), RUN)
    try:
        before = (await broker.info()).boot_id
        await broker.append("log", entry(0))
        with redis.Redis(port=primary.port) as client:
            assert client.wait(1, 30_000) == 1
        blocked = asyncio.create_task(broker.read("other", ZERO_ID, count=1, wait_s=WAIT_S))
        await asyncio.sleep(0.1)
        primary.kill()
        async with asyncio.timeout(WAIT_S):
            await broker.append("log", entry(1))
            await broker.append("other", entry(2))
            assert [one.entry.fields["number"] for one in await blocked] == ["2"]
        numbers = [one.entry.fields["number"] for one in await broker.read("log", ZERO_ID, count=9)]
        assert numbers == ["0", "1"]
        assert (await broker.info()).boot_id != before, "what was lost is looked for as after a restart"
        with redis.Redis(port=replica.port) as client:
            assert client.info("replication")["role"] == "master"
    finally:
        await broker.close()


async def test_a_primary_that_was_demoted_is_left(servers: Servers) -> None:
    """As in a planned fail-over: it lives, answers reads and refuses writes."""
    first = servers.start()
    second = servers.start("--replicaof", f"127.0.0.1 {first.port}")
    sentinel = servers.start(sentinel=f"sentinel monitor runs 127.0.0.1 {first.port} 1\n")
    with redis.Redis(port=second.port) as client, redis.Redis(port=sentinel.port) as asked:
        until(lambda: client.info("replication")["master_link_status"] == "up", "the replica")
        until(lambda: len(asked.execute_command("SENTINEL", "REPLICAS", "runs")) == 1, "the sentinel")
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/runs"
        broker = RedisBroker(RedisLink(url, outage_s=WAIT_S), RUN)
        try:
            await broker.append("log", entry(0))
            asked.execute_command("SENTINEL", "FAILOVER", "runs")
            until(lambda: client.info("replication")["role"] == "master", "the fail-over")
            await broker.append("log", entry(1))
            numbers = [one.entry.fields["number"] for one in await broker.read("log", ZERO_ID, count=9)]
            assert numbers == ["0", "1"]
        finally:
            await broker.close()


async def test_a_run_lives_on_the_node_of_a_cluster_that_has_its_keys(servers: Servers) -> None:
    nodes = [servers.start_node() for _ in range(2)]
    for node, slots in zip(nodes, (range(0, 8192), range(8192, 16384)), strict=True):
        with redis.Redis(port=node.port) as client:
            client.execute_command("CLUSTER", "ADDSLOTS", *slots)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].bus_port)
    for node in nodes:
        with redis.Redis(port=node.port) as client:
            until(lambda c=client: b"cluster_state:ok" in c.execute_command("CLUSTER", "INFO"), "the cluster")
    asked: set[str] = set()
    for name in ("a", "b", "c", "d", "e", "f", "g", "h"):  # of which each node has some
        settings = BrokerSettings(url=f"redis+cluster://127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[1].port}")
        broker = await connect(settings, RunName(name))
        try:
            await broker.append("log", entry(0))
            await broker.put_meta("state", b"running")
            assert len(await broker.read("log", ZERO_ID, count=9)) == 1
            asked.add((await broker.info()).boot_id)
        finally:
            await broker.close()
    assert len(asked) == 2


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://127.0.0.1:26379",
        "redis+sentinel://127.0.0.1:26379/a/b",
        "redis+cluster://127.0.0.1:6379/0",
        "redis+sentinel://,127.0.0.1:1/name",
        "redis+sentinel://127.0.0.1:port/name",
    ],
)
def test_what_names_no_primary_is_refused_with_how_it_is_written(url: str) -> None:
    with pytest.raises(BrokerRejectedError, match=r"broker\.url is no URL of a broker"):
        RedisLink(url)


async def test_sentinels_that_do_not_answer_are_named(servers: Servers) -> None:
    sentinel = servers.start(sentinel="sentinel monitor runs 127.0.0.1 1 1\n")
    dead = free_port()
    link = RedisLink(f"redis+sentinel://127.0.0.1:{dead},127.0.0.1:{sentinel.port}/others", outage_s=0.1)
    with pytest.raises(BrokerUnavailableError, match=rf"{dead}.*{sentinel.port}: watches no 'others'"):
        await link.command("PING")
    await link.close()


def test_user_password_and_options_are_those_of_the_servers() -> None:
    url, watchers = watchers_of("rediss+sentinel://me:pw@[::1],other:1/runs?db=3", "key")
    assert url == "rediss://me:pw@[::1]:26379?db=3"
    assert watchers is not None
    assert (watchers.places, watchers.name, watchers.key) == ([("::1", 26379), ("other", 1)], "runs", "key")
    assert watchers_of("redis://host/2", "key") == ("redis://host/2", None)
