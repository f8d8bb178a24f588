"""The few settings that the decision core needs, as one frozen value.

Owns: the view and what is derived from it. Never: defaults and checks, which live in
``transport/contracts/settings.py`` and ``orchestrator/config/load.py``. Invariant: it travels inside every snapshot,
so a journal replays without its TOML file.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from orchestrator.core.model.autoscale import ScalingSettings
from orchestrator.core.model.batching import Release
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.settings import DecodeCostSettings, GenerationSettings, Settings
from transport.contracts.types import UpdateMode

LEAST_LOADED = "least_loaded"
MANY_WORKERS = 5
"""Generation workers from which on a plan pays also where batches overlap."""
"""The dispatch policy that plans nothing: each group to the worker with the least to do."""
UNBOUNDED = 2**31
"""Of a service run: the number of a request says nothing of the age of weights; it starts with the newest there are."""

MAX_DEATHS = 5
"""Workers in a row that may die under one prompt. It is lowered to ``liveness.max_restarts`` (same default), so that a
prompt that kills workers is given up before their restarts are used up, and it is not raised with that setting."""

Membership: TypeAlias = Literal["fixed", "rolling"]
"""Whether a group is trained in the batch that it was admitted to, or in the first one that waits when it is ready."""


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What decides a run, and nothing else.

    max_deaths: workers in a row that may die under a group before its slot is dead.
    mini_batch_groups: groups handed over together where ``release`` is "mini_batch".
    rollout_batches: batches that are generated before newer weights are waited for, at most max_staleness + 1.
    membership: "rolling" lets a finished group take the place of one that still runs, see ``rolling.py``.
    oversampled_groups: groups of each batch beyond groups_per_batch; when enough are ready the others end unused.
    micro_batch_tokens: packed tokens a rank takes in one round.
    record_logprobs: old-policy logprobs are recomputed by the trainer before the first step of a batch.
    max_retained_bytes: bytes of rows in the broker; at it a checkpoint is forced, above it admission closes.
    eval_every: batches between two evaluations of at most eval_problems held-out problems each; 0: none.
    eval_budget: share of each worker's slots that they may take.  eval_hold_s, eval_timeout_s: see
    ``evaluation_schedule.py``.
    dispatch: policy, see ``dispatch/policies.py``.  plan_wait_s: a batch waits so long for its plan.
    migrate_running: running groups of slow workers start over on idle ones, see ``migration.py``.
    decode_cost: of a worker of pace 1.  train_token_s: of the trainer, 0 where unknown.
    max_response_tokens: no response is longer, 0 where unknown.
    scaling: when generation workers come and go; None: never.
    service: nothing is trained, prompts come with requests.  service_window: samples of one request that are generated
    ahead of its reader.  service_keep_s: a whole request that nobody reads for so long is forgotten.
    """

    num_batches: int
    groups_per_batch: int
    group_size: int
    max_staleness: int = 1
    update: UpdateMode = UpdateMode.IN_FLIGHT
    release: Release = "stream"
    mini_batch_groups: int = 4
    rollout_batches: int = 1
    membership: Membership = "fixed"
    oversampled_groups: int = 0
    drop_no_signal: bool = False
    max_refills: int = 8
    max_attempts: int = 4
    max_deaths: int = 5
    rollout_timeout_s: float = 300.0
    micro_batch_tokens: int = 4096
    mini_batches: int = 1
    epochs: int = 1
    record_logprobs: bool = False
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    max_retained_bytes: int = 2_000_000_000
    service: bool = False
    service_window: int = 1024
    service_keep_s: float = 3600.0
    eval_every: int = 0
    eval_problems: int = 0
    eval_budget: float = 0.5
    eval_hold_s: float = 60.0
    eval_timeout_s: float = 300.0
    dispatch: str = LEAST_LOADED
    plan_wait_s: float = 1.0
    migrate_running: bool = False
    decode_cost: DecodeCost = DecodeCost(fixed_s=0.02, sample_s=0.0005)
    train_token_s: float = 0.0
    max_response_tokens: int = 0
    scaling: ScalingSettings | None = None

    @property
    def plans(self) -> bool:
        """Whether batches are planned; a service run has none."""
        return self.dispatch != LEAST_LOADED and not self.service


