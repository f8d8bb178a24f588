"""Two data-parallel ranks as processes on a real broker: the same weights as one, whoever got which group."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from safetensors.torch import load_file

from tests.fakes.preloaded import Program
from tests.fakes.trainer_run import DigestPublisher, TrainerRun, close_of, round_of, tiny_settings
from tests.fakes.training import make_groups
from transport.broker import keys
from transport.broker.embedded import EmbeddedServer
from transport.broker.redis_streams import connect
from transport.contracts.messages import CheckpointSaved, StepDone, TrainerReady, encode
from transport.contracts.settings import BrokerSettings, LivenessSettings
from transport.contracts.types import RunName
from workers.models import prepare_model

BATCHES = 3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("random:qwen3-tiny", cache_dir=tmp_path_factory.mktemp("models"), say=lambda line: None)


@pytest.fixture
async def run(model_dir: Path, tmp_path: Path) -> AsyncIterator[TrainerRun]:
    async with AsyncExitStack() as stack:
        server = EmbeddedServer(tmp_path / "broker", appendfsync="no")
        await server.start()
        stack.push_async_callback(server.stop)
        # half of it is what a rank waits for the others, here while they import torch on a busy machine
        settings = msgspec.structs.replace(tiny_settings(ranks=2), liveness=LivenessSettings(stall_s=240.0))
        run = TrainerRun(model_dir, tmp_path / "run", settings)
        run.broker = await connect(BrokerSettings(), RunName("run"), url=server.url, password=server.password)
        stack.push_async_callback(run.broker.close)
        await run.broker.put_meta(keys.SETTINGS, encode(settings))
        await run.broker.put_meta(keys.STATUS, b"{}")  # somebody orchestrates, however long a rank takes to start
        run.environment = {**os.environ, "STREAMRL_BROKER_PASSWORD": server.password}
        run.url = server.url
        yield run


Rank = Callable[..., Coroutine[Any, Any, asyncio.subprocess.Process]]
Ranks = Callable[[], Coroutine[Any, Any, list[asyncio.subprocess.Process]]]


@pytest.fixture
def start_forked(run: TrainerRun, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts one rank that need not import torch: what a start by hand adds is tried with ``start_rank``."""
    started: list[Program] = []

    def start(rank: int | str, *options: str) -> Program:
        index = ["--index", str(rank)] if rank != "" else []
        words = ("train", *index, *options, *place_of(run))
        started.append(Program("workers", words, cwd=tmp_path, environ=run.environment))
        return started[-1]

    yield start
    for rank in started:
        rank.kill()


def place_of(run: TrainerRun) -> list[str]:
    return ["--broker", run.url, "--run", "run", "--run-dir", str(run.run_dir), "--model-dir", str(run.model_dir)]


@pytest.fixture
async def start_rank(run: TrainerRun) -> AsyncIterator[Rank]:
    """Starts one rank; none outlives the test."""
    started: list[asyncio.subprocess.Process] = []

    async def start(rank: int | str, *options: str, torchrun: Sequence[str] = ()) -> asyncio.subprocess.Process:
        index = ["--index", str(rank)] if rank != "" else []
        launcher = ("-m", "torch.distributed.run", *torchrun, "-m", "--") if torchrun else ("-m",)
        command = (sys.executable, *launcher, "workers", "train", *index, *options, *place_of(run))
        started.append(await asyncio.create_subprocess_exec(*command, env=run.environment))
        return started[-1]

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
def start_ranks(start_rank: Rank) -> Ranks:
    """Starts both."""

    async def start() -> list[asyncio.subprocess.Process]:
        return [await start_rank(0), await start_rank(1)]

    return start


async def send_batch(run: TrainerRun, batch: int, *, checkpoint: bool = False) -> None:
    """Two groups on one rank, one on the other, then a pad for the first; and a round packed for one rank."""
    groups = make_groups(seed=batch, batch=batch)
    await run.write_groups(groups)
    await run.write_rows(groups)
    first, second, third = (round_of([group], batch, 0).ranks[0] for group in groups)
    packed_for_one = round_of(groups[2:], batch, 1)
    padded = msgspec.structs.replace(packed_for_one, ranks=((), third))
    await run.send(msgspec.structs.replace(packed_for_one, round_id=f"{batch}.0", ranks=(first, second)))
    await run.send(padded if batch else packed_for_one, close_of(groups, batch, checkpoint=checkpoint))


