"""The few settings that the decision core needs, as one frozen value.

Owns: the view and what is derived from it. Never: values of its own: names, defaults and ranges are those of
``transport/contracts/settings.py``. Invariant: it travels inside every snapshot, so a journal replays without its TOML
file.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import msgspec

from orchestrator.core.model.precision import PrecisionSettings
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.settings import (
    BrokerSettings,
    DecodeCostSettings,
    EvalSettings,
    GenerationSettings,
    PipelineSettings,
    RowSettings,
    ServiceSettings,
    Settings,
    TrainerSettings,
    eval_sets,
    records_logprobs,
)
from transport.contracts.types import UpdateMode

LEAST_LOADED = "least_loaded"
"""The dispatch policy that plans nothing: each group to the worker with the least to do."""
PULLED = "pulled"
"""The same, but no worker begins a batch before the others can: the first would take all that is long."""
MANY_WORKERS = 3
"""Generation workers from which on a plan pays also where batches overlap: docs/dispatch.md, "The default"."""
ROUNDS = 8
"""Of a mini-batch whose responses are all as long as they may be; they are half of that, or less, and so are rounds."""
MAX_DEATHS = 5
"""Workers in a row that may die under one prompt. It is lowered to ``liveness.max_restarts`` (same default), so that a
prompt that kills workers is given up before their restarts are used up, and it is not raised with that setting."""

Release: TypeAlias = Literal["stream", "mini_batch", "batch"]
"""What of a batch that is still being generated the trainer may have."""
Membership: TypeAlias = Literal["fixed", "rolling"]
"""Whether a group is trained in the batch that it was admitted to, or in the first one that waits when it is ready."""
Tail: TypeAlias = Literal["drop", "defer"]
"""What becomes of the slowest groups of an over-sampled batch: they end unused, or the next batch trains them."""

_PIPELINE, _TRAINER, _EVAL, _SERVICE = PipelineSettings(), TrainerSettings(), EvalSettings(), ServiceSettings()


class ScalingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When workers come and go.

    rule: "gain" judges the iteration, "gap" is StreamRL's own, see ``autoscale.py``.
    min_workers, max_workers: limits, min_workers <= max_workers.  unit: workers that come or go together.
    min_gain: share of an iteration that a unit must save to be added.
    max_loss: share that an iteration may grow by when a unit goes; below ``min_gain``, and the gap is the hysteresis.
    confirm: iterations in a row that must say the same.  rest: iterations after a change that are not judged: the new
    worker loads, and the batch that was cut for fewer workers ends.
    """

    rule: Literal["gain", "gap"] = "gain"
    min_workers: int = 1
    max_workers: int = 1
    unit: int = 1
    min_gain: float = 0.05
    max_loss: float = 0.01
    confirm: int = 2
    rest: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(f"need 1 <= min_workers <= max_workers, got {self.min_workers} and {self.max_workers}")
        if self.unit < 1 or self.confirm < 1 or self.rest < 0:
            raise ValueError("unit and confirm must be at least 1, rest at least 0")
        if not 0 <= self.max_loss < self.min_gain:
            raise ValueError(
                f"need 0 <= max_loss < min_gain, got {self.max_loss} and {self.min_gain}: "
                "else the same worker is added and drained in turn"
            )


def decode_cost_of(cost: DecodeCostSettings) -> DecodeCost:
    named: dict[str, Any] = {field.name: getattr(cost, field.name) for field in msgspec.structs.fields(DecodeCost)}
    named["kv_capacity_tokens"] = cost.kv_capacity_tokens or math.inf
    return DecodeCost(**named)


