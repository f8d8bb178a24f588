"""A profile: what was fitted of one machine with one model, as a file, and as hardware to simulate and to plan with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from orchestrator.core.costs.cost_model import TrainCost
from orchestrator.core.costs.hardware import GPUS, Gpu, Measured, profiled
from orchestrator.core.costs.llms import Llm
from orchestrator.core.model.settings import decode_cost_of
from orchestrator.errors import ConfigError
from transport.contracts.settings import DecodeCostSettings
from transport.errors import InputFileError
from transport.process.json_files import read_json

NAME = "measured"
"""Of the hardware that a profile defines, beside the names of GPUs."""
GOOD_FIT = 0.15
"""Held-out errors above it are worth a warning."""


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Of a fit, relative; 0 where there was too little to hold some back."""

    median: float = 0.0
    worst: float = 0.0


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What was fitted. JSON in a file that ``simulate`` and ``plan`` read; ``decode_cost`` is a section for runs.

    llm: the model's shape; None where it is no dense decoder.  train: None where no trainer was measured.
    publish_s, load_s: of a version, 0 where not measured.
    slots, context_tokens, micro_batch_tokens: the largest batch, sample and micro-batch that were measured.
    decode_beside, train_beside: seconds of either while both work, over alone; 1 where not measured.
    held_out, train_held_out: relative errors on decode runs and micro-batches that the fit had not seen.
    """

    model: str
    llm: Llm | None
    engine: str
    host: str
    decode_cost: DecodeCostSettings
    train: TrainCost | None
    publish_s: float
    load_s: float
    slots: int
    context_tokens: int
    micro_batch_tokens: int
    decode_beside: float
    train_beside: float
    held_out: Errors
    train_held_out: Errors

    @property
    def measured(self) -> Measured:
        """For the cost model."""
        return Measured(
            decode=decode_cost_of(self.decode_cost),
            train=self.train,
            publish_s=self.publish_s,
            load_s=self.load_s,
            slots=self.slots,
            micro_batch_tokens=self.micro_batch_tokens,
            decode_beside=self.decode_beside,
            train_beside=self.train_beside,
        )


def read_profile(path: Path) -> Profile:
    """A profile that was written. Raises ConfigError."""
    try:
        return read_json(path, Profile)
    except InputFileError as error:
        raise ConfigError(f"{error}; make a profile with `streamrl-orchestrator profile`") from error


def hardware(profile: Profile | None) -> Mapping[str, Gpu]:
    """Name, in capitals -> what may be simulated."""
    return GPUS if profile is None else {**GPUS, NAME.upper(): profiled(NAME, profile.measured)}


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
        if errors.worst > GOOD_FIT:
            yield f"the profile's fit of {what} is off by {errors.worst:.0%} at worst: profile again on a quiet machine"
