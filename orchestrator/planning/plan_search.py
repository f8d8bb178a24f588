"""What to do with some GPUs: the best split, the runner-up, and the even split that needs no thought.

Bounds first, then short simulations, then long ones of the few that are close. All candidates are judged on the same
lengths and seed, and everything that is compared in the end was simulated by the same window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from multiprocessing import get_context

import msgspec

from orchestrator.core.model.autoscale import estimate_of
from orchestrator.core.model.settings import CoreSettings, default_dispatch
from orchestrator.planning.allocation import (
    Found,
    MeasuredSplit,
    Objective,
    Pool,
    Progress,
    Split,
    ranked,
    search,
    silent,
    splits,
)
from orchestrator.sim.costs import (
    ASSUMED,
    OUR_TRAINER,
    Algorithm,
    Assumptions,
    Gpu,
    Recompute,
    most_micro_batch_tokens,
)
from orchestrator.sim.engine import SimulationLog
from orchestrator.sim.lengths import Group, representative
from orchestrator.sim.scenarios import (
    MINI_BATCHES,
    PIPELINES,
    Bound,
    Layout,
    Workload,
    bound,
    drafting_always,
    planned_cost,
    scenario,
    shortened,
)
from orchestrator.sim.simulate import simulate
from transport.contracts.llms import BF16, Fp8, Llm
from transport.contracts.settings import SERVER_ENGINES

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


PLANNED = msgspec.structs.replace(ASSUMED, trainer=OUR_TRAINER)


def planned(recompute: Recompute) -> Assumptions:
    """Of our trainer, with activations computed again as ``trainer.recompute`` says."""
    return msgspec.structs.replace(PLANNED, trainer=msgspec.structs.replace(OUR_TRAINER, recompute=recompute))


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
    """What is to be trained, and how, by our trainer unless ``assumed`` says otherwise.

    groups: lengths as read from a file.

    link_bytes_per_s: between two sites.  recall: of the ranker, None: it knows every prompt's mean length.
    drafts, fp8: as in ``Layout``, of whatever generates.  probes, deferred: as in ``shortened``.
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
    drafts: float = 0.0
    fp8: Fp8 = BF16
    probes: bool = False
    deferred: int = 0
    seed: int = 0
    assumed: Assumptions = PLANNED

    @property
    def settings(self) -> CoreSettings:
        return shortened(PIPELINES[self.pipeline], probes=self.probes, deferred=self.deferred)

    def dispatch(self, split: Split) -> str:
        """As a run of the split would choose."""
        return default_dispatch(self.settings, num_workers=split.instances)

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
            group_size=self.group_size,
            batches=batches,
            prompt_tokens=self.prompt_tokens,
            recall=self.recall,
            seed=self.seed,
        )
        return Workload(
            llm=self.llm, lengths=lengths, batch=self.batch, group_size=self.group_size, algorithm=self.algorithm
        )

    def layout(self, split: Split, workload: Workload) -> Layout:
        means = [sum(group) / len(group) for group in workload.lengths.lengths[: self.batch]]
        tokens = sum(means) * self.group_size + self.batch * self.prompt_tokens
        wanted = min(micro_batch_tokens_of(split.training.gpu), max(1.0, tokens / split.ranks / ROUNDS))
        longest = self.context_tokens
        most = most_micro_batch_tokens(
            self.llm, split.training.gpu, split.training_gpus, split.ranks, longest, self.assumed
        )
        micro_batch_tokens = min(max(wanted, longest), most)  # a sample is never split
        layout = Layout(
            generation_gpus=split.generation_gpus,
            training_gpus=split.training_gpus,
            tensor_parallel=split.tensor_parallel,
            ranks=split.ranks,
            generation_gpu=split.generation.gpu,
            training_gpu=split.training.gpu,
            slots=slots_of(split.generation.gpu),
            micro_batch_tokens=int(micro_batch_tokens),
            drafts=self.drafts,
            fp8=self.fp8,
            link_bytes_per_s=self.link_bytes_per_s if split.generation.site != split.training.site else 0.0,
        )
        return drafting_always(workload, layout, self.assumed, drains=not self.settings.max_staleness)  # as servers do


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
    return _steady_s(simulation_of(job, window, split, trace=False), window, bound_of(job, job.workload(1), split), job)