MAX_ANSWERS = 16_384
"""Answers of one evaluation in a run: one message of MAX_MESSAGE_BYTES names all prompts, 512 bytes each at most."""
END_PROBLEMS = 64
"""Held-out problems of an evaluation of the first and the last weights where nothing else is asked for."""


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What decides a run, and nothing else.

    max_deaths: workers in a row that may die under a group before its slot is dead.
    mini_batch_groups: groups handed over together where ``release`` is "mini_batch".
    rollout_batches: batches that are generated before newer weights are waited for, at most max_staleness + 1.
    membership: "rolling" lets a finished group take the place of one that still runs, see ``rollout/admission.py``.
    oversampled_groups: groups of each batch beyond groups_per_batch; when enough are ready the others are
    ``oversampled_tail``: "drop", they end unused, or "defer", the next batch trains them, see ``rollout/admission.py``.
    micro_batch_tokens: packed tokens a rank takes in one round.
    round_tokens: tokens a rank that a round waits for while more of its batch is to come; 0: none.
    record_logprobs: old-policy logprobs are recomputed by the trainer before the first step of a batch.
    lr_schedule: "constant" or how the trainer's rate falls until the last batch, which only the core knows.
    max_retained_bytes, max_unit_bytes: bytes of rows in the broker, and in storage units; at one of them a checkpoint
    is forced, above it admission closes.
    eval_every: batches between two evaluations; 0: none.  eval_ends: the first and the last weights are evaluated, too.
    eval_problems: of each, at most; a problem that is to be answered several times counts as often.
    eval_budget: share of each worker's slots that they may take.  eval_hold_s, eval_timeout_s: see
    ``lanes/evaluation.py``.
    dispatch: policy, see ``dispatch/compute.py``.  tail_share: of the groups, that two-class dispatch counts as long.
    plan_wait_s: a batch waits so long for its plan.
    migrate_running: running groups of slow workers start over on idle ones, see ``dispatch/handout.py``.
    probes: one sample of a group starts before its others where it pays, see ``dispatch/probes.py``.
    decode_cost: of a worker without slowdown.  train_token_s: of the trainer, 0 where unknown.
    max_response_tokens: no response is longer, 0 where unknown.
    scaling: when generation workers come and go; None: never.  fp8: until when engines use it; None: none does.
    critic: a critic reads the rounds log, too: what it has not saved is kept.
    service: nothing is trained, prompts come with requests.  service_window: samples of one request that are generated
    ahead of its reader.  service_keep_s: a whole request that is not read for so long is forgotten.
    """

    num_batches: int
    groups_per_batch: int
    group_size: int
    max_staleness: int = _PIPELINE.max_staleness
    update: UpdateMode = _PIPELINE.update
    release: Release = _PIPELINE.release
    mini_batch_groups: int = _PIPELINE.mini_batch_groups
    rollout_batches: int = _PIPELINE.rollout_batches
    membership: Membership = _PIPELINE.membership
    oversampled_groups: int = _PIPELINE.oversampled_groups
    oversampled_tail: Tail = _PIPELINE.oversampled_tail
    drop_no_signal: bool = _PIPELINE.drop_no_signal
    max_refills: int = _PIPELINE.max_refills
    max_attempts: int = _PIPELINE.max_attempts
    max_deaths: int = MAX_DEATHS
    rollout_timeout_s: float = _PIPELINE.rollout_timeout_s
    micro_batch_tokens: int = _TRAINER.micro_batch_tokens
    round_tokens: int = 0
    mini_batches: int = _TRAINER.mini_batches
    epochs: int = _TRAINER.epochs
    record_logprobs: bool = False
    lr_schedule: str = _TRAINER.lr_schedule
    checkpoint_every: int = _TRAINER.checkpoint_every
    keep_checkpoints: int = _TRAINER.keep_checkpoints
    max_retained_bytes: int = BrokerSettings().max_retained_bytes
    max_unit_bytes: int = RowSettings().admitted_bytes
    critic: bool = False
    service: bool = False
    service_window: int = _SERVICE.window
    service_keep_s: float = _SERVICE.keep_s
    eval_every: int = _EVAL.every
    eval_ends: bool = False
    eval_problems: int = _EVAL.problems
    eval_budget: float = _EVAL.budget
    eval_hold_s: float = _EVAL.hold_s
    eval_timeout_s: float = _EVAL.timeout_s
    dispatch: str = LEAST_LOADED
    tail_share: float = _PIPELINE.tail_share
    plan_wait_s: float = _PIPELINE.plan_wait_s
    migrate_running: bool = _PIPELINE.migrate_running
    probes: bool = _PIPELINE.probes
    decode_cost: DecodeCost = decode_cost_of(DecodeCostSettings())
    train_token_s: float = 0.0
    max_response_tokens: int = 0
    scaling: ScalingSettings | None = None
    fp8: PrecisionSettings | None = None

    @property
    def defers(self) -> bool:
        """Whether the slowest groups of a batch go on in the next."""
        return self.oversampled_groups > 0 and self.oversampled_tail == "defer"

    @property
    def plans(self) -> bool:
        """Whether batches are planned; a service run has none."""
        return self.dispatch not in (LEAST_LOADED, PULLED) and not self.service


def core_settings(settings: Settings) -> CoreSettings:
    """Take from a run's settings what the core needs: by name, or derived."""
    trainer, generation = settings.trainer, settings.generation
    low, high = generation.min_workers or generation.num_workers, generation.max_workers or generation.num_workers
    scaling = ScalingSettings(
        rule=generation.scaling_rule,
        min_workers=low,
        max_workers=max(low, high),
        unit=generation.scaling_unit,
        min_gain=generation.min_gain,
    )
    sections = {"": settings.trainer, "eval_": settings.eval, "service_": settings.service}
    named: dict[str, Any] = msgspec.structs.asdict(settings.pipeline)
    for prefix, section in sections.items():
        named |= {f"{prefix}{name}": value for name, value in msgspec.structs.asdict(section).items()}
    derived: dict[str, Any] = {
        "num_batches": settings.run.batches,
        "max_deaths": min(MAX_DEATHS, max(1, settings.liveness.max_restarts)),
        "record_logprobs": records_logprobs(settings.algorithm.old_logprobs, trainer),
        "round_tokens": chosen_round_tokens(settings),
        "max_retained_bytes": settings.broker.max_retained_bytes,
        "max_unit_bytes": settings.rows.admitted_bytes,
        "critic": settings.has_critic,
        "service": trainer.engine == "none",
        "dispatch": chosen_dispatch(settings),
        "decode_cost": decode_cost_of(settings.decode_cost).limited(settings.generation.kv_tokens),
        "train_token_s": settings.decode_cost.train_token_s,
        "max_response_tokens": settings.sampling.max_new_tokens,
        "scaling": scaling if low < high else None,
        "fp8": precision_settings(generation),
        "eval_problems": (answers := answers_of_evaluation(settings)),
        "eval_ends": settings.eval.ends
        and 0 < answers <= MAX_ANSWERS
        and trainer.engine != "none"
        and not settings.endpoint.enabled,
    }
    wanted = {field.name for field in msgspec.structs.fields(CoreSettings)}
    return CoreSettings(**{name: value for name, value in (named | derived).items() if name in wanted})


