"""What ``streamrl-worker profile`` measures and ``streamrl-orchestrator profile`` fits: seconds of known work.

Owns: the schema. Never: a formula (``DecodeCost`` and ``TrainCost`` have them), and no unit but seconds and tokens.
"""

from __future__ import annotations

from typing import Any

from msgspec import field

from transport.contracts.types import Struct


class DecodeRun(Struct, frozen=True, kw_only=True):
    """``steps`` decode steps of a constant batch. context_tokens: of all its samples together, at the first step.

    padded_tokens: if all were as long as the longest of them.
    """

    batch: int
    context_tokens: float
    padded_tokens: float
    steps: int
    seconds: float


class PrefillRun(Struct, frozen=True, kw_only=True):
    """One prompt computed, nothing else running."""

    tokens: int
    seconds: float


class TrainRun(Struct, frozen=True, kw_only=True):
    """One micro-batch, forward and backward. tokens: prompts once, and responses.  squared_tokens: sum over samples of
    the square of prompt and response together.  padded_tokens: if all were as long as the longest of their group."""

    tokens: int
    squared_tokens: float
    padded_tokens: float
    seconds: float


class Measurements(Struct, frozen=True, kw_only=True):
    """One machine, one model. Lists are empty where there was nothing to measure.

    config: the model's Hugging Face configuration.  context_tokens: of the longest sample that was decoded.
    optimizer_s: end of a mini-batch.  publish_s: a version from the trainer into shared memory.
    load_s: that version into an engine, checked.
    beside_training: seconds of decode runs while the trainer computed in a process of its own, over seconds without it.
    beside_decoding: of micro-batches while an engine decoded, over seconds without it.
    """

    model: str
    engine: str
    host: str
    config: dict[str, Any]
    context_tokens: int
    decode: list[DecodeRun]
    prefill: list[PrefillRun]
    train: list[TrainRun] = field(default_factory=list[TrainRun])
    optimizer_s: list[float] = field(default_factory=list[float])
    publish_s: list[float] = field(default_factory=list[float])
    load_s: list[float] = field(default_factory=list[float])
    beside_training: list[float] = field(default_factory=list[float])
    beside_decoding: list[float] = field(default_factory=list[float])
