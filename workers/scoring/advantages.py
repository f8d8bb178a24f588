"""The task "advantages": when every sample of a group has its reward, compare them and tell the orchestrator.

Owns: the group's step from rewards to GroupScored. Never: the arithmetic (workers/algorithms/advantage.py). Invariant:
GroupScored is appended with the insert of the group's advantages, hence exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec
import numpy as np

from transport.broker.base import RowWrite
from transport.contracts.messages import GroupScored, rollout_info_decoder
from transport.contracts.types import Column, GroupId, WorkerId, row_id
from transport.errors import MessageError
from transport.rows.columns import RowStore, decode_scalar, encode_array
from workers.algorithms.advantage import AdvantageKind, group_advantages, has_signal
from workers.leases.consumer import Outcome, Unit
from workers.leases.events import event_append

READS = (Column.REWARD, Column.REWARD_COMPONENTS, Column.ROLLOUT_INFO)


class AdvantageTask:
    """kind: how a reward is compared with its group's.  max_group_size: samples a group can have."""

    def __init__(self, rows: RowStore, worker_id: WorkerId, *, kind: AdvantageKind, max_group_size: int) -> None:
        self._rows = rows
        self._worker_id = worker_id
        self._kind: AdvantageKind = kind
        self._max_group_size = max_group_size

    async def __call__(self, unit: Unit) -> Outcome:
        """Advantages of one whole group. Raises MessageError for rows whose columns do not decode."""
        ids = [row_id(unit.group_id, sample) for sample in range(self._max_group_size)]
        read = await self._rows.read_rows(ids, READS)
        rows = {row: columns for row, columns in zip(ids, read, strict=True) if Column.REWARD in columns}
        if not rows:
            return Outcome()  # the group was dropped
        rewards = [decode_scalar(Column.REWARD, columns[Column.REWARD]) for columns in rows.values()]
        scored = _group_scored(unit.group_id, list(rows.values()), rewards)
        mean = f"{fmean(rewards):.4f}"
        append = event_append(scored, group=unit.group_id, worker=self._worker_id, reward=mean)
        advantages = group_advantages(np.asarray(rewards, np.float32), self._kind)
        writes = [
            RowWrite(
                row_id=row,
                columns={Column.ADVANTAGE: encode_array(Column.ADVANTAGE, advantages[index : index + 1])},
                on_insert=(append,) if index == 0 else (),
            )
            for index, row in enumerate(rows)
        ]
        return Outcome(rows=writes)


def _group_scored(group_id: GroupId, rows: Sequence[Mapping[Column, bytes]], rewards: Sequence[float]) -> GroupScored:
    infos = [rollout_info_decoder.decode(row.get(Column.ROLLOUT_INFO, b"")) for row in rows]
    return GroupScored(
        group_id=group_id,
        rewards=tuple(rewards),
        response_tokens=tuple(info.response_tokens for info in infos),
        signal=has_signal(rewards),
        components=_mean_components(rows),
    )


def _mean_components(rows: Sequence[Mapping[Column, bytes]]) -> dict[str, float]:
    """Mean of each named component over the samples that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        try:
            components = msgspec.json.decode(row.get(Column.REWARD_COMPONENTS, b"{}"), type=dict[str, float])
        except msgspec.MsgspecError as error:
            raise MessageError(f"the reward components of a row are not numbers by name: {error}") from error
        for name, value in components.items():
            values.setdefault(name, []).append(value)
    return {name: fmean(found) for name, found in values.items()}
