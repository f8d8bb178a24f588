"""The plans that a generation worker holds: claimed, and not yet acknowledged.

Owns: which samples of which plan are still to come, and what was called off. Never: I/O.
Invariant: a plan leaves only after the commit that acknowledged it, so a report never misses a group that is at work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from transport.broker.base import ZERO_ID, parse_entry_id
from transport.messages import AbortRollouts, GroupPlan
from transport.types import GroupId

REMEMBERED_ABORTS = 4096
"""Aborts kept for plans that are not claimed yet; more than a worker's queue ever holds."""


@dataclass(slots=True, kw_only=True)
class HeldPlan:
    """One claimed plan. to_come: samples that have no result yet.  aborted: nobody wants the rest of them.
    prompt_tokens: of its prompt, once that was read.
    """

    entry_id: str
    plan: GroupPlan
    to_come: set[int] = field(init=False)
    aborted: bool = False
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.to_come = set(self.plan.samples)

    @property
    def key(self) -> tuple[GroupId, int]:
        return self.plan.group_id, self.plan.attempt


class HeldPlans:
    """By (group, attempt), in the order in which they were claimed."""

    def __init__(self) -> None:
        self._held: dict[tuple[GroupId, int], HeldPlan] = {}
        self._aborts: dict[tuple[GroupId, int], None] = {}  # an ordered set
        self.cursor = ZERO_ID

    def add(self, entry_id: str, plan: GroupPlan) -> HeldPlan:
        """A plan was claimed. It is aborted from the start when its abort came before it."""
        held = HeldPlan(entry_id=entry_id, plan=plan)
        held.aborted = self._aborts.pop(held.key, 0) is None
        self._held[held.key] = held
        self.claimed(entry_id)
        return held

    def claimed(self, entry_id: str) -> None:
        self.cursor = max(self.cursor, entry_id, key=parse_entry_id)

    def get(self, group_id: GroupId, attempt: int) -> HeldPlan | None:
        return self._held.get((group_id, attempt))

    def of_group(self, group_id: GroupId) -> list[HeldPlan]:
        return [held for held in self._held.values() if held.plan.group_id == group_id]

    def remove(self, plans: Iterable[HeldPlan]) -> None:
        for held in plans:
            self._held.pop(held.key, None)

    def abort(self, command: AbortRollouts) -> list[HeldPlan]:
        """Mark what ``command`` means. Returns what is held of it; the rest is remembered until it is claimed."""
        attempts: Sequence[int | None] = command.attempts or [None] * len(command.group_ids)
        stopped: list[HeldPlan] = []
        for group_id, attempt in zip(command.group_ids, attempts, strict=False):
            meant = [held for held in self.of_group(group_id) if attempt in (None, held.plan.attempt)]
            stopped += meant
            if not meant and attempt is not None:
                self._aborts[group_id, attempt] = None
        for held in stopped:
            held.aborted = True
        while len(self._aborts) > REMEMBERED_ABORTS:
            del self._aborts[next(iter(self._aborts))]
        return stopped

    def lose(self, entry_ids: Iterable[str]) -> list[HeldPlan]:
        """Leases that went to someone else: forget these plans without an acknowledgement."""
        lost = set(entry_ids)
        plans = [held for held in self._held.values() if held.entry_id in lost]
        self.remove(plans)
        return plans

    @property
    def entry_ids(self) -> list[str]:
        return [held.entry_id for held in self._held.values()]

    @property
    def group_ids(self) -> tuple[GroupId, ...]:
        return tuple(dict.fromkeys(held.plan.group_id for held in self._held.values()))

    @property
    def num_samples(self) -> int:
        """Samples that are to come."""
        return sum(len(held.to_come) for held in self._held.values())
