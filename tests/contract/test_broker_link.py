"""What only a real connection can show: cuts, cancellations, restarts, servers that must be refused."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from tests.fakes.broker_entries import told
from tests.fakes.cutting_proxy import CuttingProxy
from tests.fakes.explicit_ids import append_at
from tests.fakes.redis_servers import ServerProcess, find_binary, free_port, self_signed
from tests.fakes.small_disk import filled, small_disk
from transport.broker import keys
from transport.broker.base import ZERO_ID, Commit, Entry, GroupWrite, RowWrite, StreamWrite
from transport.broker.redis_link import RedisLink, ScriptCall
from transport.broker.redis_streams import NUM_SLOTS, RedisBroker, check_server, connect
from transport.contracts.settings import BrokerSettings
from transport.contracts.types import Column, GroupId, RowId, RunName, WorkerId
from transport.errors import BrokerFullError, BrokerRejectedError, BrokerUnavailableError

RUN = RunName("r")
HELLO = Entry(fields={"name": "hello"}, payload=b"\x80")


@pytest.fixture
async def proxy(server_url: str) -> AsyncIterator[CuttingProxy]:
    async with CuttingProxy(int(server_url.rpartition(":")[2])) as made:
        yield made


@pytest.fixture
async def broker(proxy: CuttingProxy, run_name: RunName) -> AsyncIterator[RedisBroker]:
    made = RedisBroker(RedisLink(proxy.url, outage_s=20.0), run_name)
    await made.info()  # the connection is there, so that the next reply is the one to cut
    yield made
    await made.close()


def finished_row(row_id: str = "0/0/0") -> Commit:
    columns = {Column.RESPONSE_IDS: b"\x01"}
    return Commit(
        groups=[GroupWrite(group_id=GroupId("0/0"), size=2, columns={Column.PROMPT_TEXT: b"p"})],
        rows=[RowWrite(row_id=RowId(row_id), columns=columns, on_insert=[told("finished")])],
        appends=[told("reported")],
    )


# -- a cut connection: the server has done it, the client cannot know


@pytest.mark.parametrize("warm", [True, False], ids=["script known", "script unknown"])
async def test_commit_sent_again_happens_once(broker: RedisBroker, proxy: CuttingProxy, warm: bool) -> None:
    if warm:
        await broker.commit(Commit())
    proxy.cut_replies = 2
    result = await broker.commit(finished_row())
    assert proxy.num_cut == 2
    assert result.inserted == (True,)
    assert result.retained_bytes == await broker.retained_bytes() == 2
    written = await broker.read(keys.EVENTS, ZERO_ID, count=9)
    assert [found.entry.fields["name"] for found in written] == ["finished", "reported"]


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda broker: append_at(broker, "log", HELLO, "5-0"), "5-0"),
        (
            lambda broker: broker.append_many([StreamWrite(stream="log", entries=[("5-0", HELLO), ("5-1", HELLO)])]),
            [2],
        ),
        (lambda broker: broker.next_incarnation("generate-0"), 1),
        (lambda broker: broker.acquire_epoch("trainer"), 1),
        (lambda broker: broker.drop_groups([GroupId("9/9")]), 1),
        (lambda broker: broker.trim("filled", "9-0"), 1),
    ],
    ids=["append", "append_many", "next_incarnation", "acquire_epoch", "drop_groups", "trim"],
)
async def test_write_sent_again_answers_as_the_first_time(
    broker: RedisBroker,
    proxy: CuttingProxy,
    write: Callable[[RedisBroker], Awaitable[object]],
    expected: object,
) -> None:
    await append_at(broker, "filled", HELLO, "1-0")
    group = GroupWrite(group_id=GroupId("9/9"), size=1, columns={Column.PROMPT_TEXT: b"x"})
    await broker.commit(Commit(groups=[group]))
    proxy.cut_replies = 3
    assert await write(broker) == expected
    assert proxy.num_cut == 3


async def test_plain_append_sent_again_is_appended_once(broker: RedisBroker, proxy: CuttingProxy) -> None:
    for _ in range(5):
        proxy.cut_replies = 1
        await broker.append("log", HELLO)
    proxy.cut_replies = 1
    await broker.enqueue("queue", HELLO)
    assert await broker.length("log") == 5
    assert await broker.length("queue") == 1
    assert proxy.num_cut == 6


async def test_dead_letter_is_told_although_the_reply_was_cut(broker: RedisBroker, proxy: CuttingProxy) -> None:
    await broker.enqueue("queue", HELLO)
    await broker.claim("queue", "c", count=1)
    proxy.cut_replies = 1
    taken, dead = await broker.reclaim("queue", "d", idle_s=0, max_deliveries=1, count=9)
    assert taken == []
    assert [letter.entry for letter in dead] == [HELLO]
    assert len(await broker.dead_letters()) == 1


async def test_claim_whose_reply_was_cut_is_reclaimed(broker: RedisBroker, proxy: CuttingProxy) -> None:
    await broker.enqueue("queue", HELLO)
    proxy.cut_replies = 1
    assert await broker.claim("queue", "c", count=1) == []
    taken, _ = await broker.reclaim("queue", "c", idle_s=0, max_deliveries=3, count=1)
    assert [(delivery.entry, delivery.deliveries) for delivery in taken] == [(HELLO, 2)]


async def test_request_that_arrives_after_a_later_one_is_refused(server_url: str, run_name: RunName) -> None:
    """A client gives a request up and sends the next one, and only then the network delivers the first."""
    link, slot = RedisLink(server_url), keys.session(run_name, "client", 0)

    async def append(number: int) -> None:
        request = ScriptCall({"streams": [["log", 0, [["*", ["number", str(number)]]]]]})
        await link.script("append", slot, keys.full(run_name, ""), number, request)

    await append(2)
    with pytest.raises(BrokerRejectedError, match="OUTDATED"):
        await append(1)
    assert await link.command("XLEN", keys.full(run_name, "log")) == 1
    await link.close()


async def test_many_writes_at_once_leave_few_session_keys(server_url: str, run_name: RunName) -> None:
    broker, link = RedisBroker(RedisLink(server_url), run_name), RedisLink(server_url)
    await asyncio.gather(*(broker.append("log", HELLO) for _ in range(10 * NUM_SLOTS)))
    assert await broker.length("log") == 10 * NUM_SLOTS
    sessions = await link.command("KEYS", keys.full(run_name, "session:*"))
    assert isinstance(sessions, list)
    assert 0 < len(sessions) <= NUM_SLOTS
    for key in sessions:
        assert isinstance(key, bytes)
        assert await link.command("TTL", key) != -1
    await broker.close()
    await link.close()


# -- cancellation


async def test_connection_of_a_cancelled_call_is_not_used_again(broker: RedisBroker, proxy: CuttingProxy) -> None:
    await broker.put_meta("first", b"1")
    await broker.put_meta("second", b"2")
    proxy.held = True
    reading = asyncio.create_task(broker.get_meta("first"))
    async with asyncio.timeout(60):
        await proxy.reply_held.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    proxy.held = False
    before = proxy.num_connections
    assert [await broker.get_meta("second") for _ in range(3)] == [b"2"] * 3
    assert proxy.num_connections == before + 1


async def test_cancelled_blocking_reads_leave_the_client_whole(broker: RedisBroker) -> None:
    for n in range(20):
        reading = asyncio.create_task(broker.read("log", ZERO_ID, count=1, wait_s=30.0))
        claiming = asyncio.create_task(broker.claim("queue", "c", count=1, wait_s=30.0))
        for _ in range(n):
            await asyncio.sleep(0)
        reading.cancel()
        claiming.cancel()
        await asyncio.gather(reading, claiming, return_exceptions=True)
        await broker.put_meta("n", str(n).encode())
        assert await broker.get_meta("n") == str(n).encode()


async def test_cancelled_write_does_not_disturb_the_next(broker: RedisBroker, proxy: CuttingProxy) -> None:
    proxy.held = True
    writing = asyncio.create_task(broker.append("log", Entry(fields={"name": "given up"})))
    async with asyncio.timeout(60):
        await proxy.reply_held.wait()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    proxy.held = False
    await broker.append("log", Entry(fields={"name": "next"}))
    found = [entry.entry.fields["name"] for entry in await broker.read("log", ZERO_ID, count=9)]
    assert found == ["given up", "next"]


# -- a server that went away


async def test_scripts_are_loaded_again_when_the_server_forgot_them(server_url: str, run_name: RunName) -> None:
    broker, link = RedisBroker(RedisLink(server_url), run_name), RedisLink(server_url)
    await broker.append("log", HELLO)
    await link.command("SCRIPT", "FLUSH")
    await broker.append("log", HELLO)
    assert await broker.length("log") == 2
    await broker.close()
    await link.close()


class Servers:
    """Starts servers that a test may kill; those that live on are killed at its end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[ServerProcess] = []

    def start(self, *options: str, port: int | None = None, kind: str = "valkey") -> ServerProcess:
        binary = find_binary(kind)
        if binary is None:
            pytest.skip(f"no {kind}-server on this machine: apt-get install {kind}-server")
        server = ServerProcess(binary, self._directory, *options, port=port)
        self._started.append(server)
        server.wait_listening()
        return server

    def kill(self) -> None:
        for server in self._started:
            server.kill()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path / "server")
    yield made
    made.kill()


