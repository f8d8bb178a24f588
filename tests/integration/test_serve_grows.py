"""``serve --launcher``: the generation workers that the run asks for are started, and are gone when it is over."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.config.load import resolve
from orchestrator.config.run_directory import RunDir
from orchestrator.errors import ChildFailedError
from orchestrator.launch import app
from orchestrator.launch.launchers.base import ProcessSpec
from orchestrator.launch.launchers.local import LocalLauncher
from orchestrator.launch.ownership import take_name
from tests.fakes.redis_servers import ServerProcess, find_binary
from transport.broker import keys
from transport.broker.redis_streams import connect
from transport.contracts.messages import SpawnWorkers, encode
from transport.contracts.types import RunName
from transport.errors import first_error


class Recording(LocalLauncher):
    """Starts ``argv`` in the place of each worker."""

    def __init__(self, *argv: str) -> None:
        self._argv = argv
        self.started: list[asyncio.subprocess.Process] = []
        self.specs: list[ProcessSpec] = []
        self.began = asyncio.Event()

    async def start(self, spec: ProcessSpec, output: Path) -> asyncio.subprocess.Process:
        self.specs.append(spec)
        self.started.append(await super().start(dataclasses.replace(spec, argv=self._argv), output))
        self.began.set()
        return self.started[-1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    made = ServerProcess(find_binary("valkey") or pytest.skip("no valkey-server"), tmp_path / "server")
    try:
        made.wait_listening()
        yield made
    finally:
        made.kill()


async def grown(
    server: ServerProcess, directory: Path, launcher: Recording, monkeypatch: pytest.MonkeyPatch, over: asyncio.Event
) -> bool:
    """Serve a run that asks for one more worker until ``over``."""
    overrides = ["run.name=mine", f"broker.url={server.url}", "generation.workers=1", "liveness.max_restarts=1"]
    settings = resolve("tiny", [], overrides, {}).settings
    monkeypatch.setattr(app, "open_launcher", lambda *_, **__: launcher)
    rundir = RunDir(directory / "mine")
    rundir.logs.mkdir(parents=True)
    broker = await connect(settings.broker, RunName("mine"))
    claim = await take_name(broker, rundir)
    await broker.put_meta(keys.SPAWN, encode(SpawnWorkers(total=1, reason="generation is slower")))
    await broker.close()

    async def serving() -> bool:
        await over.wait()
        return True

    return await app._growing(serving, settings, claim, rundir, directory, resume=False)


async def test_a_worker_that_is_asked_for_is_started_and_ended_with_the_run(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    launcher = Recording("/bin/sleep", "600")
    assert await grown(server, tmp_path, launcher, monkeypatch, launcher.began)
    (spec,) = launcher.specs
    assert spec.name == "generate-1"
    assert server.url in spec.argv
    assert launcher.started[0].returncode == -15


async def test_one_that_cannot_work_ends_the_control_plane_with_its_reason(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    launcher = Recording("/bin/sh", "-c", "echo 'error: no such model'; exit 4")
    with pytest.raises(BaseExceptionGroup) as raised:
        await grown(server, tmp_path, launcher, monkeypatch, asyncio.Event())
    error = first_error(raised.value)
    assert isinstance(error, ChildFailedError)
    assert "no such model" in str(error)
