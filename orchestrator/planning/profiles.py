"""A profile: what one machine with one model takes, fitted, as a file, and as hardware to simulate and to plan with.

Coefficients come from measured seconds by least squares of relative errors, nothing below zero. The formulas are those
of ``DecodeCost`` and ``TrainCost``, in which every coefficient is linear but the knee between memory-bound and
compute-bound batches; that one is searched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Annotated, TypeVar

import msgspec

from orchestrator.core.model.settings import decode_cost_of
from orchestrator.errors import ConfigError
from orchestrator.sim.costs import GPUS, Gpu, Measured, Sharing, TrainCost
from transport.contracts.continuous_batching import DecodeCost, DecodeRun, Measurements, PrefillRun, TrainRun
from transport.contracts.llms import BF16, Fp8, Llm, UnknownModelError, from_config
from transport.contracts.settings import AtLeast0, AtLeast1, DecodeCostSettings, NotNegative
from transport.errors import InputFileError
from transport.process.files import read_json
from transport.process.programs import command

NAME = "measured"
"""Of the hardware that a profile defines, beside the names of GPUs."""
MAX_GOOD_ERROR = 0.15
"""Held-out errors above it are worth a warning."""
FOLDS = 4
"""A quarter of the runs at a time tells how good the fit of the others is."""
KNEE_GAIN = 0.8
"""A knee has one parameter more; it must make the errors so much smaller, or there is none."""
MIN_RUNS = 4
"""Runs for four coefficients."""
MIN_BATCH_SIZES = 3
"""Sizes of batches, to separate what a sample adds from what every step takes."""


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Of a fit, relative; 0 where there was too little to hold some back."""

    median: float = 0.0
    worst: float = 0.0


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """The same engine with something in fp8: what differs then, as in ``Profile``."""

    fp8: Fp8
    decode_cost: DecodeCostSettings
    slots: AtLeast1
    context_tokens: AtLeast1
    held_out: Errors


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What was fitted. JSON in a file that ``simulate`` and ``plan`` read; ``decode_cost`` is a section for runs.

    llm: the model's shape; None where it is no dense decoder.  train: None where no trainer was measured.
    publish_s, load_s: of a version, 0 where not measured.
    slots, context_tokens, micro_batch_tokens: the largest batch, sample and micro-batch that were measured.
    decode_beside, train_beside: seconds of either while both work, over alone; 1 where not measured.
    decode_share, train_share: of the host's cores, what one worker, and one rank, keep busy; 0: they compute elsewhere.
    held_out, train_held_out: relative errors on decode runs and micro-batches that the fit had not seen.
    fp8: what the engine held in it.  variants: the engine once more, with other things in fp8.
    """

    model: str
    llm: Llm | None
    engine: str
    host: str
    decode_cost: DecodeCostSettings
    train: TrainCost | None
    publish_s: NotNegative
    load_s: NotNegative
    slots: AtLeast1
    context_tokens: AtLeast1
    micro_batch_tokens: AtLeast0
    decode_beside: Annotated[float, msgspec.Meta(ge=1)]
    train_beside: Annotated[float, msgspec.Meta(ge=1)]
    held_out: Errors
    train_held_out: Errors
    decode_share: NotNegative = 0.0
    train_share: NotNegative = 0.0
    fp8: Fp8 = BF16
    variants: tuple[Variant, ...] = ()

    @property
    def measured(self) -> Measured:
        """For the cost model."""
        same = {name: getattr(self, name) for name in Measured.__struct_fields__ if name not in ("decode", "sharing")}
        sharing = Sharing(**{name: getattr(self, name) for name in Sharing.__struct_fields__})
        return Measured(decode=decode_cost_of(self.decode_cost), sharing=sharing, **same)

    @property
    def round_tokens(self) -> int:
        """Tokens of one rank that saturate it (``TrainCost.saturating_tokens``).

        At most what was measured; 0: no trainer was. Several data ranks also gather weights in each round, which one
        rank alone cannot show: they need more.
        """
        if self.train is None:
            return 0
        return min(self.train.saturating_tokens(), self.micro_batch_tokens)


def read_profile(path: Path) -> Profile:
    """A profile that was written. Raises ConfigError."""
    try:
        return read_json(path, Profile)
    except InputFileError as error:
        make = command("streamrl-orchestrator", "profile")
        raise ConfigError(f"{error}; make a profile: {make}") from error


def variant_of(profile: Profile, fp8: Fp8) -> Profile:
    """The profile of the engine with this in fp8. Raises ConfigError: it was not measured so."""
    if profile.fp8 == fp8:
        return profile
    for variant in profile.variants:
        if variant.fp8 == fp8:
            return msgspec.structs.replace(
                profile,
                fp8=fp8,
                decode_cost=variant.decode_cost,
                slots=variant.slots,
                context_tokens=variant.context_tokens,
                held_out=variant.held_out,
                variants=(),
            )
    again = command("streamrl-orchestrator", "profile", *fp8.options.split())
    raise ConfigError(
        f"the profile has no engine with that in fp8: measure it, too ({again} ...)", where=fp8.options.split()[0]
    )


def hardware(profile: Profile | None) -> Mapping[str, Gpu]:
    """Name, in capitals -> what may be simulated."""
    return GPUS if profile is None else {**GPUS, NAME.upper(): Gpu(name=NAME, measured=profile.measured)}


def llm_of(profile: Profile) -> Llm:
    """The profiled model's shape. Raises ConfigError."""
    if profile.llm is None:
        raise ConfigError(f"the profiled model {profile.model} is no dense decoder: only those are modelled")
    return profile.llm