async def test_calls_resume_when_the_server_is_back(servers: Servers) -> None:
    first = servers.start()
    broker = RedisBroker(RedisLink(first.url, outage_s=20.0), RUN)
    boot_id = (await broker.info()).boot_id
    first.kill()
    calls = [
        asyncio.create_task(broker.append("log", HELLO)),
        asyncio.create_task(broker.read("log", ZERO_ID, count=1, wait_s=15.0)),
        asyncio.create_task(broker.claim("queue", "c", count=1, wait_s=0.0)),
    ]
    done, _ = await asyncio.wait(calls, timeout=0.3)
    assert not done
    servers.start(port=first.port)
    async with asyncio.timeout(60):
        entry_id, read, claimed = await asyncio.gather(*calls)
    assert [found.entry_id for found in read] == [entry_id]
    assert claimed == []
    assert (await broker.info()).boot_id != boot_id
    await broker.close()


async def test_outage_that_lasts_has_a_name(servers: Servers) -> None:
    server = servers.start()
    server.kill()
    link = RedisLink(server.url, outage_s=0.2)
    with pytest.raises(BrokerUnavailableError, match=f"127.0.0.1:{server.port} is unavailable"):
        await RedisBroker(link, RUN).append("log", HELLO)
    with pytest.raises(BrokerUnavailableError):
        await connect(BrokerSettings(url=server.url, outage_s=0.1), RUN)
    await link.close()


