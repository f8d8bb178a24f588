"""How many processes of a run a machine with GPUs starts, and which GPUs each of them uses. Pure.

    ranks of the trainer     one each, of their own: NCCL takes one rank a GPU
    generation workers       each ``gpus_per_worker``, of those that are left
    models that score        of each pool one that is idle, else the first rank's
    the critic               likewise, another one where there is

Where fewer are left than the workers ask for, they share: with each other, and, where none is left, with the trainer.
Each process of a shared GPU has the same share of its memory; a tenth stays free for what they do not account for.

Where the user did not say how many ranks and workers there are to be, ``fill`` does: the trainer gets half of the GPUs,
generation the rest, so that both wait for one another as little as can be known before a run is measured (`plan` knows
more); a number that was given leaves the other kind all that is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transport.contracts.types import WorkerKind


class PlacementError(Exception):
    """There are too few GPUs. key: of the setting that asks for more; the message says what would fit."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key


USABLE = 0.9
"""Of the memory of a GPU that several processes share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many processes of a kind there may be; ``low == high`` where the user said how many.

    high: None: as many as find a place.  step: so many belong together, as the ranks that share every layer.
    """

    low: int = 1
    high: int | None = None
    step: int = 1

    def within(self, number: int) -> int:
        """``number``, or the bound that it is beyond."""
        return max(self.low, number if self.high is None else min(number, self.high))

    def doubled(self, room: int) -> int:
        """The largest ``step`` times a power of two that has room and is within ``high``; as many as ``low`` needs."""
        if self.low == self.high:
            return self.low
        most, number = room if self.high is None else min(room, self.high), self.step
        while 2 * number <= most or (number < self.low and (self.high is None or 2 * number <= self.high)):
            number *= 2
        return number


