"""An inference server of a worker's own, as another user of the machine meets it: a door that is closed to him."""

from __future__ import annotations

import asyncio
import json
import stat
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import psutil
import pytest
import torch

from tests.fakes.command_line import REPOSITORY
from tests.fakes.sglang_servers import fake_server, own_command
from transport.contracts.llms import Fp8
from transport.contracts.types import GroupId, SamplingParams, WeightIdentity
from transport.process.clock import MonotonicClock
from workers.errors import EngineCrashedError, ModelError
from workers.generation.engine import Completion, GenerationRequest, serving
from workers.generation.server.client import ServerSettings
from workers.generation.server.engine import ServerEngine
from workers.generation.server.sglang import SGLANG, SglangClient
from workers.generation.server.upkeep import ServerProcess, wait_healthy
from workers.generation.server.vllm import VLLM

STARTUP_S = 50.0
PATHS = ("/model_info", "/server_info", "/generate", "/pause_generation", "/update_weights_from_tensor")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fake is found by what starts it. No path of a socket fits into the temporary directory."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 12)))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {"model_type": "qwen3", "vocab_size": 50, "max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def settings(model_dir: Path, *arguments: str) -> ServerSettings:
    command = (*own_command(), *arguments)
    return ServerSettings(directory=model_dir, log=model_dir / "s.log", command=command, slots=4, startup_s=STARTUP_S)


def told_to_everyone(server: ServerProcess) -> str:
    """What every user of the machine sees of a process."""
    assert server.pid is not None
    return " ".join(psutil.Process(server.pid).cmdline())


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def exists(path: Path) -> bool:
    return path.exists()


async def test_an_sglang_server_answers_its_worker_and_nobody_else(model_dir: Path) -> None:
    theirs = model_dir / "mine.yaml"
    theirs.write_text("tp-size: 1\n")
    engine = ServerEngine(SGLANG, settings(model_dir, "--config", str(theirs)), MonotonicClock())
    async with serving(engine):
        sampling = SamplingParams(max_new_tokens=5)
        prompt = np.arange(3, dtype=np.int32)
        engine.submit(GenerationRequest(group_id=GroupId("0/0"), prompt_ids=prompt, samples=(0,), sampling=sampling))
        (sample,) = await engine.results()
        assert isinstance(sample, Completion)
        server = engine.server.process
        assert server is not None
        for path in PATHS:
            with pytest.raises(HTTPError, match="401") as refused:
                await asyncio.to_thread(urlopen, server.url + path, timeout=10.0)
            refused.value.close()
        assert server.key not in told_to_everyone(server)
        config_path = Path(told_to_everyone(server).partition("--config ")[2].split()[0])
        assert (permissions(config_path.parent), permissions(config_path)) == (0o700, 0o600)
        assert text_of(config_path) == f'tp-size: 1\napi-key: "{server.key}"\n', "what the user configures stays"
        assert permissions(model_dir / "s.log") == 0o600
    assert not exists(config_path.parent)


async def test_fp8_is_given_up_by_starting_the_server_again_and_no_sample_is_lost(model_dir: Path) -> None:
    weights = WeightIdentity(epoch=1, version=4)
    engine = ServerEngine(SGLANG, replace(settings(model_dir), fp8=Fp8(kv=True, weights=True)), MonotonicClock())
    async with serving(engine):
        server = engine.server.process
        assert server is not None
        await engine.load_weights(weights, {"a": torch.ones(2)})
        before, told = server.pid, told_to_everyone(server)
        assert "--kv-cache-dtype fp8_e4m3" in told
        assert "--quantization fp8" in told
        await engine.use_full_precision("too far off")
        sampling, prompt = SamplingParams(max_new_tokens=5), np.arange(3, dtype=np.int32)
        engine.submit(GenerationRequest(group_id=GroupId("0/0"), prompt_ids=prompt, samples=(0,), sampling=sampling))
        async with asyncio.timeout(STARTUP_S):
            (sample,) = await engine.results()
        assert isinstance(sample, Completion)
        assert sample.spans[0].weights == weights, "the new server was given what the old one held"
        again = server.pid
        assert again not in (None, before)
        assert not {"--kv-cache-dtype", "--quantization"} & set(told_to_everyone(server).split())
        await engine.use_full_precision("said with every load")
        await engine.load_weights(WeightIdentity(epoch=1, version=5), {"a": torch.ones(2)})
        assert server.pid == again, "nothing is left to be given up"


async def test_a_vllm_server_is_reached_through_a_directory_of_its_user_alone(model_dir: Path) -> None:
    made_of = ServerSettings(directory=model_dir, log=model_dir / "s.log", command=own_command(), slots=4)
    server = ServerProcess(VLLM, made_of)
    client = VLLM.client(server.url, made_of, server.key)
    await client.open()
    try:
        await server.start()
        await until_healthy(server)
        await client.set_label("1.2.ab")
        path = Path(server.url.removeprefix("unix:"))
        assert permissions(path.parent) == 0o700
        assert server.key not in told_to_everyone(server)
        listening = [one for one in psutil.Process(server.pid).net_connections() if one.status == psutil.CONN_LISTEN]
        assert listening == [], "no port"
    finally:
        await client.close()
        await server.stop()
    assert not exists(path.parent)


async def until_healthy(server: ServerProcess) -> None:
    """The fake has not what vLLM is asked beside /health."""
    settings = ServerSettings(directory=Path(), log=Path())
    client = SglangClient(server.url, settings, server.key)
    await client.open()
    try:
        await wait_healthy(client, STARTUP_S, server)
    finally:
        await client.close()


async def test_a_server_elsewhere_that_asks_for_a_key_says_where_it_comes_from(model_dir: Path) -> None:
    async with fake_server() as server:
        made_of = ServerSettings(directory=model_dir, log=model_dir / "s.log", url=server.url, slots=4, startup_s=5.0)
        with pytest.raises(EngineCrashedError, match="STREAMRL_ENGINE_KEY"):
            async with serving(ServerEngine(SGLANG, made_of, MonotonicClock())):
                pass


async def test_a_key_on_the_command_line_is_refused(model_dir: Path) -> None:
    for argument in ("--api-key", "--api-key=mine"):
        server = ServerProcess(SGLANG, settings(model_dir, argument))
        with pytest.raises(ModelError, match="leave --api-key out"):
            await server.start()
        await server.stop()
