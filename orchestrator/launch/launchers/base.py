"""What starts processes on nodes: one contract for this machine, Slurm, Ray and Kubernetes.

    ProcessSpec ──► Launcher.start ──► Running ──► wait() is its exit code, as of a child of this process
                    Launcher.pending   what has not begun, and the engine's own reason
                    Launcher.close     what the launcher holds itself; processes are ended by who started them

A launcher starts once: who is started again, and how often, is decided in ``processes.Children``, the same for all. A
node that dies is a process that ended. Secrets travel in the environment or as the engine's own secrets, never in argv.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from transport.contracts.settings import SERVER_ENGINES, Settings
from transport.contracts.types import WorkerKind

NODE_LOST = -9
"""Exit code of a process whose node is gone: as if it had been killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one process asks its engine for. memory_mib: 0 leaves it to the engine."""

    gpus: int = 0
    cpus: int = 1
    memory_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to keep alive; its clean exit is the end of its work.

    kind: None for the orchestrator, which is always on this machine.  env: holds secrets.
    ranks: processes of this command that start and end together; each learns its number from RANK, or srun's own.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    kind: WorkerKind | None = None
    resources: Resources = Resources()
    ranks: int = 1


class Running(Protocol):
    """One start of a process, with what an ``asyncio.subprocess.Process`` has."""

    @property
    def pid(self) -> int:
        """Different for every start; of the process itself where it is a child on this machine."""
        ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int:
        """Its exit code; -N where signal N ended it."""
        ...

    def terminate(self) -> None:
        """Ask it to end: it hands its work back. Raises ProcessLookupError where it is gone."""
        ...

    def kill(self) -> None:
        """End it, also one that is stopped or hangs. Raises ProcessLookupError where it is gone."""
        ...


class Launcher(Protocol):
    is_local: bool
    """Whether what it starts are children on this machine, which end with this process."""

    async def open(self, *, resume: bool) -> None:
        """Look whether the engine answers and has what is asked for; end what an earlier start of this run left.

        Raises: ConfigError: it does not, or another run has this name there.
        """
        ...

    async def start(self, spec: ProcessSpec, output: Path) -> Running:
        """Start it; what it writes is appended to ``output``, or that file says where it is.

        Raises: TransientError: the engine does not take it now.
        """
        ...

    async def pending(self) -> Mapping[str, str]:
        """Names of processes that were started and have not begun, or are not heard of, and why, in the engine's own
        words.

        Raises: EngineLostError: it is away for good.
        """
        ...

    async def close(self) -> None: ...


def resources_of(settings: Settings, kind: WorkerKind, index: int = 0) -> Resources:
    """Of one process of ``kind`` on a cluster: a GPU where its device says "cuda", none where it may be a CPU."""
    generation, launcher = settings.generation, settings.launcher
    gpus = 0
    if kind is WorkerKind.GENERATE and not generation.engine_url:
        served = generation.engine in SERVER_ENGINES
        gpus = generation.gpus_per_worker if served else int(_on_gpu(generation.device))
    elif kind is WorkerKind.TRAIN:
        gpus = int(_on_gpu(settings.trainer.device))
    elif kind is WorkerKind.CRITIC:
        gpus = int(_on_gpu(settings.critic.device))
    elif kind is WorkerKind.SCORE:
        tasks = settings.scorers[settings.scorer(index)[0]].tasks
        gpus = int(_on_gpu(settings.scoring_device) and any(settings.scoring_tasks[task] for task in tasks))
    return Resources(gpus=gpus, cpus=launcher.cpus, memory_mib=launcher.memory_mib)


def _on_gpu(device: str) -> bool:
    return device.startswith("cuda")