def fill(
    free: Sequence[int],
    ranks: Bounds,
    workers: Bounds,
    *,
    gpus_per_worker: int = 1,
    models: int = 0,
    critics: int = 0,
    trainer: Sequence[int] | None = None,
    generation: Sequence[int] | None = None,
) -> tuple[int, int]:
    """How many trainer ranks and generation workers there are to be, so that every GPU has its work.

    Ranks get half of the GPUs, more where workers may not be so many as need the other half, less where workers that
    were asked for need more, or all that the user named for them; rounded down to a power of two, because layers and
    rounds are divided evenly. Workers get the rest, but for one GPU for each pool of models that score, and one where
    there is a critic.

    Args:    free: those that nobody holds.  models: pools of scoring workers with a model.  critics, trainer,
             generation: as in ``Needs``.
    Returns: (ranks, workers), within their bounds; on few GPUs they do not all find one of their own.
    Source:  ours.
    """
    room = len(free) - models - critics
    if trainer is not None:
        share = len(trainer)
    elif generation is not None:
        share = room - len(generation)
    else:
        left_by_most = 0 if workers.high is None else room - workers.high * gpus_per_worker
        share = max(min(len(free) // 2, room - workers.low * gpus_per_worker), left_by_most)
    num_ranks = ranks.doubled(share)
    left = room - (num_ranks if trainer is None else len(trainer)) if generation is None else len(generation)
    return num_ranks, workers.within(left // gpus_per_worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPool:
    """Scoring workers with a model each. gpus: that the user named, None: any."""

    workers: int
    gpus: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What computes on GPUs, in processes.

    ranks: of the trainer.  workers: generation workers, as many as there may ever be, each on ``gpus_per_worker`` GPUs.
    models: by pool, the scoring workers that load one; "": those of no pool.  critics: 1 where there is a critic.
    trainer, generation, critic: the GPUs that the user named, None: any.
    """

    ranks: int
    workers: int
    gpus_per_worker: int = 1
    models: Mapping[str, ModelPool] = field(default_factory=dict[str, ModelPool])
    critics: int = 0
    trainer: Sequence[int] | None = None
    generation: Sequence[int] | None = None
    critic: Sequence[int] | None = None

    @property
    def named(self) -> set[int]:
        """GPUs that the user named for the critic, or for models that score."""
        return {*(self.critic or ()), *(gpu for pool in self.models.values() for gpu in pool.gpus or ())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """GPUs by number: of each rank; of each place for a generation worker, which workers take in turn; of models that
    score, by pool, in turn; of the critic.

    shares: of the memory of a GPU, what each process there may use.  idle: those that nobody uses.
    """

    trainer: tuple[int, ...]
    generation: tuple[tuple[int, ...], ...]
    models: Mapping[str, tuple[int, ...]]
    shares: dict[int, float]
    idle: tuple[int, ...]
    critic: tuple[int, ...] = ()

    def gpus(self, kind: WorkerKind, index: int, pool: str = "") -> tuple[int, ...]:
        """Of the ``index``-th worker of its kind, or its pool; () where it computes on none."""
        match kind:
            case WorkerKind.TRAIN if self.trainer:
                return (self.trainer[index],)
            case WorkerKind.GENERATE if self.generation:
                return self.generation[index % len(self.generation)]
            case WorkerKind.SCORE if pool in self.models:
                of_pool = self.models[pool]
                return (of_pool[index % len(of_pool)],)
            case WorkerKind.CRITIC:
                return self.critic
            case _:
                return ()

    def share(self, gpus: Sequence[int]) -> float:
        """Of the memory of ``gpus``, what one process on them may use: 1 where nobody else is."""
        return min(self.shares[gpu] for gpu in gpus)


def place(free: Sequence[int], needs: Needs) -> Placement:
    """Deal the free GPUs out.

    Args:    free: at least one, those that nobody holds; the GPUs that the user named are among them.
    Raises:  PlacementError: too few for ranks that need one each, or for one worker.
    """
    trainer = _trainer(free, needs)
    generation = _generation(free, trainer, needs)
    used = {*trainer, *(gpu for place in generation for gpu in place)}
    used |= needs.named

    def idle() -> tuple[int, ...]:
        found = next(((gpu,) for gpu in free if gpu not in used), trainer[:1] or tuple(free[:1]))
        used.update(found)
        return found

    models = {name: idle() if pool.gpus is None else tuple(pool.gpus) for name, pool in needs.models.items()}
    critic: tuple[int, ...] = ()
    if needs.critics:
        critic = idle() if needs.critic is None else tuple(needs.critic[:1])
    tenants = Counter([*trainer, *critic])
    for name, pool in needs.models.items():
        tenants.update(models[name][worker % len(models[name])] for worker in range(pool.workers))
    for worker in range(needs.workers):
        tenants.update(generation[worker % len(generation)])
    return Placement(
        trainer=trainer,
        generation=generation,
        models=models,
        shares={gpu: 1.0 if count == 1 else int(100 * USABLE) // count / 100 for gpu, count in tenants.items()},
        idle=tuple(gpu for gpu in free if gpu not in tenants),
        critic=critic,
    )


def _trainer(free: Sequence[int], needs: Needs) -> tuple[int, ...]:
    named = needs.trainer
    taken = {*(needs.generation or ()), *needs.named}
    apart = [gpu for gpu in free if gpu not in taken]
    candidates = named if named is not None else apart if len(apart) >= needs.ranks else free
    if len(candidates) < needs.ranks:
        raise PlacementError(
            "trainer.ranks",
            f"{needs.ranks} ranks need a GPU each, and there are {len(candidates)} for them; set "
            f"trainer.ranks={len(candidates)}",
        )
    return tuple(candidates[: needs.ranks])


def _generation(free: Sequence[int], trainer: Sequence[int], needs: Needs) -> tuple[tuple[int, ...], ...]:
    if not needs.workers:
        return ()
    each = needs.gpus_per_worker
    left = [gpu for gpu in free if gpu not in {*trainer, *needs.named}]
    candidates = needs.generation if needs.generation is not None else left if len(left) >= each else [*left, *trainer]
    if len(candidates) < each:
        raise PlacementError(
            "generation.gpus_per_worker",
            f"a worker needs {each} GPUs, and there are {len(candidates)} for it; set "
            f"generation.gpus_per_worker={len(candidates)}",
        )
    whole = len(candidates) // each * each
    places = [tuple(candidates[start : start + each]) for start in range(0, whole, each)]
    return tuple(places[: needs.workers])