def _steady_s(log: SimulationLog, window: Window, least: Bound, job: Job) -> float:
    """Of the window, and no less than the bound: a window that ends behind a burst of versions, which were generated
    before it began, is shorter than the same number of iterations in the long run."""
    return max(log.iteration_s(window.warm_up, window.cool_down), least.iteration_s(job.settings))


def predict(job: Job, window: Window, split: Split) -> Prediction:
    """The same, with everything that is worth saying of it."""
    log = simulation_of(job, window, split, trace=True)
    workload = job.workload(1)
    least = bound_of(job, workload, split)
    seconds = _steady_s(log, window, least, job)
    begin_s = log.published_s[window.warm_up - 1]
    end_s = log.published_s[len(log.published_s) - window.cool_down - 1]
    idle = _generation_idle(log, split.instances, begin_s, end_s)
    busy_s = sum(max(0.0, min(at_s + took_s, end_s) - max(at_s, begin_s)) for at_s, took_s, _ in log.training)
    return Prediction(
        split=split,
        iteration_s=seconds,
        bound=least,
        transfer_s=job.layout(split, workload).transfer_s(job.llm, job.assumed),
        generation_idle=idle,
        generation_thin=max(0.0, 1.0 - idle - least.generation_s / seconds),
        trainer_idle=max(0.0, 1.0 - busy_s / (end_s - begin_s)),
        mean_age=log.mean_age,
        oldest_age=log.oldest_age,
    )


def simulation_of(job: Job, window: Window, split: Split, *, trace: bool) -> SimulationLog:
    workload = job.workload(window.iterations)
    return simulate(
        scenario(
            workload,
            job.layout(split, workload),
            job.settings,
            iterations=window.iterations,
            assumed=job.assumed,
            dispatch=job.dispatch(split),
            trace=trace,
        )
    )


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


FINALIST_SHARE = 0.05
"""What a short simulation may be off by: splits this near to the best are simulated longer."""
MAX_FINALISTS = 6


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
        max_ranks=job.batch,
        minimise=minimise,
        assumed=job.assumed,
        fp8=job.fp8,
    )
    bounds = Bounds(job, job.workload(1))
    several = processes > 1  # each simulation in a process of its own
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) if several else nullcontext() as pool:
        simulated = map if pool is None else pool.map
        found = search(
            candidates,
            bounds.iteration_s,
            lambda chosen: list(simulated(partial(iteration_s, job, SHORT), chosen)),
            minimise=minimise,
            at_once=processes,
            progress=progress,
        )
        even = bounds.quickest(_even(candidates))
        compared = _finalists(found, candidates, bounds, minimise)
        compared += [even] if even is not None and even not in compared else []
        predictions = dict(zip(compared, simulated(partial(predict, job, LONG), compared), strict=True))
    measured = [MeasuredSplit(split=split, iteration_s=one.iteration_s) for split, one in predictions.items()]
    order = [one.split for one in ranked(measured, minimise)]
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
    order = ranked(found.measured, minimise)
    limit = (1 + FINALIST_SHARE) * order[0].score(minimise)
    close = [one.split for one in order if one.score(minimise) <= limit][:MAX_FINALISTS]
    others = [one.split for one in order if _place(one.split) != _place(close[0])]
    if not others:
        elsewhere = [split for split in candidates if _place(split) != _place(close[0])]
        reached = [MeasuredSplit(split=split, iteration_s=bounds.iteration_s(split)) for split in elsewhere]
        others = [one.split for one in ranked(reached, minimise)]
    return list(dict.fromkeys([*close, *others[:1]]))


