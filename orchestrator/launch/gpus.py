"""The GPUs of this machine, dealt out to the processes of a run (core/placement.py decides, workers lock them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from orchestrator.config.load import Resolved
from orchestrator.config.schema import value_of
from orchestrator.config.starts import GpuUse
from orchestrator.core.placement import Bounds, ModelPool, Needs, Placement, PlacementError, fill, place
from orchestrator.errors import ConfigError
from transport.contracts.llms import UnknownModelError, from_config
from transport.contracts.settings import SERVER_ENGINES, Settings
from transport.contracts.training_memory import (
    USABLE_SHARE,
    DoesNotFitError,
    LayoutError,
    layout_of_run,
)
from transport.contracts.types import WorkerKind
from transport.process.files import read_json
from transport.process.gpus import Gpu, free_gpus, list_gpus, parse_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGpus:
    """The GPUs of this machine, and who of a run computes on which.

    settings: those of the run, with the numbers that "auto" stands for here.
    """

    present: Sequence[Gpu]
    placement: Placement
    settings: Settings

    def arguments(self, kind: WorkerKind, index: int) -> list[str]:
        """Of the command line of one worker."""
        gpus = self._gpus(kind, index)
        if not gpus:
            return []
        share = self.placement.share(gpus)
        parts = ["--gpus", ",".join(map(str, gpus))]
        parts += ["--gpus-each", str(len(gpus))] if len(gpus) > 1 else []
        return [*parts, "--gpu-share", f"{share:g}"] if share < 1 else parts

    def _gpus(self, kind: WorkerKind, index: int) -> tuple[int, ...]:
        if kind is not WorkerKind.SCORE:
            return self.placement.gpus(kind, index)
        pool, number = self.settings.scorer(index)
        return self.placement.gpus(kind, number, pool)

    def uses(self, workers: Sequence[tuple[WorkerKind, int]]) -> list[GpuUse]:
        """Who computes on each GPU. workers: how many of each kind the run begins with."""
        everyone = {
            f"{kind.value}-{index}": self._gpus(kind, index) for kind, count in workers for index in range(count)
        }
        return [
            GpuUse(
                number=number,
                name=gpu.name,
                memory_mib=gpu.memory_mib,
                workers=[name for name, gpus in everyone.items() if number in gpus],
                share=self.placement.shares.get(number, 1.0),
                held=number not in self.placement.idle and number not in self.placement.shares,
            )
            for number, gpu in enumerate(self.present)
        ]

    def lines(self, workers: Sequence[tuple[WorkerKind, int]]) -> list[str]:
        """``uses`` for people, a line a GPU, and what would use those that are idle."""
        lines = [f"GPU {one.number}  {one}  {one.use}" for one in self.uses(workers)]
        generation = self.settings.generation
        more = len(self.placement.idle) // generation.gpus_per_worker
        if more and generation.gpus == "auto" and self.placement.generation:
            lines.append(f"idle GPUs would be used with --set generation.workers={generation.num_workers + more}")
        return lines


def place_gpus(settings: Settings) -> PlacedGpus | None:
    """Look for GPUs, decide how many processes compute on them where settings leave it open, and deal the GPUs out to
    them; None where there are none, or nothing computes on one.

    A device that names its GPU ("cuda:1") is left to its user.
    Raises: ConfigError: too few GPUs, or named ones that are not free.  GpuError: named ones that are not there.
    """
    trainer, generation, scoring = settings.trainer, settings.generation, settings.scoring
    trains = trainer.engine == "torch" and trainer.device in ("auto", "cuda")
    serves = generation.engine in SERVER_ENGINES and not generation.engine_url
    generates = serves or (generation.engine == "embedded" and generation.device in ("auto", "cuda"))
    if settings.launcher.kind != "local" or not (trains or generates):
        return None  # an engine deals out its own
    present = list_gpus()
    learns = settings.has_critic and trainer.engine == "torch" and settings.critic.device in ("auto", "cuda")
    named = {"trainer.gpus": trainer.gpus, "generation.gpus": generation.gpus}
    named |= {"critic.gpus": settings.critic.gpus} if learns else {}
    loading = _pools_with_models(settings) if trains else {}
    named |= {f"scoring.pools.{name}.gpus": scoring.pools[name].gpus for name in loading if name}
    chosen = {key: None if gpus == "auto" else parse_gpus(key, gpus, len(present)) for key, gpus in named.items()}
    if not present:
        return None
    free = free_gpus(present)
    for key, numbers in chosen.items():
        if taken := [str(number) for number in numbers or () if number not in free]:
            raise ConfigError(f"{key}: GPU {', '.join(taken)} is held by a worker of another run", key=key)
    if not free:
        raise ConfigError(f"all {len(present)} GPUs of this machine are held by workers of other runs; wait for them")
    models = {
        name: ModelPool(workers=workers, gpus=chosen.get(f"scoring.pools.{name}.gpus"))
        for name, workers in loading.items()
    }
    of_workers = _workers(settings) if generates else NONE
    critics = 1 if learns else 0
    room = _room(free, settings, of_workers.low, len(models) + critics, chosen)
    ranks, workers = fill(
        free,
        _ranks(settings, _usable_bytes(present), room) if trains else NONE,
        of_workers,
        gpus_per_worker=generation.gpus_per_worker,
        models=len(models),
        critics=critics,
        trainer=chosen["trainer.gpus"],
        generation=chosen["generation.gpus"],
    )
    needs = Needs(
        ranks=ranks,
        workers=max(workers, generation.max_workers) if generates else 0,
        gpus_per_worker=generation.gpus_per_worker,
        models=models,
        critics=critics,
        trainer=chosen["trainer.gpus"],
        generation=chosen["generation.gpus"],
        critic=chosen.get("critic.gpus"),
    )
    try:
        placement = place(free, needs)
    except PlacementError as error:
        raise ConfigError(str(error), key=error.key) from error
    return PlacedGpus(present=present, placement=placement, settings=_with_numbers(settings, ranks, workers))


NONE = Bounds(low=0, high=0)


def _pools_with_models(settings: Settings) -> dict[str, int]:
    """Pools of scoring workers that load a model onto a GPU, and how many they are."""
    if settings.scoring_device not in ("auto", "cuda"):
        return {}
    loads = {task for task, model in settings.scoring_tasks.items() if model}
    return {name: pool.workers for name, pool in settings.scorers.items() if loads.intersection(pool.tasks)}


def _room(
    free: Sequence[int],
    settings: Settings,
    fewest_workers: int,
    others: int,
    chosen: Mapping[str, Sequence[int] | None],
) -> int:
    """How many GPUs the trainer's ranks may have at most.

    others: that models of scoring and the critic take.  chosen: by setting, those that the user named.
    """
    if (own := chosen["trainer.gpus"]) is not None:
        return len(own)
    if (theirs := chosen["generation.gpus"]) is not None:
        return len(set(free) - set(theirs))
    return len(free) - fewest_workers * settings.generation.gpus_per_worker - others


def _usable_bytes(present: Sequence[Gpu]) -> float:
    """Of the smallest GPU."""
    return min(gpu.memory_mib for gpu in present) * 2**20 * USABLE_SHARE


def _ranks(settings: Settings, memory_bytes: float, room: int) -> Bounds:
    """A round has a part for each of ``trainer.parallel.data``, which may be as many as there are groups to part.

    A model that does not fit on fewer has more. room: GPUs that the trainer may have.
    """
    trainer, fewest = settings.trainer, settings.trainer.num_ranks
    if trainer.ranks != "auto":
        return Bounds(low=fewest, high=fewest)
    parts = settings.pipeline.groups_per_batch // trainer.mini_batches if trainer.parallel.data == "auto" else 1
    low = _fitting(settings, memory_bytes, fewest, room)
    return Bounds(low=low, high=max(fewest * parts, low), step=fewest)


def _fitting(settings: Settings, memory_bytes: float, step: int, room: int) -> int:
    """The fewest ranks on which the model fits; ``step`` where its shape is not on this machine yet: the trainer looks
    again. Raises ConfigError: on no number that there is room for; the message says what would fit.
    """
    trainer, config = settings.trainer, Path(settings.model.path) / "config.json"
    if not config.is_file():
        return step
    try:
        llm = from_config(settings.model.path, read_json(config, dict[str, object]))
    except UnknownModelError:
        return step
    size = 4 if trainer.dtype == "float32" else 2
    number, problem = step, ""
    while number <= max(room, step):
        try:
            layout_of_run(llm, settings, number, memory_bytes, compute_bytes=size, on_gpu=True)
            return number
        except (LayoutError, DoesNotFitError) as error:
            problem = str(error)
        number *= 2
    raise ConfigError(
        f"trainer.ranks: the trainer may have {max(room, step)} of the GPUs here, and {problem}", key="trainer.ranks"
    )


def _workers(settings: Settings) -> Bounds:
    generation = settings.generation
    fewest = generation.num_workers
    return Bounds(low=fewest, high=generation.max_workers or None if generation.workers == "auto" else fewest)


def _with_numbers(settings: Settings, ranks: int, workers: int) -> Settings:
    """``settings`` with these numbers of what computes on GPUs."""
    replaced = msgspec.structs.replace
    trainer = replaced(settings.trainer, ranks=ranks) if ranks else settings.trainer
    generation = replaced(settings.generation, workers=workers) if workers else settings.generation
    return replaced(settings, trainer=trainer, generation=generation)


def with_numbers(resolved: Resolved, placed: PlacedGpus | None) -> Resolved:
    """``resolved`` with the numbers that "auto" stands for here: the run keeps them when it is resumed elsewhere."""
    if placed is None:
        return resolved
    origins = dict(resolved.origins)
    for key in ("trainer.ranks", "generation.workers"):
        if value_of(resolved.settings, key) != value_of(placed.settings, key):
            origins[key] = f"{origins[key]}; auto, on {len(placed.present)} GPUs"
    return replace(resolved, settings=placed.settings, origins=origins)
