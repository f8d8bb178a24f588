"""Who the ranks of a trainer are now: nobody joins one that is gone, and a replaced one is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import (
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.contracts.training_memory import Layout
from transport.contracts.types import RunName
from workers.errors import RanksError
from workers.trainer.policy.ranks import ASKS, GPU, MEETING, Meeting, RankGroup, gpu_of, store_of_this_start

SOON_S = 30.0
NOW_S = 0.5
"""What has not come by then does not come: a follower looks five times meanwhile, and a joiner twice."""


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker(MemoryServer(), RunName("run"))


@asynccontextmanager
async def following(meeting: Meeting) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(meeting.follow())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def goes_on(task: asyncio.Task[None]) -> bool:
    done, _ = await asyncio.wait({task}, timeout=NOW_S)
    return not done


async def test_ranks_meet_in_the_file_of_the_present_rank_0(broker: MemoryBroker, tmp_path: Path):
    rank_0, rank_1 = (Meeting(broker, rank, 2, tmp_path / "ranks") for rank in (0, 1))
    await rank_0.open()
    await rank_1.join(limit_s=SOON_S)
    assert rank_0.store == rank_1.store
    assert (tmp_path / "ranks").stat().st_mode & 0o777 == 0o700
    rank_0.close()
    assert not list((tmp_path / "ranks").iterdir())


async def test_a_meeting_whose_rank_0_is_gone_is_not_joined(broker: MemoryBroker, tmp_path: Path):
    rank_0 = Meeting(broker, 0, 2, tmp_path)
    await rank_0.open()
    rank_0.close()  # as the kernel does for one that is killed: its lock is free
    with pytest.raises(RanksError, match=r"rank 1 found no rank 0 .*--run-dir"):
        await Meeting(broker, 1, 2, tmp_path).join(limit_s=NOW_S)


@pytest.mark.parametrize("said", [b"../../etc/passwd", b"", b"\xff" * 16, b"0" * 5000])
async def test_what_the_broker_says_is_no_path(broker: MemoryBroker, tmp_path: Path, said: bytes):
    await broker.put_meta(MEETING, said)
    with pytest.raises(RanksError, match="found no rank 0"):
        await Meeting(broker, 1, 2, tmp_path).join(limit_s=NOW_S)


def test_ranks_that_never_join_are_named(tmp_path: Path):
    with pytest.raises(RanksError, match=r"rank 0 waited .* rank 1, rank 2 never joined: start 3, or"):
        RankGroup(0, Layout(data=3), FileStore(str(tmp_path / "s"), 3), device=torch.device("cpu"), timeout_s=NOW_S)


def test_ranks_with_different_settings_are_refused(tmp_path: Path):
    """As where the run's settings were replaced between their starts: each rank fetches them itself."""
    store = FileStore(str(tmp_path / "store"), 2)
    store.set("rank 1", f"torch {torch.__version__}, {Layout(data=2)}, cpu, settings 2")
    with pytest.raises(RanksError, match=r"rank 0 has .* settings 1; rank 1 has .* settings 2: .* start all anew"):
        RankGroup(0, Layout(data=2), store, device=torch.device("cpu"), timeout_s=SOON_S, alike="settings 1")


async def test_a_rank_starts_over_with_the_next_rank_0_and_not_before(broker: MemoryBroker, tmp_path: Path):
    rank_0, rank_1 = (Meeting(broker, rank, 2, tmp_path) for rank in (0, 1))
    await rank_0.open()
    await rank_1.join(limit_s=SOON_S)
    async with following(rank_1) as task:
        await broker.put_meta(MEETING, b"")  # a broker that lost its tail knows of nobody
        assert await goes_on(task)
        rank_0.close()
        await Meeting(broker, 0, 2, tmp_path).open()
        with pytest.raises(RanksError, match="rank 0 died"):
            await asyncio.wait_for(task, SOON_S)


async def test_rank_0_starts_over_when_another_rank_was_replaced(broker: MemoryBroker, tmp_path: Path):
    rank_0 = Meeting(broker, 0, 3, tmp_path)
    await rank_0.open()
    for rank in (1, 2):
        await Meeting(broker, rank, 3, tmp_path).join(limit_s=SOON_S)
    async with following(rank_0) as task:
        assert await goes_on(task)
        joining = asyncio.create_task(Meeting(broker, 2, 3, tmp_path).join(limit_s=SOON_S))
        with pytest.raises(RanksError, match="rank 2 died"):
            await asyncio.wait_for(task, SOON_S)
        assert not joining.done(), "it must not join what its predecessor was part of"
        rank_0.close()
        again = Meeting(broker, 0, 3, tmp_path)
        await again.open()
        await asyncio.wait_for(joining, SOON_S)


def test_ranks_that_torchrun_starts_again_meet_none_of_those_before(tmp_path: Path):
    """Its agents keep one store: the address of a rank that is gone was what the others connected to."""
    store = FileStore(str(tmp_path / "store"), 3)
    store.set(ASKS.format(2), "somebody of a start that never was whole")
    starts: list[list[Store]] = []
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            meeting = [pool.submit(store_of_this_start, store, rank, 3, SOON_S) for rank in range(3)]
            starts.append([one.result() for one in meeting])
        assert not starts[-1][0].check(["address"])
        starts[-1][1].set("address", "of rank 1")
        assert all(part.get("address") == b"of rank 1" for part in starts[-1])


def test_a_rank_that_torchrun_does_not_start_is_named(tmp_path: Path):
    store = FileStore(str(tmp_path / "store"), 2)
    part = store_of_this_start(store, 0, 2, NOW_S)
    with pytest.raises(RanksError, match="rank 1 never joined"):
        RankGroup(0, Layout(data=2), part, device=torch.device("cpu"), timeout_s=NOW_S)
    with pytest.raises(RuntimeError):
        store_of_this_start(store, 1, 2, NOW_S)


def test_two_ranks_on_one_gpu_are_refused_before_they_connect(tmp_path: Path):
    cuda, gpu = torch.device("cuda"), "GPU-0001 (H100)"
    store = FileStore(str(tmp_path / "store"), 2)
    store.set("rank 1", f"torch {torch.__version__}, {Layout(data=2)}, cuda")
    store.set(GPU.format(1), gpu)
    with pytest.raises(RanksError, match=r"rank 0 and rank 1 both compute on GPU-0001 \(H100\): .*--gpus all"):
        RankGroup(0, Layout(data=2), store, device=cuda, timeout_s=SOON_S, gpu=gpu)
    assert gpu_of(torch.device("cpu")) == ""


def test_a_gpu_is_known_by_what_the_driver_calls_it(monkeypatch: pytest.MonkeyPatch):
    found = SimpleNamespace(uuid="7f3a", name="H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert gpu_of(torch.device("cuda", 0)) == gpu_of(torch.device("cuda", 1)) == "GPU-7f3a (H100)"
