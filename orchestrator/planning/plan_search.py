"""What to do with some GPUs: the best split, the runner-up, and the even split that needs no thought.

Bounds first, then short simulations, then long ones of the few that are close. All candidates are judged on the same
lengths and seed, and everything that is compared in the end was simulated by the same window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Protocol, TypeVar

from orchestrator.core.costs.analytic import GPUS_PER_NODE, Algorithm, decode_cost, transfer_cost
from orchestrator.core.costs.hardware import ASSUMED, Assumptions, Gpu
from orchestrator.core.costs.llms import Llm
from orchestrator.core.model.autoscale import estimate_of
from orchestrator.core.model.settings import CoreSettings, default_dispatch
from orchestrator.planning.allocation import Found, Objective, Outcome, Pool, Split, ranked, score, search, splits
from orchestrator.planning.length_files import Group, representative
from orchestrator.sim.bounds import Bound, bound
from orchestrator.sim.log import SimulationLog
from orchestrator.sim.scenarios import PIPELINES, Layout, Workload, scenario
from orchestrator.sim.simulate import simulate
from transport.contracts.messages import TrainerCommand

T = TypeVar("T")

SLOTS = 256
"""Samples that an instance decodes at once, at most. With 1,024 a long sample shares its steps with more: between 2%
faster and 4% slower for 72B on 128 H800, depending on the split."""
ROUNDS = 8
"""Micro-batches of a rank and batch at least, so that training can begin with the first samples."""
MICRO_BATCH_TOKENS = 65_536
SPARE_TOKENS = 512
"""Of KV cache beside the longest sample: the engine keeps room for new tokens (``sim/README.md``)."""


def slots_of(gpu: Gpu) -> int:
    """Samples that an instance decodes at once, at most."""
    return gpu.measured.slots if gpu.measured is not None else SLOTS


def micro_batch_tokens_of(gpu: Gpu) -> int:
    """Tokens of a micro-batch of one rank, at most."""
    return gpu.measured.micro_batch_tokens if gpu.measured is not None else MICRO_BATCH_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How long to simulate: ``iterations``, of which the first and the last do not count."""

    iterations: int
    warm_up: int
    cool_down: int