# -- a plan as settings of a run

GROUP_LIVES = 4.0
"""Times the iterations that a group may be under way, before it is taken back: it also waits for a slot."""


def run_settings(job: Job, plan: Prediction, engine: str, model_path: str) -> dict[str, dict[str, object]]:
    """Section -> settings that make a run what was simulated; all others keep their defaults.

    A section inside of another has a dotted name.

    engine: of generation.  model_path: as setting ``model.path``.
    """
    split, core = plan.split, job.settings
    workload = job.workload(1)
    layout = job.layout(split, workload)
    cost = planned_cost(workload, layout, job.assumed)
    costs = {name: getattr(cost, name) for name in cost.__struct_fields__}
    timeout_s = ceil(max(300.0, GROUP_LIVES * (core.max_staleness + 1) * plan.iteration_s))
    generation: dict[str, object] = {"engine": engine, "workers": split.instances, "slots": layout.slots}
    if split.tensor_parallel > 1:
        generation["gpus_per_worker"] = split.tensor_parallel
    if engine in SERVER_ENGINES:
        generation |= job.fp8.settings
        generation |= {"drafts": layout.draft_depth} if layout.draft_depth else {}
    elif split.generation.gpu.measured is not None and cost.kv_capacity_tokens < inf:
        generation["kv_tokens"] = int(cost.kv_capacity_tokens)  # that it was profiled with
    saturating = layout.train_cost(job.llm, job.algorithm, job.assumed).saturating_tokens()
    trainer: dict[str, object] = {
        "ranks": split.training_gpus,
        "micro_batch_tokens": layout.micro_batch_tokens,
        "round_tokens": min(saturating, layout.micro_batch_tokens),
    }
    if job.assumed.trainer.recompute != "none":
        trainer["recompute"] = job.assumed.trainer.recompute
    return {
        "model": {"path": model_path},
        "sampling": {"max_new_tokens": max(max(group) for group in job.groups)},
        "generation": generation,
        "trainer": trainer,
        "trainer.parallel": {
            "data": split.ranks,
            "tensor": split.training_tensor_parallel,
            "pipeline": split.pipeline_parallel,
        },
        "pipeline": {
            "groups_per_batch": job.batch,
            "group_size": job.group_size,
            "max_staleness": core.max_staleness,
            "update": core.update,
            "release": core.release,
            "mini_batch_groups": max(1, job.batch // MINI_BATCHES),
            "rollout_batches": core.rollout_batches,
            "membership": core.membership,
            **({"probes": True} if core.probes else {}),
            **({"oversampled_groups": job.deferred, "oversampled_tail": "defer"} if core.defers else {}),
            "rollout_timeout_s": float(timeout_s),
        },
        "decode_cost": {name: value for name, value in costs.items() if value and value != inf},
        "liveness": {"stall_s": 2.0 * timeout_s},
    }


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
        return bound_of(self._job, self._workload, split).iteration_s(self._job.settings)

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
            cost = planned_cost(self._workload, job.layout(split, self._workload), job.assumed)
            self._makespans[key] = estimate_of(
                cost, lengths, prompt_tokens=float(job.prompt_tokens), max_running=slots_of(split.generation.gpu)
            )
        return self._makespans[key]

    def quickest(self, candidates: Sequence[Split]) -> Split | None:
        """Of these the one whose slower stage is the fastest."""
        return min(candidates, key=lambda split: max(self.stages_s(split)), default=None)


def _even(candidates: Sequence[Split]) -> list[Split]:
    """One pool each, or half and half of the only one: what needs no thought (StreamRL fig. 10)."""
    apart = [
        split
        for split in candidates
        if split.generation is not split.training
        and (split.generation_gpus, split.training_gpus) == (split.generation.num_gpus, split.training.num_gpus)
    ]
    return apart or [split for split in candidates if 2 * split.generation_gpus == split.generation.num_gpus]