async def test_full_server_says_so_and_can_be_emptied(servers: Servers) -> None:
    server = servers.start("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    broker = await connect(BrokerSettings(url=server.url, outage_s=0.1), RUN)

    async def fill() -> None:
        for slot in range(100):
            columns = {Column.PROMPT_IDS: bytes(200_000)}
            await broker.commit(Commit(groups=[GroupWrite(group_id=GroupId(f"0/{slot}"), size=1, columns=columns)]))

    with pytest.raises(BrokerUnavailableError, match=r"raise its maxmemory or lower broker\.max_retained_bytes"):
        await fill()
    assert await broker.drop_groups([GroupId(f"0/{slot}") for slot in range(100)]) > 200_000
    assert (await broker.commit(finished_row())).inserted == (True,)
    await broker.close()


MANY = [StreamWrite(stream="many", is_queue=True, entries=[("1-0", HELLO)])]
WRITES: dict[str, Callable[[RedisBroker], Awaitable[object]]] = {
    "append": lambda broker: broker.append("log", HELLO),
    "append_many": lambda broker: broker.append_many(MANY),
    "enqueue": lambda broker: broker.enqueue("queue", HELLO),
    "claim": lambda broker: broker.claim("another", "c", count=1, wait_s=0.0),
    "commit": lambda broker: broker.commit(finished_row()),
    "acquire_epoch": lambda broker: broker.acquire_epoch("trainer"),
    "beat": lambda broker: broker.beat(WorkerId("generate-0.1"), b"{}", ttl_s=10.0),
    "put_meta": lambda broker: broker.put_meta("name", b"value"),
}
"""Every way to write: plain commands, and scripts that let the server's answer through or look at it first."""


@pytest.mark.parametrize("kind", ["valkey", pytest.param("redis", marks=pytest.mark.redis)])
@pytest.mark.parametrize("name", WRITES)
async def test_a_write_that_finds_the_server_full_waits_for_room(servers: Servers, name: str, kind: str) -> None:
    server = servers.start(kind=kind)
    impatient = await connect(BrokerSettings(url=server.url, outage_s=0.1), RUN)
    patient = await connect(BrokerSettings(url=server.url, outage_s=60.0), RUN)
    server.limit_memory(1)
    with pytest.raises(BrokerFullError, match=r"is full: its memory: raise its maxmemory .* \(.*command not allowed"):
        await WRITES[name](impatient)
    waiting = asyncio.create_task(WRITES[name](patient))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    server.limit_memory(0)
    async with asyncio.timeout(60):
        await waiting
    await impatient.close()
    await patient.close()


async def fill_log(broker: RedisBroker) -> None:
    """The server notices at the next write to its file that there is no room for it."""
    while True:
        await broker.append("log", HELLO)


async def test_a_write_that_finds_the_disk_full_waits_for_room(servers: Servers, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        server = servers.start("--appendonly", "yes", "--appendfsync", "everysec", "--dir", str(disk))
        impatient = await connect(BrokerSettings(url=server.url, outage_s=3.0), RUN)
        patient = await connect(BrokerSettings(url=server.url, outage_s=60.0), RUN)
        with filled(disk):
            with pytest.raises(BrokerFullError, match=r"cannot write its files: free some space .*MISCONF"):
                await fill_log(impatient)
            waiting = asyncio.create_task(patient.append("log", HELLO))
            done, _ = await asyncio.wait({waiting}, timeout=0.2)
            assert not done
        async with asyncio.timeout(60):
            await waiting
        await impatient.close()
        await patient.close()
        servers.kill()


async def test_a_server_that_is_no_master_any_more_is_waited_for(servers: Servers) -> None:
    server = servers.start()
    broker = await connect(BrokerSettings(url=server.url, outage_s=60.0), RUN)
    with redis.Redis(port=server.port) as client:
        client.replicaof("127.0.0.1", 1)  # fails over
        waiting = [asyncio.create_task(WRITES[name](broker)) for name in ("append", "commit", "put_meta")]
        done, _ = await asyncio.wait(waiting, timeout=0.2)
        assert not done
        client.replicaof("NO", "ONE")
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting)
    await broker.close()


# -- servers that must be refused, each with what to change


async def test_password(servers: Servers) -> None:
    server = servers.start("--requirepass", "p@ss:word")
    right = BrokerSettings(url=server.url, password="p@ss:word", outage_s=5)
    for settings, more in [
        (right, {}),
        (BrokerSettings(url=server.url), {"password": "p@ss:word"}),
        (BrokerSettings(url=server.url.replace("//", "//:p%40ss%3Aword@")), {"password": "ignored"}),
        (BrokerSettings(), {"url": server.url, "password": "p@ss:word"}),
    ]:
        broker = await connect(settings, RUN, **more)
        await broker.close()
    for wrong in (BrokerSettings(url=server.url), BrokerSettings(url=server.url, password="wrong")):
        with pytest.raises(BrokerRejectedError, match=r"refuses the password.*set broker\.password"):
            await connect(wrong, RUN)


async def test_password_for_a_server_that_has_none(server_url: str) -> None:
    with pytest.raises(BrokerRejectedError, match="password"):
        await connect(BrokerSettings(url=server_url, password="useless"), RUN)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_server_that_evicts_is_refused(servers: Servers, policy: str) -> None:
    server = servers.start("--maxmemory-policy", policy)
    with pytest.raises(BrokerRejectedError, match=f"{policy}.*config set maxmemory-policy noeviction"):
        await connect(BrokerSettings(url=server.url), RUN)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"redis_version": "6.2.14"}, r"is Redis 6\.2\.14: use Redis >= 7\.0 or Valkey >= 7\.2"),
        ({"redis_version": "7.2.4", "valkey_version": "7.1.0"}, r"is Valkey 7\.1\.0"),
        ({}, "unknown version"),
        ({"redis_version": "7.0.0"}, "maxmemory-policy is unknown"),
    ],
)
def test_unusable_server_is_refused(facts: dict[str, str], message: str) -> None:
    with pytest.raises(BrokerRejectedError, match=message):
        check_server(facts, "host:6379")


