"""The GPUs of this machine, dealt out to the processes of a run (core/placement.py decides, workers lock them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.placement import Needs, Placement, PlacementError, place
from orchestrator.errors import ConfigError
from transport.contracts.settings import SERVER_ENGINES, Settings
from transport.contracts.types import WorkerKind
from transport.process.gpus import Gpu, free_gpus, list_gpus, parse_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGpus:
    """The GPUs of this machine, and who of a run computes on which."""

    present: Sequence[Gpu]
    placement: Placement
    settings: Settings

    def arguments(self, kind: WorkerKind, index: int) -> list[str]:
        """Of the command line of one worker."""
        gpus = self.placement.gpus(kind, index)
        if not gpus:
            return []
        share = self.placement.share(gpus)
        parts = ["--gpus", ",".join(map(str, gpus))]
        parts += ["--gpus-each", str(len(gpus))] if len(gpus) > 1 else []
        return [*parts, "--gpu-share", f"{share:g}"] if share < 1 else parts

    def lines(self, workers: Sequence[tuple[WorkerKind, int]]) -> list[str]:
        """A line a GPU: what it is, who computes on it, and what would use one that is idle.

        workers: how many of each kind the run begins with.
        """
        everyone = [(kind, index) for kind, count in workers for index in range(count)]
        lines: list[str] = []
        for number, gpu in enumerate(self.present):
            names = [f"{kind.value}-{index}" for kind, index in everyone if number in self.placement.gpus(kind, index)]
            share = self.placement.shares.get(number, 1.0)
            said = ", ".join(names) + (f" ({share:.0%} of its memory each)" if share < 1 else "")
            other = "idle" if number in self.placement.idle else "held by another run"
            lines.append(f"GPU {number}  {gpu}  {said or other}")
        generation = self.settings.generation
        more = len(self.placement.idle) // generation.gpus_per_worker
        if more and generation.gpus == "auto" and self.placement.generation:
            lines.append(f"idle GPUs would be used with --set generation.workers={generation.workers + more}")
        return lines


def place_gpus(settings: Settings) -> PlacedGpus | None:
    """Look for GPUs and deal them out to the processes of a run; None where there are none, or nothing computes on one.

    A device that names its GPU ("cuda:1") is left to its user.
    Raises: ConfigError: too few GPUs, or named ones that are not free.  GpuError: named ones that are not there.
    """
    trainer, generation, scoring = settings.trainer, settings.generation, settings.scoring
    trains = trainer.engine == "torch" and trainer.device in ("auto", "cuda")
    serves = generation.engine in SERVER_ENGINES and not generation.engine_url
    generates = serves or (generation.engine == "embedded" and generation.device in ("auto", "cuda"))
    if not trains and not generates:
        return None
    present = list_gpus()
    named = {"trainer.gpus": trainer.gpus, "generation.gpus": generation.gpus}
    chosen = {key: None if gpus == "auto" else parse_gpus(key, gpus, len(present)) for key, gpus in named.items()}
    if not present:
        return None
    free = free_gpus(present)
    for key, numbers in chosen.items():
        if taken := [str(number) for number in numbers or () if number not in free]:
            raise ConfigError(f"{key}: GPU {', '.join(taken)} is held by a worker of another run", key=key)
    if not free:
        raise ConfigError(f"all {len(present)} GPUs of this machine are held by workers of other runs; wait for them")
    needs = Needs(
        ranks=trainer.ranks if trains else 0,
        workers=max(generation.workers, generation.max_workers) if generates else 0,
        gpus_per_worker=generation.gpus_per_worker,
        references=scoring.workers if trains and settings.algorithm.kl_coef > 0 else 0,
        trainer=chosen["trainer.gpus"],
        generation=chosen["generation.gpus"],
    )
    try:
        return PlacedGpus(present=present, placement=place(free, needs), settings=settings)
    except PlacementError as error:
        raise ConfigError(str(error), key=error.key) from error
