"""The few settings that the decision core needs, as one frozen value.

Owns: the view and what is derived from it. Never: defaults and checks, which live in ``transport/settings.py`` and
``orchestrator/config.py``. Invariant: it travels inside every snapshot, so a journal replays without its TOML file.
"""

from __future__ import annotations

import msgspec

from orchestrator.core.batching import Release
from transport.settings import Settings
from transport.types import UpdateMode


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What decides a run, and nothing else.

    mini_batch_groups: groups handed over together where ``release`` is "mini_batch".
    rollout_batches: batches that are generated before newer weights are waited for, at most max_staleness + 1.
    micro_batch_tokens: packed tokens a rank takes in one round.
    record_logprobs: old-policy logprobs are recomputed by the trainer before the first step of a batch.
    max_retained_bytes: bytes of rows in the broker; at it a checkpoint is forced, above it admission closes.
    """

    num_batches: int
    groups_per_batch: int
    group_size: int
    max_staleness: int = 1
    update: UpdateMode = UpdateMode.IN_FLIGHT
    release: Release = "stream"
    mini_batch_groups: int = 4
    rollout_batches: int = 1
    drop_no_signal: bool = False
    max_refills: int = 8
    max_attempts: int = 4
    rollout_timeout_s: float = 300.0
    micro_batch_tokens: int = 4096
    mini_batches: int = 1
    epochs: int = 1
    record_logprobs: bool = False
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    max_retained_bytes: int = 2_000_000_000


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
        max_staleness=pipeline.max_staleness,
        update=pipeline.update,
        release=pipeline.release,
        mini_batch_groups=pipeline.mini_batch_groups,
        rollout_batches=pipeline.rollout_batches,
        drop_no_signal=pipeline.drop_no_signal,
        max_refills=pipeline.max_refills,
        max_attempts=pipeline.max_attempts,
        rollout_timeout_s=pipeline.rollout_timeout_s,
        micro_batch_tokens=trainer.micro_batch_tokens,
        mini_batches=trainer.mini_batches,
        epochs=trainer.epochs,
        record_logprobs=settings.algorithm.old_logprobs == "recomputed" and many_steps,
        checkpoint_every=trainer.checkpoint_every,
        keep_checkpoints=trainer.keep_checkpoints,
        max_retained_bytes=settings.broker.max_retained_bytes,
    )
