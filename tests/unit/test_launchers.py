"""What all launchers have in common, and what is decided around them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from orchestrator.config.run_directory import RunDir
from orchestrator.errors import ConfigError
from orchestrator.launch.checks import check_cluster
from orchestrator.launch.growth import add_workers, report_loss
from orchestrator.launch.launchers import kubernetes_cluster, slurm
from orchestrator.launch.launchers.base import ProcessSpec, Resources, Running, resources_of
from orchestrator.launch.launchers.choice import open_launcher
from orchestrator.launch.processes import Children, Fleet
from tests.fakes.launched import RANKS, configured
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.contracts.messages import SpawnWorkers, WorkerStatus, encode
from transport.contracts.types import RunName, WorkerId, WorkerKind


def test_gpus_are_asked_for_where_a_device_says_so():
    asked = configured("generation.device=cuda", "trainer.device=auto", "launcher.cpus=3").settings
    assert resources_of(asked, WorkerKind.GENERATE) == Resources(gpus=1, cpus=3)
    assert resources_of(asked, WorkerKind.TRAIN) == Resources(gpus=0, cpus=3)
    served = configured("generation.engine=sglang", "generation.gpus_per_worker=4").settings
    assert resources_of(served, WorkerKind.GENERATE).gpus == 4


def test_ranks_that_an_engine_starts_are_one_process_that_numbers_itself(tmp_path: Path):
    settings = configured("trainer.ranks=2", "trainer.parallel.tensor=2").settings
    fleet = Fleet(
        settings=settings,
        run_dir=tmp_path,
        model_dir=tmp_path,
        url="unix:///s",
        worker_url="redis://h:1",
        env={},
        is_local=False,
    )
    (train,) = [spec for spec in fleet.workers() if spec.kind is WorkerKind.TRAIN]
    assert train.ranks == 2
    assert "--index" not in train.argv
    assert "redis://h:1" in train.argv
    assert "unix:///s" in fleet.orchestrator().argv


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("launcher.kind=slurm",), "launcher.address"),
        (("launcher.kind=ray", "launcher.place=auto"), "launcher.address"),
        (("launcher.kind=slurm", "launcher.address=10.0.0.1"), "tensors.host"),
        (("launcher.kind=ray", "broker.url=redis://far:1"), "tensors.host"),
        (("launcher.kind=slurm", "launcher.address=h", "tensors.host=0.0.0.0", "rows.store=units"), "rows.host"),
    ],
)
def test_what_nodes_could_not_reach_is_refused(overrides: tuple[str, ...], problem: str):
    with pytest.raises(ConfigError, match=problem):
        check_cluster(configured(*overrides).settings)


class Slow:
    """A launcher whose processes begin when a test says so."""

    is_local = False

    def __init__(self) -> None:
        self.waits: dict[str, str] = {"generate-1": "Resources"}

    async def open(self, *, resume: bool) -> None: ...

    async def start(self, spec: ProcessSpec, output: Path) -> Running:
        raise AssertionError("nothing is started")

    async def pending(self) -> Mapping[str, str]:
        return self.waits

    async def close(self) -> None: ...


async def test_who_is_pending_is_reported_again_and_again(tmp_path: Path):
    heard: asyncio.Queue[Mapping[str, str]] = asyncio.Queue()
    children = Children(tmp_path, max_restarts=0, launcher=Slow())
    watching = asyncio.create_task(children.watch_pending(heard.put))
    assert await heard.get() == {"generate-1": "Resources"}
    assert children.pending() == {"generate-1": "Resources"}
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_workers_that_are_added_take_numbers_that_nobody_has():
    broker = MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    for number in (1, 2):
        await broker.beat(WorkerId(f"generate-{number}.1"), b"", ttl_s=1000.0)
    await broker.put_meta(keys.SPAWN, encode(SpawnWorkers(total=2, reason="slower")))
    added: list[int] = []
    done = asyncio.Event()

    def start(number: int) -> ProcessSpec:
        added.append(number)
        if len(added) == 2:
            done.set()
        return ProcessSpec(name=f"generate-{number}", argv=[], kind=WorkerKind.GENERATE)

    adding = asyncio.create_task(add_workers(broker, start, first=1))
    await done.wait()
    adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)
    assert added == [3, 4]


async def test_a_process_elsewhere_that_ended_is_reported_by_its_name_with_all_its_ranks():
    broker = MemoryBroker(MemoryServer(ManualClock()), RunName("r"))
    for name in ("train-0", "train-1", "train-2", "generate-1"):
        status = WorkerStatus(
            worker_id=WorkerId(f"{name}.1"), kind=WorkerKind.TRAIN, host="n1", pid=7, protocol=1, doing="waiting"
        )
        await broker.beat(status.worker_id, encode(status), ttl_s=1000.0)
    await report_loss(broker, RANKS, None)
    assert sorted(await broker.leases()) == ["generate-1.1", "train-2.1"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("launcher.kind=slurm",), r'"slurm" needs srun, squeue, scancel, sinfo in PATH .* login node'),
        (("launcher.kind=kubernetes",), r"launcher.image: .* name it with --set"),
        (("launcher.kind=kubernetes", "launcher.image=i"), r"this process is in none: print the manifests"),
    ],
)
def test_an_engine_that_is_not_here_is_refused_before_a_run_has_a_directory(
    overrides: tuple[str, ...], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=problem):
        open_launcher(configured(*overrides).settings, RunDir(tmp_path / "a"), ())


@pytest.mark.parametrize("kind", ["local", "slurm", "ray", "kubernetes"])
def test_a_run_gets_the_launcher_that_its_settings_name(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slurm, "check_installed", lambda: None)
    monkeypatch.setattr(kubernetes_cluster, "check_in_a_pod", lambda environ: None)
    settings = configured(f"launcher.kind={kind}", "launcher.image=registry/streamrl:1").settings
    launcher = open_launcher(settings, RunDir(tmp_path), ["train-0"])
    assert type(launcher).__name__ == f"{kind.capitalize()}Launcher"
