"""The one gate of all pipeline modes: how old the weights behind a sample may be, counted in policy versions.

Owns: admission, dispatch and arrival rules, and which weights belong to the surviving lineage. Never: what happens to
a sample that fails a rule. Invariant: rules are pure functions of integers and identities.

Batch ``b`` is trained on top of version ``b`` (version = number of batches trained), so the staleness of a sample of
batch ``b`` that was sampled under version ``v`` is ``b - v``. A deferred group began for batch ``b`` and is trained in
``b + 1``: what it has got is judged by ``b``, so it may be one version older than any other, and never two.
"""

from __future__ import annotations

import msgspec

from transport.contracts.types import WeightIdentity


def may_admit(batch: int, trained_version: int, max_staleness: int, rollout_batches: int = 1) -> bool:
    """Whether prompts may be bound to ``batch``: it could be generated with the newest weights right now.

    rollout_batches: k >= 1 batches 0..k-1, k..2k-1, ... are opened together, where the last of them may be opened.
    Source: k > 1 is the enlarged rollout batch of AsyncFlow sec. 4.2.1, fig. 8(b).
    """
    last = batch - batch % rollout_batches + rollout_batches - 1
    return last <= trained_version + max_staleness


def may_dispatch(batch: int, loaded: WeightIdentity | None, epoch: int, max_staleness: int) -> bool:
    """Whether a group of ``batch`` may start under ``loaded``: the trainer's epoch, and fresh enough.

    Source: StreamRL sec. 4.1 (0: synchronous, 1: one-step asynchronous). Ours: the epoch, because after a rollback
    "version 6" of the former epoch is not the version 6 that will be trained now.
    """
    return loaded is not None and loaded.epoch == epoch and batch - loaded.version <= max_staleness


def is_too_old(batch: int, oldest_version: int, max_staleness: int) -> bool:
    """Whether a finished row may no longer be trained in ``batch``, judged by its oldest span."""
    return batch - oldest_version > max_staleness


def may_resume(
    batch: int, oldest: WeightIdentity, newest: WeightIdentity, lineage: Lineage, max_staleness: int | None
) -> bool:
    """Whether a sample of ``batch`` may go on from tokens of these weights: as a row it could still be trained, which
    reaches from the oldest of them to those of now.

    max_staleness: None where nothing is trained, or the trainer waits for the row however old it is.
    Source: ours. Its age is that of its oldest token, so it is known before it goes on, and does not change by it.
    """
    too_old = max_staleness is not None and is_too_old(batch, oldest.version, max_staleness)
    now = WeightIdentity(epoch=lineage.epoch, version=lineage.version)
    return not too_old and lineage.contains(newest) and lineage.contains_row(oldest, now)


class Lineage(msgspec.Struct, kw_only=True):
    """Which weights lead to the trainer's current ones.

    A trainer that restarts from a checkpoint of version ``v`` keeps versions <= v of the epochs before it; what those
    epochs published above v is lost, and so are rows sampled under it. ``survived``: epoch that ended -> its highest
    version still in the lineage. ``lossy``: epochs whose end lost versions. A row that began before such an end and
    finished after it may have a span of lost weights in its middle, which its event does not name: it counts as lost.
    """

    epoch: int = 0
    version: int = 0
    survived: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    lossy: list[int] = msgspec.field(default_factory=list[int])

    def restart(self, weights: WeightIdentity) -> bool:
        """A trainer of a higher epoch goes on from ``weights``. Returns whether versions were lost."""
        lost = weights.version < self.version
        for epoch, version in self.survived.items():
            self.survived[epoch] = min(version, weights.version)
        if self.epoch:
            self.survived[self.epoch] = min(self.version, weights.version)
        if lost:
            self.lossy.append(self.epoch)
        self.epoch, self.version = weights.epoch, weights.version
        return lost

    def contains(self, weights: WeightIdentity) -> bool:
        """Whether ``weights`` lead to the current ones (or are them)."""
        if weights.epoch == self.epoch:
            return weights.version <= self.version
        return weights.version <= self.survived.get(weights.epoch, -1)

    def contains_row(self, oldest: WeightIdentity, newest: WeightIdentity) -> bool:
        """Whether every span between these two can only be of weights in the lineage."""
        if not (self.contains(oldest) and self.contains(newest)):
            return False
        if oldest.epoch == newest.epoch:
            return True
        return not any(oldest.epoch <= epoch < newest.epoch for epoch in self.lossy)