@pytest.mark.parametrize(
    "facts",
    [{"redis_version": "7.0.0"}, {"redis_version": "10.1"}, {"redis_version": "7.2.4", "valkey_version": "9.1"}],
)
def test_usable_server(facts: dict[str, str]) -> None:
    check_server({**facts, "maxmemory_policy": "noeviction"}, "host:6379")


async def test_url_of_another_kind_is_refused() -> None:
    with pytest.raises(BrokerRejectedError, match=r"broker\.url is no URL of a broker"):
        await connect(BrokerSettings(url="http://localhost"), RUN)


async def test_error_never_shows_the_password(servers: Servers) -> None:
    server = servers.start()
    server.kill()
    with pytest.raises(BrokerUnavailableError) as caught:
        await connect(BrokerSettings(url=f"redis://:secret@127.0.0.1:{server.port}", outage_s=0.05), RUN)
    assert "secret" not in str(caught.value)


# -- TLS


@pytest.fixture
def tls_files(tmp_path: Path) -> Path:
    """A certificate of 127.0.0.1 that signs itself, its key, and that key behind a pass phrase."""
    _, key = self_signed(tmp_path)
    locked = f"openssl rsa -aes256 -passout pass:word -in {key} -out {tmp_path / 'locked.pem'}"
    subprocess.run(locked.split(), check=True, capture_output=True)
    return tmp_path


