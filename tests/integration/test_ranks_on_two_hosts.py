"""Two ranks of a trainer on two hosts: torchrun's agents meet over the network, and so do gloo and the weights."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from safetensors.torch import load_file

from tests.fakes.redis_servers import ServerProcess, free_port
from tests.fakes.second_host import SecondHost, second_host
from tests.fakes.trainer_run import DigestPublisher, TrainerRun, close_of, round_of, tiny_settings
from tests.fakes.training import make_groups
from transport.broker import keys
from transport.broker.embedded import packaged_binary
from transport.broker.redis_streams import connect
from transport.contracts.messages import StepDone, encode, manifest_decoder
from transport.contracts.settings import BrokerSettings, LivenessSettings
from transport.contracts.types import RunName
from transport.process.secret import SHARED_SECRET
from workers.models import prepare_model

SECRET = "a secret that two hosts share"
STALL_S = 240.0
"""Half of it is what a rank waits for the others in a collective, here while they import torch on a busy machine."""


@pytest.fixture
def other_host() -> Iterator[SecondHost]:
    with second_host() as host:
        yield host


@pytest.fixture
async def run(other_host: SecondHost, tmp_path: Path) -> AsyncIterator[TrainerRun]:
    """Its broker listens on this host's end of the cable too."""
    model_dir = prepare_model("random:qwen3-tiny", cache_dir=tmp_path / "models", say=lambda line: None)
    bind = ("--bind", "127.0.0.1", other_host.here, "--requirepass", SECRET)
    server = ServerProcess(packaged_binary(), tmp_path / "broker", *bind)
    try:
        server.wait_listening()
        settings = msgspec.structs.replace(tiny_settings(ranks=2), liveness=LivenessSettings(stall_s=STALL_S))
        run = TrainerRun(model_dir, tmp_path / "run", settings)
        run.broker = await connect(BrokerSettings(), RunName("run"), url=server.url, password=SECRET)
        await run.broker.put_meta(keys.SETTINGS, encode(settings))
        await run.broker.put_meta(keys.STATUS, b"{}")  # somebody orchestrates, however long a rank takes to start
        run.url = f"redis://{other_host.here}:{server.port}"
        run.environment = {**os.environ, "STREAMRL_BROKER_PASSWORD": SECRET, SHARED_SECRET: SECRET}
        yield run
        await run.broker.close()
    finally:
        server.kill()


def command_of(run: TrainerRun, address: str, meeting: str) -> list[str]:
    """One host's ranks, of which ``address`` is."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--local-addr", address]
    is_first = int(meeting.startswith(f"{address}:"))  # which torchrun asks the host's name, and a namespace has none
    meet = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        meeting,
        "--rdzv-id",
        "run",
        "--rdzv-conf",
        f"is_host={is_first}",
    ]
    where = ["--broker", run.url, "--run", "run", "--run-dir", str(run.run_dir), "--model-dir", str(run.model_dir)]
    return [sys.executable, *torchrun, *meet, "-m", "--", "workers", "train", "--listen", address, *where]


async def end(started: list[asyncio.subprocess.Process]) -> None:
    """With their ranks, which outlive an agent that is killed."""
    for agent in started:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(agent.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        if agent.returncode is None:
            agent.kill()
        await agent.wait()


@pytest.mark.long  # four processes import torch
async def test_ranks_of_two_hosts_train_what_one_process_does(
    run: TrainerRun, other_host: SecondHost, tmp_path: Path
) -> None:
    single = TrainerRun(run.model_dir, tmp_path / "single", tiny_settings())
    groups = make_groups(seed=0, batch=0)
    await run.write_groups(groups)
    await run.write_rows(groups)
    both = round_of(groups, 0, 0)
    two = both.ranks[0]
    await run.send(type(both)(round_id="0.0", batch=0, ranks=(two[:2], two[2:])), close_of(groups, 0))
    await single.send_batch(0)
    await single.finish()
    meeting = f"{other_host.here}:{free_port()}"
    started: list[asyncio.subprocess.Process] = []
    try:
        for prefix, address in (((), other_host.here), (other_host.run, other_host.there)):
            command = [*prefix, *command_of(run, address, meeting)]
            started.append(await asyncio.create_subprocess_exec(*command, env=run.environment))
        await run.until_told(StepDone, 1)
        manifests = await run.broker.read(keys.WEIGHTS, "0-0", count=10)
        places = str(manifest_decoder.decode(manifests[-1].entry.payload).parts)
        assert all(f"tcp://{address}:" in places for address in (other_host.here, other_host.there))
        await run.finish()
        assert [await agent.wait() for agent in started] == [0, 0]
    finally:
        await end(started)
    await single.trainer(DigestPublisher()).run()
    found, expected = (load_file(d / "model" / "model.safetensors") for d in (run.run_dir, tmp_path / "single"))
    assert found.keys() == expected.keys()
    assert max((found[name] - expected[name]).abs().max().item() for name in found) < 1e-5


@pytest.mark.long
async def test_ranks_whose_hosts_share_no_directory_are_refused_before_they_train(
    run: TrainerRun, other_host: SecondHost, tmp_path: Path
) -> None:
    """The other host has a file system of its own where the checkpoints go, under the same path."""
    checkpoints = run.run_dir / "checkpoints"
    checkpoints.mkdir(parents=True)
    apart = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {checkpoints} && exec "$@"', "sh")
    meeting = f"{other_host.here}:{free_port()}"
    started: list[asyncio.subprocess.Process] = []
    log = tmp_path / "ranks.log"
    try:
        for prefix, address in (((), other_host.here), ((*other_host.run, *apart), other_host.there)):
            command = [*prefix, *command_of(run, address, meeting)]
            with log.open("ab") as file:
                both = {"stdout": file, "stderr": file}
                started.append(await asyncio.create_subprocess_exec(*command, env=run.environment, **both))
        assert 0 not in [await agent.wait() for agent in started]
        said = log.read_text()
        assert said.count("rank 1: on other it is not the directory of rank 0: all ranks need the same one") >= 2
        assert not list(checkpoints.iterdir())
    finally:
        await end(started)
