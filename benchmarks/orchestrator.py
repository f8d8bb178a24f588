"""Figure ``orchestrator``: what it costs to orchestrate, and how fast a finished sample reaches the trainer.

The real orchestrator process on a real broker, against an emulated fleet (benchmarks/emulated_fleet.py) of 1 to 1,000
workers that finish some hundred samples a second together. Its CPU seconds are those of the process, whatever else
they were spent on: ticks, leases, status, journal, HTTP.

    python -m benchmarks.orchestrator [--workers 1,4,32,128,1000] [--seconds 10] [--in-flight 100000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import uvloop

from benchmarks.emulated_fleet import EmulatedFleet
from benchmarks.run import ROOT
from orchestrator.config.load import render, resolve
from transport.broker.base import Broker
from transport.broker.embedded import EmbeddedServer
from transport.broker.redis_streams import connect
from transport.contracts.settings import BrokerSettings
from transport.contracts.types import RunName
from workers.models import model_cache, prepare_model

GROUP_SIZE = 4
IN_FLIGHT = 2048
"""Samples at work at once where the workers have room for as many."""
SAMPLES_PER_S = 500.0
LATENCY_AT = 32
LONG_BATCH = 8
"""There a batch outlasts the measurement: when a batch's turn comes, what is ready of it goes out two rounds at a time,
which is pacing and not the orchestrator's latency."""
WARM_UP_S = 3.0
START_S = 60.0
FILL_S = 240.0
FOREVER_S = 1e6

