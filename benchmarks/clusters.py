"""Figure ``clusters``: what it costs to start a run on an engine of many nodes, and to lose one of its nodes.

    ray_first_batch_s, slurm_first_batch_s    from the command to the first trained batch, preset tiny, emulated, the
                                              cluster up; null where there is none. Slurm: whichever sinfo reaches
    launcher_ms_per_worker                    CPU of this process to start one worker through each launcher and see it
                                              end, the most of all: engines are programs, or an API server, that answer
                                              at once (``launcher_ms``: each)
    node_loss_recovery_s                      from the loss of a node of Ray to the first batch trained after its worker
                                              was started again elsewhere; lease_s stands beside it

The launchers are the product's; ``--workers`` processes are started through each, ``--at-once`` at a time.

    python -m benchmarks.clusters [--workers 200] [--at-once 50] [--no-runs]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.config.load import resolve
from orchestrator.launch.launchers.base import Launcher, ProcessSpec
from orchestrator.launch.launchers.kubernetes_cluster import KubernetesLauncher
from orchestrator.launch.launchers.local import LocalLauncher
from orchestrator.launch.launchers.slurm import SlurmLauncher
from orchestrator.launch.processes import Children
from tests.fakes.kubernetes_api import KubernetesApi, kubernetes_api
from tests.fakes.live_run import EMULATED, QUICK, LiveRun
from tests.fakes.ray_nodes import ray_nodes
from tests.fakes.slurm_nodes import why_no_slurm
from transport.contracts.settings import Settings
from transport.contracts.types import WorkerKind

NOTHING = ["/bin/true"]
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
            await children.keep(ProcessSpec(name=f"generate-{number}", argv=NOTHING, kind=WorkerKind.GENERATE))

    await asyncio.gather(*(one(number) for number in range(count)))
    cpu_ms = (time.process_time() - cpu_s) * 1000 / count
    return {"cpu_ms": round(cpu_ms, 2), "seconds": round(time.monotonic() - began_s, 2)}


async def launchers(count: int, at_once: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        found["local"] = await start_all(LocalLauncher(), directory, count, at_once)
        programs = directory / "bin"
        programs.mkdir()
        for program in ("srun", "squeue", "scancel"):
            (programs / program).write_text("#!/bin/sh\n")
            (programs / program).chmod(0o755)
        os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
        slurm = SlurmLauncher(settings("launcher.kind=slurm"), directory, (), {})
        found["slurm"] = await start_all(slurm, directory, count, at_once)
        with kubernetes_api() as api:
            ending = asyncio.create_task(_end_pods(api))
            pods = KubernetesLauncher(settings("launcher.kind=kubernetes", "launcher.image=i"), api.url)
            await pods.open(resume=False)
            found["kubernetes"] = await start_all(pods, directory, count, at_once)
            await pods.close()
            ending.cancel()
    return found


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


def node_loss_s(directory: Path, address: str, kill: Any) -> float:
    on_ray = (*ON_RAY, f"launcher.place={address}", "generation.device=cuda")
    with LiveRun(directory, *EMULATED, *QUICK, *on_ray, "run.batches=400") as run:
        run.wait_for_batch(3)
        kill(holding=["workers", "generate", "--index", "0"])
        lost_s = time.monotonic()
        run.wait_until(lambda: "generate-0 ended" in run.output, "the loss of the node")
        run.wait_for_batch(len(run.metrics()) + 1)
        return round(time.monotonic() - lost_s, 1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--no-runs", action="store_true", help="launchers alone")
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {"ray_first_batch_s": None, "slurm_first_batch_s": None, "node_loss_recovery_s": None}
    if not options.no_runs:
        with tempfile.TemporaryDirectory() as name:
            if not why_no_slurm():
                place = Path(name) / "slurm"
                place.mkdir()
                more = ("launcher.kind=slurm", "launcher.address=127.0.0.1")
                figures["slurm_first_batch_s"] = first_batch_s(place, *more)
            if importlib.util.find_spec("ray"):
                with ray_nodes(Path(name)) as nodes:
                    for part in ("ray", "loss"):
                        (Path(name) / part).mkdir()
                    place = f"launcher.place={nodes.address}"
                    figures["ray_first_batch_s"] = first_batch_s(Path(name) / "ray", *ON_RAY, place)
                    figures["node_loss_recovery_s"] = node_loss_s(Path(name) / "loss", nodes.address, nodes.kill)
    each = asyncio.run(launchers(options.workers, options.at_once))
    figures["launcher_ms_per_worker"] = max(one["cpu_ms"] for one in each.values())
    print(json.dumps({**figures, "lease_s": LEASE_S, "workers": options.workers, "launcher_ms": each}))


if __name__ == "__main__":
    main()
