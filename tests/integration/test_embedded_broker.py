"""The embedded server as a run uses it: killed under load, started again on its data, refused to a second owner."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path

import psutil
import pytest

from transport.broker import keys
from transport.broker.base import ZERO_ID, Append, Commit, Entry, GroupWrite, RowWrite
from transport.broker.embedded import REMOVED, EmbeddedServer
from transport.broker.redis_link import RedisLink
from transport.broker.redis_streams import RedisBroker, connect
from transport.contracts.settings import BrokerSettings
from transport.contracts.types import Column, RowId, RunName, group_id, row_id
from transport.errors import BrokerRejectedError, BrokerUnavailableError, ForeignError, RunExistsError

RUN = RunName("r")
GROUP_SIZE = 8


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    made = EmbeddedServer(tmp_path / "broker")
    yield made
    await made.stop()


async def connect_to(server: EmbeddedServer, outage_s: float = 20.0) -> RedisBroker:
    return await connect(BrokerSettings(outage_s=outage_s), RUN, url=server.url, password=server.password)


async def test_start_use_stop_start(server: EmbeddedServer) -> None:
    url = await server.start()
    assert url == server.url
    broker = await connect_to(server)
    await broker.put_meta("settings", b"\x80")
    await broker.close()
    await server.stop()
    assert server.process.returncode == 0
    await server.stop()
    assert await server.start() == url
    broker = await connect_to(server)
    assert await broker.get_meta("settings") == b"\x80"
    await broker.close()


async def test_it_listens_for_workers_of_other_hosts_where_its_user_names_an_address(tmp_path: Path) -> None:
    """With its password alone; on the same port after it died, because workers know that."""
    server = EmbeddedServer(tmp_path / "broker", listen="127.0.0.1")
    await server.start()
    try:
        for _ in range(2):
            far = await connect(BrokerSettings(outage_s=20.0), RUN, url=server.network_url, password=server.password)
            await far.put_meta("settings", b"\x80")
            await far.close()
            await server.kill()
            await server.start()
        with pytest.raises(BrokerRejectedError, match="password"):
            await connect(BrokerSettings(outage_s=5.0), RUN, url=server.network_url, password="wrong")
    finally:
        await server.stop()
    with pytest.raises(BrokerRejectedError, match=r"launcher\.address: 203\.0\.113\.9 is no address of this host"):
        EmbeddedServer(tmp_path / "other", listen="203.0.113.9")


async def test_only_the_owner_reads_its_secrets(server: EmbeddedServer, tmp_path: Path) -> None:
    await server.start()
    directory = tmp_path / "broker"
    for name in ("broker.password", "broker.conf"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    command = " ".join(psutil.Process(server.process.pid).cmdline())
    assert server.password not in command + server.url
    assert stat.S_IMODE((directory / "broker.sock").stat().st_mode) == 0o600
    assert len(server.password) >= 24
    with pytest.raises(BrokerRejectedError, match="refuses the password"):
        await connect(BrokerSettings(), RUN, url=server.url)
    await (await connect_to(server)).close()


async def test_it_listens_on_its_socket_alone_however_deep_that_lies(tmp_path: Path) -> None:
    directory = tmp_path / ("so deep " * 20) / 'it\'s "here" #1?' / "broker"
    server = EmbeddedServer(directory)
    await server.start()
    try:
        assert len(server.address) > 200
        assert not [c for c in psutil.Process(server.process.pid).net_connections("inet") if c.status == "LISTEN"]
        broker = await connect_to(server)
        await broker.put_meta("m", b"1")
        await server.kill()
        await server.start()
        assert await broker.get_meta("m") == b"1"
        await broker.close()
    finally:
        await server.stop()


async def test_no_client_changes_the_server_itself(server: EmbeddedServer) -> None:
    await server.start()
    link = RedisLink(server.url, password=server.password)
    known = {bytes(name).decode() for name in await link.command("COMMAND", "LIST")}
    assert not known & set(REMOVED)
    assert {"xadd", "xdel", "get", "hgetall", "info", "evalsha"} <= known
    for command in ("CONFIG SET maxmemory 1", "MODULE LIST", "SHUTDOWN NOSAVE", "FLUSHALL", "REPLICAOF 127.0.0.1 1"):
        with pytest.raises(BrokerRejectedError, match="unknown command"):
            await link.command(*command.split())
        with pytest.raises(BrokerRejectedError, match=r"[Uu]nknown"):
            await link.command("EVAL", f"return redis.call({', '.join(map(repr, command.split()))})", 0)
    await link.close()


# -- directories that somebody else has prepared


@pytest.mark.parametrize("password", ['x"\nloadmodule /tmp/x.so\n#', "x" * 24 + "\nport 6666", "short", ""])
async def test_a_password_that_would_be_configuration_is_refused_by_name(tmp_path: Path, password: str) -> None:
    directory = tmp_path / "broker"
    directory.mkdir()
    (directory / "broker.password").write_text(password)
    for use in (EmbeddedServer(directory).start, to_thread(EmbeddedServer(directory).attach)):
        with pytest.raises(ForeignError, match=r"broker\.password holds no password of an embedded broker"):
            await use()
    assert not (directory / "broker.conf").exists()


async def test_an_append_only_file_changes_nothing_but_keys_and_values(tmp_path: Path) -> None:
    """As it is loaded, its commands run unchecked: MODULE LOAD in it was code that ran."""
    module, proof = tmp_path / "module.so", tmp_path / "proof"
    source = f'void ValkeyModule_OnLoad(void) {{ FILE *f = fopen("{proof}", "w"); fclose(f); }}'
    (tmp_path / "module.c").write_text(f"#include <stdio.h>\n{source}\n")
    compiler = shutil.which("cc")
    if compiler is not None:  # without one the file is not there, and the command is refused all the same
        arguments = [compiler, "-shared", "-fPIC", "-o", module, tmp_path / "module.c"]
        await asyncio.to_thread(subprocess.run, arguments, timeout=60, check=True)
    for command in (("MODULE", "LOAD", str(module)), ("CONFIG", "SET", "save", "1 1"), ("REPLICAOF", "127.0.0.1", "1")):
        directory = tmp_path / command[0] / "broker"
        aof = directory / "aof"
        aof.mkdir(parents=True)
        (aof / "appendonly.aof.manifest").write_text("file appendonly.aof.1.incr.aof seq 1 type i\n")
        words = b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in command)
        (aof / "appendonly.aof.1.incr.aof").write_bytes(b"*%d\r\n" % len(command) + words)
        with pytest.raises(BrokerRejectedError, match=f"unknown command '{command[0]}'"):
            await EmbeddedServer(directory).start()
    assert not proof.exists()


@pytest.mark.parametrize("name", ["broker.conf", "broker.password", "broker.lock", "broker.log", "aof", "aof/x.aof"])
async def test_a_link_is_not_followed(tmp_path: Path, name: str) -> None:
    directory, target = tmp_path / "broker", tmp_path / "mine"
    target.mkdir() if name == "aof" else target.write_text("precious")
    (directory / name).parent.mkdir(parents=True)
    (directory / name).symlink_to(target)
    with pytest.raises(ForeignError, match=f"{name} is not a plain file or directory: put what it names in its place"):
        await EmbeddedServer(directory).start()
    assert target.is_dir() or target.read_text() == "precious"


async def test_a_linked_directory_is_refused_and_its_mode_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "broker").symlink_to(tmp_path / "mine")
    for use in (EmbeddedServer(tmp_path / "broker").start, to_thread(EmbeddedServer(tmp_path / "broker").attach)):
        with pytest.raises(ForeignError, match="broker is no directory"):
            await use()
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o755
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", ["", "broker.password", "aof/appendonly.aof.1.incr.aof"])
async def test_what_belongs_to_another_user_is_named_with_both(tmp_path: Path, name: str) -> None:
    path = tmp_path / "broker" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if not name else path.write_text("x" * 32)
    os.chown(path, 12345, 12345)
    with pytest.raises(ForeignError, match=r"belongs to user 12345, you are user root \(0\)"):
        await EmbeddedServer(tmp_path / "broker").start()


async def test_the_password_of_an_ended_run_goes_to_nobody(server: EmbeddedServer, tmp_path: Path) -> None:
    """Whoever listens where it listened, on a port of former days or where another user can, is not asked."""
    await server.start()
    await server.stop()
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1000))
        writer.close()

    stranger = await asyncio.start_server(listen, "127.0.0.1", 0)
    (tmp_path / "broker" / "broker.port").write_text(str(stranger.sockets[0].getsockname()[1]))
    looking = EmbeddedServer(tmp_path / "broker")
    looking.attach()
    link = RedisLink(looking.url, password=looking.password, outage_s=0.2)
    with pytest.raises(BrokerUnavailableError):
        await link.command("PING")
    await link.close()
    stranger.close()
    await stranger.wait_closed()
    assert heard == []


def to_thread(call: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    return lambda: asyncio.to_thread(call)


async def test_second_owner_of_a_directory_is_refused(server: EmbeddedServer, tmp_path: Path) -> None:
    await server.start()
    with pytest.raises(RunExistsError, match="a live broker owns"):
        await EmbeddedServer(tmp_path / "broker").start()
    broker = await connect_to(server)
    await broker.close()


async def test_next_owner_finds_socket_password_and_data(server: EmbeddedServer, tmp_path: Path) -> None:
    await server.start()
    broker = await connect_to(server)
    await broker.put_meta("m", b"1")
    await server.stop()
    resumed = EmbeddedServer(tmp_path / "broker")
    try:
        assert await resumed.start() == server.url
        assert await broker.get_meta("m") == b"1"
    finally:
        await broker.close()
        await resumed.stop()


async def test_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "broker")
    await server.start()
    await server.stop()
    for part in (tmp_path / "broker" / "aof").glob("*.manifest"):
        part.write_text("not a manifest\n")
    with pytest.raises(BrokerRejectedError, match=r"the embedded broker ended with 1: .*manifest"):
        await server.start()


async def test_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    binary = tmp_path / "sleeper"
    binary.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    binary.chmod(0o755)
    server = EmbeddedServer(tmp_path / "broker", binary=binary)
    with pytest.raises(BrokerUnavailableError, match=r"not ready after 0\.2 s: it wrote no log"):
        await server.start(ready_s=0.2)
    assert server.process.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
async def test_server_dies_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from transport.broker.embedded import EmbeddedServer\n"
        "async def main():\n"
        "    server = EmbeddedServer(pathlib.Path(sys.argv[1]))\n"
        "    await server.start()\n"
        "    print(server.process.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path / "broker"), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    async with asyncio.timeout(60):
        orphan = psutil.Process(int(await owner.stdout.readline()))
        owner.kill()
        await owner.communicate()  # the pipe ends only when the orphan, which does not hold it, cannot keep it open
    await asyncio.to_thread(psutil.wait_procs, [orphan], 10)
    assert not orphan.is_running()
    successor = EmbeddedServer(tmp_path / "broker")
    await successor.start()
    await successor.stop()


# -- killed under load

Acknowledged = dict[RowId, bytes]


async def write_rows(broker: RedisBroker, writer: int, acknowledged: Acknowledged) -> None:
    """Insert rows until cancelled; each tells of itself in the events log."""
    for slot in count():
        group = group_id(writer, slot)
        prompt = GroupWrite(group_id=group, size=GROUP_SIZE, columns={Column.PROMPT_TEXT: b"p"})
        await broker.commit(Commit(groups=[prompt]))
        for sample in range(GROUP_SIZE):
            row = row_id(group, sample)
            columns = {Column.RESPONSE_IDS: os.urandom(512), Column.ROLLOUT_LOGPROBS: bytes(2048)}
            told = Append(stream=keys.EVENTS, entry=Entry(fields={"row": row}))
            result = await broker.commit(Commit(rows=[RowWrite(row_id=row, columns=columns, on_insert=[told])]))
            if result.inserted == (True,):
                acknowledged[row] = columns[Column.RESPONSE_IDS]


async def told_rows(broker: RedisBroker) -> list[RowId]:
    return [RowId(found.entry.fields["row"]) for found in await broker.read(keys.EVENTS, ZERO_ID, count=1_000_000)]


async def kill_under_load(server: EmbeddedServer, *, kills: int) -> tuple[Acknowledged, RedisBroker]:
    """Kill and restart the server while four writers go on, without their noticing. Returns what was acknowledged."""
    acknowledged: Acknowledged = {}
    await server.start()
    broker = await connect_to(server)
    writers = [asyncio.create_task(write_rows(broker, n, acknowledged)) for n in range(4)]
    for kill in range(kills):
        await until_grown(acknowledged, writers, by=100 + 37 * kill)
        await server.kill()
        await server.start()
    await until_grown(acknowledged, writers, by=50)
    for writer in writers:
        writer.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    return acknowledged, broker


async def until_grown(acknowledged: Acknowledged, writers: list[asyncio.Task[None]], *, by: int) -> None:
    enough = len(acknowledged) + by
    async with asyncio.timeout(60):
        while len(acknowledged) < enough:
            assert not any(writer.done() for writer in writers)
            await asyncio.sleep(0.005)


async def test_nothing_acknowledged_is_lost_under_always(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "broker", appendfsync="always")
    try:
        acknowledged, broker = await kill_under_load(server, kills=3)
        told = await told_rows(broker)
        assert len(told) == len(set(told))
        assert set(acknowledged) <= set(told)
        rows = await broker.read_rows(list(acknowledged), [Column.RESPONSE_IDS])
        assert [row[Column.RESPONSE_IDS] for row in rows] == list(acknowledged.values())
        await broker.close()
    finally:
        await server.stop()


async def test_what_survives_everysec_is_consistent(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "broker", appendfsync="everysec")
    try:
        acknowledged, broker = await kill_under_load(server, kills=3)
        told = await told_rows(broker)
        assert len(told) == len(set(told))
        every = [row_id(group_id(writer, slot), n) for writer in range(4) for slot in range(400) for n in range(8)]
        rows = await broker.read_rows(every, [Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS])
        there = [row for row, columns in zip(every, rows, strict=True) if columns]
        assert max(len(acknowledged), len(there)) < len(every)
        assert set(there) == set(told)
        assert {len(columns) for columns in rows} == {0, 2}
        sizes = sum(len(value) for columns in rows for value in columns.values())
        groups = await broker.read_groups([group_id(w, s) for w in range(4) for s in range(400)], [Column.PROMPT_TEXT])
        assert await broker.retained_bytes() == sizes + sum(bool(group) for group in groups)
        await broker.close()
    finally:
        await server.stop()
