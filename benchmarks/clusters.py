"""Figure ``clusters``: what it costs to start a run on an engine of many nodes, and to lose one of its nodes.

    ray_first_batch_s, slurm_first_batch_s    from the command to the first trained batch, preset tiny, emulated, the
                                              cluster up; null where there is none. Slurm: whichever sinfo reaches.
    local_first_batch_s                       the same without a cluster, for comparison
    launcher_ms_per_worker                    CPU of this process to start one worker through each launcher and see it
                                              end, the most of all: engines are programs, or an API server, that answer
                                              at once (``launcher_ms``: each)
    start_s                                   seconds until --workers processes were started and ended, the most of all
    alive                                     by launcher: seconds until --alive workers live at once, own CPU of each
                                              (ms), of one question for what is pending and one look (ms), and MB
    orchestrator                              by launcher: CPU of the orchestrator a sample (ms), with an emulated fleet
                                              of --alive workers, while the launcher holds as many, none has begun, and
                                              the supervisor says so; "local": nobody says anything
    groups_in_flight                          of one run at once, and the orchestrator's memory (MB) then
    node_loss_recovery_s                      from the loss of a node of Ray, with one of two workers, until two more
                                              batches are trained, of which the second began after it; lease_s stands
                                              beside it, and when it was noticed (node_loss_seen_s), and its worker
                                              had joined again, on the node that is left (node_loss_replaced_s)
    failover_pause_s                          from the kill of the broker's primary until two more batches are trained,
                                              sentinels having promoted its replica
    failover_lost_trained                     batches trained before it that the run's end does not have; its audit is
                                              clean, or there is no figure

The launchers are the product's; ``--workers`` processes are started through each, ``--at-once`` at a time. Slurm's srun
is a program that ends at once, or sleeps; the API of Kubernetes and Ray are those of the tests, in this process.

    python -m benchmarks.clusters [--workers 200] [--at-once 50] [--alive 1000] [--parts failover,launchers]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.orchestrator import GROUP_SIZE, opened
from orchestrator.config.load import resolve
from orchestrator.launch.growth import tell_pending
from orchestrator.launch.launchers.base import Launcher, ProcessSpec, Running
from orchestrator.launch.launchers.kubernetes_cluster import KubernetesLauncher
from orchestrator.launch.launchers.local import LocalLauncher
from orchestrator.launch.launchers.ray_cluster import RayLauncher
from orchestrator.launch.launchers.slurm import SlurmLauncher, SrunProcess
from orchestrator.launch.processes import Children
from tests.fakes.kubernetes_api import KubernetesApi, kubernetes_api
from tests.fakes.live_run import EMULATED, QUICK, LiveRun
from tests.fakes.ray_api import RayApi, ray_api
from tests.fakes.ray_nodes import ray_nodes
from tests.fakes.redis_servers import Servers, Watched
from tests.fakes.slurm_nodes import why_no_slurm
from transport.broker.base import Broker
from transport.contracts.settings import Settings
from transport.contracts.types import WorkerKind

NOTHING = ["/bin/true"]
ENGINES = ("local", "slurm", "ray", "kubernetes")
ON_RAY = ("launcher.kind=ray", "launcher.address=127.0.0.1")
LEASE_S = 4.0
"""As QUICK has it."""


def settings(*overrides: str) -> Settings:
    return resolve("tiny", [], ["run.name=bench", *overrides], {}).settings


async def start_all(launcher: Launcher, directory: Path, count: int, at_once: int) -> dict[str, float]:
    """Start ``count`` workers and see each end. Returns own CPU, milliseconds a worker, and seconds of all."""
    children = Children(directory, max_restarts=3, launcher=launcher)
    place, began_s, cpu_s = asyncio.Semaphore(at_once), time.monotonic(), time.process_time()

    async def one(number: int) -> None:
        async with place:
            await children.keep(spec_of(number))

    await asyncio.gather(*(one(number) for number in range(count)))
    cpu_ms = (time.process_time() - cpu_s) * 1000 / count
    return {"cpu_ms": round(cpu_ms, 2), "seconds": round(time.monotonic() - began_s, 2)}


def spec_of(number: int) -> ProcessSpec:
    return ProcessSpec(name=f"generate-{number}", argv=NOTHING, kind=WorkerKind.GENERATE)


@asynccontextmanager
async def held(launcher: Launcher, directory: Path, count: int, at_once: int) -> AsyncIterator[list[Running]]:
    """Workers that live on; ended at the end."""
    place = asyncio.Semaphore(at_once)

    async def one(number: int) -> Running:
        async with place:
            return await launcher.start(spec_of(number), directory / f"generate-{number}.log")

    started = await asyncio.gather(*(one(number) for number in range(count)))
    try:
        yield started
    finally:
        for process in started:
            os.kill(process.pid, signal.SIGKILL) if isinstance(process, SrunProcess) else process.kill()
        await asyncio.gather(*(process.wait() for process in started))


async def hold_all(launcher: Launcher, directory: Path, count: int, at_once: int) -> dict[str, float]:
    """What it takes to start ``count`` workers that live on, and to ask what is pending: all of them."""
    began_s, cpu_s, rss_bytes = time.monotonic(), time.process_time(), psutil.Process().memory_info().rss
    async with held(launcher, directory, count, at_once) as started:
        took_s, started_s = time.monotonic() - began_s, time.process_time()
        if isinstance(launcher, KubernetesLauncher):
            await launcher.look()
        waiting = await launcher.pending()
        asked_s, grown_bytes = time.process_time(), psutil.Process().memory_info().rss - rss_bytes
        assert len(waiting) == count
        assert all(process.returncode is None for process in started)
    return {
        "seconds": round(took_s, 2),
        "cpu_ms": round((started_s - cpu_s) * 1000 / count, 2),
        "pending_ms": round((asked_s - started_s) * 1000, 1),
        "mb": round(grown_bytes / 1e6, 1),
    }


@asynccontextmanager
async def faked(kind: str, directory: Path, *, ends: bool) -> AsyncIterator[Launcher]:
    """The launcher of ``kind`` before an engine that starts at once. ends: what it starts ends at once, too."""
    async with AsyncExitStack() as stack:
        if kind == "local":
            yield LocalLauncher()
            return
        if kind == "slurm":
            programs = directory / f"bin-{ends}"
            programs.mkdir()
            (programs / "queue").write_text(
                "".join(f"{n}|streamrl/bench/generate-{n}|Resources\n" for n in range(2000))
            )
            does_queue = f"exec cat {programs}/queue"
            asked = {"srun": "" if ends else "exec sleep 3600", "squeue": does_queue, "scancel": ""}
            for program, does in asked.items():
                (programs / program).write_text(f"#!/bin/sh\n{does}\n")
                (programs / program).chmod(0o755)
            before = os.environ["PATH"]
            stack.callback(os.environ.update, PATH=before)
            os.environ["PATH"] = f"{programs}:{before}"
            yield SlurmLauncher(settings("launcher.kind=slurm"), directory, (), {})
            return
        if kind == "ray":
            ray = stack.enter_context(ray_api())
            launcher = RayLauncher(settings("launcher.kind=ray"), 1)
            ending = _end_actors(ray) if ends else None
        else:
            api = stack.enter_context(kubernetes_api())
            launcher = KubernetesLauncher(settings("launcher.kind=kubernetes", "launcher.image=i"), api.url)
            ending = _end_pods(api) if ends else None
        await launcher.open(resume=False)
        stack.push_async_callback(launcher.close)
        if ending is not None:
            stack.callback(asyncio.create_task(ending).cancel)
        yield launcher


async def launchers(
    engines: Sequence[str], count: int, at_once: int, alive: int
) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {"launcher_ms": {}, "alive": {}}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for kind in engines:
            async with faked(kind, directory, ends=True) as launcher:
                found["launcher_ms"][kind] = await start_all(launcher, directory, count, at_once)
            print(f"{kind}: {found['launcher_ms'][kind]}", flush=True)
            if kind != "local":
                async with faked(kind, directory, ends=False) as launcher:
                    found["alive"][kind] = await hold_all(launcher, directory, alive, at_once)
                print(f"{kind}, alive: {found['alive'][kind]}", flush=True)
    return found


async def orchestrators(
    engines: Sequence[str], count: int, at_once: int, seconds: float, in_flight: int
) -> dict[str, Any]:
    """The orchestrator of ``count`` workers, while each launcher holds as many that have not begun."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as name:
        directory = Path(name)
        async with opened(directory) as bench:
            found["local"] = round((await bench.measure(count, seconds, name="local")).cpu_ms, 3)
            for kind in [one for one in engines if one != "local"]:
                async with faked(kind, directory, ends=False) as launcher, held(launcher, directory, count, at_once):
                    children = Children(directory, max_restarts=3, launcher=launcher)

                    async def tell(broker: Broker, children: Children = children) -> None:
                        await children.watch_pending(partial(tell_pending, broker))

                    measured = await bench.measure(count, seconds, name=kind, beside=tell)
                    found[kind] = round(measured.cpu_ms, 3)
                    print(f"orchestrator under {kind}: {measured}"[:120], flush=True)
            samples, rss_mb = await bench.fill(in_flight * GROUP_SIZE)
    return {"orchestrator": found, "groups_in_flight": samples // GROUP_SIZE, "orchestrator_mb": round(rss_mb)}


async def _end_actors(ray: RayApi) -> None:
    """As processes that have nothing to do."""
    ended = 0
    while True:
        begun = ray.actors[ended:]  # threads add to them meanwhile
        for actor in begun:
            actor.says(b"", 0)
        ended += len(begun)
        await asyncio.sleep(0.02)


async def _end_pods(api: KubernetesApi) -> None:
    """As a node would whose containers have nothing to do. The API's server is in this process, and its CPU counts."""
    while True:
        for name, made in list(api.objects.items()):
            if made["status"]["phase"] == "Pending":
                api.ended(name, 0)
        await asyncio.sleep(0.2)


def first_batch_s(directory: Path, *more: str) -> float:
    began_s = time.monotonic()
    with LiveRun(directory, *EMULATED, *QUICK, *more, "run.batches=2") as run:
        run.wait_for_batch(1)
        took_s = time.monotonic() - began_s
        run.wait_for_end()
    return round(took_s, 1)


def node_loss(directory: Path, address: str, kill: Callable[..., None]) -> dict[str, float]:
    """Of two nodes with a worker each one is killed."""
    on_ray = (*ON_RAY, f"launcher.place={address}", "generation.device=cuda", "generation.workers=2")
    with LiveRun(directory, *EMULATED, *QUICK, *on_ray, "run.batches=1000") as run:
        log = run.run_dir / "logs" / "generate-0.log"

        def begun() -> int:
            return log.read_text().count('"joined"') if log.exists() else 0

        run.wait_until(lambda: begun() == 1 and len(run.metrics()) >= 3, "batch 3")
        kill(holding=["workers", "generate", "--index", "0"])
        lost_s = time.monotonic()
        run.wait_until(lambda: "generate-0 ended" in run.output, "the loss of the node")
        seen_s = time.monotonic()
        run.wait_for_batch(len(run.metrics()) + 2)
        trained_s = time.monotonic()
        run.wait_until(lambda: begun() == 2, "a worker on another node")
        again_s = time.monotonic()
    return {
        "node_loss_seen_s": round(seen_s - lost_s, 1),
        "node_loss_recovery_s": round(trained_s - lost_s, 1),
        "node_loss_replaced_s": round(again_s - lost_s, 1),
    }


def failover(directory: Path) -> dict[str, float]:
    servers = Servers(directory / "servers")
    try:
        watched = Watched(servers)
        on_it = ("emulated.time_scale=0.1", f"broker.url={watched.url}", "run.batches=30")
        with LiveRun(directory, *EMULATED, *QUICK, *on_it) as run:
            run.wait_for_batch(5)
            before = {line["batch"] for line in run.metrics()}
            watched.primary.kill()
            killed_s = time.monotonic()
            run.wait_for_batch(len(before) + 2)
            pause_s = time.monotonic() - killed_s
            assert run.wait_for_end() == 0, run.describe()
            assert run.audit().returncode == 0
            lost = before - {line["batch"] for line in run.metrics()}
    finally:
        servers.kill()
    return {"failover_pause_s": round(pause_s, 1), "failover_lost_trained": len(lost)}


def on_local(directory: Path) -> dict[str, Any]:
    return {"local_first_batch_s": first_batch_s(directory)}


def on_slurm(directory: Path) -> dict[str, Any]:
    if why := why_no_slurm():
        print(f"not on Slurm: {why}")
        return {"slurm_first_batch_s": None}
    return {"slurm_first_batch_s": first_batch_s(directory, "launcher.kind=slurm", "launcher.address=127.0.0.1")}


def on_ray(directory: Path) -> dict[str, Any]:
    if not importlib.util.find_spec("ray"):
        print("not on Ray: it is not installed")
        return {"ray_first_batch_s": None, "node_loss_recovery_s": None}
    with ray_nodes(directory) as nodes:
        for part in ("first", "loss"):
            (directory / part).mkdir()
        first_s = first_batch_s(directory / "first", *ON_RAY, f"launcher.place={nodes.address}")
        lost = node_loss(directory / "loss", nodes.address, nodes.kill)
    return {"ray_first_batch_s": first_s, **lost, "lease_s": LEASE_S}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--alive", type=int, default=1000)
    parser.add_argument("--parts", default="local,slurm,ray,failover,launchers,orchestrator")
    parser.add_argument("--engines", default=",".join(ENGINES), help="of parts launchers and orchestrator")
    parser.add_argument("--seconds", type=float, default=10.0, help="that are measured of each orchestrator")
    parser.add_argument("--groups-in-flight", type=int, default=10_000)
    options = parser.parse_args(argv)
    runs = {"local": on_local, "slurm": on_slurm, "ray": on_ray, "failover": failover}
    figures: dict[str, Any] = {}
    engines = options.engines.split(",")
    for part in options.parts.split(","):
        if part in runs:
            with tempfile.TemporaryDirectory() as name:
                figures |= runs[part](Path(name))
            continue
        if part == "orchestrator":
            groups = options.groups_in_flight
            figures |= asyncio.run(orchestrators(engines, options.alive, options.at_once, options.seconds, groups))
            continue
        each = asyncio.run(launchers(engines, options.workers, options.at_once, options.alive))
        most = max(one["cpu_ms"] for one in each["launcher_ms"].values())
        start_s = max(one["seconds"] for one in each["launcher_ms"].values())
        figures |= {"launcher_ms_per_worker": most, "start_s": start_s, "workers": options.workers, **each}
    print(json.dumps({**figures, "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
