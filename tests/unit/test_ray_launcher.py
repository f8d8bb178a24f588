"""Actors of Ray as processes, before a Ray in this process whose actors do what a test says."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, EngineLostError
from orchestrator.launch.launchers import ray_cluster
from orchestrator.launch.launchers.base import NODE_LOST
from orchestrator.launch.launchers.ray_cluster import RayLauncher, RayUnavailableError, in_time
from orchestrator.launch.processes import last_words
from tests.fakes.launched import RANKS, WORKER, configured, opened, until
from tests.fakes.manual_clock import ManualClock
from tests.fakes.ray_api import NO_PACKAGE, RayApi, ray_api
from tests.fakes.redis_servers import free_port


@asynccontextmanager
async def on_ray() -> AsyncIterator[tuple[RayApi, RayLauncher]]:
    with ray_api() as api:
        async with opened(RayLauncher(configured("launcher.kind=ray").settings, 2)) as launcher:
            yield api, launcher


async def test_a_head_of_ray_that_is_gone_is_a_reason_then_the_end_and_one_that_comes_back_is_neither(tmp_path: Path):
    address = ("127.0.0.1", free_port())

    async def answer() -> asyncio.Server:
        return await asyncio.start_server(lambda _, writer: writer.close(), *address)

    clock, head = ManualClock(), await answer()
    launcher = RayLauncher(configured("launcher.kind=ray", "launcher.place=auto").settings, 1)
    launcher.watch_head(f"{address[0]}:{address[1]}", clock)
    assert await launcher.pending() == {}
    for silent_s in (0.0, 134.0):  # 135 s are three quarters of 180
        head.close()
        await head.wait_closed()
        await launcher.pending()
        clock.advance(silent_s)
        with pytest.raises(RayUnavailableError, match="ends after 135 s"):
            await launcher.start(WORKER, tmp_path / "log")
        await launcher.pending()
        head = await answer()
        assert await launcher.pending() == {}
    head.close()
    await head.wait_closed()
    await launcher.pending()
    clock.advance(136.0)
    with pytest.raises(EngineLostError, match=f"its head at {address[0]}:{address[1]} took no connection for 136 s"):
        await launcher.pending()


async def test_an_actor_is_a_process_with_what_it_writes_and_its_exit_code(tmp_path: Path):
    async with on_ray() as (api, launcher):
        output = tmp_path / "generate-1.log"
        process = await launcher.start(WORKER, output)
        assert await launcher.pending() == {
            "generate-1": "Ray: asks for 2 CPU, of which the cluster has 1000 free of 1000"
        }
        (actor,) = api.actors
        assert actor.options["memory"] == 512 * 2**20
        assert actor.given[:2] == (["worker", "generate"], {"K": "v"})
        actor.says(b"a line of the worker\n")
        await until(lambda: process.has_begun)
        assert await launcher.pending() == {}
        process.terminate()
        assert actor.sent == [15]
        await asyncio.sleep(0)
        actor.says(b"", 3)
        assert await process.wait() == 3
        assert output.read_text() == "a line of the worker\n"


async def test_ranks_of_ray_end_with_the_first_that_is_lost_and_all_are_lost_with_the_head(tmp_path: Path):
    async with on_ray() as (api, launcher):
        ranks = await launcher.start(RANKS, tmp_path / "train-0.log")
        assert api.groups == [[{"CPU": 1.0, "GPU": 1.0}] * 2]
        assert [actor.given[1]["RANK"] for actor in api.actors] == ["0", "1"]
        api.actors[1].lost()
        assert await ranks.wait() == NODE_LOST
        assert "its node has died" in (tmp_path / "train-0.log").read_text()
        worker = await launcher.start(WORKER, tmp_path / "log")
        clock = ManualClock()
        launcher.watch_head(f"127.0.0.1:{free_port()}", clock)
        assert "has taken no connection" in (await launcher.pending())["generate-1"]
        clock.advance(200.0)
        with pytest.raises(EngineLostError):
            await launcher.pending()
        assert await worker.wait() == NODE_LOST
        api.actors[-1].lost()


async def test_an_actor_that_is_created_after_nobody_waits_for_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with on_ray() as (api, launcher):
        with monkeypatch.context() as impatient:
            impatient.setattr(ray_cluster, "ANSWER_S", 0.05)
            api.answers.clear()
            with pytest.raises(RayUnavailableError, match="Ray did not answer"):
                await launcher.start(WORKER, tmp_path / "log")
        api.answers.set()
        await until(lambda: [actor.was_killed for actor in api.actors] == [True])
        second = await launcher.start(WORKER, tmp_path / "log")
        assert [actor.was_killed for actor in api.actors] == [True, False]
        second.kill()
        assert await second.wait() == NODE_LOST


async def test_a_node_without_the_package_is_no_lost_node_and_says_what_it_lacks(tmp_path: Path):
    async with on_ray() as (api, launcher):
        process = await launcher.start(WORKER, tmp_path / "log")
        api.actors[0].lost(NO_PACKAGE)
        assert await process.wait() == 1
        words = last_words((tmp_path / "log").read_text())
        assert words == "Ray cannot start it on a node: ModuleNotFoundError: No module named 'orchestrator'"


async def test_a_cluster_of_ray_that_is_not_there_is_said_before_anything_starts():
    """As ray.init does."""
    with ray_api() as api:
        api.refuses = ConnectionError("Failed to connect to 10.0.0.1:6379")
        launcher = RayLauncher(configured("launcher.kind=ray", "launcher.place=10.0.0.1:6379").settings, 1)
        with pytest.raises(
            ConfigError, match=r"launcher\.place: no cluster of Ray answers at 10\.0\.0\.1:6379: Failed"
        ):
            await launcher.open(resume=False)


@pytest.mark.parametrize(
    ("mode", "release", "words"),
    [
        ("disabled", "2.60.0", "RAY_AUTH_MODE=disabled lets everyone who reaches this machine"),
        ("", "2.60.0", "RAY_AUTH_MODE= lets everyone"),
        ("token", "2.58.1", r"Ray 2\.58\.1 lets everyone .*install 2\.59 or later"),
    ],
)
async def test_a_ray_that_strangers_could_use_is_not_started(
    monkeypatch: pytest.MonkeyPatch, mode: str, release: str, words: str
):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with ray_api() as api:
        api.__version__ = release
        with pytest.raises(ConfigError, match=words):
            await RayLauncher(configured("launcher.kind=ray").settings, 1).open(resume=False)
        assert api.initialized is None


async def test_a_ray_of_the_runs_own_gets_a_token_that_no_other_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    tokens: list[str] = []
    for _ in range(2):
        monkeypatch.setenv("RAY_AUTH_TOKEN", "another cluster's")
        async with on_ray() as (api, _):
            assert api.initialized is not None
            assert api.initialized["_node_ip_address"] == "127.0.0.1"
            assert os.environ["RAY_AUTH_MODE"] == "token"
            tokens.append(os.environ["RAY_AUTH_TOKEN"])
    assert len({*tokens, "another cluster's"}) == 3


async def test_a_ray_without_a_gpu_is_refused_by_a_run_that_asks_for_one():
    with ray_api() as api:
        api.resources = {"CPU": 4.0}
        launcher = RayLauncher(configured("launcher.kind=ray", "generation.device=cuda").settings, 1)
        with pytest.raises(ConfigError, match="has no GPU, and the run asks for 1"):
            await launcher.open(resume=False)
        await launcher.close()


async def test_a_call_that_waits_for_ray_ends_in_time():
    hangs = threading.Event()
    with pytest.raises(RayUnavailableError, match="Ray did not answer for 0 s"):
        await in_time(hangs.wait, 0.01)
    hangs.set()
    assert await in_time(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_time(lambda: 1 // 0)