def answers_of_evaluation(settings: Settings) -> int:
    """Answers that one evaluation asks for; of one that nothing but ``eval.ends`` asks for, END_PROBLEMS at most."""
    answers = sum(one.problems * one.samples for one in eval_sets(settings).values())
    return answers if settings.eval.every or settings.eval.sets else min(answers, END_PROBLEMS)


def precision_settings(generation: GenerationSettings) -> PrecisionSettings | None:
    """None where nothing is held in fp8."""
    if not generation.fp8:
        return None
    return PrecisionSettings(
        limit=generation.fp8_mismatch_limit,
        batches=generation.fp8_mismatch_batches,
        held=" and ".join(generation.fp8.names),
    )


def chosen_round_tokens(settings: Settings) -> int:
    """Tokens a rank that a round waits for: what ``trainer.round_tokens`` says, or what "auto" stands for there.

    One rank waits for none. Several gather weights, or wait for peers, in every micro-batch, so each shall get a whole
    one; less where a mini-batch would otherwise have too few rounds to be trained while it is generated.
    Source: ours, measured by ``benchmarks/parallel_rounds.py``: rounds as they come cost 1.2 times a batch at once, of
    whole micro-batches 1.1 times.
    """
    trainer, pipeline = settings.trainer, settings.pipeline
    if trainer.round_tokens != "auto":
        return trainer.round_tokens
    if trainer.num_ranks == 1:
        return 0
    longest = pipeline.groups_per_batch * pipeline.group_size * settings.sampling.max_new_tokens
    return min(trainer.micro_batch_tokens, longest // (trainer.num_parts * trainer.mini_batches * ROUNDS))


def chosen_dispatch(settings: Settings) -> str:
    """The policy of a run: what ``pipeline.dispatch`` says, or what "auto" stands for there."""
    pipeline, generation = settings.pipeline, settings.generation
    if pipeline.dispatch != "auto":
        return pipeline.dispatch
    return default_dispatch(
        pipeline,
        num_workers=max(generation.num_workers, generation.max_workers),
        ranked=settings.ranker.kind != "none",
    )


def default_dispatch(pipeline: PipelineSettings | CoreSettings, *, num_workers: int, ranked: bool = True) -> str:
    """The policy that "auto" stands for, in `run`, `plan` and `simulate` alike. ranked: lengths are predicted.

    With probes there is no plan, which would be made before a probe has run. Else plans pay where a batch is waited
    for. Where batches overlap, a worker with room takes the next group, and with one or two a plan that holds groups
    back loses some; with more that take versions in flight, a plan keeps the longest in time. Source: ours, simulated
    and live (docs/dispatch.md, "The default").
    """
    if pipeline.probes:
        return LEAST_LOADED if pipeline.max_staleness else PULLED
    if pipeline.max_staleness == 0:
        return "scored"
    steady = ranked and pipeline.update not in (UpdateMode.BARRIER, UpdateMode.TOGETHER) and num_workers >= MANY_WORKERS
    return "paced" if steady else LEAST_LOADED


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


def changed(settings: CoreSettings, key: str, value: object) -> CoreSettings | None:
    """``settings`` with another value of ``key``; None where it cannot change, or not to that."""
    if key not in CHANGEABLE:
        return None
    field_type: Any = Settings
    for name in key.split("."):  # with its range
        field_type = next(field.type for field in msgspec.structs.fields(field_type) if field.name == name)
    try:
        converted = msgspec.convert(value, field_type)
    except msgspec.ValidationError:
        return None
    if converted == math.inf:
        return None
    wanted = msgspec.structs.replace(settings, **{CHANGEABLE[key]: converted})
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