async def train_on_one_rank(run: TrainerRun, directory: Path) -> dict[int, str]:
    single = TrainerRun(run.model_dir, directory, tiny_settings())
    for batch in range(BATCHES):
        await single.send_batch(batch)
    await single.finish()
    publisher = DigestPublisher()
    await single.trainer(publisher).run()
    return publisher.digests


async def test_two_ranks_train_what_one_does(
    run: TrainerRun, start_forked: Callable[..., Program], tmp_path: Path
) -> None:
    for batch in range(BATCHES):
        await send_batch(run, batch)
    await run.finish()
    ranks = [start_forked(0), start_forked(1)]
    assert [await rank.wait() for rank in ranks] == [0, 0]
    (ready,) = await run.told(TrainerReady)
    assert isinstance(ready, TrainerReady)
    assert ready.dp_size == 2
    steps = [event for event in await run.told(StepDone) if isinstance(event, StepDone)]
    assert [(step.weights.version, step.num_rows) for step in steps] == [(1, 9), (2, 9), (3, 9)]
    await train_on_one_rank(run, tmp_path / "single")
    found, expected = (load_file(d / "model" / "model.safetensors") for d in (run.run_dir, tmp_path / "single"))
    assert found.keys() == expected.keys()
    assert max((found[name] - expected[name]).abs().max().item() for name in found) < 1e-5


@pytest.mark.chaos
async def test_a_rank_stays_until_rank_0_has_saved_everything(
    run: TrainerRun, start_ranks: Ranks, tmp_path: Path
) -> None:
    """Rank 0 dies in its last save: the other rank starts over with the next rank 0, which cannot start without it."""
    await send_batch(run, 0)
    await run.finish()
    run.environment["STREAMRL_FAULTS"] = f"train.checkpoint_written:1:{tmp_path / 'died'}"
    before = await start_ranks()
    assert await before[0].wait() == -signal.SIGKILL
    after = await start_ranks()
    assert await before[1].wait() == 1
    assert [await rank.wait() for rank in after] == [0, 0]
    assert (run.run_dir / "model" / "model.safetensors").exists()


@pytest.mark.chaos
async def test_a_killed_rank_takes_both_back_to_the_checkpoint(
    run: TrainerRun, start_ranks: Ranks, start_rank: Rank, tmp_path: Path
) -> None:
    await send_batch(run, 0, checkpoint=True)
    await send_batch(run, 1)
    ranks = await start_ranks()
    await run.until_told(StepDone, 2)
    await run.until_told(CheckpointSaved)  # written while the second batch was trained
    ranks[1].send_signal(signal.SIGKILL)
    await ranks[1].wait()
    again = await start_rank(1)  # rank 0 starts over as soon as it sees it; no mini-batch has to close for that
    assert await ranks[0].wait() == 1
    ranks = [await start_rank(0), again]
    await send_batch(run, 2)
    await run.finish()
    assert [await rank.wait() for rank in ranks] == [0, 0]
    ready = [event.weights for event in await run.told(TrainerReady) if isinstance(event, TrainerReady)]
    assert [(weights.epoch, weights.version) for weights in ready] == [(1, 0), (2, 1)]
    await train_on_one_rank(run, tmp_path / "single")
    found, expected = (load_file(d / "model" / "model.safetensors") for d in (run.run_dir, tmp_path / "single"))
    assert max((found[name] - expected[name]).abs().max().item() for name in found) < 1e-5


@pytest.mark.chaos
async def test_torchrun_starts_all_ranks_again_when_one_is_killed(
    run: TrainerRun, start_rank: Rank, tmp_path: Path
) -> None:
    """As often as --max-restarts allows: from the checkpoint, under a new epoch."""
    await send_batch(run, 0, checkpoint=True)
    await send_batch(run, 1)
    agent = await start_rank("", torchrun=("--standalone", "--nproc-per-node", "2", "--max-restarts", "1"))
    await run.until_told(StepDone, 2)
    await run.until_told(CheckpointSaved)
    ranks = psutil.Process(agent.pid).children()
    ranks[1].kill()
    await run.until_told(TrainerReady, 2)
    assert not any(rank.is_running() for rank in ranks), "all start over"
    await send_batch(run, 2)
    await run.finish()
    assert await agent.wait() == 0
    ready = [event.weights for event in await run.told(TrainerReady) if isinstance(event, TrainerReady)]
    assert [(weights.epoch, weights.version) for weights in ready] == [(1, 0), (2, 1)]
    await train_on_one_rank(run, tmp_path / "single")
    found, expected = (load_file(d / "model" / "model.safetensors") for d in (run.run_dir, tmp_path / "single"))
    assert max((found[name] - expected[name]).abs().max().item() for name in found) < 1e-5