def check_model(profile: Profile, llm: Llm) -> None:
    """Raises ConfigError: the profile is of a model of another shape."""
    if msgspec.structs.replace(llm, name="") != msgspec.structs.replace(llm_of(profile), name=""):
        raise ConfigError(
            f"the profile is of {profile.model}, not of {llm.name}: profile that model, or leave --model out",
            where="--model",
        )


def extrapolated(
    profile: Profile, *, context_tokens: int, slots: int = 0, micro_batch_tokens: int = 0
) -> Iterator[str]:
    """What is asked of a profile beyond what was measured, in words; and when its fit is bad.

    context_tokens: of the longest sample.  slots, micro_batch_tokens: 0 where none of it is asked for.
    """
    asked = (
        (f"batches of {slots} samples", slots, profile.slots),
        (f"samples of {context_tokens} tokens", context_tokens, profile.context_tokens),
        (f"micro-batches of {micro_batch_tokens} tokens", micro_batch_tokens, profile.micro_batch_tokens),
    )
    for what, wanted, most in asked:
        if wanted > most:
            yield f"extrapolating to {what}: the profile has measured up to {most}"
    for what, errors in (("decode steps", profile.held_out), ("micro-batches", profile.train_held_out)):
        if errors.worst > MAX_GOOD_ERROR:
            yield f"the profile's fit of {what} is off by {errors.worst:.0%} at worst: profile again on a quiet machine"


# -- fitting


def with_variant(profile: Profile, fp8: Fp8, measurements: Measurements) -> Profile:
    """The profile, and its engine once more as it was measured with this in fp8. Raises ConfigError as ``fit``."""
    found = fit(measurements)
    cost = msgspec.structs.replace(found.decode_cost, train_token_s=profile.decode_cost.train_token_s)
    variant = Variant(
        fp8=fp8, decode_cost=cost, slots=found.slots, context_tokens=found.context_tokens, held_out=found.held_out
    )
    others = tuple(one for one in profile.variants if one.fp8 != fp8)
    return msgspec.structs.replace(profile, variants=(*others, variant))


def fit(measurements: Measurements) -> Profile:
    """All coefficients. Raises ConfigError: too few decode runs to fit anything."""
    found = measurements
    batches = {run.batch for run in found.decode}
    if len(batches) < MIN_BATCH_SIZES or len(found.decode) < MIN_RUNS:
        raise ConfigError(
            f"{len(batches)} sizes of batches are too few to fit a decode step: generation.slots must be at least 4",
            key="generation.slots",
        )
    train = fit_train(found.train, found.optimizer_s) if found.train else None
    try:
        llm = from_config(found.model, found.config)
    except UnknownModelError:
        llm = None
    cost = fit_decode(found.decode, found.prefill, padded=found.kv_padded or None)
    fields = {name: getattr(cost, name) for name in cost.__struct_fields__ if name != "kv_capacity_tokens"}
    return Profile(
        model=found.model,
        llm=llm,
        engine=found.engine,
        host=found.host,
        decode_cost=DecodeCostSettings(
            engine=found.engine,
            model=found.model,
            **fields,
            kv_capacity_tokens=float(found.kv_tokens),
            train_token_s=train.token_s if train else 0.0,
        ),
        train=train,
        publish_s=median(found.publish_s) if found.publish_s else 0.0,
        load_s=median(found.load_s) if found.load_s else 0.0,
        slots=max(batches),
        context_tokens=found.context_tokens,
        micro_batch_tokens=max((run.tokens for run in found.train), default=0),
        decode_beside=_slowdown(found.beside_training),
        train_beside=_slowdown(found.beside_decoding),
        decode_share=found.decode_share,
        train_share=found.train_share,
        held_out=_errors(held_out_errors(found.decode)),
        train_held_out=_errors(held_out_train_errors(found.train)),
    )


def _slowdown(ratios: Sequence[float]) -> float:
    """Nothing is faster for company: below 1 it is noise."""
    return max(1.0, median(ratios)) if ratios else 1.0


def _errors(errors: Sequence[float]) -> Errors:
    return Errors(median=median(errors), worst=max(errors)) if errors else Errors()


def held_out_errors(runs: Sequence[DecodeRun]) -> list[float]:
    """Relative errors of a fit on what it did not see: each run is held back once, one in FOLDS at a time."""
    return [
        abs(cost.steps_s(run.batch, _read_tokens(run, cost.padded), run.steps) / run.seconds - 1)
        for seen, held_back in _folds(runs)
        for cost in [fit_decode(seen, [])]
        for run in held_back
    ]


