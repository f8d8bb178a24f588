"""The scoring tasks that need no model: "reward" of one sample, and "advantages" of a group that has all its rewards.

Owns: detokenisation, the columns that each task writes, the group's step from rewards to GroupScored. Never: the reward
itself (reward_pool.py), the arithmetic of advantages (workers/algorithms/advantage.py). Invariant: GroupScored is
appended with the insert of the group's advantages, hence exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol

import msgspec
import numpy as np

from transport.broker.base import RowWrite
from transport.contracts.messages import GroupScored, RowsMissing, rollout_info_decoder
from transport.contracts.types import Column, GroupId, RowId, WorkerId, row_id
from transport.errors import MessageError
from transport.rows.columns import RowStore, decode_array, decode_scalar, encode_array
from workers.algorithms.advantage import AdvantageKind, group_advantages, has_signal
from workers.errors import ModelError
from workers.leases.events import event_append
from workers.scoring.consumer import Outcome, Unit
from workers.scoring.rewards import Reward

READS = (Column.REWARD, Column.REWARD_COMPONENTS, Column.ROLLOUT_INFO)

Detokenize = Callable[[Sequence[int]], str]


class Scores(Protocol):
    """What computes rewards (reward_pool.RewardPool)."""

    async def score(self, prompt: str, response: str, entry: bytes) -> Reward: ...


def load_detokenizer(model_dir: Path) -> Detokenize:
    """The model's own tokenizer, special tokens left out. Raises ModelError where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load a tokenizer from {model_dir}: {error}") from error
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def lost_row(row_id: RowId, group: Mapping[Column, bytes], worker_id: WorkerId) -> Outcome:
    """A unit whose columns are not there: nothing to do when its group was dropped; else its bytes were lost."""
    if not group:
        return Outcome()
    return Outcome(appends=(event_append(RowsMissing(row_ids=(row_id,)), row=row_id, worker=worker_id),))


class RewardTask:
    """Scores one sample at a time; many may be in work together."""

    def __init__(self, rows: RowStore, worker_id: WorkerId, scores: Scores, detokenize: Detokenize) -> None:
        self._rows = rows
        self._worker_id = worker_id
        self._scores = scores
        self._detokenize = detokenize

    async def __call__(self, unit: Unit) -> Outcome:
        """Reward of one row. Raises RewardError; MessageError for columns that do not decode."""
        row_id = RowId(unit.unit_id)
        (row,) = await self._rows.read_rows([row_id], [Column.RESPONSE_IDS])
        (group,) = await self._rows.read_groups([unit.group_id], [Column.PROMPT_TEXT, Column.TASK_ENTRY])
        if Column.RESPONSE_IDS not in row or not group:
            return lost_row(row_id, group, self._worker_id)
        response = self._text(row[Column.RESPONSE_IDS])
        prompt = group.get(Column.PROMPT_TEXT, b"").decode(errors="replace")
        reward = await self._scores.score(prompt, response, group.get(Column.TASK_ENTRY, b""))
        columns = {
            Column.REWARD: encode_array(Column.REWARD, [reward.value]),
            Column.REWARD_COMPONENTS: msgspec.json.encode(reward.components),
        }
        return Outcome(rows=(RowWrite(row_id=row_id, columns=columns),))

    def _text(self, raw: bytes) -> str:
        try:
            return self._detokenize(decode_array(Column.RESPONSE_IDS, raw).tolist())
        except (OverflowError, IndexError) as error:
            raise MessageError(f"the response has ids that the tokenizer does not know: {error}") from error


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
