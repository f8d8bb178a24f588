"""Whether engines may go on in fp8: as long as the trainer finds the logprobs that they said.

    StepDone ──► observe: over the limit, so many batches in a row? ──► reason ──► every LoadWeights carries it

Owns: the judgement of a batch. Never: how an engine changes (``workers/generation``). Invariant: what was given up
stays given up, also in workers that come later and in a resumed run, until the settings of it are changed.

Source: ours. Rounding of caches and weights makes the policy that samples another one than the policy that trains; what
it costs is seen in no reward at first, and in the difference of their logprobs at once.
"""

from __future__ import annotations

import msgspec

METRIC = "logprob_mismatch"
"""Of a trained batch: mean |trainer - rollout logprob| over its tokens."""


class PrecisionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """limit: of the mean |trainer - rollout logprob| of a batch, > 0.  batches: in a row beyond it, >= 1.
    held: what engines hold in fp8, in words."""

    limit: float
    batches: int
    held: str


class Precision(msgspec.Struct, kw_only=True):
    """over: batches in a row beyond the limit so far.  reason: why nothing is held in fp8 any more; empty: it still is.
    since: first version that is generated without it, 0 while there is none.
    """

    over: int = 0
    reason: str = ""
    since: int = 0

    def observe(self, settings: PrecisionSettings, version: int, mismatch: float | None) -> None:
        """A batch was trained and became ``version``. mismatch: nothing can be said without one (nothing was trained);
        one that is not a number agrees with nothing."""
        if self.reason or mismatch is None:
            return
        self.over = 0 if mismatch <= settings.limit else self.over + 1
        if self.over >= settings.batches:
            in_a_row = f"{self.over} batches in a row" if self.over > 1 else "a batch"
            self.since = version
            self.reason = (
                f"logprobs of trainer and engines differ by {mismatch:.3f} on average, and by more than "
                f"generation.fp8_mismatch_limit {settings.limit:g} in {in_a_row}: {settings.held} are no longer "
                f"held in fp8 from version {version} on"
            )