def held_out_train_errors(runs: Sequence[TrainRun]) -> list[float]:
    """The same of micro-batches."""
    return [
        abs(cost.micro_batch_s(run.tokens, _attended(run, cost.padded)) / run.seconds - 1)
        for seen, held_back in _folds(runs)
        for cost in [fit_train(seen, [])]
        for run in held_back
    ]


Run = TypeVar("Run", DecodeRun, TrainRun)


def _folds(runs: Sequence[Run]) -> Iterator[tuple[list[Run], list[Run]]]:
    """(seen, held back), on the diagonal: of every batch and every prompt length some are held back at a time."""
    fold_of = [(place + place // FOLDS) % FOLDS for place in range(len(runs))]
    for fold in range(FOLDS):
        seen = [run for run, of in zip(runs, fold_of, strict=True) if of != fold]
        if len(seen) >= MIN_RUNS:
            yield seen, [run for run, of in zip(runs, fold_of, strict=True) if of == fold]


def fit_decode(runs: Sequence[DecodeRun], prefill: Sequence[PrefillRun], *, padded: bool | None = None) -> DecodeCost:
    """Coefficients of decode steps; the knee is at one of the measured batches, or there is none.

    padded: whether samples are read as long as the longest; None: whichever is nearer to the runs.
    """
    readings = (False, True) if padded is None else (padded,)
    best, error = min((_fit_steps(runs, 0, reading) for reading in readings), key=itemgetter(1))
    for knee in sorted({run.batch for run in runs})[1:-1]:
        cost, knee_error = _fit_steps(runs, knee, best.padded)
        if knee_error < KNEE_GAIN * error - 1e-12:  # rounding of a sum of squared relative errors
            best, error = cost, knee_error
    return msgspec.structs.replace(best, prefill_token_s=_fit_prefill(prefill))


def _read_tokens(run: DecodeRun, padded: bool) -> float:
    return run.padded_tokens if padded else run.context_tokens


def _attended(run: TrainRun, padded: bool) -> float:
    return run.padded_tokens if padded else run.squared_tokens


def _fit_steps(runs: Sequence[DecodeRun], knee: int, padded: bool) -> tuple[DecodeCost, float]:
    """(coefficients, sum of squared relative errors). Up to ``knee`` samples the weights hide the arithmetic."""
    rows = [
        (
            run.steps,
            run.steps * max(knee, run.batch) if knee else 0.0,
            run.steps * run.batch,
            run.steps * _read_tokens(run, padded) + 0.5 * run.batch * run.steps * (run.steps - 1),
        )
        for run in runs
    ]
    (fixed, gemm, sample, kv), error = non_negative(rows, [run.seconds for run in runs])
    cost = DecodeCost(
        fixed_s=max(fixed, 1e-9),
        weights_s=gemm * knee,
        gemm_sample_s=gemm,
        sample_s=sample,
        kv_token_s=kv,
        padded=padded,
    )
    return cost, error


def _fit_prefill(runs: Sequence[PrefillRun]) -> float:
    """What a prompt token takes, above what a step takes in any case."""
    slopes = [
        (long.seconds - short.seconds) / (long.tokens - short.tokens)
        for short, long in itertools.combinations(sorted(runs, key=lambda run: run.tokens), 2)
        if long.tokens > 2 * short.tokens
    ]
    return max(0.0, median(slopes)) if slopes else 0.0


def fit_train(runs: Sequence[TrainRun], optimizer_s: Sequence[float]) -> TrainCost:
    """Coefficients of micro-batches; the first optimizer step, which allocates, does not count."""
    later = optimizer_s[1:] or optimizer_s
    fits: list[tuple[TrainCost, float]] = []
    for padded in (False, True):
        rows = [(1.0, run.tokens, _attended(run, padded)) for run in runs]
        (round_s, token_s, squared_s), error = non_negative(rows, [run.seconds for run in runs])
        fits.append((TrainCost(round_s=round_s, token_s=token_s, squared_token_s=squared_s, padded=padded), error))
    best, _ = min(fits, key=itemgetter(1))
    return msgspec.structs.replace(best, optimizer_s=median(later) if later else 0.0)


def non_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """(coefficients >= 0 that minimise the sum of squared relative errors, that sum).

    Args: rows: [N, K] what each coefficient is multiplied by, K small.  seconds: [N] measured, > 0.
    """
    import numpy as np  # here: `plan` and `simulate` read profiles and fit none

    weighted = np.array(rows) / np.array(seconds)[:, None]
    count = weighted.shape[1]
    best, least = [0.0] * count, float("inf")
    # every choice of columns but none: with four of them the exact answer is this cheap
    for used in [list(one) for size in range(1, count + 1) for one in itertools.combinations(range(count), size)]:
        if not np.any(weighted[:, used], axis=0).all():
            continue
        found = np.linalg.lstsq(weighted[:, used], np.ones(len(seconds)), rcond=None)[0]
        error = float(np.sum((weighted[:, used] @ found - 1.0) ** 2))
        if (found >= 0).all() and error < least:
            best, least = [0.0] * count, error
            for place, value in zip(used, found, strict=True):
                best[place] = float(value)
    return best, least