Beside: TypeAlias = Callable[[Broker], Coroutine[Any, Any, None]]
"""What a supervisor does to the run's broker meanwhile, forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """cpu_ms: of the orchestrator a sample.  samples_per_s: that were finished meanwhile."""

    cpu_ms: float
    samples_per_s: float
    latencies_s: Sequence[float]
    rss_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One broker, one directory, one model for all runs."""

    server: EmbeddedServer
    directory: Path
    model_dir: Path
    data: Path

    @contextlib.asynccontextmanager
    async def orchestrator(self, name: str, groups_per_batch: int) -> AsyncIterator[psutil.Process]:
        """The orchestrator process of run ``name``; killed at the end."""
        settings = [
            f"run.name={name}",
            f"run.dir={self.directory}",
            "run.batches=100000",
            "data.source=jsonl",
            f"data.path={self.data}",
            f"pipeline.groups_per_batch={groups_per_batch}",
            f"pipeline.group_size={GROUP_SIZE}",
            "pipeline.max_staleness=2",
            "trainer.checkpoint_every=1",
            "eval.problems=0",
        ]
        run_dir = self.directory / name
        run_dir.mkdir()
        (run_dir / "config.toml").write_text(render(resolve("tiny", [], settings, {})))
        arguments = ["serve", "--run", name, "--broker", self.server.url, "--run-dir", str(run_dir)]
        with (run_dir / "orchestrator.log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "orchestrator", *arguments, "--model-dir", str(self.model_dir)),
                env=os.environ | {"STREAMRL_BROKER_PASSWORD": self.server.password, "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=output,
            )
        try:
            yield psutil.Process(process.pid)
        finally:
            if process.returncode is not None:
                print((run_dir / "orchestrator.log").read_text(errors="replace")[-3000:], file=sys.stderr)
            else:
                process.kill()
                await process.wait()

    async def measure(
        self, num_workers: int, seconds: float, *, name: str = "", beside: Beside | None = None
    ) -> Measured:
        """Let a fleet of so many workers run for a while.

        name: of the run, unlike others of this bench.
        """
        capacity = max(GROUP_SIZE, IN_FLIGHT // num_workers)
        in_flight = num_workers * (capacity + GROUP_SIZE)
        name = name or f"with-{num_workers}"
        longer = LONG_BATCH if num_workers == LATENCY_AT else 1
        async with self.orchestrator(name, longer * in_flight // GROUP_SIZE) as process:
            sample_s = in_flight / SAMPLES_PER_S
            poll_s = 0.25 if num_workers <= 128 else 1.0
            async with self.fleet(
                name, num_workers, capacity, sample_s=sample_s, poll_s=poll_s, beside=beside
            ) as fleet:
                await until(lambda: fleet.tally.samples > 0, START_S + 2 * sample_s, "sample")
                await asyncio.sleep(1.5 * sample_s + WARM_UP_S)
                before, samples, started_s = cpu_s(process), fleet.tally.samples, time.monotonic()
                fleet.tally.latencies_s.clear()
                await asyncio.sleep(seconds)
                done = fleet.tally.samples - samples
                return Measured(
                    cpu_ms=1000 * (cpu_s(process) - before) / done,
                    samples_per_s=done / (time.monotonic() - started_s),
                    latencies_s=tuple(fleet.tally.latencies_s),
                    rss_mb=process.memory_info().rss / 1e6,
                )

    async def fill(self, in_flight: int) -> tuple[int, float]:
        """Put so many samples in flight, of which none ends. Returns how many there are, and the memory in MB."""
        num_workers = LATENCY_AT
        async with self.orchestrator("full", in_flight // GROUP_SIZE // 2) as process:
            capacity = -(-in_flight // num_workers)
            async with self.fleet("full", num_workers, capacity, sample_s=FOREVER_S, poll_s=0.1) as fleet:
                await until(lambda: fleet.in_flight >= in_flight, FILL_S, f"{in_flight} samples in flight")
                return fleet.in_flight, process.memory_info().rss / 1e6

    @contextlib.asynccontextmanager
    async def fleet(
        self,
        run: str,
        num_workers: int,
        capacity: int,
        *,
        sample_s: float,
        poll_s: float,
        beside: Beside | None = None,
    ) -> AsyncIterator[EmulatedFleet]:
        broker = await connect(
            BrokerSettings(), RunName(run), url=self.server.url, password=self.server.password, outage_s=5.0
        )
        fleet = EmulatedFleet(broker, num_workers, capacity, group_size=GROUP_SIZE, sample_s=sample_s, poll_s=poll_s)
        working = [asyncio.create_task(work) for work in (fleet.run(), *([beside(broker)] if beside else []))]
        try:
            yield fleet
            for task in working:
                if task.done():
                    task.result()
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            await broker.close()


async def until(holds, limit_s: float, what: str) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"no {what} within {limit_s:.0f} s")
        await asyncio.sleep(0.05)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextlib.asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Bench]:
    """What all runs of a bench share, in ``directory``."""
    data = directory / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n} + {n} =", "answer": str(2 * n)}) + "\n" for n in range(512)))
    model_dir = await asyncio.to_thread(prepare_model, "random:qwen3-tiny", cache_dir=model_cache(os.environ))
    server = EmbeddedServer(directory / "broker", appendfsync="no")
    await server.start()
    try:
        yield Bench(server=server, directory=directory, model_dir=model_dir, data=data)
    finally:
        await server.stop()


async def measure_all(workers: Sequence[int], seconds: float, in_flight: int, directory: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with opened(directory) as bench:
        for count in workers:
            measured = await bench.measure(count, seconds)
            figures[f"cpu_ms_per_sample_{count}"] = round(measured.cpu_ms, 3)
            print(
                f"{count} workers: {measured.cpu_ms:.3f} ms a sample at {measured.samples_per_s:.0f} samples/s, "
                f"{measured.rss_mb:.0f} MB",
                flush=True,
            )
            if count == LATENCY_AT:
                cuts = statistics.quantiles(measured.latencies_s, n=100)
                print(f"{len(measured.latencies_s)} groups to the trainer", flush=True)
                latencies = {"latency_p50_ms": 1000 * cuts[49], "latency_p99_ms": 1000 * cuts[98]}
                figures |= {name: round(value, 2) for name, value in latencies.items()}
        if in_flight:
            filled, rss_mb = await bench.fill(in_flight)
            figures |= {"rollouts_in_flight": filled, "rss_mb": round(rss_mb)}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,4,32,128,1000", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=10.0, help="that are measured, of each")
    parser.add_argument("--in-flight", type=int, default=100_000, help="0: leave that figure out")
    options = parser.parse_args()
    workers = [int(count) for count in options.workers.split(",")]
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as directory:
        figures = uvloop.run(measure_all(workers, options.seconds, options.in_flight, Path(directory)))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