@pytest.mark.long  # starts four ranks, and waits for a deadline
async def test_a_full_disk_on_one_rank_costs_a_checkpoint_and_a_hang_the_round(
    run: TrainerRun, start_ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 cannot write its part of a checkpoint: both go on, and save after the next batch. Then it stops in a
    round: the other ends by name at its deadline, and the next two go on from that checkpoint, under a new epoch."""
    output = ""
    ranks = await start_ranks()
    await run.until_told(TrainerReady)
    limits = resource.prlimit(ranks[1].pid, resource.RLIMIT_FSIZE)
    resource.prlimit(ranks[1].pid, resource.RLIMIT_FSIZE, (250_000, limits[1]))  # its moments have 313 KB
    await send_batch(run, 0, checkpoint=True)
    async with asyncio.timeout(60):
        while "no checkpoint; trying again" not in output:
            await asyncio.sleep(0.1)
            output += "".join(capfd.readouterr())
    assert "no checkpoint: this rank cannot write its part" in output
    assert re.search(r"checkpoint \S+/checkpoints/step-\S+ .*: rank 1: \[Errno 27\] File too large", output)
    assert await run.told(CheckpointSaved) == []
    resource.prlimit(ranks[1].pid, resource.RLIMIT_FSIZE, limits)
    await send_batch(run, 1)
    await run.until_told(CheckpointSaved)

    ranks[1].send_signal(signal.SIGSTOP)
    await send_batch(run, 2)
    assert await ranks[0].wait() == 1
    assert re.search(r"error: rank 0 lost the others: .*[Tt]imed out", "".join(capfd.readouterr()))
    ranks[1].kill()
    await ranks[1].wait()
    again = await start_ranks()
    await run.finish()
    assert [await rank.wait() for rank in again] == [0, 0]
    ready = [event.weights for event in await run.told(TrainerReady) if isinstance(event, TrainerReady)]
    assert [(weights.epoch, weights.version) for weights in ready] == [(1, 0), (2, 2)]


async def test_ranks_listen_to_this_machine_only(run: TrainerRun, start_forked: Callable[..., Program]) -> None:
    """Neither their meeting point nor gloo nor the weights are reached from another machine."""
    await send_batch(run, 0)
    ranks = [start_forked(0), start_forked(1)]
    await run.until_told(StepDone, 1)
    listening = {
        connection.laddr.ip
        for rank in ranks
        for connection in psutil.Process(rank.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    await run.finish()
    assert [await rank.wait() for rank in ranks] == [0, 0]
    assert listening == {"127.0.0.1"}
    assert not list((run.run_dir / "ranks").iterdir())


@pytest.mark.chaos
async def test_one_command_starts_all_ranks_and_ends_them_together(run: TrainerRun, start_rank: Rank) -> None:
    """As in a container: a rank that is killed ends the command, which is started again."""
    await send_batch(run, 0, checkpoint=True)
    command = await start_rank("", "--ranks", "2")
    await run.until_told(StepDone, 1)
    first, second = psutil.Process(command.pid).children()
    second.kill()
    assert await command.wait() == 128 + signal.SIGKILL
    assert not first.is_running()
    await send_batch(run, 1)
    await run.finish()
    again = await start_rank("", "--ranks", "2")
    assert await again.wait() == 0
    steps = [event for event in await run.told(StepDone) if isinstance(event, StepDone)]
    assert {step.weights.version for step in steps} == {1, 2}


async def test_ranks_find_their_numbers_by_themselves(run: TrainerRun, start_forked: Callable[..., Program]) -> None:
    """Of the launcher's variable, and of what is free on this machine."""
    await send_batch(run, 0)
    run.environment["SLURM_PROCID"] = "0"
    ranks = [start_forked("")]
    run.environment["RANK"] = "1"  # torchrun's goes before
    ranks.append(start_forked("auto"))
    del run.environment["RANK"], run.environment["SLURM_PROCID"]
    await run.until_told(StepDone, 1)
    for rank in ranks:
        rank.terminate()
    assert [await rank.wait() for rank in ranks] == [143, 143]
    await run.finish()
    ranks = [start_forked("auto") for _ in range(2)]
    assert [await rank.wait() for rank in ranks] == [0, 0]
    assert (run.run_dir / "model" / "model.safetensors").exists()


async def test_a_rank_that_the_run_does_not_have_is_named(
    run: TrainerRun, start_rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await (await start_rank(2)).wait() == 2
    assert "there is no rank 2 in run 'run', which has trainer.ranks = 2, numbered from 0" in capfd.readouterr().err