SHORT = Window(iterations=7, warm_up=2, cool_down=1)
"""Four that count: mostly within 5% of many (9% was seen), for batches that hold the same lengths."""
LONG = Window(iterations=16, warm_up=4, cool_down=2)
"""For the few that are compared in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be trained, and how. groups: lengths as read from a file.

    link_bytes_per_s: between two sites.  recall: of the ranker, None: it knows every prompt's mean length.
    """

    llm: Llm
    groups: tuple[Group, ...]
    pipeline: str = "in_flight"
    batch: int = 1024
    group_size: int = 1
    algorithm: Algorithm = "grpo"
    prompt_tokens: int = 500
    recall: float | None = 0.75
    link_bytes_per_s: float = 10e9
    seed: int = 0
    assumed: Assumptions = ASSUMED

    @property
    def settings(self) -> CoreSettings:
        return PIPELINES[self.pipeline]

    def dispatch(self, split: Split) -> str:
        """As a run of the split would choose."""
        settings = self.settings
        return default_dispatch(
            max_staleness=settings.max_staleness, update=settings.update, num_workers=split.instances
        )

    @property
    def samples(self) -> int:
        """Of a batch."""
        return self.batch * self.group_size

    @property
    def context_tokens(self) -> int:
        """Room that the longest sample needs."""
        return max(max(group) for group in self.groups) + self.prompt_tokens + SPARE_TOKENS

    def workload(self, batches: int) -> Workload:
        lengths = representative(
            self.groups,
            batch=self.batch,
            batches=batches,
            prompt_tokens=self.prompt_tokens,
            recall=self.recall,
            seed=self.seed,
        )
        return Workload(
            llm=self.llm, lengths=lengths, batch=self.batch, group_size=self.group_size, algorithm=self.algorithm
        )

    def layout(self, split: Split, workload: Workload) -> Layout:
        return Layout(
            generation_gpus=split.generation_gpus,
            training_gpus=split.training_gpus,
            tensor_parallel=split.tensor_parallel,
            ranks=split.ranks,
            generation_gpu=split.generation.gpu,
            training_gpu=split.training.gpu,
            slots=slots_of(split.generation.gpu),
            micro_batch_tokens=self._micro_batch_tokens(split, workload),
            link_bytes_per_s=self.edge_bytes_per_s(split.generation, split.training),
        )

    def edge_bytes_per_s(self, generation: Pool, training: Pool) -> float:
        """Of the weight transfer: the slower node's network, or the link between the sites."""
        nodes = GPUS_PER_NODE * min(generation.gpu.network_bytes_per_s, training.gpu.network_bytes_per_s)
        return min(nodes, self.link_bytes_per_s) if generation.site != training.site else nodes

    def _micro_batch_tokens(self, split: Split, workload: Workload) -> int:
        sampled = [group for group in workload.lengths.lengths[: self.batch]]
        tokens = sum(sum(group) / len(group) for group in sampled) * self.group_size + self.batch * self.prompt_tokens
        most = micro_batch_tokens_of(split.training.gpu)
        return int(min(most, max(1.0, tokens / split.ranks / ROUNDS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a split would do.

    iteration_s: seconds of an iteration.  bound: what no schedule beats, by stage.  transfer_s: of a version's weights.
    generation_idle: share of instance time without any sample.  generation_thin: what the rest loses against the batch
    at which a token is cheapest: long samples that are left, memory, prompts.  trainer_idle: share of the trainer's
    time.  mean_age, oldest_age: versions that trained tokens were behind.
    """

    split: Split
    iteration_s: float
    bound: Bound
    transfer_s: float
    generation_idle: float
    generation_thin: float
    trainer_idle: float
    mean_age: float
    oldest_age: int


def bound_of(job: Job, workload: Workload, split: Split) -> Bound:
    """The bound of one split."""
    return bound(workload, job.layout(split, workload), job.assumed)


def iteration_s(job: Job, window: Window, split: Split) -> float:
    """Seconds of an iteration, by simulation."""
    return _simulated(job, window, split, trace=False).iteration_s(window.warm_up, window.cool_down)


def predict(job: Job, window: Window, split: Split) -> Prediction:
    """The same, with everything that is worth saying of it."""
    log = _simulated(job, window, split, trace=True)
    workload = job.workload(1)
    seconds = log.iteration_s(window.warm_up, window.cool_down)
    begin_s = log.published_s[window.warm_up - 1]
    end_s = log.published_s[len(log.published_s) - window.cool_down - 1]
    least = bound_of(job, workload, split)
    idle = _generation_idle(log, split.instances, begin_s, end_s)
    edge = job.edge_bytes_per_s(split.generation, split.training)
    return Prediction(
        split=split,
        iteration_s=seconds,
        bound=least,
        transfer_s=transfer_cost(job.llm, edge, split.instances, job.assumed).transfer_s(),
        generation_idle=idle,
        generation_thin=max(0.0, 1.0 - idle - least.generation_s / seconds),
        trainer_idle=max(0.0, 1.0 - _busy_s(log.training, begin_s, end_s) / (end_s - begin_s)),
        mean_age=log.mean_age,
        oldest_age=log.oldest_age,
    )


def _simulated(job: Job, window: Window, split: Split, *, trace: bool) -> SimulationLog:
    workload = job.workload(window.iterations)
    run = scenario(
        workload,
        job.layout(split, workload),
        job.settings,
        iterations=window.iterations,
        assumed=job.assumed,
        dispatch=job.dispatch(split),
        trace=trace,
    )
    return simulate(run)


def _busy_s(training: Sequence[tuple[float, float, TrainerCommand]], begin_s: float, end_s: float) -> float:
    return sum(max(0.0, min(at_s + seconds, end_s) - max(at_s, begin_s)) for at_s, seconds, _ in training)


def _generation_idle(log: SimulationLog, instances: int, begin_s: float, end_s: float) -> float:
    """Share of instance time between two moments in which nothing was decoded."""
    since: dict[str, float] = {}
    idle_s = 0.0
    for at_s, worker, running in log.batches:
        if running == 0:
            since.setdefault(worker, at_s)
        elif worker in since:
            idle_s += max(0.0, min(at_s, end_s) - max(since.pop(worker), begin_s))
    idle_s += sum(max(0.0, end_s - max(at_s, begin_s)) for at_s in since.values())
    return idle_s / (instances * (end_s - begin_s))


class Simulate(Protocol):
    """Ask the same of several splits."""

    def __call__(self, ask: Callable[[Split], T], splits: Sequence[Split]) -> list[T]: ...


@contextmanager
def simulating(processes: int) -> Iterator[Simulate]:
    """Several simulations at once, each in a process of its own; 1: one after another, in this one."""
    if processes <= 1:
        yield lambda ask, splits: [ask(split) for split in splits]
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield lambda ask, splits: list(pool.map(ask, splits))


FINALIST_SHARE = 0.05
"""What a short simulation may be off by: splits this near to the best are simulated longer."""
MAX_FINALISTS = 6

Progress = Callable[[int, int, Outcome], None]


def silent(done: int, most: int, best: Outcome) -> None:
    """For callers who show nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answer. runner_up: of another size or place; None where there is no other.  even: the split that needs no
    thought, with its best degrees; None where none fits, or where it has the same sizes as the plan."""

    best: Prediction
    runner_up: Prediction | None
    even: Prediction | None
    found: Found


def advise(
    job: Job, pools: Sequence[Pool], minimise: Objective = "time", *, processes: int = 1, progress: Progress = silent
) -> Advice:
    """Search. Raises DoesNotFitError: nothing fits; the message says what would."""
    candidates = splits(
        job.llm,
        pools,
        context_tokens=job.context_tokens,
        max_instances=job.samples,
        minimise=minimise,
        assumed=job.assumed,
    )
    workload = job.workload(1)
    bounds = Bounds(job, workload)
    with simulating(processes) as simulate:
        found = search(
            candidates,
            bounds.iteration_s,
            lambda chosen: simulate(partial(iteration_s, job, SHORT), chosen),
            minimise=minimise,
            at_once=processes,
            progress=progress,
        )
        finalists = _finalists(found, candidates, bounds, minimise)
        return _judged(job, simulate, finalists, bounds.quickest(_even(candidates)), found, minimise)


def _judged(
    job: Job,
    simulate: Simulate,
    finalists: list[Split],
    even: Split | None,
    found: Found,
    minimise: Objective,
) -> Advice:
    compared = finalists if even is None or even in finalists else [*finalists, even]
    predictions = dict(zip(compared, simulate(partial(predict, job, LONG), compared), strict=True))
    measured = [
        Outcome(split=split, bound_s=0.0, iteration_s=prediction.iteration_s)
        for split, prediction in predictions.items()
    ]
    order = [outcome.split for outcome in ranked(measured, minimise)]
    others = [split for split in order[1:] if _place(split) != _place(order[0])]
    return Advice(
        best=predictions[order[0]],
        runner_up=predictions[others[0]] if others else None,
        even=predictions[even] if even in others else None,
        found=found,
    )


def _place(split: Split) -> tuple[str, int, str, int]:
    return split.generation.place, split.generation_gpus, split.training.place, split.training_gpus


def _finalists(found: Found, candidates: Sequence[Split], bounds: Bounds, minimise: Objective) -> list[Split]:
    """The close ones, and in any case one of another size: the best measured, else the one with the best bound."""
    order = ranked(found.outcomes, minimise)
    limit = (1 + FINALIST_SHARE) * score(order[0], minimise)
    close = [outcome.split for outcome in order if score(outcome, minimise) <= limit][:MAX_FINALISTS]
    others = [outcome.split for outcome in order if _place(outcome.split) != _place(close[0])]
    if not others:
        elsewhere = [split for split in candidates if _place(split) != _place(close[0])]
        others = [outcome.split for outcome in ranked(map(bounds.outcome, elsewhere), minimise)]
    return list(dict.fromkeys([*close, *others[:1]]))


# -- bounds, and the split that needs no thought


class Bounds:
    """Bounds of splits, computed once each."""

    def __init__(self, job: Job, workload: Workload) -> None:
        self._job = job
        self._workload = workload
        self._makespans: dict[tuple[str, int], Callable[[int], float]] = {}
        self._known: dict[Split, tuple[float, float]] = {}

    def iteration_s(self, split: Split) -> float:
        """What no schedule of the job's pipeline beats."""
        return bound_of(self._job, self._workload, split).iteration_s(self._job.settings.max_staleness)

    def outcome(self, split: Split) -> Outcome:
        """As if it were reached."""
        bound_s = self.iteration_s(split)
        return Outcome(split=split, bound_s=bound_s, iteration_s=bound_s)

    def stages_s(self, split: Split) -> tuple[float, float]:
        """Each stage by itself: generation with even shares, longest first; training without waiting."""
        if split not in self._known:
            training_s = bound_of(self._job, self._workload, split).training_s
            self._known[split] = self._makespan(split)(split.instances), training_s
        return self._known[split]

    def _makespan(self, split: Split) -> Callable[[int], float]:
        key = split.generation.gpu.name, split.tensor_parallel
        if key not in self._makespans:
            job = self._job
            lengths = [
                float(group[sample % len(group)])
                for group in self._workload.lengths.lengths
                for sample in range(job.group_size)
            ]
            cost = decode_cost(job.llm, split.generation.gpu, split.tensor_parallel, job.assumed)
            self._makespans[key] = estimate_of(
                cost, lengths, prompt_tokens=float(job.prompt_tokens), max_running=slots_of(split.generation.gpu)
            )
        return self._makespans[key]

    def quickest(self, candidates: Sequence[Split]) -> Split | None:
        """Of these the one whose slower stage is the fastest."""
        return min(candidates, key=lambda split: max(self.stages_s(split)), default=None)


def _even(candidates: Sequence[Split]) -> list[Split]:
    """One pool each, or half and half of the only one: what needs no thought (StreamRL fig. 10)."""
    apart = [split for split in candidates if split.generation is not split.training and _whole(split)]
    return apart or [split for split in candidates if 2 * split.generation_gpus == split.generation.num_gpus]


def _whole(split: Split) -> bool:
    return (split.generation_gpus, split.training_gpus) == (split.generation.num_gpus, split.training.num_gpus)