@pytest.mark.redis
async def test_tls(servers: Servers, tls_files: Path) -> None:
    certificate, key = str(tls_files / "ca.pem"), str(tls_files / "key.pem")
    port = free_port()
    tls = ["--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-auth-clients", "no"]
    servers.start(*tls, kind="redis").wait_listening(port)
    url = f"rediss://127.0.0.1:{port}"
    broker = await connect(BrokerSettings(url=url, tls_ca=certificate, outage_s=5), RUN)
    assert (await broker.commit(finished_row())).inserted == (True,)
    await broker.close()
    with pytest.raises(BrokerRejectedError, match=r"not trusted .*broker\.tls_ca"):
        await connect(BrokerSettings(url=url, outage_s=5), RUN)


@pytest.mark.redis
async def test_a_server_that_asks_for_a_certificate(servers: Servers, tls_files: Path) -> None:
    certificate, key = str(tls_files / "ca.pem"), str(tls_files / "key.pem")
    port = free_port()
    tls = ["--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", key]
    servers.start(*tls, "--tls-ca-cert-file", certificate, "--tls-auth-clients", "yes", kind="redis").wait_listening(
        port
    )
    settings = BrokerSettings(url=f"rediss://127.0.0.1:{port}", tls_ca=certificate, outage_s=5)
    shown = msgspec.structs.replace(settings, tls_cert=certificate, tls_key=key)
    broker = await connect(shown, RUN)
    assert (await broker.commit(finished_row())).inserted == (True,)
    await broker.close()
    # the server's refusal, or the reset of its connection that may overtake it
    with pytest.raises((BrokerRejectedError, BrokerUnavailableError), match=r"broker\.tls_cert and broker\.tls_key"):
        await connect(settings, RUN)
    for wrong in ("no-such-file.pem", certificate, str(tls_files / "locked.pem")):
        with pytest.raises(BrokerRejectedError, match="without a pass phrase"):
            await connect(msgspec.structs.replace(shown, tls_key=wrong), RUN)


async def test_tls_to_a_server_without(server_url: str) -> None:
    link = RedisLink(server_url.replace("redis", "rediss"), outage_s=0.1, timeout_s=0.2)
    with pytest.raises(BrokerUnavailableError, match="if it does not speak TLS, use redis://"):
        await link.command("PING")
    await link.close()


async def test_tls_to_something_else() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"-ERR what is this?\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        link = RedisLink(f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}", outage_s=5.0)
        with pytest.raises(BrokerRejectedError, match="does not speak TLS as asked"):
            await link.command("PING")
        await link.close()


async def test_server_that_hangs_is_not_waited_for(servers: Servers) -> None:
    server = servers.start()
    link = RedisLink(server.url, outage_s=0.1, timeout_s=0.2)
    await link.command("PING")
    server.process.send_signal(signal.SIGSTOP)
    try:
        for fresh in (link, RedisLink(server.url, password="p", outage_s=0.1, timeout_s=0.2)):
            with pytest.raises(BrokerUnavailableError, match="no answer in time"):
                await fresh.command("PING")
            await fresh.close()
    finally:
        server.process.send_signal(signal.SIGCONT)


# -- what others may have written


async def test_foreign_entry_is_read_escaped(server_url: str, run_name: RunName) -> None:
    link = RedisLink(server_url)
    broker = RedisBroker(link, run_name)
    await link.command("XADD", keys.full(run_name, "log"), "1-0", b"\xff\x00", b"\xfe", "payload", b"\xff")
    (found,) = await broker.read("log", ZERO_ID, count=9)
    assert found.entry == Entry(fields={"\\xff\x00": "\\xfe"}, payload=b"\xff")
    await broker.close()
