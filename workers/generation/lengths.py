"""Forced output lengths: which row gets how many tokens, from a file instead of from a model.

Every engine takes them, so that runs of different modes, engines and hardware generate exactly the same work, as in
StreamRL's evaluation (sec. 7.1).

Owns: the order of the file's lengths. Never: the file (``transport/lengths.py``). Invariant: a row has the same length
whoever generates it, and when.
"""

from __future__ import annotations

from collections.abc import Sequence

from transport.types import GroupId, is_evaluation


class ForcedLengths:
    """lengths: tokens, each >= 1; batch after batch, slot after slot, sample after sample takes the next, in a circle.

    groups_per_batch, group_size: of the run. A replaced slot's lengths are those of a later batch, and those of every
    evaluation are the same from the first batch on.
    """

    def __init__(self, lengths: Sequence[int], *, groups_per_batch: int, group_size: int) -> None:
        self._lengths = tuple(lengths)
        self._groups_per_batch = groups_per_batch
        self._group_size = group_size

    def limits(self, group_id: GroupId, samples: Sequence[int]) -> tuple[int, ...]:
        """Tokens of each of these samples of the group."""
        batch, slot = group_id.split("/")
        place = 0 if is_evaluation(group_id) else int(batch) * self._groups_per_batch
        first = (place + int(slot)) * self._group_size
        return tuple(self._lengths[(first + sample) % len(self._lengths)] for sample in samples)
