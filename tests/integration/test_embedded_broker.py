"""The embedded server as a run uses it: killed under load, started again on its data, refused to a second owner."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import psutil
import pytest

from transport.broker import keys
from transport.broker.base import ZERO_ID, Append, Commit, Entry, GroupWrite, RowWrite
from transport.broker.connect import connect
from transport.broker.embedded import PORTS, EmbeddedServer
from transport.broker.redis_streams import RedisBroker
from transport.errors import BrokerRejectedError, BrokerUnavailableError, RunExistsError
from transport.settings import BrokerSettings
from transport.types import Column, RowId, RunName, group_id, row_id

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
    assert url == server.url == f"redis://{server.address}"
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


async def test_only_the_owner_reads_its_secrets(server: EmbeddedServer, tmp_path: Path) -> None:
    await server.start()
    directory = tmp_path / "broker"
    for name in ("broker.password", "broker.conf"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    command = " ".join(psutil.Process(server.process.pid).cmdline())
    assert server.password not in command + server.url
    assert len(server.password) >= 24
    with pytest.raises(BrokerRejectedError, match="refuses the password"):
        await connect(BrokerSettings(), RUN, url=server.url)
    await (await connect_to(server)).close()


async def test_port_is_none_that_a_reconnecting_client_may_take(server: EmbeddedServer) -> None:
    await server.start()
    assert int(server.address.rpartition(":")[2]) in PORTS
    assert PORTS.stop <= 32_768  # where Linux starts to give ports to clients


async def test_second_owner_of_a_directory_is_refused(server: EmbeddedServer, tmp_path: Path) -> None:
    await server.start()
    with pytest.raises(RunExistsError, match="a live broker owns"):
        await EmbeddedServer(tmp_path / "broker").start()
    broker = await connect_to(server)
    await broker.close()


async def test_next_owner_finds_port_password_and_data(server: EmbeddedServer, tmp_path: Path) -> None:
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
