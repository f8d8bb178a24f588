"""However a process that publishes weights ends, short of SIGKILL, no shared memory of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from orchestrator.launch.app import see_off
from tests.fakes.command_line import hear_hang_up
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.trainer_run import TrainerRun, tiny_settings
from transport.broker import keys
from transport.broker.embedded import EmbeddedServer
from transport.broker.redis_streams import connect
from transport.contracts.messages import encode
from transport.contracts.settings import BrokerSettings, EmulatedSettings
from transport.contracts.types import RunName, WorkerId
from transport.process.clock import MonotonicClock
from transport.tensors.shm import SHARED_MEMORY
from workers.trainer.learner import EmulatedLearner
from workers.trainer.worker import TrainerWorker
from workers.weights.publish import PublishingWorker, WeightPublisher

NEVER_S = 1000.0
"""What is begun is not over when its process ends."""


def segments(pid: int) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"streamrl-endings@{pid}@*"))


class Hold:
    """Where a thread stops until it is let go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.go.wait(30)


def held_tensor(hold: Hold) -> torch.Tensor:
    """One whose writing stops at its begin."""

    class HeldTensor(torch.Tensor):
        def reshape(self, *shape: Any) -> torch.Tensor:
            hold.wait()
            return self.as_subclass(torch.Tensor).reshape(*shape)

    return torch.ones(64).as_subclass(HeldTensor)


@pytest.mark.parametrize("phase", ["reading", "writing"])
async def test_a_publisher_that_is_stopped_in_the_middle_takes_everything_back(tmp_path: Path, phase: str):
    hold = Hold()

    def read(path: Path) -> dict[str, torch.Tensor]:
        if phase == "reading":
            hold.wait()
        return {"weight": held_tensor(hold)}

    broker = MemoryBroker(MemoryServer(), RunName("endings"))
    publisher = WeightPublisher("endings", tmp_path)
    worker = PublishingWorker(
        broker,
        WorkerId("publish-0.1"),
        publisher,
        torch.float32,
        read,
        MonotonicClock(),
        model_dir=tmp_path,
        weights_dir=None,
    )
    working = asyncio.create_task(worker.run())
    assert await asyncio.to_thread(hold.reached.wait, 30)
    assert len(segments(os.getpid())) == (phase == "writing")
    working.cancel()
    await asyncio.wait({working})
    assert working.cancelled()
    assert segments(os.getpid()) == [], "also while the thread is still at it"
    hold.go.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert segments(os.getpid()) == [], "nor does the thread leave anything behind"


async def test_a_trainer_that_is_stopped_within_a_round_does_not_wait_for_it(tmp_path: Path):
    run = trainer_run(tmp_path)
    await run.send_batch(0)
    hold = Hold()
    learner = EmulatedLearner(run.settings.emulated, WeightPublisher("endings", tmp_path), lambda _: hold.wait())
    worker = TrainerWorker(
        run.broker, run.settings, WorkerId("train-0.1"), run.model_dir, run.run_dir, learner, MonotonicClock()
    )
    working = asyncio.create_task(worker.run())
    assert await asyncio.to_thread(hold.reached.wait, 30)
    assert len(segments(os.getpid())) == 1
    working.cancel()
    await asyncio.wait({working})
    assert segments(os.getpid()) == []
    hold.go.set()


async def test_a_trainer_is_busy_while_it_computes_and_not_only_once_the_round_is_done(tmp_path: Path):
    run = trainer_run(tmp_path)
    await run.send_batch(0)
    hold, clock = Hold(), ManualClock()
    learner = EmulatedLearner(run.settings.emulated, WeightPublisher("endings", tmp_path), lambda _: hold.wait())
    worker = TrainerWorker(run.broker, run.settings, WorkerId("train-0.1"), run.model_dir, run.run_dir, learner, clock)
    working = asyncio.create_task(worker.run())
    assert await asyncio.to_thread(hold.reached.wait, 30)
    assert (worker.activity().doing, worker.activity().busy_s) == ("training", 0.0)
    clock.advance(7.0)
    assert worker.activity().busy_s == 7.0
    working.cancel()
    await asyncio.wait({working})
    hold.go.set()


def trainer_run(directory: Path) -> TrainerRun:
    """A run whose emulated trainer never ends its first round."""
    model_dir = directory / "model"
    model_dir.mkdir()
    (model_dir / "config.json").write_text("{}")
    (directory / "run").mkdir()
    settings = tiny_settings(engine="emulated")
    section = msgspec.structs.replace(settings.run, name="endings")
    settings = msgspec.structs.replace(
        settings, run=section, emulated=EmulatedSettings(time_scale=1.0, round_s=NEVER_S)
    )
    return TrainerRun(model_dir, directory / "run", settings)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "broker", appendfsync="no")
    await server.start()
    yield server
    await server.stop()


@pytest.mark.parametrize(
    ("name", "code"), [("SIGTERM", 143), ("SIGINT", 143), ("SIGHUP", 143), ("its broker is gone", 1)]
)
async def test_a_trainer_process_takes_its_weights_back(tmp_path: Path, server: EmbeddedServer, name: str, code: int):
    run = trainer_run(tmp_path)
    run.broker = await connect(BrokerSettings(), RunName("endings"), url=server.url, password=server.password)
    await run.broker.put_meta(keys.SETTINGS, encode(run.settings))
    await run.send_batch(0)
    where = ("--broker", server.url, "--run", "endings", "--outage-s", "1", "--run-dir", str(run.run_dir))
    log = tmp_path / "trainer.log"
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "workers", "train", *where, "--model-dir", str(run.model_dir)),
            env={**os.environ, "STREAMRL_BROKER_PASSWORD": server.password},
            stdout=written,
            stderr=written,
            preexec_fn=hear_hang_up,
        )
    try:
        assert await run.broker.read(keys.WEIGHTS, "0-0", count=1, wait_s=120.0), log.read_text()
        assert len(segments(process.pid)) == 1
        await run.broker.close()
        if name.startswith("SIG"):
            process.send_signal(signal.Signals[name])
        else:
            await server.stop()
        async with asyncio.timeout(60):
            assert await process.wait() == code, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert segments(process.pid) == []


async def test_a_run_that_is_over_waits_until_its_workers_have_left():
    broker = MemoryBroker(MemoryServer(), RunName("endings"))
    publisher = WorkerId("publish-0.1")
    await broker.beat(publisher, b"", ttl_s=60.0)
    await asyncio.wait_for(see_off(broker, limit_s=600.0), 60)  # it is not over: nobody is to leave
    await broker.put_meta(keys.STATE, keys.STATE_FINISHED)
    leaving = asyncio.create_task(see_off(broker, limit_s=60.0))
    await asyncio.wait({leaving}, timeout=0.3)
    assert not leaving.done()
    await broker.end_lease(publisher)
    await asyncio.wait_for(leaving, 60)


async def test_a_run_that_is_over_does_not_wait_for_a_worker_that_stays(capsys: pytest.CaptureFixture[str]):
    broker = MemoryBroker(MemoryServer(), RunName("endings"))
    await broker.put_meta(keys.STATE, keys.STATE_FINISHED)
    await broker.beat(WorkerId("publish-0.1"), b"", ttl_s=60.0)
    await see_off(broker, limit_s=0.2)
    assert "publish-0.1" in capsys.readouterr().out
