"""Coefficients of the cost model from measured seconds: least squares of relative errors, nothing below zero.

Owns: the fits, and how wrong they are on what they did not see. Never: measuring (``workers/profile.py``).
Invariant: the formulas are those of ``core/cost_model.py``, in which every coefficient is linear but the knee between
memory-bound and compute-bound batches; that one is searched.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

from orchestrator.core.cost_model import DecodeCost, TrainCost
from orchestrator.core.settings import decode_cost_of
from orchestrator.errors import ConfigError
from transport.measurements import DecodeRun, Measurements, PrefillRun, TrainRun
from transport.settings import DecodeCostSettings

HELD_OUT_EVERY = 4
"""Of the decode runs, one in so many tells how good the fit of the others is."""
KNEE_GAIN = 0.8
"""A knee has one parameter more; it must make the errors so much smaller, or there is none."""
ROUNDING = 1e-12
"""Of a sum of squared relative errors."""
FEWEST = 4
"""Runs for four coefficients."""
FEWEST_BATCHES = 3
"""Sizes of batches, to tell what a sample adds from what every step takes."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What was fitted. JSON in a file, so that ``simulate`` and ``plan`` can read it; ``decode_cost`` is a section.

    train: None where no trainer was measured.  publish_s, load_s: of a version, 0 where not measured.
    held_out_median, held_out_worst: relative errors on decode runs that the fit had not seen.
    """

    model: str
    engine: str
    host: str
    decode_cost: DecodeCostSettings
    train: TrainCost | None
    publish_s: float
    load_s: float
    held_out_median: float
    held_out_worst: float

    @property
    def decode(self) -> DecodeCost:
        """For the cost model."""
        return decode_cost_of(self.decode_cost)


def fit(measurements: Measurements) -> Profile:
    """All coefficients. Raises ConfigError: too few decode runs to fit anything."""
    batches = {run.batch for run in measurements.decode}
    if len(batches) < FEWEST_BATCHES or len(measurements.decode) < FEWEST:
        raise ConfigError(
            f"{len(batches)} sizes of batches are too few to fit a decode step: generation.slots must be at least 4",
            key="generation.slots",
        )
    errors = held_out_errors(measurements.decode)
    train = fit_train(measurements.train, measurements.optimizer_s) if measurements.train else None
    cost = fit_decode(measurements.decode, measurements.prefill)
    fields = {name: getattr(cost, name) for name in cost.__struct_fields__ if name != "kv_capacity_tokens"}
    return Profile(
        model=measurements.model,
        engine=measurements.engine,
        host=measurements.host,
        decode_cost=DecodeCostSettings(**fields, train_token_s=train.token_s if train else 0.0),
        train=train,
        publish_s=median(measurements.publish_s) if measurements.publish_s else 0.0,
        load_s=median(measurements.load_s) if measurements.load_s else 0.0,
        held_out_median=median(errors) if errors else 0.0,
        held_out_worst=max(errors, default=0.0),
    )


def held_out_errors(runs: Sequence[DecodeRun]) -> list[float]:
    """Relative errors on every HELD_OUT_EVERY-th run of a fit to the others; none where too few are left."""
    seen = [run for place, run in enumerate(runs) if place % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    held_out = [run for place, run in enumerate(runs) if place % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    if len(seen) < FEWEST:
        return []
    cost = fit_decode(seen, [])
    return [abs(cost.steps_s(run.batch, run.context_tokens, run.steps) / run.seconds - 1) for run in held_out]


def fit_decode(runs: Sequence[DecodeRun], prefill: Sequence[PrefillRun]) -> DecodeCost:
    """Coefficients of decode steps; the knee is at one of the measured batches, or there is none."""
    best, error = _fit_steps(runs, 0)
    for knee in sorted({run.batch for run in runs})[1:-1]:
        cost, knee_error = _fit_steps(runs, knee)
        if knee_error < KNEE_GAIN * error - ROUNDING:
            best, error = cost, knee_error
    return msgspec.structs.replace(best, prefill_token_s=_fit_prefill(best, prefill))


def _fit_steps(runs: Sequence[DecodeRun], knee: int) -> tuple[DecodeCost, float]:
    """(coefficients, sum of squared relative errors). Up to ``knee`` samples the weights hide the arithmetic."""
    rows = np.array(
        [
            (
                run.steps,
                run.steps * max(knee, run.batch) if knee else 0.0,
                run.steps * run.batch,
                run.steps * run.context_tokens + 0.5 * run.batch * run.steps * (run.steps - 1),
            )
            for run in runs
        ]
    )
    (fixed, gemm, sample, kv), error = non_negative(rows, np.array([run.seconds for run in runs]))
    cost = DecodeCost(
        fixed_s=max(fixed, 1e-9), weights_s=gemm * knee, gemm_sample_s=gemm, sample_s=sample, kv_token_s=kv
    )
    return cost, error


def _fit_prefill(cost: DecodeCost, runs: Sequence[PrefillRun]) -> float:
    """What a prompt token takes, above what a step takes in any case."""
    slopes = [
        (long.seconds - short.seconds) / (long.tokens - short.tokens)
        for short, long in itertools.combinations(sorted(runs, key=lambda run: run.tokens), 2)
        if long.tokens > 2 * short.tokens
    ]
    return max(0.0, median(slopes)) if slopes else 0.0


def fit_train(runs: Sequence[TrainRun], optimizer_s: Sequence[float]) -> TrainCost:
    """Coefficients of micro-batches; the first optimizer step, which allocates, does not count."""
    rows = np.array([(1.0, run.tokens, run.squared_tokens) for run in runs])
    (round_s, token_s, squared_s), _ = non_negative(rows, np.array([run.seconds for run in runs]))
    later = optimizer_s[1:] or optimizer_s
    return TrainCost(
        round_s=round_s, token_s=token_s, squared_token_s=squared_s, optimizer_s=median(later) if later else 0.0
    )


def non_negative(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[list[float], float]:
    """(coefficients >= 0 that minimise the sum of squared relative errors, that sum).

    Args: rows: [N, K] what each coefficient is multiplied by, K small.  seconds: [N] measured, > 0.
    """
    weighted = rows / seconds[:, None]
    best, least = [0.0] * rows.shape[1], float("inf")
    for used in _subsets(rows.shape[1]):
        if not np.any(weighted[:, used], axis=0).all():
            continue
        found = np.linalg.lstsq(weighted[:, used], np.ones(len(seconds)), rcond=None)[0]
        error = float(np.sum((weighted[:, used] @ found - 1.0) ** 2))
        if (found >= 0).all() and error < least:
            best, least = [0.0] * rows.shape[1], error
            for place, value in zip(used, found, strict=True):
                best[place] = float(value)
    return best, least


def _subsets(count: int) -> list[list[int]]:
    """Every choice of columns but none: with four of them the exact answer is this cheap."""
    return [list(used) for size in range(1, count + 1) for used in itertools.combinations(range(count), size)]


def read_profile(path: Path) -> Profile:
    """A profile that was written. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no profile: {error}; make one with `streamrl-orchestrator profile`") from error