def core_settings(settings: Settings) -> CoreSettings:
    """Take from a run's settings what the core needs.

    Logprobs are recorded only when a batch takes several steps: with one step the policy that trains is still the one
    that the logprobs would be recorded under, so the trainer's own forward pass already has them.
    """
    pipeline, trainer = settings.pipeline, settings.trainer
    many_steps = trainer.mini_batches > 1 or trainer.epochs > 1
    return CoreSettings(
        num_batches=settings.run.batches,
        groups_per_batch=pipeline.groups_per_batch,
        group_size=pipeline.group_size,
        max_staleness=pipeline.max_staleness if trainer.engine != "none" else UNBOUNDED,
        update=pipeline.update,
        release=pipeline.release,
        mini_batch_groups=pipeline.mini_batch_groups,
        rollout_batches=pipeline.rollout_batches,
        membership=pipeline.membership,
        oversampled_groups=pipeline.oversampled_groups,
        drop_no_signal=pipeline.drop_no_signal,
        max_refills=pipeline.max_refills,
        max_attempts=pipeline.max_attempts,
        max_deaths=min(MAX_DEATHS, max(1, settings.liveness.max_restarts)),
        rollout_timeout_s=pipeline.rollout_timeout_s,
        micro_batch_tokens=trainer.micro_batch_tokens,
        mini_batches=trainer.mini_batches,
        epochs=trainer.epochs,
        record_logprobs=settings.algorithm.old_logprobs == "recomputed" and many_steps,
        checkpoint_every=trainer.checkpoint_every,
        keep_checkpoints=trainer.keep_checkpoints,
        max_retained_bytes=settings.broker.max_retained_bytes,
        service=trainer.engine == "none",
        service_window=settings.service.window,
        service_keep_s=settings.service.keep_s,
        eval_every=settings.eval.every,
        eval_problems=settings.eval.problems,
        eval_budget=settings.eval.budget,
        eval_hold_s=settings.eval.hold_s,
        eval_timeout_s=settings.eval.timeout_s,
        dispatch=chosen_dispatch(settings),
        plan_wait_s=pipeline.plan_wait_s,
        migrate_running=pipeline.migrate_running,
        decode_cost=decode_cost_of(settings.decode_cost),
        train_token_s=settings.decode_cost.train_token_s,
        max_response_tokens=settings.sampling.max_new_tokens,
        scaling=_scaling(settings.generation),
    )


def chosen_dispatch(settings: Settings) -> str:
    """The policy of a run: what ``pipeline.dispatch`` says, or what "auto" stands for there."""
    pipeline, generation = settings.pipeline, settings.generation
    if pipeline.dispatch != "auto":
        return pipeline.dispatch
    return default_dispatch(
        max_staleness=pipeline.max_staleness,
        update=UpdateMode(pipeline.update),
        num_workers=max(generation.workers, generation.max_workers),
        ranked=settings.ranker.kind != "none",
    )


def default_dispatch(*, max_staleness: int, update: UpdateMode, num_workers: int, ranked: bool = True) -> str:
    """The policy that "auto" stands for, in `run`, `plan` and `simulate` alike. ranked: somebody predicts lengths.

    Plans pay where a batch is waited for. Where batches overlap, whoever has room takes the next group, and with few
    workers a plan that holds groups back loses some; with many that take versions in flight, a plan keeps the longest
    in time. Source: ours, simulated and live (docs/dispatch.md, "The default").
    """
    if max_staleness == 0:
        return "scored"
    paced = ranked and update is not UpdateMode.BARRIER and num_workers >= MANY_WORKERS
    return "paced" if paced else LEAST_LOADED


def _scaling(generation: GenerationSettings) -> ScalingSettings | None:
    low, high = generation.min_workers or generation.workers, generation.max_workers or generation.workers
    return ScalingSettings(min_workers=low, max_workers=high, min_gain=generation.min_gain) if low < high else None


def decode_cost_of(cost: DecodeCostSettings) -> DecodeCost:
    """The cost model that the section describes."""
    return DecodeCost(
        fixed_s=cost.fixed_s,
        weights_s=cost.weights_s,
        gemm_sample_s=cost.gemm_sample_s,
        sample_s=cost.sample_s,
        kv_token_s=cost.kv_token_s,
        prefill_token_s=cost.prefill_token_s,
        kv_capacity_tokens=cost.kv_capacity_tokens or math.inf,
        padded=cost.padded,
    )


CHANGEABLE = {
    "run.batches": "num_batches",
    "pipeline.max_staleness": "max_staleness",
    "pipeline.update": "update",
    "pipeline.max_refills": "max_refills",
    "pipeline.max_attempts": "max_attempts",
    "pipeline.rollout_timeout_s": "rollout_timeout_s",
    "trainer.checkpoint_every": "checkpoint_every",
}
"""Settings that may change while the run goes on, and their fields here: the core alone reads them, each for its next
decision. The others are in the hands of processes that read them once, or fix what a batch is."""
MINIMUM = {"num_batches": 1, "max_staleness": 0, "max_refills": 0, "max_attempts": 1, "checkpoint_every": 1}


def changed(settings: CoreSettings, key: str, value: object) -> CoreSettings | None:
    """``settings`` with another value of ``key``; None where the core cannot take it."""
    name = CHANGEABLE.get(key, "")
    types = {field.name: field.type for field in msgspec.structs.fields(CoreSettings)}
    try:
        converted = msgspec.convert(value, types[name])
    except (KeyError, msgspec.ValidationError):
        return None
    if name == "rollout_timeout_s" and not 0 < converted < float("inf"):
        return None
    if name in MINIMUM and converted < MINIMUM[name]:
        return None
    wanted = msgspec.structs.replace(settings, **{name: converted})
    return wanted if wanted.rollout_batches <= wanted.max_staleness + 1 else None  # none of them could be admitted


def changeable(settings: CoreSettings) -> dict[str, int | float | str]:
    """Dotted key -> its value now, of every setting that may be changed."""
    return {key: getattr(settings, name) for key, name in CHANGEABLE.items()}


def reconfigured(current: CoreSettings, before: CoreSettings, wanted: CoreSettings) -> CoreSettings:
    """``current`` under a configuration that was ``before`` and is now ``wanted``.

    What the configuration changed wins; what was changed while the run went on stays otherwise.
    """
    names = [field.name for field in msgspec.structs.fields(CoreSettings)]
    differing = [name for name in names if getattr(wanted, name) != getattr(before, name)]
    return msgspec.structs.replace(current, **{name: getattr(wanted, name) for name in differing})
